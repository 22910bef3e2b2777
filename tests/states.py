"""Compares the training states in checkpoints bit by bit."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.core.train import checkpoint


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of the training state in a checkpoint's content, in hexadecimal. It is equal only for
    bitwise equal states.
    """
    sha256 = hashlib.sha256()
    parts = ("model", "optimizer", "scheduler", "ema", "sampler", "rng")
    state = {part: content[part] for part in parts}
    _feed(sha256.update, {**state, "step": content["meta"]["step"]})
    return sha256.hexdigest()


def at_step(run_dir: Path, step: int) -> str:
    """The digest of the checkpoint of this step."""
    return digest(checkpoint.read(run_dir / f"checkpoints/step-{step:08d}.pt"))


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    if isinstance(value, Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().flatten()
        update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            update(f"{key!r}:".encode())
            _feed(update, value[key])
    elif isinstance(value, (list, tuple)):
        update(f"[{len(value)}".encode())
        for item in value:
            _feed(update, item)
    else:
        update(repr(value).encode())
