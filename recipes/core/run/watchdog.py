"""Ends a rank that makes no progress.

A separate process does this, so that it also works for a rank that is stopped or stuck. The rank
writes its pulse into memory that it shares with a small process, `python -m
recipes.core.run.watchdog`. This process monitors the pulse. Standard library only.
"""

import contextlib
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recipes.core.errors import EXIT_CRASH, Kind
from recipes.core.place import processes, proctree
from recipes.core.place.memory import Memory
from recipes.core.place.memory import read as read_memory
from recipes.core.run import attempt as attempts
from recipes.core.run import logs, look, positions

PULSE = struct.Struct("<QQQ")  # number of beats, step, phase
BEAT_AT = struct.Struct("<d")  # after the pulse: time.monotonic() of the last beat
ASKED_AT = 32  # a byte: 1 while the watchdog asks for the collective of the rank
# after these: JSON, padded with zero bytes
NOTE_AT = 64
COLLECTIVE_AT = 1 << 16  # the answer of the rank, likewise
BYTES = COLLECTIVE_AT + 512
ANSWER_S = 2.0  # for this answer; a rank that holds the interpreter's lock has none
# Of two ranks at the same step, the rank in the lower phase is behind. With several ranks, DATA
# lasts until the model is called, since DDP's forward pass can wait for the other ranks. BACKWARD
# includes the optimiser.
PHASES = (
    "outside the steps",
    "start",
    "evaluation",
    "saving",
    "data",
    "forward",
    "backward",
    "waiting",
)
OUTSIDE, START, EVALUATION, SAVING, DATA, FORWARD, BACKWARD, WAITING = range(len(PHASES))
POLL_S = 0.5
# a process that did not run for this long was stopped; a busy machine delays a thread by less
STOP_S = 2.0
# added to timeout_s, so that ranks that wait for this one report first: they know more about it
MARGIN_S = 15.0
# the limit outside the steps, for example to prepare data, is so many times timeout_s
OUTSIDE_TIMES = 6
TELL_S = 5.0  # time to write the error record to the run directory's file system
PARENT_ENDED = signal.SIGURG  # the kernel sends it to the watchdog at the end of its parent
STACK_S = 3.0  # time for faulthandler to write the stack


class RunningClock:
    """A monotonic clock that does not count while this process is stopped.

    scontrol suspend, gang scheduling and SIGSTOP stop a process. A gap of more than `STOP_S`
    between two readings does not count. The clock must therefore be read more often: in a loop, or
    by the thread of `start`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_at = time.monotonic()
        self.stopped_s = 0.0  # total length of all gaps

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        with self._lock:
            moment = time.monotonic()
            gap = moment - self._read_at
            self._read_at = moment
            if gap > STOP_S:
                self.stopped_s += gap - POLL_S
            return moment - self.stopped_s

    def start(self) -> None:
        """Starts a thread that reads this clock until the process ends. The time before counts as
        running.
        """
        with self._lock:
            self._read_at = time.monotonic()

        def read() -> None:
            while True:
                time.sleep(POLL_S)
                self.now()

        threading.Thread(target=read, name="running clock", daemon=True).start()


class Pulse:
    """The progress of a rank, which calls ``beat``. The watchdog and the rank's own threads read
    it. descriptor: in the watchdog, of the memory that the rank shares with it.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("pulse")
            os.ftruncate(descriptor, BYTES)
        self._descriptor = descriptor
        self.memory = mmap.mmap(descriptor, BYTES)
        self._beats = 0
        self.clock = RunningClock()

    def beat(self, phase: int, step: int | None = None) -> None:
        """Records that ``phase`` begins. step: completed optimiser steps; unchanged if it is
        omitted.
        """
        self._beats += 1
        if step is None:
            step = self.read()[1]
        PULSE.pack_into(self.memory, 0, self._beats, step, phase)
        BEAT_AT.pack_into(self.memory, PULSE.size, time.monotonic())

    def read(self) -> tuple[int, int, int]:
        """Returns the number of beats, the step and the phase."""
        return PULSE.unpack_from(self.memory)

    def unchanged_s(self) -> float:
        """Seconds since the last beat."""
        (beat_at,) = BEAT_AT.unpack_from(self.memory, PULSE.size)
        return time.monotonic() - beat_at

    def progress(self) -> dict[str, Any]:
        """What the rank has told with `tell`, its step and phase, whether it may wait for other
        ranks there, and how long its pulse has not changed.
        """
        _, step, phase = self.read()
        note = json.loads(self.memory[NOTE_AT:COLLECTIVE_AT].rstrip(b"\0"))
        return {
            **note,
            "step": step,
            "phase": phase,
            "at": place(step, phase),
            "may_wait": phase > START,
            "unchanged_s": self.unchanged_s(),
        }

    def tell(self, **note: Any) -> None:
        """Tells the watchdog recipe, rank and host, and the folder of its attempt if it exists, for
        its message and record. Must be called before `watch`.
        """
        text = json.dumps(note).encode()
        assert len(text) < COLLECTIVE_AT - NOTE_AT
        self.memory[NOTE_AT:COLLECTIVE_AT] = text.ljust(COLLECTIVE_AT - NOTE_AT, b"\0")

    def answer(self, collective: Callable[[], str]) -> None:
        """Tells the watchdog the collective of this rank, if it asks."""
        if self.memory[ASKED_AT]:
            length = BYTES - COLLECTIVE_AT
            text = collective().encode()[:length]
            self.memory[COLLECTIVE_AT:BYTES] = text.ljust(length, b"\0")
            self.memory[ASKED_AT] = 0

    def watch(self, timeout_s: float, root: Path) -> None:
        """Starts the clock of this rank, and the watchdog, which shares only this memory and ends
        with this process.
        """
        self.beat(START)
        self.clock.start()
        # The watchdog has its own session, so that Ctrl-C at a terminal does not reach it. Of
        # Slurm's signals, only SIGKILL ends it.
        facts = map(str, (os.getpid(), self._descriptor, timeout_s))
        subprocess.Popen(
            [sys.executable, "-m", "recipes.core.run.watchdog", *facts],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[self._descriptor],
            start_new_session=True,
        )


