"""The Python stack of another process, also of one that holds the interpreter's lock. Standard
library only.

A process that has called `register` writes its stack into a file in memory when it gets a signal.
A handler in C writes it, so that neither the lock nor ptrace is needed.
"""

import contextlib
import faulthandler
import functools
import os
import re
import signal
import time

STACKS = signal.SIGRTMAX - 2  # as in program/hook/sitecustomize.py, which imports nothing from here
NAME = "python-stacks"
SETTLED_S = 0.1  # a stack that has not grown for this long is complete
LONGEST = 1 << 16  # bytes of a stack that are read
# a character that is not ASCII, as faulthandler writes it
ESCAPED = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U000[0-9a-f]{5})")


@functools.cache
def register() -> None:
    """Lets this process and its forks write the stack of their main thread at STACKS. Must be
    called from the main thread.
    """
    file = os.memfd_create(NAME)
    signal.signal(STACKS, signal.SIG_IGN)  # Python restores this at its end
    # Not all threads: the frames of a thread that runs meanwhile cannot be read safely.
    faulthandler.register(STACKS, file=file, all_threads=False)


def read(pid: int, patience_s: float) -> str:
    """The lines of the stack of a process, innermost frame first. "" if it has not called
    `register`, or if it writes nothing within ``patience_s`` seconds.
    """
    content = b""
    deadline = time.monotonic() + patience_s
    with contextlib.suppress(OSError), open(_file(pid), "rb") as file:
        old = os.fstat(file.fileno()).st_size
        os.kill(pid, STACKS)
        before = b""
        while time.monotonic() < deadline and (not content or content != before):
            time.sleep(SETTLED_S)
            before = content
            content = os.pread(file.fileno(), LONGEST, old)
    # an answer to an earlier signal may precede it
    text = content.rpartition(b"call first):\n")[2].decode(errors="replace")
    return ESCAPED.sub(lambda match: chr(int(match[1][1:], 16)), text)


def _file(pid: int) -> str:
    """The path of the file of a process. Raises OSError if it has none.

    A process that has replaced its program has none, and the signal would end it.
    """
    folder = f"/proc/{pid}/fd"
    for number in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            if os.readlink(f"{folder}/{number}").startswith(f"/memfd:{NAME} "):
                return f"{folder}/{number}"
    raise FileNotFoundError(folder)
