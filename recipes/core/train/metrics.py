"""metrics.jsonl, summary.json and what a run was made with."""

import contextlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.core.errors import MachineError
from recipes.core.train import checkpoint


class Rows:
    """``metrics.jsonl``: one JSON object a line, only ever added to; rank 0 alone has one."""

    def __init__(self, path: Path) -> None:
        # A line that a killed attempt left half written is ended, so that it spoils no other.
        self._path = path
        torn = path.exists() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        if torn:
            self._file.write("\n")

    def add(self, row: Mapping[str, Any]) -> None:
        """Raises MachineError, one line, where there is no room."""
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise MachineError(
                f"run_dir={self._path.parent}: {self._path.name} cannot be written ({error.strerror}): make room there; "
                f"{checkpoint.after_a_restart(self._path.parent / 'checkpoints')}"
            ) from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what `add` has raised already: it ends the run, and is its last word
            self._file.flush()
            os.fsync(self._file.fileno())
        with contextlib.suppress(OSError):
            self._file.close()


def right(logits: Tensor, labels: Tensor) -> Tensor:
    """How many are right among the first, among the first five, and how many there are: int64 (3,), to be added up.

    logits: (B, classes). labels: (B,); negative ones stand for samples that could not be read, and do not count.
    """
    hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    return torch.stack([hits[:, 0].sum(), hits.sum(), (labels >= 0).sum()])


def accuracy(top1: int, top5: int, samples: int) -> dict[str, Any]:
    """``val_top1``, ``val_top5`` (fractions) and ``val_samples`` of what `right` counted."""
    return {"val_top1": top1 / max(1, samples), "val_top5": top5 / max(1, samples), "val_samples": samples}


def _installed(package: str) -> str | None:
    """A package's version without its import, which can cost as much again as torch's; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": _installed("torchvision"),
        "cuda": torch.version.cuda,
    }
