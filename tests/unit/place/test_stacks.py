"""The stack of another process, whatever this process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.core.place import stacks
from recipes.core.program.hook import sitecustomize
from tests import helpers
from tests.helpers import ROOT

# Registers, writes a line, and does what its argument says until a line comes on stdin.
PROCESS = """
import ctypes, os, select, sys
from recipes.core.place import stacks

def busy_é():
    while not select.select([0], [], [], 0)[0]:
        pass

def hold_the_lock():
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(9), 9)

def of_a_fork():
    pid = os.fork()
    if pid == 0:
        os.write(1, b"%d\\n" % os.getpid())
        busy_é()
        os._exit(0)
    os.waitpid(pid, 0)

def replaced():
    os.execvp("sh", ["sh", "-c", "echo $$; read line; echo continues"])

stacks.register()
stacks.register()
print(os.getpid(), flush=True)
globals()[sys.argv[1]]()
print("continues")
"""


@contextmanager
def running(name: str) -> Iterator[int]:
    """The ID of a process in a function of PROCESS, which must continue afterwards."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, name], cwd=ROOT, stdin=pipe, stdout=pipe, text=True
    )
    assert process.stdout
    pid = int(process.stdout.readline())
    if name in ("of_a_fork", "replaced"):
        pid = int(process.stdout.readline())
    yield pid
    out, _ = process.communicate("\n", timeout=20)
    assert (process.returncode, out) == (0, "continues\n")


def innermost(pid: int) -> str:
    """The function at the top of a stack, once the process is in one of PROCESS."""
    text = helpers.wait_until(lambda: stacks.read(pid, 3.0).partition("\n")[0], 10, "a stack")
    return text.rpartition(" in ")[2]


def test_a_process_is_read_while_it_computes_holds_the_lock_or_is_a_fork() -> None:
    for name, function in (
        ("busy_é", "busy_é"),
        ("hold_the_lock", "hold_the_lock"),
        ("of_a_fork", "busy_é"),
    ):
        with running(name) as pid:
            helpers.wait_until(lambda pid=pid: innermost(pid) != "<module>", 10, name)
            assert innermost(pid) == function
            assert stacks.read(pid, 3.0).count("in <module>") == 1


def test_a_process_that_has_not_registered_gets_no_signal() -> None:
    with running("replaced") as pid:
        assert stacks.read(pid, 1.0) == ""


def test_a_stopped_process_writes_nothing_and_only_the_newest_stack_counts_later() -> None:
    with running("busy_é") as pid:
        os.kill(pid, signal.SIGSTOP)
        helpers.wait_until(
            lambda: "T (stopped)" in Path(f"/proc/{pid}/status").read_text(), 5, "stop"
        )
        assert stacks.read(pid, 0.5) == ""
        os.kill(pid, signal.SIGCONT)
        assert stacks.read(pid, 3.0).count("in <module>") == 1


def test_the_hook_of_programs_uses_the_same_signal() -> None:
    assert stacks.STACKS == sitecustomize.STACKS
