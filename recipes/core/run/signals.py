"""Stopping: a signal, or the approaching end of the job, sets a flag.

The step loop acts on the flag when all ranks have agreed. A Python signal handler does not run
while the main thread waits in a collective. A thread that reads the interpreter's wake-up pipe sees
the signal immediately.
"""

import atexit
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

# SIGUSR1 and SIGUSR2: set with --signal by a site or by the scripts. NCCL catches SIGUSR1 only if
# NCCL_PROXY_DUMP_SIGNAL names it (NVIDIA/nccl issue 704). SIGHUP: the terminal was closed.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
# signals within this time count as one: timeout(1) signals the command, then its whole process
# group
TOGETHER_S = 0.3
TOLD_S = 1.0  # time to write a line to stderr
# the margin before the end of a job is at most this share of the time that is left at the start
SHARE = 0.25
# ask again for the end this long before the known end, which may have been moved
ASK_AGAIN_S = 60.0
INTERRUPTED = 130  # exit status after a second SIGINT


class StopFlag:
    """Whether this rank is to stop, and the reason: the name of a signal, or a phrase. The first
    reason is kept.
    """

    def __init__(self) -> None:
        self.reason = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def note(self, reason: str) -> bool:
        """Sets the reason if there is none yet. Returns whether this is the first reason."""
        is_first = not self.reason
        self.reason = self.reason or reason
        return is_first


def handled() -> tuple[signal.Signals, ...]:
    """SIGNALS, without SIGHUP if the parent process ignores it, as under nohup."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return tuple(number for number in SIGNALS if number != signal.SIGHUP)
    return SIGNALS


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Programs that are started within the ``with`` block do not receive SIGNALS, since Slurm
    signals all processes of a rank.

    Only SIGKILL ends them early, so end them with ``kill()``, not with ``terminate()``.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # children inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def keep_from_workers() -> None:
    """Processes of multiprocessing, such as the workers of a DataLoader, do not receive SIGNALS
    from now on.

    Their ``terminate()``, which Python calls at exit too, sends SIGKILL. Programs that they start
    inherit this.
    """
    # not on a login node, which imports this module too
    from multiprocessing import popen_fork, resource_tracker
    from multiprocessing.process import BaseProcess

    tracker = resource_tracker.ResourceTracker
    BaseProcess.start = kept_from_children()(BaseProcess.start)  # type: ignore[method-assign]
    for name in ("ensure_running", "_ensure_running_and_write"):
        if hasattr(tracker, name):  # the second one from Python 3.13.7 on
            setattr(tracker, name, kept_from_children()(getattr(tracker, name)))
    # torch's handler would report them as killed
    atexit.register(signal.signal, signal.SIGCHLD, signal.SIG_DFL)
    # the base of all start methods
    popen_fork.Popen.terminate = popen_fork.Popen.kill  # type: ignore[method-assign]


@contextlib.contextmanager
def stop_flag(
    tell: Callable[[str], None] = lambda name: None, by_clock: bool = False
) -> Iterator[StopFlag]:
    """Yields a flag that each of SIGNALS sets. Must be called from the main thread.

    A second SIGINT, at least TOGETHER_S later, ends the process with INTERRUPTED. tell: called
    once, in a separate thread, with the name of the first signal. by_clock: whether SIGUSR2 is
    ignored, see `jobstate.Job.is_short`.
    """
    flag = StopFlag()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    listening = threading.Thread(
        target=_listen, args=(read_end, flag, tell), name="signals", daemon=True
    )

    def handle(number: int, frame: FrameType | None) -> None:
        flag.note(signal.Signals(number).name)  # in case the thread has not set it yet

    old_pipe = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    # signals to a child are not for this process
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    before = {number: signal.signal(number, handle) for number in handled()}
    if by_clock:
        # this also discards a blocked, pending SIGUSR2
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    listening.start()
    # entry.begin blocks SIGUSR1 and SIGUSR2; a parent process may have blocked others.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield flag
    finally:
        os.write(write_end, b"\0")
        listening.join()  # it reads the pipe that is closed below
        signal.set_wakeup_fd(old_pipe)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(write_end)
        os.close(read_end)


def _listen(pipe: int, flag: StopFlag, tell: Callable[[str], None]) -> None:
    """Reads the interpreter's wake-up pipe in a thread, up to a zero byte, which is not a signal.

    Ends the process at a second SIGINT, since the main thread may be inside a collective.
    """
    telling = threading.Thread()  # separate, so that a blocked stderr does not block this thread
    interrupted_at = math.inf  # the time of the first SIGINT
    while 0 not in (numbers := os.read(pipe, 64)):
        if signal.SIGINT in numbers:
            interrupted_at = min(interrupted_at, time.monotonic())
            if time.monotonic() - interrupted_at > TOGETHER_S:
                os._exit(INTERRUPTED)
        stops = [signal.Signals(number).name for number in numbers if number in SIGNALS]
        if stops and not telling.ident:
            flag.note(stops[0])
            telling = threading.Thread(target=tell, args=stops[:1], name="signal", daemon=True)
            telling.start()
    if telling.ident:
        telling.join(TOLD_S)


def watch_the_end(
    flag: StopFlag,
    stop_before_s: float,
    left: Callable[[], float | None],
    tell: Callable[[str], None],
) -> None:
    """Starts a thread that sets ``flag`` when the job has ``stop_before_s`` seconds left, at most a
    quarter of the time left now.

    For sites that send no signal. left: `client.seconds_left`. tell: called with the reason, unless
    the flag has one already.
    """

    def watch() -> None:
        known = left()
        if known is None:
            return
        margin = min(stop_before_s, SHARE * known)
        while (early := known - margin) > 0:
            if math.isinf(early):
                return
            wait = early - ASK_AGAIN_S if early > 2 * ASK_AGAIN_S else max(0.5, early)
            time.sleep(wait)
            now = left()  # the time limit may have been changed since
            known = known - wait if now is None else now
        reason = "the time limit"
        if flag.note(reason):
            tell(reason)

    threading.Thread(target=watch, name="time limit", daemon=True).start()
