"""Stopping: a signal, or the approaching end of the job, sets a flag.

The step loop acts on the flag when all ranks have agreed. A Python signal handler does not run while the main thread
waits in a collective. A thread that reads the interpreter's wake-up pipe sees the signal immediately.
"""

import atexit
import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

# SIGUSR1 and SIGUSR2: set with --signal by a site or by the scripts. NCCL 2.12 and 2.13 caught SIGUSR1. Since 2.14,
# NCCL catches it only if NCCL_PROXY_DUMP_SIGNAL names it (NVIDIA/nccl issue 704). SIGHUP: the terminal was closed.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
TOGETHER_S = 0.3  # signals within this time count as one: timeout(1) signals the command, then its whole process group
SAID_S = 1.0  # time to write a line to stderr
SHARE = 0.25  # the margin before the end of a job is at most this share of the time that is left at the start
ASK_AGAIN_S = 60.0  # ask again for the end this long before the known end, which may have been moved
INTERRUPTED = 130  # exit status after a second SIGINT


class StopFlag:
    """Whether this rank is to stop, and the reason: the name of a signal, or a phrase. The first reason is kept."""

    def __init__(self) -> None:
        self.reason = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def note(self, reason: str) -> bool:
        """Sets the reason if there is none yet. Returns whether this is the first reason."""
        first, self.reason = not self.reason, self.reason or reason
        return first


def handled() -> tuple[signal.Signals, ...]:
    """SIGNALS without SIGHUP if the parent process has it ignored, as nohup does; else all SIGNALS."""
    return tuple(n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)


class _Listener:
    """Reads the interpreter's wake-up pipe in a thread. tell: see `stop_flag`."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.flag, self._tell = StopFlag(), tell
        self.read_end, self.write_end = os.pipe()
        self.saying = threading.Thread()  # the thread that calls tell
        self._interrupted_at = math.inf  # the time of the first SIGINT

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of each signal, in the main thread."""
        self.flag.note(signal.Signals(number).name)  # in case the thread has not set it yet

    def listen(self) -> None:
        """The thread. It ends the process at a second SIGINT, since the main thread may be inside a collective."""
        over = False
        while not over:
            numbers = os.read(self.read_end, 64)
            over = 0 in numbers  # 0 is not a signal: the flag is no longer needed
            if signal.SIGINT in numbers and not over:
                self._interrupted_at = min(self._interrupted_at, time.monotonic())
                if time.monotonic() - self._interrupted_at > TOGETHER_S:
                    _aside(lambda: print("ended by a second SIGINT", file=sys.stderr, flush=True)).join(SAID_S)
                    os._exit(INTERRUPTED)
            name = next((signal.Signals(number).name for number in numbers if number in SIGNALS), "")
            if name and not self.saying.ident:
                self.flag.note(name)
                self.saying = _aside(functools.partial(self._tell, name))


def _aside(call: Callable[[], object]) -> threading.Thread:
    """Calls ``call`` in a separate thread, so that a blocked stderr blocks nothing else."""

    def quietly() -> None:
        with contextlib.suppress(OSError):
            call()

    thread = threading.Thread(target=quietly, name="a signal's word", daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Programs that are started within the ``with`` block do not receive SIGNALS, since Slurm signals all processes of a rank.

    Only SIGKILL ends them early, so end them with ``kill()``, not with ``terminate()``.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # children inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def keep_from_workers() -> None:
    """Processes of multiprocessing, such as the workers of a DataLoader, do not receive SIGNALS from now on.

    Their ``terminate()``, which Python calls at exit too, sends SIGKILL. Programs that they start inherit this.
    """
    from multiprocessing import popen_fork, resource_tracker  # not on a login node, which imports this module too
    from multiprocessing.process import BaseProcess

    for kind, method in ((BaseProcess, "start"), (resource_tracker.ResourceTracker, "ensure_running")):
        setattr(kind, method, kept_from_children()(getattr(kind, method)))
    atexit.register(signal.signal, signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report them as killed
    popen_fork.Popen.terminate = popen_fork.Popen.kill  # type: ignore[method-assign]  # the base of all start methods


@contextlib.contextmanager
def stop_flag(tell: Callable[[str], None] = lambda name: None, by_clock: bool = False) -> Iterator[StopFlag]:
    """Yields a flag that each of SIGNALS sets. Must be called from the main thread.

    A second SIGINT, at least TOGETHER_S later, ends the process with INTERRUPTED. tell: called once, in a separate thread, with the
    name of the first signal. by_clock: whether SIGUSR2 is ignored, see `queue.is_short`.
    """
    listener = _Listener(tell)
    os.set_blocking(listener.write_end, False)
    thread = threading.Thread(target=listener.listen, name="signals", daemon=True)
    old_pipe = signal.set_wakeup_fd(listener.write_end, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # signals to a child are not for this process
    before = {number: signal.signal(number, listener.handle) for number in handled()}
    if by_clock:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # this also discards a blocked, pending SIGUSR2
    thread.start()
    # entry.begin blocks SIGUSR1 and SIGUSR2; a parent process may have blocked others.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield listener.flag
    finally:
        os.write(listener.write_end, b"\0")
        thread.join()  # it reads the pipe that is closed below
        if listener.saying.ident:
            listener.saying.join(SAID_S)
        signal.set_wakeup_fd(old_pipe)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(listener.write_end)
        os.close(listener.read_end)


def watch_the_end(
    flag: StopFlag,
    stop_before_s: float,
    left: Callable[[], float | None],
    tell: Callable[[str], None] = lambda name: None,
) -> None:
    """Starts a thread that sets ``flag`` when the job has ``stop_before_s`` seconds left, at most a quarter of the time left now.

    For sites that send no signal. left: `queue.seconds_left`. tell: called with the reason, unless the flag has one already.
    """

    def watch() -> None:
        known = left()
        if known is None:
            return
        margin = min(stop_before_s, SHARE * known)
        while known > margin:
            early = known - margin
            wait = early - ASK_AGAIN_S if early > 2 * ASK_AGAIN_S else max(0.5, early)
            if math.isinf(early):
                return
            time.sleep(wait)
            now = left()  # the time limit may have been changed since
            known = known - wait if now is None else now
        if flag.note("the time limit"):
            tell("the time limit")

    threading.Thread(target=watch, name="time limit", daemon=True).start()
