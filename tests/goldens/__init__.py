"""Records of short trainings and of run directories, to show that a change of the code changes no
result.

    python -m tests.goldens write [NAME ...]      # makes all records again, or those that are named

tests/distributed/recipes/test_goldens.py compares the code with these records:

- ``NAME.json``: the rows of ``metrics.jsonl`` of a training of a few steps, on two ranks of this
  machine. A new record means that results have changed: say why in the commit.
- ``runs/NAME``: a run directory of the recipe toy as the code has left it. `done` has ended.
  `preempted` was stopped by SIGTERM within an epoch. `failed` lost rank 1 of 2 by SIGKILL. All
  three have the same keys, so they end with the same losses. The files are those that the run
  wrote. They name a temporary folder, the host, its boot ID and a process, which have no meaning on
  another machine: no test reads them. Later code must continue these runs, so make them again only
  if it may refuse them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from tests import helpers

FOLDER = Path(__file__).parent
RUNS = FOLDER / "runs"

# In float32, on the CPU. The batches are uneven on two ranks, and divided into pieces.
TRAININGS = {
    "mnist": ("dataset=digits", "global_batch_size=61", "accumulate=2", "max_steps=16"),
}
# of a row; the others depend on the machine
KEPT = (
    "step",
    "epoch",
    "loss",
    "lr",
    "val_top1",
    "val_top5",
    "val_samples",
)

# Of the run directories: 24 steps, 8 of them in an epoch.
TOY_KEYS = (
    "device=cpu",
    "cpu_threads=1",
    "samples=250",
    "global_batch_size=32",
    "epochs=3",
    "log_every_steps=1",
    "checkpoint_every_steps=8",
    "keep_checkpoints=1",
)
STEPS = 24
# Runs the recipe toy, and sends a signal to this process while it computes the loss of a step.
SIGNALLED = """
import os, runpy, signal
from torch.nn import functional
mse_loss, steps = functional.mse_loss, 0
def and_signal(*args, **keys):
    global steps
    steps += 1
    if steps == {step} and os.environ["RANK"] == "{rank}":
        os.kill(os.getpid(), signal.{signal})
    return mse_loss(*args, **keys)
functional.mse_loss = and_signal
runpy.run_module("recipes.toy", run_name="__main__", alter_sys=True)
"""


def train(recipe: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of a training of ``TRAININGS``, one for each step."""
    words = [
        f"recipe={recipe}",
        "launcher=local",
        "ranks_per_node=2",
        "device=cpu",
        "log_every_steps=1",
    ]
    argv = [
        sys.executable,
        str(helpers.ROOT / "launch.py"),
        *words,
        *TRAININGS[recipe],
        f"run_dir={folder / 'run'}",
    ]
    ended = helpers.run_fork(argv)
    assert ended.status == 0, ended.out
    return [
        {name: row[name] for name in KEPT if name in row} for row in helpers.rows(folder / "run")
    ]


def make_run(name: str, run_dir: Path) -> None:
    """Makes a run directory as those in ``RUNS``."""
    code, ranks, status = {
        "done": (SIGNALLED.format(step=0, rank=0, signal="SIGTERM"), 1, 0),
        "preempted": (SIGNALLED.format(step=11, rank=0, signal="SIGTERM"), 1, 75),
        "failed": (SIGNALLED.format(step=13, rank=1, signal="SIGKILL"), 2, 1),
    }[name]
    ended = helpers.run_ranks(code, [*TOY_KEYS, f"run_dir={run_dir}"], ranks)
    assert ended.status == status, ended.out


def copy_of_run(name: str, folder: Path) -> Path:
    return shutil.copytree(RUNS / name, folder / name)
