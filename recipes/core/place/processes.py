"""Processes: the end of a child with its parent, what they use, and how they keep memory. Standard
library only.
"""

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from recipes.core import errors
from recipes.core.place import proctree

PR_SET_PDEATHSIG = 1
# of mallopt(3)
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """Returns a function for a child process to call: after it, the kernel kills the child when its
    parent ends, for any reason.

    parent: process id of the parent. number: the signal that the child gets. The function is also
    suitable as ``preexec_fn``.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(errors.EXIT_CRASH)

    return prepare


def keep_freed_memory() -> None:
    """Lets this process keep the memory of freed tensors for the next ones, unless a MALLOC_
    variable or GLIBC_TUNABLES sets malloc up.

    glibc returns large blocks to the system, and each new block costs page faults: a step on a CPU
    took up to 27 % longer. With kept memory, a rank used up to 20 % more.
    """
    libc = ctypes.CDLL(None)
    is_set_up = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )
    if is_set_up or not hasattr(libc, "mallopt"):
        return
    # Older versions of glibc (such as 2.30) refuse more than 32 MiB. Setting the other threshold
    # alone would make steps slower.
    if libc.mallopt(M_MMAP_THRESHOLD, 1 << 30) or libc.mallopt(M_MMAP_THRESHOLD, 32 << 20):
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def cpu_time(root: int | None = None) -> tuple[float, float]:
    """CPU seconds of a process (by default this one) and its descendants so far, and seconds of a
    monotonic clock.
    """
    ticks = 0
    for pid in proctree.descendants(root or os.getpid()):
        with contextlib.suppress(OSError):  # it has ended
            # its own and that of its children that have ended
            ticks += sum(map(int, stat(pid)[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK"), time.monotonic()


def memory() -> int:
    """Resident bytes of this process and its descendants; those that several of them share count
    once. Slow for large ones.
    """
    resident = 0
    for pid in proctree.descendants(os.getpid()):
        with contextlib.suppress(OSError):
            resident += _share(pid)
    return resident


def _share(pid: int) -> int:
    """Resident bytes of a process, each divided by the number of processes that share it; not
    divided on Linux before 4.14. Raises OSError.
    """
    with contextlib.suppress(OSError):
        smaps = Path(f"/proc/{pid}/smaps_rollup").read_text()
        share = re.search(r"^Pss:\s+(\d+)", smaps, re.MULTILINE)
        if share:
            return 1024 * int(share[1])
    return int(stat(pid)[21]) * os.sysconf("SC_PAGE_SIZE")


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
