"""Batch recipes for training on Slurm clusters: one experiment per file.

`load` returns a trained model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load(run: str | Path, device: str = "cpu") -> Any:
    """The trained classifier of a run directory, or of a checkpoint: see
    `recipes.core.train.trained.load`.
    """
    from recipes.core.train import trained  # imports torch, which a login node does not need

    return trained.load(run, device)
