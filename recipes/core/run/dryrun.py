"""A dry run: `launch.py check` starts a recipe up to its first step, and the recipe writes down what it found."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "RECIPES_CHECK"  # set in the process of a dry run: `Asked`, as JSON


class Over(Exception):
    """Ends a dry run where the training would begin."""


@dataclass(frozen=True)
class Asked:
    """What a dry run is told. file: where to write `Found`. ranks: of the job. gpus: whether the job has GPUs."""

    file: str
    ranks: int
    gpus: bool


@dataclass(frozen=True)
class Found:
    """What a dry run found; None for what the run does not have. checkpoint_bytes: the size of one file, with the optimiser's state."""

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
            begin = "starts from the beginning" if step is None else f"continues from step {step}"
        return f"{samples}{self.parameters:,} parameters, {begin}"


def asked(environ: Mapping[str, str]) -> Asked | None:
    """What this process is told, if it is a dry run; None if it is not."""
    return Asked(**json.loads(environ[VARIABLE])) if VARIABLE in environ else None
