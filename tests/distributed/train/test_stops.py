"""A run that is stopped repeatedly, by SIGTERM, by SIGINT, by the death of a rank, and resumes each time."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.core.run import signals
from recipes.core.train import failure
from tests import helpers
from tests.helpers import LOCAL, Ended

HOST = socket.gethostname()
WORDS = ("epochs=1000", "warmup=0", "schedule=constant", "checkpoint_every_steps=5", "log_every_steps=5")


# Two interrupts behind the moment at which a run's end is written, or a rank's error recorded.
LATE = """
import os, signal, sys, time
from recipes.core.run import entry
START = entry.begin("toy")
from recipes import toy
from recipes.core.run import attempt, directory, signals; from recipes.core.train import session
def late(write):
    def call(*given, **of):
        write(*given, **of)
        if "running" not in given:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(2 * signals.TOGETHER_S)
    return call
directory.write_status, attempt.record = late(directory.write_status), late(attempt.record)
session.run(toy.main, START)
"""


@pytest.mark.parametrize(("words", "state", "status"), [((), "done", 0), (("lr=1e30",), "failed", 1)])
def test_two_interrupts_after_the_end_change_nothing(
    tmp_path: Path, words: tuple[str, ...], state: str, status: int
) -> None:
    ended = helpers.run_fork([sys.executable, "-c", LATE, "device=cpu", f"run_dir={tmp_path}", *words])
    found = helpers.read(tmp_path, "status")
    assert (ended.status, found["state"]) == (status, state), ended.out
    assert "KeyboardInterrupt" not in ended.out + found["reason"]


# A step that never ends, in a call that no Python handler comes between.
STUCK = """
import ctypes, signal, sys
from recipes.core.run import entry
START = entry.begin("toy")
from recipes import toy
from recipes.core.train import loop, session
def stuck(*given):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # another thread takes it
    print("stuck", flush=True)
    ctypes.CDLL(None).sleep(300)
loop.Agreement = stuck
session.run(toy.main, START)
"""


def test_an_interrupt_that_the_main_thread_cannot_handle_is_recorded(tmp_path: Path) -> None:
    process = helpers.fork([sys.executable, "-c", STUCK, "device=cpu", f"run_dir={tmp_path}"])
    assert process.stdout
    while process.stdout.readline() != "stuck\n":
        assert process.poll() is None
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(2 * signals.TOGETHER_S)
    ended = helpers.finish(process)
    assert ended.status == signals.INTERRUPTED, ended.out
    status = helpers.read(tmp_path, "status")
    assert (status["state"], status["reason"]) == ("failed", f"rank 0 on {HOST} failed first: KeyboardInterrupt")


# A library that crashes when the interpreter takes itself apart, and what is done before that.
CRASHES = """
import atexit, os
from recipes.core.run import entry
entry.begin("toy")
import sys
class Library:
    abort = staticmethod(os.abort)
    def __del__(self):
        self.abort()
library = Library()
atexit.register(print, "at exit")
entry.end(0)
"""


@pytest.mark.parametrize(("looked_into", "status"), [({}, 0), ({"LD_PRELOAD": ""}, -signal.SIGABRT)])
def test_a_crash_after_the_end_does_not_fail_the_run(looked_into: dict[str, str], status: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CRASHES, "device=cpu", "max_steps=1", f"run_dir={tmp_path}/run"]
    ended = helpers.run(command, environ=helpers.clean_environment(**looked_into))
    assert ended.status == status, ended.out
    assert "at exit" in ended.lines


@dataclass(frozen=True)
class Stop:
    """How an attempt ended, and what the run directory held right after it. seconds: from the signal to the launcher's end."""

    ended: Ended
    seconds: float
    pids: list[int]
    status: dict[str, Any]
    rows: list[dict[str, Any]]
    newest: str


def attempt(run_dir: Path, number: int, end: Any) -> Stop:
    """Starts the run with two ranks, lets it train a little, calls ``end(launcher, ranks)`` and waits."""
    launcher = helpers.fork([*LOCAL, *WORDS, "ranks_per_node=2", f"run_dir={run_dir}"])

    def steps() -> list[int]:
        return [row["step"] for row in helpers.rows(run_dir) if row["attempt"] == number]

    try:
        helpers.wait_until(
            lambda: len(steps()) >= 3 or launcher.poll() is not None, helpers.START_S, "three rows of metrics"
        )
        pids = helpers.children(launcher.pid) if launcher.poll() is None else []
        begin = time.monotonic()
        end(launcher, pids)
    except BaseException:
        launcher.kill()
        raise
    ended = helpers.finish(launcher, timeout_s=60)
    newest = (run_dir / "checkpoints" / "latest").read_text().strip()
    return Stop(ended, time.monotonic() - begin, pids, helpers.read(run_dir, "status"), helpers.rows(run_dir), newest)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stopped") / "run"


@pytest.fixture(scope="module")
def terminated(run_dir: Path) -> Stop:
    return attempt(run_dir, 0, lambda launcher, pids: launcher.terminate())


@pytest.fixture(scope="module")
def interrupted(run_dir: Path, terminated: Stop) -> Stop:
    return attempt(run_dir, 1, lambda launcher, pids: launcher.send_signal(signal.SIGINT))


