"""Child processes that end with their parent. Standard library only."""

import ctypes
import os
import signal
from collections.abc import Callable

from recipes.core import errors

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> Callable[[], None]:
    """Returns a function for a child process to call: after it, the kernel kills the child when its parent ends, for any reason.

    parent: process id of the parent. The function is also suitable as ``preexec_fn``.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(errors.EXIT_CRASH)

    return prepare
