"""A rank that makes no progress is ended from outside, named, and its stack shown; one that does is
left alone.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.core.errors import Kind
from recipes.core.place.memory import Memory
from recipes.core.run import attempt, watchdog
from tests import helpers
from tests.helpers import ROOT


def test_the_clock_leaves_out_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    clock = watchdog.RunningClock()
    moment += 50.0  # the import of torch, before the clock is started, is not a gap
    clock.start()
    begin = clock.now()
    moment += watchdog.POLL_S + 100.0
    assert clock.now() - begin == pytest.approx(watchdog.POLL_S)
    assert clock.stopped_s == pytest.approx(100.0)
    moment += watchdog.POLL_S + 30.0
    assert clock.now() - begin == pytest.approx(2 * watchdog.POLL_S)
    assert clock.stopped_s == pytest.approx(130.0)


RANK = """
import ctypes, faulthandler, os, signal, sys, time
from pathlib import Path
from recipes.core.run import watchdog
from recipes.core.run.watchdog import Pulse
faulthandler.enable()
pulse = Pulse()
pulse.tell(recipe="toy", rank=3, host="node7", attempt=sys.argv[2] + "/attempts/0001")
pulse.watch(float(sys.argv[1]), Path.cwd())
pulse.beat(watchdog.BACKWARD, 11)
print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)

def sleep_without_letting_go():
    # keeps the interpreter's lock: no thread of it runs, no handler either
    ctypes.PyDLL(None).sleep(600)

def work():
    for step in range(25):
        time.sleep(0.2)
        pulse.beat(watchdog.DATA, step)
    print("alive")

