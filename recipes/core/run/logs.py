"""Output: each rank's log file, and what is said to a person. Standard library only.

The copy is made by a process of its own (``tee``), below Python: NCCL's lines are in it too, and the last words of a rank that
is killed or crashes.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from recipes.core.errors import MachineError
from recipes.core.run import signals


@contextlib.contextmanager
def copied_to(path: Path) -> Iterator[TextIO | None]:
    """Copies this process's stdout and stderr, children's included, to the end of ``path`` while it is entered.

    Gives the terminal that stderr was, where it was one, for a progress line that does not belong into a file; else None.
    Raises MachineError when ``path`` cannot be written, or there is no ``tee``.
    """
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise MachineError(
            f"run_dir={path.parents[1]}: {path.name} cannot be written ({error.strerror}): give another run_dir"
        ) from None
    if shutil.which("tee") is None:
        raise MachineError(
            f"{socket.gethostname()}: there is no tee on the PATH, which writes logs/: it is of coreutils"
        )
    terminal = os.fdopen(os.dup(2), "w") if sys.stderr.isatty() else None
    copies = []
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        original = os.dup(number)
        read_end, write_end = os.pipe()
        # Slurm signals every process of a step, and Ctrl-C all of a terminal's: tee inherits these blocked, and ends when
        # the rank does. They are blocked here for this moment, so that none is lost.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)
        try:
            tee = subprocess.Popen(
                ["tee", "-a", str(path)],
                stdin=read_end,
                stdout=original,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                restore_signals=False,  # SIGPIPE stays ignored: where who reads along has ended, the file goes on
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        os.close(read_end)
        os.dup2(write_end, number)
        os.close(write_end)
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
        copies.append((number, stream, original, tee))
    try:
        yield terminal
    finally:
        for number, stream, original, tee in copies:
            stream.flush()
            os.dup2(original, number)
            os.close(original)
            with contextlib.suppress(subprocess.TimeoutExpired):
                tee.wait(timeout=5)  # not for ever: a grandchild may still hold the pipe
        if terminal:
            with contextlib.suppress(OSError):  # it is gone
                terminal.close()
