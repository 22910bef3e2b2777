"""Checkpoints: one file each, written whole or not at all, and read without running what is in them."""

import contextlib
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from recipes.core import rundir
from recipes.core.rundir import InputError

NAME = re.compile(r"step-(\d{8,})\.pt")


@dataclass
class State:
    """All that a run is made of at a step boundary. step: completed optimiser steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    ema: nn.Module | None = None
    step: int = 0
    meta: dict[str, Any] = field(default_factory=dict)


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's random states of torch."""
    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_state(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def save(folder: Path, state: State, sampler: Mapping[str, Any], rng: list[dict[str, torch.Tensor]]) -> Path:
    """Writes ``step-XXXXXXXX.pt`` into ``folder`` and points ``latest`` to it. Called by rank 0 alone.

    The file comes under its name only when all of it is on the disk. Raises OSError where it cannot be written.
    """
    path = folder / f"step-{state.step:08d}.pt"
    content = {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "scheduler": state.scheduler.state_dict(),
        "ema": state.ema.state_dict() if state.ema else None,
        "sampler": dict(sampler),
        "rng": rng,
        "meta": {**state.meta, "step": state.step},
    }
    rundir.write_whole(path, lambda file: torch.save(content, file))
    rundir.write_whole(folder / "latest", lambda file: file.write(f"{path.name}\n".encode()))
    return path


def candidates(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, the newest first: the one that ``latest`` names, then those before it, then the rest.

    A run that was sent back to an earlier step has older ones of higher steps beside its own.
    """
    steps = {int(m[1]): p for p in folder.glob("step-*.pt") if (m := NAME.fullmatch(p.name))}
    try:
        named = NAME.fullmatch((folder / "latest").read_text().strip())
    except (OSError, ValueError):
        named = None
    newest = int(named[1]) if named else max(steps, default=0)
    return [steps[step] for step in sorted(steps, key=lambda step: (step > newest, -step))]


def sweep(folder: Path) -> None:
    """Removes what attempts that were killed while they saved have left. Called by rank 0 alone, before any save."""
    for path in folder.glob(".step-*"):
        with contextlib.suppress(OSError):
            path.unlink()


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU. Raises InputError, one line, for a file that is damaged or is none.

    ``weights_only``: nothing in it is run. Safe from torch 2.10 on (CVE-2025-32434, CVE-2026-24747). torch writes checksums and
    does not look at them when it loads: a flipped bit of a weight would pass.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"checkpoint {path}: is no file")
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(damaged)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"checkpoint {path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # torch.load raises whatever a damaged archive makes it
        raise InputError(f"checkpoint {path}: is damaged or no checkpoint ({type(error).__name__})") from None
    if not isinstance(content, dict) or not {"model", "optimizer", "scheduler", "sampler", "rng", "meta"} <= set(
        content
    ):
        raise InputError(f"checkpoint {path}: is not one of these recipes'")
    meta = content["meta"]
    if not isinstance(meta, dict) or not isinstance(meta.get("config"), dict) or not isinstance(meta.get("step"), int):
        raise InputError(f"checkpoint {path}: does not say what it is of")
    return content


def restore(state: State, content: Mapping[str, Any], to_train: bool = True) -> None:
    """Puts a checkpoint's content into ``state``, without optimiser and schedule where it is not to be trained further.

    Raises InputError when it is of another model.
    """
    try:
        state.model.load_state_dict(content["model"])
        if to_train:
            state.optimizer.load_state_dict(content["optimizer"])
            state.scheduler.load_state_dict(content["scheduler"])
        if state.ema:
            state.ema.load_state_dict(content["ema"])
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"checkpoint: is of another model ({' '.join(str(error).split())[:200]})") from None
    state.step = int(content["meta"]["step"])
    if to_train and isinstance(state.scheduler, LambdaLR):
        state.scheduler.last_epoch, state.scheduler._step_count = state.step - 1, state.step
        state.scheduler.step()  # the rate of this step by today's schedule: with more epochs it is another one


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], may_change: set[str]) -> list[str]:
    """``name: then → now`` for each key that differs and may not."""
    names = [n for n in {**saved, **now} if n not in may_change and saved.get(n) != now.get(n)]
    return [f"{name}: {saved.get(name)} then, {now.get(name)} now" for name in names]
