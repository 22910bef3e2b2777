"""Processes of this machine as /proc shows them: their tree, commands and signals. Standard library
only.
"""

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
MOST_BLOCKED = 32  # of more signals, glibc has blocked all for some milliseconds, to start a thread
TRIES = 5  # to read the signals that a process blocks


@dataclass(frozen=True)
class Process:
    """One process. caught: numbers of the signals that have a handler and are not blocked."""

    pid: int
    command: tuple[str, ...]
    program: str  # file name of its executable
    caught: frozenset[int]

    @property
    def is_python(self) -> bool:
        return self.program.startswith("python")


def read(pid: int) -> Process | None:
    """The process with this ID; None if there is none, or if it has ended."""
    folder = Path(f"/proc/{pid}")
    program = ""
    try:
        for _ in range(TRIES):
            status = (folder / "status").read_text()
            blocked = signal_set(status, "SigBlk")
            if len(blocked) <= MOST_BLOCKED:
                break
            time.sleep(0.002)
        command = (folder / "cmdline").read_bytes().decode(errors="replace")
        # a program with the setuid bit, such as Apptainer's
        with contextlib.suppress(PermissionError):
            program = os.path.basename(os.readlink(folder / "exe"))
    except OSError:
        return None
    caught = signal_set(status, "SigCgt") - blocked
    return Process(pid, tuple(command.split("\0")[:-1]), program, caught)


def signal_set(status: str, name: str) -> frozenset[int]:
    """The signals in a line of /proc/PID/status, such as SigCgt or ShdPnd."""
    line = re.search(rf"^{name}:\s*(\w+)$", status, re.MULTILINE)
    bits = int(line[1], 16) if line else 0
    return frozenset(number for number in range(1, signal.NSIG) if bits >> (number - 1) & 1)


def children(pid: int) -> list[int]:
    """The child processes of all threads of a process."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return pids


def descendants(pid: int) -> Iterator[int]:
    """A process and all processes below it."""
    yield pid
    for child in children(pid):
        yield from descendants(child)


def adopt_orphans() -> None:
    """From now on, a process below this one becomes its child when its own parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap(pids: set[int]) -> None:
    """Removes those children of this process that have ended and are not in ``pids``."""
    for pid in set(children(os.getpid())) - pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
