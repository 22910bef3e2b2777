"""cifar and imagenet, stopped in the middle of an epoch and gone on with: to the last bit what an unbroken run comes to."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import helpers

KEYS = {
    "cifar": ["arch=resnet9", "small_px=8", "ema=0.9", "cutout=4", "global_batch_size=16"],
    "imagenet": [
        "arch=resnet18", "px=32", "val_px=32", "val_resize=36", "global_batch_size=16", "ema=0.9", "optimizer=lars", "mixup=0.2",
        "num_workers=2", "lr_batch_size=0", "lr=1",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.image_sets(tmp_path_factory.mktemp("images"))


def same(one: Any, other: Any) -> bool:
    """Whether two contents of checkpoints are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("recipe", ["cifar", pytest.param("imagenet", marks=pytest.mark.long)])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(recipe: str, folder: Path, tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        f"recipes.{recipe}",
        "device=cpu",
        "cpu_threads=1",
        f"data_dir={folder}",
        *KEYS[recipe],
    ]
    argv += ["epochs=2", "log_every_steps=1", "resume=auto"]
    whole = helpers.run([*argv, f"run_dir={tmp_path}/whole"])
    assert whole.status == 0, whole.out

    process = helpers.start([*argv, f"run_dir={tmp_path}/broken"])
    helpers.wait_until(lambda: len(helpers.rows(tmp_path / "broken")) >= 4, 60, "four steps")
    process.send_signal(signal.SIGUSR2)
    stopped = helpers.finish(process)
    assert stopped.status == 75, stopped.out
    at = helpers.read(tmp_path / "broken", "status")["step"]
    assert 4 <= at < 13  # in the middle of the first epoch
    resumed = helpers.run([*argv, f"run_dir={tmp_path}/broken"])
    assert resumed.status == 0, resumed.out

    last = "checkpoints/step-00000026.pt"
    contents = [torch.load(tmp_path / name / last, weights_only=True) for name in ("whole", "broken")]
    for part in ("model", "ema", "optimizer", "scheduler", "sampler", "rng"):
        assert same(contents[0][part], contents[1][part]), part
    rows = [{row["step"]: row for row in helpers.rows(tmp_path / name)} for name in ("whole", "broken")]
    assert [rows[0][step]["loss"] for step in range(1, 27)] == [rows[1][step]["loss"] for step in range(1, 27)]


@pytest.mark.long
def test_checkpoints_of_an_interval_are_saved_for_it_and_best_and_latest_can_be_named(tmp_path: Path) -> None:
    first = [*helpers.LOCAL, "ranks_per_node=1", "epochs=1", "max_steps=10", f"run_dir={tmp_path}/first"]
    ended = helpers.run([*first, "keep_every_steps=3", "keep_checkpoints=1"])
    assert ended.status == 0, ended.out
    found = sorted(path.name for path in (tmp_path / "first/checkpoints").glob("step-*"))
    assert found == [f"step-{step:08d}.pt" for step in (3, 6, 9, 10)]
    for pointer in ("latest", "best"):
        again = [
            *first[:-1],
            "max_steps=12",
            f"run_dir={tmp_path}/{pointer}",
            f"resume={tmp_path}/first/checkpoints/{pointer}",
        ]
        ended = helpers.run(again)
        assert ended.status == 0, ended.out
        assert helpers.read(tmp_path / pointer, "summary")["resumed_from_step"] == 10
