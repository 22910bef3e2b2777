"""What a process and its children use."""

from __future__ import annotations

import os
import signal

from recipes.core.place import processes


def test_memory_that_a_forked_child_shares_counts_once() -> None:
    held = bytearray(os.urandom(1000)) * 200_000
    before = processes.memory()
    if not (child := os.fork()):
        signal.pause()
    try:
        assert processes.memory() < before + len(held) // 2
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
