"""Which checkpoints a run keeps, and which one it resumes from when it is named, requeued or sent back."""

from __future__ import annotations

import sys
from pathlib import Path

from recipes.core import checkpoint, rundir
from tests import helpers


def test_checkpoints_of_an_interval_are_saved_for_it_and_best_and_latest_can_be_named(tmp_path: Path) -> None:
    first = [*helpers.LOCAL, "ranks_per_node=1", "epochs=1", "max_steps=10", f"run_dir={tmp_path}/first"]
    ended = helpers.run_fork([*first, "keep_every_steps=3", "keep_checkpoints=1"])
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
        ended = helpers.run_fork(again)
        assert ended.status == 0, ended.out
        assert helpers.read(tmp_path / pointer, "summary")["resumed_from_step"] == 10


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
        ended = helpers.run_fork([*argv, *words], cwd=tmp_path, environ=helpers.clean_environment(**place, **environ))
        assert ended.status == 0, ended.out
        [line] = [line for line in ended.lines if line.startswith("resumed from ")]
        assert line.startswith(f"resumed from {folder}/step-"), line
        return int(line.rpartition(" ")[2])

    first = helpers.run_fork([*argv, "max_steps=6"], cwd=tmp_path, environ=helpers.clean_environment(**place))
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
