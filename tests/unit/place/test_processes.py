"""What a process and its children use, and that a process keeps the memory that it has freed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(("variables", "keeps"), [({}, True), ({"MALLOC_ARENA_TEST": "8"}, False)])
def test_a_second_block_causes_no_page_faults_unless_the_user_has_set_up_malloc(
    variables: dict[str, str], keeps: bool
) -> None:
    program = """
import resource
from recipes.core.place import processes
processes.keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = b"x" * (64 << 20)
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | variables
    done = subprocess.run([sys.executable, "-c", program], env=environ, check=True, capture_output=True, text=True)
    assert (int(done.stdout) < 100) == keeps
