"""A process that ends with its parent. Standard library only."""

import ctypes
import os
import signal
from collections.abc import Callable

from recipes.core import errors

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> Callable[[], None]:
    """What a rank does before it starts: asks the kernel to be killed when the launcher dies, however that happens."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(errors.EXIT_CRASH)

    return prepare
