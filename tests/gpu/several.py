"""The checks of ``make gpus``, for a node with several GPUs. On the CPU, two ranks take their
place.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path

import torch

from tests import helpers
from tests.gpu.place import Figures, Place

EFFICIENCY = 0.87  # at least, of the images/s of a GPU among all, against it alone
SHARE = 0.9  # at least, of nccl-tests' bandwidth


def launch(place: Place, name: str, *keys: str, run: str) -> list[str]:
    """The words of a command that runs a recipe on all GPUs."""
    ranks = 2 if place.dry else torch.cuda.device_count()
    words = [
        "launch.py",
        f"recipe={name}",
        "launcher=local",
        f"ranks_per_node={ranks}",
        f"device={place.device.type}",
    ]
    return [*words, f"run_dir={place.folder / run}", *keys]


def bandwidth(place: Place) -> Figures:
    """the bus bandwidth of an all_reduce is that of nccl-tests, where all_reduce_perf is on the
    PATH
    """
    size = place.size(256, 1)
    place.run(
        *launch(
            place,
            "collectives",
            "mode=bench",
            "operations=all_reduce",
            f"sizes={size}M..{size}M",
            run="bench",
        )
    )
    ours = place.summary("bench")["busbw"]["all_reduce"]
    figures: Figures = {"GB/s": ours}
    if not place.dry and shutil.which("all_reduce_perf"):
        command = [
            "all_reduce_perf",
            "-b",
            f"{size}M",
            "-e",
            f"{size}M",
            "-g",
            str(torch.cuda.device_count()),
        ]
        out = subprocess.check_output(command, text=True, timeout=100)
        theirs = float(
            next(line for line in out.splitlines() if "Avg bus bandwidth" in line).split(":")[1]
        )
        figures["nccl-tests"] = theirs
        assert ours >= SHARE * theirs, figures
    return figures


def overlap(place: Place) -> Figures:
    """one GPU processes nearly as many images per second in a job on all GPUs as in a job on that
    GPU alone
    """
    ranks = 2 if place.dry else torch.cuda.device_count()
    keys = (
        f"max_steps={place.size(120, 4)}",
        f"log_every_steps={place.size(20, 1)}",
        *place.small_images,
    )
    rates = {}
    for name, count in (("one", 1), ("all", ranks)):
        words = (
            place.recipe(place.recipe_of_images, run=name)
            if count == 1
            else launch(place, place.recipe_of_images, run=name)
        )
        place.run(*words, *keys, f"global_batch_size={place.size(512, 8) * count}")
        rates[name] = statistics.median(row["samples_per_second"] for row in place.rows(name)[1:-1])
    efficiency = rates["all"] / ranks / rates["one"]
    assert place.dry or efficiency >= EFFICIENCY, rates
    return {"efficiency": round(efficiency, 3)}


def killed(place: Place) -> Figures:
    """if a rank is killed, the others end within 30 s, it is named, and they keep NCCL's flight
    records
    """
    process = place.start(
        *launch(place, "mnist", "dataset=digits", "epochs=1000", "log_every_steps=1", run="run")
    )
    place.until(process)
    begin = time.monotonic()
    for pid in helpers.children(process.pid):
        if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes():
            os.kill(pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    took = time.monotonic() - begin
    assert "rank 1" in out.splitlines()[-1], out[-1000:]
    assert took < 30, took
    assert place.dry or (place.folder / "run/logs/flight-0").stat().st_size
    return {"seconds": round(took, 1)}


def fsdp_ranks(place: Place) -> Figures:
    """the losses of gpt with strategy=fsdp, and of that run resumed in its middle, are those with
    ddp
    """
    steps = place.size(20, 4)
    keys = (
        "dataset=bytes",
        "dtype=float32",
        "seq_len=64",
        "global_batch_size=16",
        "sample=0",
        "log_every_steps=1",
        f"max_steps={steps}",
        f"checkpoint_every_steps={steps // 2}",
        "keep_checkpoints=0",
    )
    middle = f"resume={place.folder}/fsdp/checkpoints/step-{steps // 2:08d}.pt"
    for run, more in (
        ("ddp", ()),
        ("fsdp", ("strategy=fsdp",)),
        ("resumed", ("strategy=fsdp", middle)),
    ):
        place.run(*launch(place, "gpt", *keys, *more, run=run))
    whole, *others = (
        {row["step"]: row["loss"] for row in place.rows(run)} for run in ("ddp", "fsdp", "resumed")
    )
    assert [len(losses) for losses in others] == [steps, steps // 2]
    apart = max(abs(whole[step] - loss) for losses in others for step, loss in losses.items())
    assert apart <= 1e-4, apart
    return {"losses differ by at most": f"{apart:.1g}"}


CHECKS = (bandwidth, overlap, killed, fsdp_ranks)
