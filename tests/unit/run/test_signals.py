"""What asks a run to stop: signals, seen at once, and the near end of its job."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.core.run import signals
from recipes.core.run.signals import StopFlag
from tests import helpers
from tests.helpers import ROOT


class Clock:
    """In place of `threading` and `time`, for `watch_the_end`: its thread runs at once, and
    sleeping moves the time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(signals, "threading", self)
        monkeypatch.setattr(signals, "time", self)

    def Thread(self, target: Callable[[], None], **of: Any) -> Any:
        return SimpleNamespace(start=target)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 1e6, "it never stops"


def test_ctrl_c_before_the_ranks_have_met_prints_no_traceback() -> None:
    code = "import signal; from recipes.core.run import entry; entry.begin('toy'); "
    code += "signal.raise_signal(signal.SIGINT)"
    environ = helpers.clean_environment()
    ended = helpers.run([sys.executable, "-c", code, "device=cpu"], environ=environ)
    assert ended.expect(-signal.SIGINT).out == ""


@pytest.mark.parametrize(
    ("answers", "stopped_at"),
    [
        ({0: 3600}, 3480),  # 120 s before the end
        (
            {0: 3600, 3420: 4600},
            4480,
        ),  # the limit was raised, which is seen when the job is asked again
        ({0: 3600, 3480: 3800}, 3680),
        ({0: 86400, 86220: None}, 86280),  # the controller does not answer any more
        ({0: 200}, 150),  # at most a quarter of what is left at first
        ({0: 100, 75: 90}, 75),
        ({0: math.inf}, None),
        ({0: None}, None),
    ],
)
def test_a_run_stops_so_long_before_its_job_ends(
    answers: dict[float, float | None], stopped_at: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    flag = StopFlag()
    told = []

    def left() -> float | None:
        end = answers[max(moment for moment in answers if moment <= clock.now)]
        return None if end is None else end - clock.now

    signals.watch_the_end(flag, 120, left, lambda name: told.append((name, clock.now)))
    assert told == ([("the time limit", stopped_at)] if stopped_at else [])
    assert flag.reason == ("the time limit" if stopped_at else "")


BLOCKED = """
import ctypes, os, signal, sys
from recipes.core.run import signals
libc = ctypes.CDLL(None)
with signals.stop_flag(lambda name: print("noted", name, flush=True)):
    print("ready", flush=True)
    # Waits below Python, as in a collective: a handler of Python's cannot run before it is over.
    read_end, write_end = os.pipe()
    buffer = ctypes.create_string_buffer(1)
    while libc.read(read_end, buffer, 1) < 0:
        pass
"""


def test_signals_act_at_once_while_the_main_thread_waits_below_python() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "noted SIGTERM\n"
        for _ in range(2):
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            time.sleep(2 * signals.TOGETHER_S)
        assert process.wait(10) == signals.INTERRUPTED
    finally:
        process.kill()
        process.communicate()


TOGETHER = """
import os, signal, sys, time
from recipes.core.run import signals
signals.TOGETHER_S = 60
with signals.stop_flag() as stop:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
print(stop.reason)
"""


def test_interrupts_that_come_together_are_one() -> None:
    ended = helpers.run([sys.executable, "-c", TOGETHER], cwd=ROOT).expect(0)
    assert ended.lines == ["SIGINT"]


FORKED = """
import os, signal, time
from recipes.core.run import signals
with signals.stop_flag() as stop:
    child = os.fork()
    if not child:
        time.sleep(60)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        time.sleep(0.5)
        os.kill(child, number)
    os.waitpid(child, 0)
    print(repr(stop.reason))
"""


def test_what_a_forked_child_is_sent_is_not_for_its_parent() -> None:
    # Python 3.12 warns of fork in a process with threads.
    ended = helpers.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED], cwd=ROOT
    ).expect(0)
    assert ended.lines == ["''"]


@pytest.mark.parametrize("nohup", [False, True])
def test_a_hangup_sets_the_flag_unless_nohup_has_it_ignored(nohup: bool) -> None:
    code = "import os, signal, time\nfrom recipes.core.run import signals\n"
    code += f"signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if nohup else 'SIG_DFL'})\n"
    code += "with signals.stop_flag() as stop:\n    os.kill(os.getpid(), signal.SIGHUP)\n"
    code += f"    deadline = time.monotonic() + {0.2 if nohup else 10}\n"
    code += "    while not stop.reason and time.monotonic() < deadline: time.sleep(0.01)\n"
    code += "    print(stop.reason or 'continues')"
    ended = helpers.run([sys.executable, "-c", code], cwd=ROOT).expect(0)
    assert ended.lines == ["continues" if nohup else "SIGHUP"]


def test_handlers_and_pipe_are_put_back() -> None:
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    descriptors = len(os.listdir("/proc/self/fd"))
    with signals.stop_flag() as stop:
        assert signal.set_wakeup_fd(-1) >= 0
        os.kill(os.getpid(), signal.SIGTERM)
        helpers.wait_until(lambda: stop.reason == "SIGTERM", 10, "the flag")
    with signals.stop_flag(by_clock=True):
        assert signal.getsignal(signal.SIGUSR1) != signal.SIG_IGN
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