FAULTS = {
    "stuck": sleep_without_letting_go,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "waits": lambda: time.sleep(600),
    "hangs before its steps": lambda: (pulse.beat(watchdog.OUTSIDE, 0), time.sleep(600)),
    "works": work,
}
FAULTS[sys.argv[3]]()
"""


def rank(folder: Path, fault: str, timeout_s: float = 1.5) -> subprocess.Popen[str]:
    (folder / "attempts/0001/failed").mkdir(parents=True, exist_ok=True)
    return helpers.start([sys.executable, "-c", RANK, str(timeout_s), str(folder), fault], cwd=ROOT)


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, subprocess.Popen[str]]]:
    """A rank for each fault, started at once, and its run directory."""
    faults = ("stuck", "stopped", "waits", "works", "hangs before its steps")
    folders = {fault: tmp_path_factory.mktemp(fault.replace(" ", "-")) for fault in faults}
    return {fault: (folder, rank(folder, fault)) for fault, folder in folders.items()}


Started = dict[str, tuple[Path, subprocess.Popen[str]]]


@pytest.mark.parametrize("fault", ["stuck", "stopped", "waits"])
def test_a_rank_without_progress_is_ended_and_named(fault: str, started: Started) -> None:
    folder, process = started[fault]
    status = -signal.SIGKILL if fault == "stopped" else -signal.SIGABRT
    ended = helpers.finish(process, timeout_s=30).expect(status)
    problem = "made no progress for 1.5 s at step 12 (backward)"
    assert f"toy: rank 3 on node7 {problem}: killing it" in ended.lines
    record = helpers.failure(folder, 3, 1)
    assert record["rank"] == 3
    assert record["host"] == "node7"
    assert record["kind"] == "hang"
    assert record["error"] == problem
    assert record["time"] - record["progress"] > 1.4
    if fault == "stuck":
        assert "sleep_without_letting_go" in ended.out  # the stack, by faulthandler
    watcher = int(ended.lines[0])
    helpers.wait_for_the_end_of([watcher], 10)


def test_a_rank_that_hangs_before_its_steps_is_ended_after_six_times_as_long(
    started: Started,
) -> None:
    _, process = started["hangs before its steps"]
    ended = helpers.finish(process, timeout_s=60).expect(-signal.SIGABRT)
    problem = "made no progress for 9 s at step 0 (outside the steps)"
    assert f"toy: rank 3 on node7 {problem}: killing it" in ended.lines


def test_a_rank_that_gets_on_is_left_alone(started: Started) -> None:
    folder, process = started["works"]
    ended = helpers.finish(process, timeout_s=60).expect(0)
    assert ended.lines[-1] == "alive"
    assert list((folder / "attempts/0001/failed").iterdir()) == []


def test_beats_that_are_slower_than_the_polls_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 8 s at a time-out of 10 s: most polls see the same pulse."""
    now = 0.0
    ends: list[float] = []
    pulse = watchdog.Pulse()

    def poll(numbers: object, seconds: float) -> None:
        nonlocal now
        now += seconds
        watchdog.PULSE.pack_into(pulse.memory, 0, 1, int(now // 8), watchdog.FORWARD)

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(watchdog, "watch_memory", lambda *of: None)
    monkeypatch.setattr(watchdog.look, "answer_requests", lambda *of: None)
    monkeypatch.setattr(watchdog.signal, "sigtimedwait", poll)
    monkeypatch.setattr(watchdog.os, "getppid", lambda: 7 if now < 100 else 1)
    monkeypatch.setattr(watchdog, "_end", lambda *of: ends.append(now))
    watchdog.watch(7, pulse, 10.0)
    assert ends == []


def test_a_file_system_that_hangs_does_not_keep_a_rank_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the watchdog: it may be what the rank waits for."""
    hangs = threading.Event()
    monkeypatch.setattr(attempt, "record", lambda *args, **record: hangs.wait(60))
    monkeypatch.setattr(watchdog, "TELL_S", 0.2)
    monkeypatch.setattr(watchdog, "_describe", lambda *of: {"processes": []})
    others = threading.enumerate()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pulse = watchdog.Pulse()
    pulse.tell(recipe="toy", rank=3, host="node7", attempt=f"{tmp_path}/attempts/0000")
    begin = time.monotonic()
    try:
        watchdog._end(process.pid, pulse, 1.5)
        assert process.wait(10) < 0
        assert time.monotonic() - begin < 10
    finally:
        hangs.set()
        process.kill()
        process.wait()
        for thread in threading.enumerate():  # else it would run in a later test
            if thread not in others:
                thread.join(10)


def test_of_a_rank_that_has_ended_meanwhile_nothing_more_is_printed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.0)
    monkeypatch.setattr(watchdog.look, "EXEC_S", 0.01)
    process = subprocess.Popen(["true"])
    process.wait()
    pulse = watchdog.Pulse()
    pulse.tell(recipe="toy", rank=3, host="node7")
    watchdog._tell(process.pid, pulse, 1.5)
    [line] = capfd.readouterr().err.splitlines()
    assert line.endswith(": killing it")


def test_a_rank_that_has_said_why_it_fails_is_believed(tmp_path: Path) -> None:
    """The kernel may have killed a worker of it, or with launcher=local another rank."""
    started = helpers.attempt(tmp_path)
    attempt.record(started, rank=3, host="node7", kind=Kind.peer_lost, error="lost rank 2")
    pulse = watchdog.Pulse()
    pulse.beat(watchdog.DATA)
    for rank in (2, 3):
        pulse.tell(recipe="toy", rank=rank, host="node7", attempt=str(started.folder))
        watchdog._tell_out_of_memory(pulse, Memory(None, 0))
    kinds = [helpers.failure(tmp_path, rank)["kind"] for rank in (2, 3)]
    assert kinds == ["out-of-memory", "peer-lost"]


def test_it_ignores_the_signals_of_slurm_and_ends_with_its_rank(tmp_path: Path) -> None:
    process = rank(tmp_path, "waits", timeout_s=600)
    try:
        watcher = int(process.stdout.readline())
        # HUP, INT, USR1, USR2, TERM
        expected = sum(1 << (number - 1) for number in (1, 2, 10, 12, 15))

        def ignores() -> bool:
            status = Path(f"/proc/{watcher}/status").read_text()
            return int(status.partition("SigIgn:")[2].split()[0], 16) & expected == expected

        helpers.wait_until(ignores, 20, "signals that are ignored")
    finally:
        process.kill()
        process.communicate()
    helpers.wait_for_the_end_of([watcher], 10)


def test_a_place_is_told_by_the_step_that_is_worked_on() -> None:
    assert watchdog.place(11, watchdog.DATA) == "step 12 (data)"
    assert watchdog.place(11, watchdog.EVALUATION) == "step 11 (evaluation)"
    assert watchdog.place(11, watchdog.WAITING) == "step 11 (waiting)"
    pulse = watchdog.Pulse()
    pulse.beat(watchdog.DATA, 5)
    pulse.beat(watchdog.FORWARD)
    assert pulse.read() == (2, 5, watchdog.FORWARD)
    pulse.tell(rank=3)
    may_wait = []
    for phase in (watchdog.START, watchdog.EVALUATION):
        pulse.beat(phase)
        may_wait.append(pulse.progress()["may_wait"])
    assert may_wait == [False, True]


def test_a_rank_answers_once_with_a_collective_of_any_length() -> None:
    pulse = watchdog.Pulse()
    pulse.memory[watchdog.ASKED_AT] = 1
    answers = iter(["x" * 1000])
    for _ in range(2):
        pulse.answer(lambda: next(answers))
    assert pulse.memory[watchdog.COLLECTIVE_AT :].rstrip(b"\0") == b"x" * 512
