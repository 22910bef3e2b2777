"""Stopping: a signal, or the near end of the job, sets a flag, and the step loop acts on it when all ranks have agreed.

A Python handler does not run while the main thread waits in a collective; a thread that reads the interpreter's wake-up pipe
sees the signal at once.
"""

import contextlib
import functools
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

from recipes.core.run import rundir

# SIGUSR1 and SIGUSR2: a site's or the scripts' --signal. NCCL 2.12 and 2.13 caught SIGUSR1; since 2.14 NCCL does so only where
# NCCL_PROXY_DUMP_SIGNAL names it (NVIDIA/nccl issue 704). SIGHUP: the terminal is gone.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
TOGETHER_S = 0.3  # signals so close are one: timeout(1) sends its own to the command, and then to its whole group
INTERRUPT_S = 5.0  # after a second SIGINT: for the main thread to end by itself, which it cannot inside of a collective
SAID_S = 1.0  # for a line on stderr
UNWINDING = 5  # times that, where it has heard, for a slow disk
SHARE = 0.25  # of a job's time, the most that may be left at its end
ASK_AGAIN_S = 60.0  # before the end that is known: it may have been put off since
SHORT_S = 480.0  # a job of less: 120 s, the signal's, are more than a quarter of it
ANSWER_S = 10.0  # for the controller; one that is silent is not to use up the time that is left
INTERRUPTED = 130


class StopFlag:
    """Whether this rank is to stop, and why: a signal's name, or words. The first reason stays.

    settling: to be set when what the run has come to is written: a second SIGINT does not cut that short.
    last_words: called, from another thread, where a second SIGINT ends the process since its main thread does not come back.
    """

    def __init__(self) -> None:
        self.reason, self.settling = "", False
        self.last_words: Callable[[], object] = lambda: None

    def __bool__(self) -> bool:
        return bool(self.reason)

    def note(self, reason: str) -> bool:
        """Whether this is the first reason."""
        first, self.reason = not self.reason, self.reason or reason
        return first


def heeded() -> tuple[signal.Signals, ...]:
    """SIGNALS, but for a SIGHUP that whoever has started this had ignored, as nohup does."""
    return tuple(n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)


@contextlib.contextmanager
def stop_flag(
    tell: Callable[[str], None] = lambda name: None,
    by_clock: bool = False,
    continued: Callable[[], None] = lambda: None,
) -> Iterator[StopFlag]:
    """A flag that each of SIGNALS sets. A second SIGINT, TOGETHER_S later, interrupts once.

    tell: called once, from a thread of its own, with the first signal's name. by_clock: SIGUSR2 is ignored, see `is_short`.
    continued: called from a thread at each SIGCONT.
    """
    flag, main_thread = StopFlag(), threading.get_ident()
    saying = threading.Thread()  # the words on the first signal
    interrupts, interrupted = 0, False  # counted by the thread: Python may call the handler once for two

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        flag.note(signal.Signals(number).name)  # where the thread has not come to it yet
        if interrupts > 1 and not (interrupted or flag.settling):  # a third one is not to cut the last words short
            interrupted = True
            raise KeyboardInterrupt

    def leave_word() -> None:
        if not (interrupted or flag.settling):
            flag.last_words()
        print("interrupted while it waited below Python, for another rank perhaps", file=sys.stderr, flush=True)

    def aside(call: Callable[[], object]) -> threading.Thread:
        """So that one that nobody reads, or a slow disk, holds up nothing."""

        def quietly() -> None:
            with contextlib.suppress(OSError):
                call()

        thread = threading.Thread(target=quietly, name="a signal's word", daemon=True)
        thread.start()
        return thread

    def listen() -> None:
        nonlocal interrupts, saying
        told, over, patience, last, deadline = False, False, UNWINDING, -math.inf, math.inf
        while not over:
            # Waits without the interpreter's lock, and for ever where there is nothing to wait for.
            left = max(0.0, deadline - time.monotonic()) if interrupts > 1 else None
            ready, _, _ = select.select([read_end], [], [], left)
            if not ready and (interrupted or flag.settling) and patience:
                patience -= 1  # the main thread is on its way out, and leaves word of that
                deadline = time.monotonic() + INTERRUPT_S
                continue
            if not ready:
                aside(leave_word).join(INTERRUPT_S * UNWINDING)
                os._exit(INTERRUPTED)
            numbers = os.read(read_end, 64)
            over = 0 in numbers  # no signal: the flag is not needed any more
            if signal.SIGINT in numbers and not over and time.monotonic() - last > TOGETHER_S:
                interrupts, last = interrupts + 1, time.monotonic()
                if interrupts == 2:
                    deadline = last + INTERRUPT_S
                    signal.pthread_kill(main_thread, signal.SIGINT)
            if signal.SIGCONT in numbers:
                continued()
            for number in numbers:
                if number in SIGNALS and not told:
                    told = True
                    flag.note(signal.Signals(number).name)
                    saying = aside(functools.partial(tell, signal.Signals(number).name))

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    listener = threading.Thread(target=listen, name="signals", daemon=True)
    old_pipe = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # what a child is sent is not for this process
    before = {number: signal.signal(number, handle) for number in heeded()}
    before[signal.SIGCONT] = signal.signal(signal.SIGCONT, lambda number, frame: None)
    if by_clock:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # one that is held back is forgotten, too
    listener.start()
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, SIGNALS
    )  # entry.begin blocks SIGUSR1 and SIGUSR2; a parent may have blocked others
    try:
        yield flag
    finally:
        os.write(write_end, b"\0")
        listener.join()  # before the handlers go: it may send a signal
        if saying.ident:
            saying.join(SAID_S)
        signal.set_wakeup_fd(old_pipe)
        for number, handler in before.items():
            signal.signal(number, handler)
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
