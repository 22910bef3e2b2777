"""Stopping: a signal, or the near end of the job, sets a flag, and the step loop acts on it when all ranks have agreed.

A Python handler does not run while the main thread waits in a collective; a thread that reads the interpreter's wake-up pipe
sees the signal at once.
"""

import contextlib
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

from recipes.core import rundir

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
INTERRUPT_S = 5.0  # after a second SIGINT: for the main thread to end by itself, which it cannot inside of a collective
UNWINDING = 5  # times that, where it has heard, for a slow disk
SHARE = 0.25  # of a job's time, the most that may be left at its end
ASK_AGAIN_S = 60.0  # before the end that is known: it may have been put off since
SHORT_S = 480.0  # a job of less: 120 s, the signal's, are more than a quarter of it
ANSWER_S = 10.0  # for the controller; one that is silent is not to use up the time that is left
INTERRUPTED = 130


class StopFlag:
    """Whether this rank is to stop, and why: a signal's name, or words. The first reason stays."""

    def __init__(self) -> None:
        self.reason = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def note(self, reason: str) -> bool:
        """Whether this is the first reason."""
        first, self.reason = not self.reason, self.reason or reason
        return first


@contextlib.contextmanager
def stop_flag(tell: Callable[[str], None] = lambda name: None, by_clock: bool = False) -> Iterator[StopFlag]:
    """A flag that SIGTERM, SIGUSR2 (ahead of the time limit) and SIGINT set. A second SIGINT interrupts as usual.

    tell: called once, from another thread, with the first signal's name. by_clock: SIGUSR2 is ignored, see `is_short`.
    """
    flag, interrupts = StopFlag(), []

    def handle(number: int, frame: FrameType | None) -> None:
        flag.note(signal.Signals(number).name)  # where the thread has not come to it yet
        if number == signal.SIGINT:
            interrupts.append(number)
            if len(interrupts) > 1:
                raise KeyboardInterrupt

    def listen() -> None:
        told = end = False
        presses = patience = 0
        while not end:
            # Waits without the interpreter's lock; INTERRUPT_S only once there is something to wait for.
            ready, _, _ = select.select([read_end], [], [], INTERRUPT_S if presses > 1 else None)
            if not ready and len(interrupts) > 1 and patience < UNWINDING:
                patience += 1  # the main thread is on its way out, and leaves word of that
                continue
            if not ready:
                print("interrupted while waiting for other ranks", file=sys.stderr, flush=True)
                os._exit(INTERRUPTED)
            for number in os.read(read_end, 64):
                if number == 0:  # no signal: the flag is not needed any more
                    end = True
                elif number in SIGNALS:
                    presses += number == signal.SIGINT
                    flag.note(signal.Signals(number).name)
                    if not told:
                        told = True
                        tell(signal.Signals(number).name)

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    listener = threading.Thread(target=listen, name="signals", daemon=True)
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    if by_clock:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # one that is held back is forgotten, too
    old_pipe = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    listener.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # SIGUSR2 is blocked by entry.begin, others perhaps by a parent
    try:
        yield flag
    finally:
        signal.set_wakeup_fd(old_pipe)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.write(write_end, b"\0")
        listener.join()
        os.close(write_end)
        os.close(read_end)


def seconds_left(environ: Mapping[str, str]) -> float | None:
    """Until Slurm ends this job, as its controller says, else as the job was told when it began; inf: no limit; None: unknown.

    Raises nothing: a controller that does not answer is no reason to end.
    """
    if not rundir.job_id(environ):
        return None
    left, end = _ask(environ, "%L"), environ.get("SLURM_JOB_END_TIME", "")
    return int(end) - time.time() if left is None and end.isdecimal() else left


def is_short(environ: Mapping[str, str]) -> bool:
    """Whether this job's time limit is so short that the ready scripts' signal, for hours, would come at its begin."""
    limit = _ask(environ, "%l")
    return limit is not None and limit < SHORT_S


def _ask(environ: Mapping[str, str], field: str) -> float | None:
    """A time of this job's, in seconds, by squeue's name of it."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(
            ["squeue", "--noheader", "--jobs", str(rundir.job_id(environ)), f"--format={field}"],
            capture_output=True, text=True, timeout=ANSWER_S,
        )  # fmt: skip
        if asked.returncode == 0 and (words := asked.stdout.split()):
            return parse_time_left(words[0])
    return None


def parse_time_left(text: str) -> float | None:
    """squeue's ``[days-][[hours:]minutes:]seconds`` in seconds; UNLIMITED is inf, and what is no time (NOT_SET) None."""
    if text == "UNLIMITED":
        return math.inf
    found = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def watch_the_end(
    flag: StopFlag,
    stop_before_s: float,
    left: Callable[[], float | None],
    tell: Callable[[str], None] = lambda name: None,
) -> threading.Event:
    """Sets ``flag`` when the job has ``stop_before_s`` left, at most a quarter of what it has now, from a thread of its own.

    left: `seconds_left`, asked now and again near the end. For the sites that send no signal.
    Setting the event that this gives ends the thread.
    """
    over = threading.Event()

    def watch() -> None:
        known = left()
        if known is None:
            return
        margin = min(stop_before_s, SHARE * known)
        while known > margin:
            early = known - margin
            wait = early - ASK_AGAIN_S if early > 2 * ASK_AGAIN_S else max(0.5, early)
            if math.isinf(early) or over.wait(wait):
                return
            now = left()  # the limit may have been moved since
            known = known - wait if now is None else now
        if flag.note("the time limit"):
            tell("the time limit")

    threading.Thread(target=watch, name="time limit", daemon=True).start()
    return over
