"""Stopping: a signal sets a flag, and the step loop acts on it when all ranks have agreed."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class StopFlag:
    """Whether this rank has been told to stop, and by which signal."""

    def __init__(self) -> None:
        self.reason = ""

    def __bool__(self) -> bool:
        return bool(self.reason)


@contextlib.contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """A flag that SIGTERM, SIGUSR2 (ahead of the time limit) and SIGINT set. A second SIGINT interrupts as usual."""
    flag = StopFlag()

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and flag:
            raise KeyboardInterrupt
        flag.reason = signal.Signals(number).name

    before = {number: signal.signal(number, note) for number in SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})  # blocked by entry.begin
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
