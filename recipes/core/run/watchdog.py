"""Ends a rank that makes no progress, from outside of its process: also one whose interpreter is stuck, or that was stopped.

The rank writes its pulse into memory that it shares with a small process of its own, `python -m recipes.core.run.watchdog`, which
looks at it. Standard library only.
"""

import collections
import contextlib
import json
import math
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.core.place import processes

PULSE = struct.Struct("<QQQ")  # beats so far, step, phase
NOTE_AT, BYTES = 64, 1 << 16  # behind the pulse: JSON, zero bytes at its end
# In the order in which a step count goes through them: of two ranks at one step, the lower is behind.
PHASES = (
    "nothing that is watched", "start", "collective", "loss over all ranks", "start of an evaluation", "evaluation",
    "sum of the evaluation", "row of metrics", "saving", "saved", "data", "forward", "forward, in the model", "backward", "update",
    "end", "last barrier",
)  # fmt: skip
(
    UNWATCHED, START, MEETING, SUM, TO_EVALUATE, EVALUATION, COUNT, ROW, SAVING, SAVED, DATA, FORWARD, MODEL, BACKWARD, UPDATE,
    END, LEAVING,
) = range(len(PHASES))  # fmt: skip
NOT_WATCHED = (UNWATCHED, END)
WAITING = (MEETING, SUM, COUNT, SAVED, LEAVING)  # a rank does nothing but wait for the others
POLL_S = 0.5
STOP_S = 2.0  # a process that did not run for so long was stopped; a busy machine delays a thread by less
MARGIN_S = 15.0  # beyond timeout_s: the other ranks, who wait for this one, tell more about it, and come first
TELL_S = 5.0  # for the run directory's file system to take the last words
RECENT_S = 60.0  # after a stop: a connection that is lost then was lost because of it
STACK_S = 3.0  # for faulthandler to write the stack


class RunningClock:
    """A monotonic clock that does not count while this process is stopped: by scontrol suspend, gang scheduling or SIGSTOP.

    A gap of `STOP_S` between two readings does not count, so it has to be read more often: in a loop, or by the thread of `start`.
    An overloaded machine can cause such a gap too; only one at whose end SIGCONT arrived (`continued`) is reported as a suspension.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_at = time.monotonic()
        self._continued_at = -math.inf
        self._gaps = collections.deque[tuple[float, float]](
            maxlen=16
        )  # begin and end; a busy machine adds some after a resume
        self.stopped_s = 0.0  # all gaps

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        with self._lock:
            moment = time.monotonic()
            before, self._read_at = self._read_at, moment
            if moment - before > STOP_S:
                self._gaps.append((before + POLL_S, moment))
                self.stopped_s += moment - before - POLL_S
            return moment - self.stopped_s

    def continued(self) -> None:
        """Called when this process received SIGCONT."""
        self._continued_at = time.monotonic()

    def suspension_s(self) -> float:
        """Length of the suspension that ended within the last `RECENT_S`; 0 if there was none."""
        moment = self.now() + self.stopped_s
        with self._lock:
            recent = [(begin, end) for begin, end in self._gaps if moment - end < RECENT_S]
        return next((end - begin for begin, end in recent if begin <= self._continued_at <= end + STOP_S), 0.0)

    def start(self) -> None:
        """Starts a thread that reads this clock until the process ends. The time before counts as running."""
        with self._lock:
            self._read_at = time.monotonic()

        def read() -> None:
            while True:
                time.sleep(POLL_S)
                self.now()

        threading.Thread(target=read, name="running clock", daemon=True).start()


class Pulse:
    """How far a rank has come: ``beat`` is called whenever it gets on. Seen by the watchdog, and by this rank's own threads."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("pulse")
        os.ftruncate(self._descriptor, BYTES)
        self._memory = mmap.mmap(self._descriptor, BYTES)
        self._beats = 0
        self.clock = RunningClock()

    def beat(self, phase: int, step: int | None = None) -> None:
        """phase: what begins now. step: completed optimiser steps; as before where it is left out."""
        self._beats += 1
        PULSE.pack_into(self._memory, 0, self._beats, self.step if step is None else step, phase)

    @property
    def step(self) -> int:
        return int(PULSE.unpack_from(self._memory)[1])

    def read(self) -> tuple[int, int, int]:
        """Beats, step, phase."""
        beats, step, phase = PULSE.unpack_from(self._memory)
        return beats, step, phase

    def tell(self, **note: Any) -> None:
        """What the watchdog is to know for its last words: recipe, rank, host; run_dir and attempt, when there are such."""
        text = json.dumps(note).encode()
        assert len(text) < BYTES - NOTE_AT
        self._memory[NOTE_AT:BYTES] = text.ljust(BYTES - NOTE_AT, b"\0")

    def watch(self, timeout_s: float, root: Path) -> None:
        """Starts the watchdog, which ends with this process and shares only this memory with it; and this rank's clock."""
        self.beat(START)
        self.clock.start()
        # A session of its own, so that what is typed at a terminal does not reach it; of Slurm's signals it heeds KILL alone.
        subprocess.Popen(
            [sys.executable, "-m", "recipes.core.run.watchdog", str(os.getpid()), str(self._descriptor), str(timeout_s)],
            cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[self._descriptor], start_new_session=True,
        )  # fmt: skip


