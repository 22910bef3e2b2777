"""What a process and its children use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from recipes.core.place import processes


def test_the_time_of_a_child_that_has_ended_counts() -> None:
    before = processes.cpu_time().cpu_s
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert processes.cpu_time().cpu_s >= before + 0.4


def test_memory_that_a_forked_child_shares_counts_once() -> None:
    held = bytearray(os.urandom(1000)) * 200_000
    before = processes.memory()
    if not (child := os.fork()):
        while True:
            signal.pause()
    try:
        assert processes.memory() < before + len(held) // 2
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
