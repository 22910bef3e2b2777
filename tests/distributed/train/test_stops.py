"""An interrupt that the main thread cannot handle, and a crash after the end."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from recipes.core.run import signals
from tests import helpers

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


def test_a_second_interrupt_ends_a_rank_whose_main_thread_cannot_handle_it(tmp_path: Path) -> None:
    process = helpers.fork([sys.executable, "-c", STUCK, "device=cpu", f"run_dir={tmp_path}"])
    assert process.stdout
    while process.stdout.readline() != "stuck\n":
        assert process.poll() is None
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(2 * signals.TOGETHER_S)
    ended = helpers.finish(process)
    assert (ended.status, ended.lines[-1]) == (signals.INTERRUPTED, "ended by a second SIGINT"), ended.out


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
