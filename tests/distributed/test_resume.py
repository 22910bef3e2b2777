"""cifar and imagenet, stopped in the middle of an epoch and gone on with: to the last bit what an unbroken run comes to."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.core import checkpoint, rundir
from tests import helpers

KEYS = {
    "cifar": ["arch=resnet9", "small_px=8", "ema=0.9", "cutout=4", "global_batch_size=6"],
    "imagenet": [
        "arch=resnet18", "px=32", "val_px=32", "val_resize=36", "global_batch_size=6", "ema=0.9", "optimizer=lars", "mixup=0.2",
        "num_workers=2", "lr_batch_size=0", "lr=1",
    ],
}  # fmt: skip
AN_EPOCH, STEPS = 34, 40  # of 200 images, in so many steps that a signal sent behind the fourth comes in time


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


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["cifar", "imagenet"])
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
    argv += ["epochs=2", f"max_steps={STEPS}", "log_every_steps=1", "resume=auto"]
    whole = helpers.run([*argv, f"run_dir={tmp_path}/whole"])
    assert whole.status == 0, whole.out

    process = helpers.start([*argv, f"run_dir={tmp_path}/broken"])
    helpers.wait_until(lambda: len(helpers.rows(tmp_path / "broken")) >= 4, helpers.START_S, "four steps")
    process.send_signal(signal.SIGUSR2)
    stopped = helpers.finish(process)
    assert stopped.status == 75, stopped.out
    at = helpers.read(tmp_path / "broken", "status")["step"]
    assert 4 <= at < AN_EPOCH  # in the middle of the first epoch
    resumed = helpers.run([*argv, f"run_dir={tmp_path}/broken"])
    assert resumed.status == 0, resumed.out

    last = f"checkpoints/step-{STEPS:08d}.pt"
    contents = [torch.load(tmp_path / name / last, weights_only=True) for name in ("whole", "broken")]
    for part in ("model", "ema", "optimizer", "scheduler", "sampler", "rng"):
        assert same(contents[0][part], contents[1][part]), part
    rows = [{row["step"]: row for row in helpers.rows(tmp_path / name)} for name in ("whole", "broken")]
    steps = range(1, STEPS + 1)
    assert [rows[0][step]["loss"] for step in steps] == [rows[1][step]["loss"] for step in steps]


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


@pytest.mark.long
def test_a_run_that_is_sent_back_goes_on_from_there(tmp_path: Path) -> None:
    """Also where it ends before its next checkpoint; and a checkpoint that was asked for stays the one, except for a job that was
    queued again and has trained this run already."""
    argv = [sys.executable, "-m", "recipes.mnist", "device=cpu", "dataset=digits", "cpu_threads=1", "run_dir=run"]
    argv += ["global_batch_size=64", "checkpoint_every_steps=2", "keep_checkpoints=0", "network=ethernet"]
    folder, again = tmp_path / "run/checkpoints", {"TORCHELASTIC_RESTART_COUNT": "1"}
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "PYTHONPATH": str(helpers.ROOT),
    }

    def resumed(*words: str, **environ: str) -> int:
        ended = helpers.run([*argv, *words], cwd=tmp_path, environ=helpers.clean_environment(**place, **environ))
        assert ended.status == 0, ended.out
        [line] = [line for line in ended.lines if line.startswith("resumed from ")]
        assert line.startswith(f"resumed from {folder}/step-"), line
        return int(line.rpartition(" ")[2])

    first = helpers.run([*argv, "max_steps=6"], cwd=tmp_path, environ=helpers.clean_environment(**place))
    assert first.status == 0, first.out
    best = checkpoint.read(folder / "step-00000006.pt")["meta"]["best"]
    assert best["step"] == 6
    back = [f"resume=run/checkpoints/step-{step:08d}.pt" for step in (2, 4)]
    assert resumed(back[0], "evaluate=true", **again) == 2
    assert checkpoint.named(folder, "latest") == "step-00000006.pt"
    assert resumed(back[1], "max_steps=4") == 4
    assert checkpoint.named(folder, "latest") == "step-00000004.pt"
    assert resumed(back[0], "max_steps=5", **again) == 4  # the same job, which has begun at 4
    noted = helpers.read(tmp_path / "run", "attempt")
    rundir.write_json(tmp_path / "run/attempt.json", {**noted, "job": "5"})
    assert resumed(back[0], "max_steps=2", **again) == 2  # another one's
    assert helpers.read(tmp_path / "run", "status")["step"] == 2
    rundir.write_json(tmp_path / "run/attempt.json", {**helpers.read(tmp_path / "run", "attempt"), "own": False})
    assert resumed(back[1], "max_steps=4", **again) == 4  # it had begun, and saved nothing
