"""`launch.py look` names the rank that makes no progress and its place, and the run continues."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import helpers
from tests.faults import conftest
from tests.faults.conftest import Start

pytestmark = pytest.mark.fault(44)

LOOK_S = 10.0  # of a command whose ranks all answer; starting Python comes on top
RUN = ("epochs=1", "seed=3", "pace_s=0.2")  # ten steps
WAITS = r"^rank 0 on \S+: waiting for rank 1 on \S+, in \w+ at recipes/core/train/step\.py:\d+ for "


def look(run_dir: Path, fault: str) -> str:
    """What it prints when the waiting rank has been found to wait, and nothing is left of it."""
    time.sleep(3.0)  # longer than STUCK_S
    begun = time.monotonic()
    ended = helpers.run([sys.executable, str(helpers.ROOT / "launch.py"), "look", str(run_dir)])
    assert time.monotonic() - begun < LOOK_S, fault
    assert os.listdir(run_dir / "attempts") == ["0000"]
    return ended.expect(0).out


def trained(run_dir: Path) -> list[tuple[Any, ...]]:
    """What a run has computed at each step."""
    assert helpers.read(run_dir, "status")["state"] == "done"
    return [(row["attempt"], row["step"], row["loss"]) for row in helpers.rows(run_dir)]


@pytest.fixture(scope="module")
def undisturbed(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    words = ["recipe=broken", "launcher=local", "ranks_per_node=2", "device=cpu", *RUN]
    command = [sys.executable, str(repo / "launch.py"), *words, f"run_dir={run_dir}"]
    helpers.finish(helpers.fork(command, cwd=repo, environ=helpers.clean_environment())).expect(0)
    return trained(run_dir)


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        pytest.param(
            "busy",
            r"^rank 1 on \S+: in \w+ at \S*broken\.py:\d+ for \d+ s, at ",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "lock",
            r"^rank 1 on \S+: in lock at \S*broken\.py:\d+ for \d+ s, at step 4 ",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "loader",
            r"^workers of rank 1 on \S+: in __getitem__ at \S*broken\.py:\d+$",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_place(
    start: Start, tmp_path: Path, undisturbed: list[tuple[Any, ...]], fault: str, place: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    run_dir = tmp_path / "run"
    process = start(run_dir, *RUN, FAULT=fault, FAULT_DIR=str(tmp_path))
    conftest.wait_for_file(tmp_path / ("worker.1" if fault == "loader" else "reached.1"))
    out = look(run_dir, fault)
    assert re.search(place, out, re.MULTILINE), out
    assert re.search(WAITS, out, re.MULTILINE), out
    (tmp_path / "go").touch()
    with open(tmp_path / "pipe", "r+b", buffering=0) as pipe:
        pipe.write(b"x")
        helpers.finish(process).expect(0)
    assert trained(run_dir) == undisturbed


def test_a_stopped_rank_is_named(
    start: Start, tmp_path: Path, undisturbed: list[tuple[Any, ...]]
) -> None:
    process = start(tmp_path, *RUN)
    conftest.wait_for_step(process, tmp_path, 2)
    rank = helpers.children(process.pid)[1]
    os.kill(rank, signal.SIGSTOP)
    out = look(tmp_path, "SIGSTOP")
    os.kill(rank, signal.SIGCONT)
    assert re.search(r"^rank 1 on \S+: stopped by a signal for \d+ s, at step ", out, re.MULTILINE)
    assert re.search(WAITS, out, re.MULTILINE), out
    helpers.finish(process).expect(0)
    assert trained(tmp_path) == undisturbed
