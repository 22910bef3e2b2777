"""What a process and its children use, and that a process keeps the memory that it has freed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from recipes.core.place import processes

OF_MALLOC = ("MALLOC_", "GLIBC_TUNABLES")


def test_the_time_of_a_child_that_has_ended_counts() -> None:
    before = processes.cpu_time()[0]
    subprocess.run(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True
    )
    assert processes.cpu_time()[0] >= before + 0.4


def test_memory_that_a_forked_child_shares_counts_once() -> None:
    held = bytearray(os.urandom(1000)) * 200_000
    before = processes.memory()
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    try:
        assert processes.memory() < before + len(held) // 2
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("variables", "keeps"),
    [
        ({}, True),
        ({"MALLOC_ARENA_TEST": "8"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=0"}, False),
    ],
)
def test_freed_memory_is_kept_unless_the_user_has_set_up_malloc(
    variables: dict[str, str], keeps: bool
) -> None:
    program = """
from recipes.core.place import processes
processes.keep_freed_memory()
block = b"x" * (16 << 20)
before = processes.memory()
del block
print(before - processes.memory())
"""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(OF_MALLOC)
    } | variables
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, check=True, capture_output=True, text=True
    )
    assert (int(done.stdout) < 1 << 20) == keeps


@pytest.mark.parametrize(
    "most", [1 << 30, 32 << 20, 0]
)  # a newer glibc, an older one, and one that refuses all
def test_the_threshold_for_trimming_is_set_only_after_the_other_one(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    calls = []

    class Libc:
        def mallopt(self, option: int, value: int) -> int:
            accepted = option == processes.M_TRIM_THRESHOLD or value <= most
            if accepted:
                calls.append(option)
            return int(accepted)

    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: Libc())
    for name in [name for name in os.environ if name.startswith(OF_MALLOC)]:
        monkeypatch.delenv(name)
    processes.keep_freed_memory()
    assert calls == ([processes.M_MMAP_THRESHOLD, processes.M_TRIM_THRESHOLD] if most else [])
