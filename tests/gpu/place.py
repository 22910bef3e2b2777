"""Where a check runs, how it starts recipes, and what it returns or raises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import helpers

ROOT = Path(__file__).resolve().parents[2]
Figures = dict[str, object]


class NotPossible(Exception):
    """This machine cannot show it: the message says why."""


@dataclass(frozen=True)
class Place:
    """Where a check runs. folder: an empty one."""

    device: torch.device
    folder: Path

    @property
    def dry(self) -> bool:
        return self.device.type == "cpu"

    @property
    def recipe_of_images(self) -> str:
        """cifar evaluates 10,000 images with a network that takes a CPU minutes."""
        return "mnist" if self.dry else "cifar"

    @property
    def small_images(self) -> tuple[str, ...]:
        return ("dataset=fake",) if self.dry else ("dataset=fake", "variant=fast")

    def size(self, full: int, small: int) -> int:
        return small if self.dry else full

    def least(self, known: dict[str, Any]) -> Any:
        """The value for this GPU in a table by GPUs; None for another one."""
        name = "" if self.dry else torch.cuda.get_device_name()
        return next((value for gpu, value in known.items() if gpu in name), None)

    def sync(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        """A Python command in the project's folder; stdout and stderr together."""
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, **environ},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def recipe(self, name: str, *keys: str, run: str = "run") -> list[str]:
        """The words of a command that runs a recipe on this device."""
        return [
            "-m",
            f"recipes.{name}",
            f"device={self.device.type}",
            f"run_dir={self.folder / run}",
            *keys,
        ]

    def run(self, *words: str, status: int = 0, **environ: str) -> str:
        """The output of `start`, which must end with ``status``."""
        process = self.start(*words, **environ)
        out, _ = process.communicate(timeout=140)
        assert process.returncode == status, (
            f"status {process.returncode}, not {status}: {out[-2000:]}"
        )
        return out

    def ranks(self, *words: str) -> list[subprocess.Popen[str]]:
        """The same command on two ranks, which have one GPU together."""
        port = str(helpers.free_port())
        place = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        if not self.dry:
            place["CUDA_VISIBLE_DEVICES"] = "0"
        return [
            self.start(*words, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(2)
        ]

    def until(self, process: subprocess.Popen[str], run: str = "run", rows: int = 1) -> None:
        """Waits, for a time, until a run has so many rows or the process ends."""
        path = self.folder / run / "metrics.jsonl"
        end = time.monotonic() + 100
        while (
            not (path.exists() and path.read_text().count("\n") >= rows)
            and time.monotonic() < end
            and process.poll() is None
        ):
            time.sleep(0.1)

    def rows(self, run: str = "run") -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (self.folder / run / "metrics.jsonl").read_text().splitlines()
        ]

    def summary(self, run: str = "run") -> dict[str, Any]:
        return json.loads((self.folder / run / "summary.json").read_text())

    def meet(self) -> None:
        """A process group of this process alone."""
        backend = "gloo" if self.dry else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
