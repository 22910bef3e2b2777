"""A run that is killed twenty times ends like a run that was never killed: the same losses, the same state, to the last bit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from recipes.core.run import attempt as attempts
from recipes.core.train import checkpoint
from tests import helpers, states
from tests.faults import conftest
from tests.faults.conftest import Recorded, Start

SAME = ("cpu_threads=1", "log_every_steps=1", "checkpoint_every_steps=5", "seed=3", "keep_checkpoints=2")
RUNS = {
    # recipe and keys, steps, kills
    "mnist": (("recipe=mnist", "dataset=digits", "epochs=24"), 552, 20),
    # dropout, batch normalisation and averaged weights: random states of each rank, and what no loss shows
    "broken": (("epochs=40",), 400, 6),
}


def kill(launcher: subprocess.Popen[str], victim: str) -> None:
    """SIGKILL of one rank, of the launcher, or of all at once."""
    pids = helpers.children(launcher.pid)
    if victim == "all":
        chosen = [launcher.pid, *pids]
    else:
        chosen = [launcher.pid] if victim == "launcher" else [pids[int(victim)]]
    for pid in chosen:  # a rank may have died with the launcher already
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for(launcher: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Until the attempt that has just been started comes so far."""
    before = len(helpers.rows(run_dir))
    helpers.wait_until(
        lambda: any(row["step"] >= step for row in helpers.rows(run_dir)[before:]) or launcher.poll() is not None,
        helpers.START_S,
        f"step {step}",
    )


def last_losses(run_dir: Path) -> dict[int, float]:
    """The loss of each step: the last row of a step counts."""
    return {row["step"]: row["loss"] for row in helpers.rows(run_dir)}


@pytest.mark.fault(1, 29)
@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("recipe", sorted(RUNS))
def test_a_run_killed_at_random_moments_ends_with_the_state_of_an_unbroken_run(
    start: Start, tmp_path: Path, recipe: str, record_property: Recorded
) -> None:
    words, total, kills = RUNS[recipe]
    whole = helpers.finish(start(tmp_path / "whole", *words, *SAME))
    assert whole.status == 0, whole.out
    wanted = last_losses(tmp_path / "whole")
    assert list(wanted) == list(range(1, total + 1))

    draw, run_dir = random.Random(29), tmp_path / "killed"
    moments = sorted(draw.sample(range(2, total - 150), kills))  # a run is many steps ahead of who looks at it
    for attempt, step in enumerate(moments):
        victim = draw.choice(["0", "1", "launcher", "all"])
        launcher = start(run_dir, *words, *SAME)
        if draw.random() < 0.2:  # while it starts
            helpers.wait_until(lambda: len(helpers.children(launcher.pid)) == 2, helpers.START_S, "two ranks")  # noqa: B023
            after_s = draw.random() * 4
        else:
            wait_for(launcher, run_dir, step)
            after_s = draw.random() * 0.1
        with pytest.raises(subprocess.TimeoutExpired):  # or it has ended by itself
            launcher.wait(after_s)
        kill(launcher, victim)
        ended = helpers.finish(launcher)
        assert ended.status in (137, -signal.SIGKILL), (attempt, victim, ended.out)
        if (run_dir / "checkpoints").exists() and checkpoint.candidates(run_dir / "checkpoints"):
            assert conftest.newest(run_dir)

    ended = helpers.finish(start(run_dir, *words, *SAME))
    assert ended.status == 0, ended.out
    assert attempts.facts(run_dir)["attempt"] >= kills * 2 // 3  # some were killed before they had a number
    assert last_losses(run_dir) == wanted
    digests = [states.digest(checkpoint.read(conftest.newest(folder))) for folder in (run_dir, tmp_path / "whole")]
    assert digests[0] == digests[1]
    record_property(f"kills of one run of {recipe}, after which nothing differs", kills)
