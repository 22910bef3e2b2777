"""How long a checkpoint of 100 MB blocks training: written by a thread from a copy, compared with
torch.save between two steps.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from recipes.core.train import checkpoint
from recipes.core.train.checkpoint import Saver
from tests.benchmarks.measure import FULL, Figure, Size, interleaved, one_thread

STATE_MB = 100
TENSORS = 160  # weights and momenta of a ResNet-50 are about as many


def figures(size: Size) -> list[Figure]:
    megabytes = STATE_MB if size.images == FULL.images else 1
    content = make_content(megabytes)
    with tempfile.TemporaryDirectory() as folder, one_thread():
        saver = Saver(Path(folder), Path(folder), lambda path, step: None, keep=1)
        durations = {"begin to end": 0.0}

        def beside() -> float:
            content["meta"]["step"] += 1
            start = time.perf_counter()
            saver.save(content)
            stood = time.perf_counter() - start
            saver.wait()
            durations["begin to end"] = time.perf_counter() - start
            return stood

        def in_place() -> float:
            start = time.perf_counter()
            torch.save(content, Path(folder, "plain.pt"))
            return time.perf_counter() - start

        values = interleaved(size.rounds, {"beside": beside, "in place": in_place})
    note = (
        f"{checkpoint.size_of(content) / 1e6:.0f} MB, one thread; on the disk after "
        f"{durations['begin to end']:.2f} s"
    )
    return [
        Figure(
            "checkpoint, time that training is blocked",
            "s",
            "written beside it",
            "torch.save",
            "<= 0.25",
            values["beside"],
            values["in place"],
            note,
        )
    ]


def make_content(megabytes: int) -> dict[str, Any]:
    """What a checkpoint holds, about: weights, and a momentum for each."""
    numbers = megabytes * 1_000_000 // 4 // TENSORS
    weights, momenta = (
        {f"{i}": torch.randn(numbers) for i in range(TENSORS // 2)} for _ in range(2)
    )
    rest = {
        "scheduler": {},
        "ema": None,
        "sampler": {},
        "rng": [],
        "meta": {"step": 0, "config": {}},
    }
    return {"model": weights, "optimizer": {"state": momenta}, **rest}
