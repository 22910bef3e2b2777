"""The log file of each rank, and the lines of its parent. Standard library only.

A separate process (``tee``) copies the output below Python. The log file therefore also contains
the lines of NCCL and the last lines of a rank that crashes or is killed.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from recipes.core import files, trust
from recipes.core.run import signals


@contextlib.contextmanager
def copied_to(path: Path) -> Iterator[TextIO | None]:
    """Appends the stdout and stderr of this process and its children to ``path`` within the
    ``with`` block.

    Yields the terminal if stderr was one, for a progress line that must not be in the file; else
    None. Raises MachineError if ``path`` cannot be written, or belongs to another user.
    """
    try:
        log = open(path, "ab", buffering=0, opener=trust.own_without_links)  # noqa: SIM115
        if log.tell():
            log.write(b"\f\n")  # a form feed separates the attempts
    except OSError as error:
        line = (
            f"run_dir={path.parents[1]}: {path.name} cannot be written on {socket.gethostname()} "
            f"({error.strerror}): give another run_dir"
        )
        raise files.machine_error(error, line) from None
    terminal = os.fdopen(os.dup(2), "w") if sys.stderr.isatty() else None
    copies = []
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        original = os.dup(number)
        read_end, write_end = os.pipe()
        with signals.kept_from_children():  # tee ends when the rank ends
            tee = subprocess.Popen(
                ["tee", "-a", f"/dev/fd/{log.fileno()}"],
                pass_fds=[log.fileno()],
                stdin=read_end,
                stdout=original,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                # SIGPIPE stays ignored: tee writes the file even without a reader of stdout
                restore_signals=False,
            )
        os.close(read_end)
        os.dup2(write_end, number)
        os.close(write_end)
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
        copies.append((number, stream, original, tee))
    log.close()
    try:
        yield terminal
    finally:
        for number, stream, original, tee in copies:
            stream.flush()
            os.dup2(original, number)
            os.close(original)
            with contextlib.suppress(subprocess.TimeoutExpired):
                tee.wait(timeout=5)  # a limit, since a grandchild may still hold the pipe
        if terminal:
            with contextlib.suppress(OSError):  # the terminal is gone
                terminal.close()


def say(line: str, to: int = 2) -> None:
    """Writes a line to stderr (2) or stdout (1) at once. Errors are ignored: the disk of the log
    may be full, or its reader gone.
    """
    with contextlib.suppress(OSError):
        os.write(to, f"{line}\n".encode("utf-8", "surrogateescape"))
