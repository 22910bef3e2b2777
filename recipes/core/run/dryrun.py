"""TODO dryrun."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "RECIPES_CHECK"  # holds `Asked`, in the process that is started here


class Over(Exception):
    """The start of a run has come to where its training would begin."""


@dataclass(frozen=True)
class Asked:
    """What the started process is told. file: where it leaves `Found`. ranks, gpus: how many the job has, and whether on GPUs."""

    file: str
    ranks: int
    gpus: bool


@dataclass(frozen=True)
class Found:
    """What a start has shown; None for what a run does not have. checkpoint_bytes: of a file, when the optimiser has its state."""

    parameters: int | None = None
    samples: int | None = None
    checkpoint_bytes: int | None = None
    resumed_from_step: int | None = None
    evaluates: bool = False

    def __str__(self) -> str:
        if self.parameters is None:
            return "nothing to train, and no checkpoints"
        samples = "" if self.samples is None else f"{self.samples:,} training samples, "
        step = self.resumed_from_step
        if self.evaluates:
            begin = "evaluates its weights" if step is None else f"evaluates step {step}"
        else:
            begin = "begins anew" if step is None else f"goes on from step {step}"
        return f"{samples}{self.parameters:,} parameters, {begin}"


def asked(environ: Mapping[str, str]) -> Asked | None:
    """What this process is to leave instead of training, where `start` has started it."""
    return Asked(**json.loads(environ[VARIABLE])) if VARIABLE in environ else None
