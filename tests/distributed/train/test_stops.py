"""Interrupts that come too late or cannot be handled, and a crash after the end."""

from __future__ import annotations

import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from recipes.core.run import signals
from tests import helpers

HOST = socket.gethostname()

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
    assert (ended.status, ended.lines[-1]) == (signals.INTERRUPTED, "ended by a second SIGINT"), ended.out
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
