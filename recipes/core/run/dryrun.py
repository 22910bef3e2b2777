"""A dry run: `launch.py check` starts a recipe, which stops before its first step and writes its
findings to a file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from recipes.core import files

VARIABLE = "RECIPES_CHECK"  # set in the process of a dry run; its value is `Request` as JSON


class DryRunEnd(Exception):
    """Ends a dry run at the point where the training would begin."""


@dataclass(frozen=True)
class Request:
    """The input of a dry run. file: where to write `Found`. ranks: number of ranks of the job."""

    file: str
    ranks: int


@dataclass(frozen=True)
class Found:
    """What a dry run found. None: the run does not have it. checkpoint_bytes: the most bytes of
    tensors in a checkpoint.

    rank_bytes: of weights, gradients and optimiser state on a rank of the job. activation_bytes: of
    what else a rank needs for a step or an evaluation.
    """

    parameters: int | None = None
    samples: int | None = None
    checkpoint_bytes: int | None = None
    rank_bytes: int | None = None
    activation_bytes: int | None = None
    resumed_from_step: int | None = None
    evaluates: bool = False

    def __str__(self) -> str:
        if self.parameters is None:
            return "nothing to train, and no checkpoints"
        samples = "" if self.samples is None else f"{self.samples:,} training samples, "
        step = self.resumed_from_step
        if self.evaluates:
            begin = "evaluates the pretrained weights" if step is None else f"evaluates step {step}"
        else:
            begin = "starts from the beginning" if step is None else f"continues from step {step}"
        size = files.size_text(self.rank_bytes or 0)
        held = f" ({size} per rank, with gradients and optimiser state)" if self.rank_bytes else ""
        return f"{samples}{self.parameters:,} parameters{held}, {begin}"


def asked(environ: Mapping[str, str]) -> Request | None:
    """The input of the dry run in this process. None if the process is not a dry run."""
    return Request(**json.loads(environ[VARIABLE])) if VARIABLE in environ else None