def place(step: int, phase: int) -> str:
    """The position of a pulse, as text for a message. step: completed optimiser steps."""
    return f"step {step + (DATA <= phase <= BACKWARD)} ({PHASES[phase]})"


def watch(parent: int, pulse: Pulse, timeout_s: float) -> None:
    """Ends the parent if the pulse does not change for ``timeout_s`` seconds. Returns when the
    parent has ended.

    If the kernel has killed the parent for want of memory, writes its error record.
    """
    task_memory = read_memory()
    threading.Thread(target=watch_memory, args=(parent, pulse, task_memory), daemon=True).start()
    looks = (pulse.progress, lambda: _describe(parent, pulse))
    threading.Thread(target=look.answer_requests, args=looks, daemon=True).start()
    clock = RunningClock()  # suspending a job stops this process too
    last = pulse.read()
    since = clock.now()
    while os.getppid() == parent:
        signal.sigtimedwait({PARENT_ENDED}, POLL_S)
        now = pulse.read()
        moment = clock.now()
        limit_s = OUTSIDE_TIMES * timeout_s if now[2] == OUTSIDE else timeout_s
        if now != last:
            last = now
            since = moment
        elif moment - since > limit_s:
            _end(parent, pulse, limit_s)
            return
    if task_memory.is_exceeded:
        _tell_out_of_memory(pulse, task_memory)


def watch_memory(parent: int, pulse: Pulse, task_memory: Memory) -> None:
    """Run in a thread: writes the error record of the parent while the kernel ends it for want of
    memory.

    With one rank on a node, Slurm kills this process some milliseconds after the parent has ended.
    """
    with contextlib.suppress(OSError):
        for _ in task_memory.events():
            deadline = time.monotonic() + TELL_S
            while time.monotonic() < deadline:
                if task_memory.is_exceeded and not proctree.read(parent):
                    return _tell_out_of_memory(pulse, task_memory)
                time.sleep(0.002)


def _tell_out_of_memory(pulse: Pulse, task_memory: Memory) -> None:
    note = pulse.progress()
    line = task_memory.describe(note["rank"])
    _record(note, Kind.out_of_memory, line, exit_status=128 + signal.SIGKILL)


def _end(parent: int, pulse: Pulse, timeout_s: float) -> None:
    # The wait has a limit, since the rank may hang in the file system of the log and the error
    # record.
    telling = threading.Thread(target=_tell, args=(parent, pulse, timeout_s), daemon=True)
    telling.start()
    telling.join(TELL_S)
    # At SIGABRT, faulthandler writes the stack.
    for number, patience_s in ((signal.SIGABRT, STACK_S), (signal.SIGKILL, 0.0)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, number)
        deadline = time.monotonic() + patience_s
        while os.getppid() == parent and time.monotonic() < deadline:
            time.sleep(0.05)


def _tell(parent: int, pulse: Pulse, timeout_s: float) -> None:
    """Prints which rank is ended and why, writes its error record, and prints where it is."""
    note = pulse.progress()
    line = f"made no progress for {timeout_s:g} s at {note['at']}"
    logs.say(f"{note['recipe']}: rank {note['rank']} on {note['host']} {line}: killing it")
    _record(note, Kind.hang, line)
    answer = {**note, **_describe(parent, pulse)}
    lines = positions.lines_of([answer], {})
    if lines:  # else the rank has ended meanwhile
        logs.say("\n".join(lines))


def _describe(parent: int, pulse: Pulse) -> dict[str, Any]:
    """`look.describe`, and the collective of the rank."""
    memory = pulse.memory
    memory[ASKED_AT] = 1
    description = look.describe(parent)
    deadline = time.monotonic() + ANSWER_S
    while memory[ASKED_AT] and time.monotonic() < deadline:
        time.sleep(0.05)
    answer = b"" if memory[ASKED_AT] else memory[COLLECTIVE_AT:BYTES].rstrip(b"\0")
    return {**description, "collective": answer.decode(errors="replace")}


def _record(note: Mapping[str, Any], kind: Kind, line: str, exit_status: int = EXIT_CRASH) -> None:
    attempt = attempts.given({attempts.VARIABLE: note.get("attempt", "")})
    if attempt:
        with contextlib.suppress(OSError):
            attempts.record(
                attempt,
                rank=note["rank"],
                host=note["host"],
                kind=kind,
                error=line,
                exit_status=exit_status,
                progress=time.time() - note["unchanged_s"],
                by_other=True,
            )


def main(argv: list[str]) -> None:
    parent = int(argv[0])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {PARENT_ENDED})
    processes.die_with(parent, PARENT_ENDED)()
    watch(parent, Pulse(int(argv[1])), timeout_s=float(argv[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