@pytest.fixture(scope="module")
def killed(run_dir: Path, interrupted: Stop) -> Stop:
    def kill_rank_1(launcher: subprocess.Popen[str], pids: list[int]) -> None:
        subprocess.run(["kill", "-KILL", str(pids[1])], check=True)

    return attempt(run_dir, 2, kill_rank_1)


@pytest.mark.parametrize(("number", "name"), [(0, "terminated"), (1, "interrupted")])
def test_a_requested_stop_saves(request: pytest.FixtureRequest, number: int, name: str) -> None:
    stop: Stop = request.getfixturevalue(name)
    assert stop.ended.status == 75, stop.ended.out
    assert "stopping: the ranks save and end; a second signal ends them immediately" in stop.ended.lines
    assert (stop.status["state"], stop.status["attempt"], stop.status["reason"]) == ("preempted", number, "SIGTERM")
    step = stop.status["step"]
    assert stop.newest == f"step-{step:08d}.pt"  # of the step that it stopped at, not of the last interval
    assert stop.rows[-1]["step"] == step
    assert any(line.startswith(f"stopped by SIGTERM at step {step}, saved in ") for line in stop.ended.lines)
    assert "Traceback" not in stop.ended.out
    assert len(stop.pids) == 2
    assert not any(helpers.alive(pid) for pid in stop.pids)


def test_a_stopped_run_resumes_where_it_stopped(run_dir: Path, terminated: Stop, interrupted: Stop) -> None:
    step = terminated.status["step"]
    assert f"resumed from {run_dir}/checkpoints/step-{step:08d}.pt, step {step}" in interrupted.ended.lines
    known = zip(terminated.rows, interrupted.rows, strict=False)
    assert all(before.items() <= after.items() for before, after in known)  # only ever added to
    added = interrupted.rows[len(terminated.rows) :]
    assert added[0]["attempt"] == 1
    assert added[0]["step"] == step + 1
    # What it had learnt is still there: no loss jumps back to that of fresh weights.
    assert added[0]["loss"] < 0.9 * terminated.rows[0]["loss"]


def test_a_killed_rank_ends_all_ranks_and_is_named(killed: Stop) -> None:
    assert killed.ended.status == 137, killed.ended.out
    assert killed.seconds < 30
    assert killed.ended.lines[-1].startswith(f"failed: rank 1 on {HOST} was killed by SIGKILL"), killed.ended.out
    found = {
        k: killed.status[k] for k in ("state", "attempt", "first_failing_rank", "first_failing_host", "exit_status")
    }
    assert found == {
        "state": "failed", "attempt": 2, "first_failing_rank": 1, "first_failing_host": HOST, "exit_status": 137,
    }  # fmt: skip
    assert f"rank 1 on {HOST}" in killed.status["reason"]
    assert not any(helpers.alive(pid) for pid in killed.pids)


def test_the_last_checkpoint_is_valid_after_all_stops(run_dir: Path, killed: Stop, interrupted: Stop) -> None:
    saved = int(killed.newest.removeprefix("step-").removesuffix(".pt"))
    assert saved > interrupted.status["step"]
    assert torch.load(run_dir / "checkpoints" / killed.newest, weights_only=True)["meta"]["step"] == saved
    more = [
        *LOCAL,
        *WORDS,
        f"max_steps={saved + 3}",
        "force=true",
        "ranks_per_node=1",
        "cpu_threads=1",
        f"run_dir={run_dir}",
    ]
    ended = helpers.run_fork(more)
    assert ended.status == 0, ended.out
    summary = helpers.read(run_dir, "summary")
    assert (summary["resumed_from_step"], summary["steps"], summary["restarts"]) == (saved, saved + 3, 3)
    status = helpers.read(run_dir, "status")
    assert (status["state"], status["reason"], status["first_failing_rank"]) == ("done", "", None)


@pytest.mark.long
def test_a_refused_start_does_not_disturb_the_running_run(tmp_path: Path) -> None:
    launcher = helpers.fork([*LOCAL, *WORDS, "ranks_per_node=2", f"run_dir={tmp_path}"])
    try:
        helpers.wait_until(
            lambda: len(helpers.rows(tmp_path)) >= 3 or launcher.poll() is not None, helpers.START_S, "three rows"
        )
        alone = [sys.executable, "-m", "recipes.mnist", "device=cpu", "dataset=digits", *WORDS, f"run_dir={tmp_path}"]
        for word, expected in (("lr=0.5", "from these keys"), ("resume=never", " uses it: end it (kill ")):
            second = helpers.run([*alone, word])
            assert second.status == 2, second.out
            assert expected in second.out or " uses it: end it (kill " in second.out
        rows = len(helpers.rows(tmp_path))
        time.sleep(2 * failure.FENCE_S)
        assert launcher.poll() is None
        helpers.wait_until(lambda: len(helpers.rows(tmp_path)) > rows, 30, "that it goes on")
        launcher.send_signal(signal.SIGTERM)
        ended = helpers.finish(launcher)
    finally:
        launcher.kill()
    assert ended.status == 75, ended.out
    status = helpers.read(tmp_path, "status")
    assert (status["state"], status["attempt"]) == ("preempted", 0)
