"""Runs a program as a child process: passes on requests to stop, and ends the processes that remain
after it. Standard library only.
"""

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core.errors import Hang, InputError, MachineError
from recipes.core.place import processes, proctree
from recipes.core.program import delivery
from recipes.core.program.delivery import Target
from recipes.core.program.watch import Watch
from recipes.core.run import in_use, signals
from recipes.core.variables import Environ

TICK_S = 0.5  # between two looks at the program and at the stop note
LOOK_S = 0.1  # between two looks for the processes that catch a signal
SETTLE_S = 0.005  # a signal that is sent to all processes has reached them after this time
END_S = 10.0  # after SIGTERM to a program that has asked for a requeue, until SIGKILL


@dataclass(frozen=True)
class Rules:
    """What a wrapper does with its program.

    order: the stop signals, preferred first. timeout_s: the program ends if the run directory
    cannot be read for so long. remark: called every few seconds and at a request, with the root of
    the program's processes and with those that catch a stop signal. It returns why the program must
    end, or "".
    """

    order: Sequence[signal.Signals]
    timeout_s: float
    remark: Callable[[int, list[Target]], str]


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    returncode: minus N if signal N ended it. at: when, in seconds since 1970. stop: why it was
    asked to stop; "" if it was not. was_killed: whether the wrapper killed it, since it had not
    ended in time.
    """

    returncode: int
    at: float
    stop: str
    was_killed: bool


class Supervisor:
    """A running program, whose process ID is ``pid``. ``look`` is called again and again while it
    runs.

    fenced: why the program was killed at once; None if it was not.
    """

    def __init__(self, pid: int, canary: int, rules: Rules, watch: Watch | None) -> None:
        self.stop = ""
        self.was_killed = False
        self.fenced: Exception | None = None
        self._pid = pid
        self._canary = canary
        self._rules = rules
        self._watch = watch
        self._asked = ""  # why the program is to stop, before a process of it has got a signal
        self._asked_at = 0.0
        self._received = dict[int, float]()  # when each signal arrived here last
        self._delivered = set[int]()
        self._next_look_at = 0.0
        self._kill_at = math.inf

    def received(self, number: signal.Signals) -> None:
        """A signal that this process has received: a request to stop."""
        self._ask(number.name)
        self._received[number] = self._asked_at
        time.sleep(SETTLE_S)
        sent_to_all = number in self._pending()
        targets = delivery.targets(self._pid, self._rules.order)
        prefers_another = any(target.signal != number for target in targets)
        # else the program may be about to end without saving
        if not (sent_to_all and prefers_another):
            targets = self._targets_until(moment_together())
        if targets:
            # the log says which signal a program gets, also soon after its start
            self._rules.remark(self._pid, targets)
        self._deliver(targets, already=number if sent_to_all else None)
        ends = number not in (signal.SIGUSR1, signal.SIGUSR2)
        if ends and not self._delivered and not sent_to_all:
            delivery.end(self._pid, number)
        if ends or sent_to_all:
            self._note_stop()

    def ended(self, returncode: int) -> None:
        """Notes the stop if the program was ended by a signal that it has received at the same time
        as this process.
        """
        if -returncode not in self._received and not self.stop:
            late = signal.sigtimedwait(signals.handled(), signals.TOGETHER_S)
            if not late:
                return
            self._ask(signal.Signals(late.si_signo).name)
        self._asked_at = self._received.get(-returncode, self._asked_at)
        self._note_stop()

    def look(self) -> None:
        """Looks at the program's handlers from time to time, and acts on what the run directory
        says.
        """
        now = time.monotonic()
        if self._watch:
            self._follow(self._watch)
        if now >= self._kill_at:
            self._kill()
        is_due = now >= self._next_look_at
        if not is_due and (self.stop or not self._asked):
            return
        targets = delivery.targets(self._pid, self._rules.order)
        if is_due:
            self._next_look_at = now + in_use.HEARTBEAT_S
            problem = self._rules.remark(self._pid, targets)
            if problem:
                self._fence(InputError(problem))
        if self._asked and self._kill_at == math.inf:
            self._ask(self._asked)
            self._deliver(targets)  # a program may register its handlers late

    def _follow(self, watch: Watch) -> None:
        unseen_s = watch.clock() - watch.seen_at
        if unseen_s > self._rules.timeout_s:
            self._fence(MachineError(f"the run directory cannot be read for {unseen_s:.0f} s"))
        elif watch.fenced:
            self._fence(MachineError(watch.fenced))
        elif watch.hangs:
            self._fence(Hang())
        note = watch.note
        if note.limit_at and time.time() >= note.limit_at:
            self._ask(note.reason)
            self._kill()
        if not note.reason or note.at - time.time() > 2 * TICK_S:
            return
        order = (signal.SIGTERM,) if note.ends else self._rules.order
        if note.ends and self._kill_at == math.inf:
            self._kill_at = time.monotonic() + END_S
        elif note.ends or self._asked:
            return
        targets = self._targets_until(note.at, order)  # all ranks act at the same moment
        self._ask(note.reason)
        if not note.ends:
            self._deliver(targets)
            return
        self._note_stop()
        for target in targets:
            delivery.send(target.pid, target.signal)
        if not targets:
            delivery.end(self._pid, signal.SIGTERM)

    def _targets_until(self, moment: float, order: Sequence[signal.Signals] = ()) -> list[Target]:
        """The newest targets that were seen before ``moment``, to which this function sleeps.

        A program blocks the signals for a tenth of a second while it starts workers.
        """
        seen = list[Target]()
        while True:
            seen = delivery.targets(self._pid, order or self._rules.order) or seen
            left_s = moment - time.time()
            if left_s < LOOK_S:
                time.sleep(max(0.0, left_s))
                return seen
            time.sleep(LOOK_S)

    def _kill(self) -> None:
        self._note_stop()
        self.was_killed = True
        delivery.end(self._pid, signal.SIGKILL)

    def _fence(self, reason: Exception) -> None:
        self.fenced = self.fenced or reason
        delivery.end(self._pid, signal.SIGKILL)

    def _ask(self, reason: str) -> None:
        if not self.stop:
            self._asked = reason
        # of the last request, since earlier ones may have reached no program
        self._asked_at = time.time()

    def _note_stop(self) -> None:
        """From now on, the end of the program is a stop, and no failure."""
        if not self.stop:
            self.stop = self._asked
            if self._watch:
                self._watch.tell_stop(self.stop, self._asked_at)

    def _pending(self) -> frozenset[int]:
        """Signals that were sent to all processes of this rank: they are pending in the canary.

        Slurm sends them so with ProctrackType=proctrack/linuxproc, and else to the wrapper alone.
        """
        with contextlib.suppress(OSError):
            return proctree.signal_set(Path(f"/proc/{self._canary}/status").read_text(), "ShdPnd")
        return frozenset()

    def _deliver(self, targets: Sequence[Target], already: signal.Signals | None = None) -> None:
        """Sends each target its signal, once.

        already: a signal that all processes have received.
        """
        for target in targets:
            if target.pid not in self._delivered and target.signal != already:
                delivery.send(target.pid, target.signal)
            self._delivered.add(target.pid)
        if targets:
            self._note_stop()


def moment_together() -> float:
    """The next whole second that is at least TOGETHER_S away.

    Slurm's signal reaches the wrappers at moments that differ by some milliseconds. With a
    framework that saves in its signal handler, one rank could then wait in the save and another in
    a step.
    """
    return float(math.ceil(time.time() + signals.TOGETHER_S))


@contextlib.contextmanager
def _canary() -> Iterator[int]:
    """The ID of a child that blocks all signals of `signals.SIGNALS`, as this process does."""
    null = subprocess.DEVNULL
    prepare = processes.die_with(os.getpid())
    canary = subprocess.Popen(
        ["sleep", "infinity"], stdin=null, stdout=null, stderr=null, preexec_fn=prepare
    )
    try:
        yield canary.pid
    finally:
        canary.kill()
        canary.wait()


def run(
    command: Sequence[str],
    workdir: str,
    environ: Environ,
    rules: Rules,
    watch: Watch | None,
) -> Ended:
    """Runs a program until it ends, and kills what it leaves behind. Raises InputError if it cannot
    be started, and the error for which it was killed at once.

    watch: None for a rank whose node has a wrapper of its own, which reads the run directory.
    """
    stops = set(signals.handled())
    signal.pthread_sigmask(signal.SIG_BLOCK, {*stops, signal.SIGCHLD})  # sigtimedwait receives them
    proctree.adopt_orphans()
    die = processes.die_with(os.getpid())

    def prepare() -> None:
        for number in stops:  # a program may register a handler only where it finds the default
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*signals.SIGNALS, signal.SIGCHLD})
        die()

    with _canary() as canary:
        others = set(proctree.children(os.getpid()))
        try:
            child = subprocess.Popen(command, cwd=workdir or None, env=environ, preexec_fn=prepare)
        except OSError as error:
            why = f"cannot be started in {workdir} ({error.strerror})"
            raise InputError(f"script={command[0]}: {why}") from None
        supervisor = Supervisor(child.pid, canary, rules, watch)
        try:
            while child.poll() is None:
                arrived = signal.sigtimedwait({*stops, signal.SIGCHLD}, TICK_S)
                if arrived and arrived.si_signo in stops:
                    supervisor.received(signal.Signals(arrived.si_signo))
                supervisor.look()
                proctree.reap({*others, child.pid})
            ended_at = time.time()
            supervisor.ended(child.returncode)
        finally:
            for pid in set(proctree.children(os.getpid())) - others:
                delivery.end(pid, signal.SIGKILL)
            child.wait()
    if supervisor.fenced:
        raise supervisor.fenced
    return Ended(child.returncode, ended_at, supervisor.stop, supervisor.was_killed)