def place(step: int, phase: int) -> str:
    """Where a pulse stands, for a line. step: completed ones."""
    return f"step {step + (DATA <= phase < END)} ({PHASES[phase]})"


def watch(parent: int, memory: mmap.mmap, timeout_s: float) -> None:
    """Looks at the pulse until the parent has ended, and ends it where there is none for ``timeout_s``."""
    clock = RunningClock()  # a job that is suspended stops this process too
    last, since = PULSE.unpack_from(memory), clock.now()
    while os.getppid() == parent:
        time.sleep(POLL_S)
        now, moment = PULSE.unpack_from(memory), clock.now()
        if now != last or now[2] in NOT_WATCHED:
            last, since = now, moment
        elif moment - since > timeout_s:
            _end(parent, memory, timeout_s)
            return


def _end(parent: int, memory: mmap.mmap, timeout_s: float) -> None:
    # Not waited for without end: what the rank hangs in may be the file system of the log and the record.
    telling = threading.Thread(target=_tell, args=(memory, timeout_s), daemon=True)
    telling.start()
    telling.join(TELL_S)
    # At the first faulthandler writes the stack.
    for number, patience_s in ((signal.SIGABRT, STACK_S), (signal.SIGKILL, 0.0)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, number)
        deadline = time.monotonic() + patience_s
        while os.getppid() == parent and time.monotonic() < deadline:
            time.sleep(0.05)


def _tell(memory: mmap.mmap, timeout_s: float) -> None:
    """Says which rank is ended and why, and leaves its record."""
    from recipes.core.errors import Kind
    from recipes.core.run import rundir

    _, step, phase = PULSE.unpack_from(memory)
    note: Mapping[str, Any] = json.loads(memory[NOTE_AT:BYTES].rstrip(b"\0") or b"{}")
    rank, host = note.get("rank", 0), note.get("host", "this host")
    line = f"made no progress for {timeout_s:g} s at {place(step, phase)}"
    print(f"{note.get('recipe', 'recipe')}: rank {rank} on {host} {line}: it is ended", file=sys.stderr, flush=True)
    if "run_dir" in note:
        with contextlib.suppress(OSError):
            rundir.record_failure(
                Path(note["run_dir"]), attempt=note["attempt"], rank=rank, host=host, kind=Kind.hang, error=line
            )


def main(argv: list[str]) -> None:
    parent, descriptor, timeout_s = int(argv[0]), int(argv[1]), float(argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    processes.die_with(parent)()
    watch(parent, mmap.mmap(descriptor, BYTES), timeout_s)


if __name__ == "__main__":
    main(sys.argv[1:])
