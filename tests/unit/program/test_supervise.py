"""What the wrapper of a rank does with its program: it hands on requests to stop, and ends what is
left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from recipes.core.errors import Hang, InputError, MachineError
from recipes.core.place import proctree
from recipes.core.program import delivery, supervise
from recipes.core.program.supervise import Rules, Supervisor
from recipes.core.run.stop_note import StopNote
from tests import helpers

USR1 = signal.SIGUSR1
USR2 = signal.SIGUSR2
TERM = signal.SIGTERM
# Writes the number of each signal that it catches. A line on stdin lets it catch the signals of
# that line. It wakes up from time to time, since Python runs a handler only then if the signal came
# just before a read.
PROGRAM = """
import os, select, signal, sys
os.write(1, b"ready\\n")
while True:
    if not select.select([0], [], [], 0.1)[0]:
        continue
    line = sys.stdin.readline()
    if not line:
        break
    for number in map(int, line.split()):
        signal.signal(number, lambda number, frame: os.write(1, f"{number}\\n".encode()))
    os.write(1, b"catches\\n")
"""
# Runs the program of its arguments. Writes how it ended.
WRAPPER = """
import json, os, signal, sys
from recipes.core.program import delivery, supervise
from recipes.core.program.supervise import Rules
rules = Rules(delivery.STOP_SIGNALS, 60.0, lambda *looked: "")
ended = supervise.run(sys.argv[1:], "", dict(os.environ), rules, None)
print(json.dumps({"ended": [ended.returncode, ended.stop]}), flush=True)
"""


@dataclass
class View:
    """What a wrapper knows of the run directory."""

    note: StopNote = field(default_factory=StopNote)
    fenced: str = ""
    hangs: bool = False
    is_stopping: bool = False
    seen_at: float = 0.0
    now: float = 0.0
    told: list[tuple[str, float]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def tell_stop(self, reason: str, moment: float) -> None:
        self.told.append((reason, moment))


class Program:
    """A running program that catches ``numbers``, and its supervisor."""

    def __init__(self, *numbers: int, problem: str = "") -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, text=True
        )
        self.view = View()
        rules = Rules(delivery.STOP_SIGNALS, 60.0, lambda root, targets: problem)
        self.supervisor = Supervisor(self.process.pid, self.process.pid, rules, self.view)
        assert self.process.stdout.readline() == "ready\n"
        if numbers:
            self.catch(*numbers)

    def catch(self, *numbers: int) -> None:
        print(*map(int, numbers), file=self.process.stdin, flush=True)  # not their names
        assert self.process.stdout.readline() == "catches\n"

    def end(self) -> list[int]:
        """The signals that the program has received."""
        out, _ = self.process.communicate(timeout=20)
        return [int(line) for line in out.splitlines()]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []
    monkeypatch.setattr(supervise, "moment_together", time.time)

    def start(*numbers: int, problem: str = "") -> Program:
        programs.append(Program(*numbers, problem=problem))
        return programs[-1]

    yield start
    for started in programs:
        started.process.kill()
        started.process.communicate()


def test_a_program_gets_the_signal_that_it_catches_once(program: Callable[..., Program]) -> None:
    run = program(USR1, TERM)
    before = time.time()
    run.supervisor.received(USR2)
    assert int(run.process.stdout.readline()) == USR1  # a second one would not be lost
    run.supervisor.received(TERM)
    run.supervisor.look()
    assert run.supervisor.stop == "SIGUSR2"
    assert run.end() == []
    [(reason, moment)] = run.view.told
    assert reason == "SIGUSR2"
    assert before <= moment <= time.time()


def test_a_signal_to_all_processes_is_not_sent_again(
    program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = program(TERM)
    monkeypatch.setattr(run.supervisor, "_pending", lambda: {TERM})
    run.supervisor.received(TERM)
    assert run.supervisor.stop == "SIGTERM"
    assert run.end() == []


def test_a_program_that_prefers_another_signal_gets_it_at_once_after_one_to_all(
    program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may end by the signal to all, and not wait for the moment of all ranks."""
    run = program(USR1)
    monkeypatch.setattr(run.supervisor, "_pending", lambda: {TERM})
    monkeypatch.delattr(supervise, "moment_together")
    run.supervisor.received(TERM)
    assert run.end() == [USR1]


@pytest.mark.parametrize("number", [USR1, USR2])
def test_a_program_that_catches_nothing_continues_and_gets_its_signal_when_it_does(
    program: Callable[..., Program], number: signal.Signals
) -> None:
    run = program()
    run.supervisor.received(number)
    run.supervisor.look()
    assert run.supervisor.stop == ""
    assert run.view.told == []
    run.catch(USR2)
    run.supervisor.look()
    assert run.supervisor.stop == number.name
    assert run.end() == [USR2]


def test_a_program_that_saves_is_not_ended_by_another_request(
    program: Callable[..., Program],
) -> None:
    """It may have reset its handler at the first one, as programs do for a second Ctrl-C."""
    run = program(USR1)
    run.supervisor.received(USR2)
    run.supervisor._rules = Rules([USR2], 60.0, lambda *looked: "")  # it catches none of these now
    run.supervisor.received(TERM)
    assert run.end() == [USR1]


def test_a_program_that_catches_nothing_is_ended_by_sigterm(
    program: Callable[..., Program],
) -> None:
    run = program()
    run.supervisor.received(TERM)
    assert run.process.wait(20) == -TERM
    assert run.supervisor.stop == "SIGTERM"


def test_the_signal_that_ended_a_program_is_the_moment_of_its_stop(
    program: Callable[..., Program],
) -> None:
    """After it, other ranks lose their connection and fail, so that srun sends SIGTERM."""
    run = program()
    run.supervisor.received(USR2)
    before_failure = time.time()
    run.supervisor.received(USR1)
    run.supervisor.ended(-USR2)
    [(_, moment)] = run.view.told
    assert moment < before_failure


@pytest.mark.parametrize("late", ["another request", "a handler"])
def test_a_request_that_reached_no_program_is_not_the_moment_of_the_stop(
    program: Callable[..., Program], late: str
) -> None:
    """A rank that fails in between was not stopped: the judgement compares these times."""
    run = program()
    run.view.note = StopNote(before_s=120.0, reason="SIGUSR2", at=time.time())
    run.supervisor.look()
    between = time.time()
    if late == "a handler":
        run.catch(USR2)
        run.supervisor.look()
    else:
        run.supervisor.received(TERM)
    [(reason, moment)] = run.view.told
    assert reason == ("SIGUSR2" if late == "a handler" else "SIGTERM")
    assert moment > between


@pytest.mark.parametrize(
    ("early_s", "expected"),
    [
        (60.0, []),
        (0.3, [USR1]),
        (-60.0, [USR1]),
    ],
)
def test_a_stop_note_is_acted_on_at_its_moment(
    program: Callable[..., Program], early_s: float, expected: list[int]
) -> None:
    run = program(USR1)
    run.view.note = StopNote(reason="SIGUSR2", at=time.time() + early_s)
    run.supervisor.look()
    assert time.time() >= run.view.note.at or not expected
    run.supervisor.look()
    assert run.end() == expected
    assert [reason for reason, _ in run.view.told] == ["SIGUSR2"] * len(expected)


def test_a_request_that_comes_too_late_is_the_reason_of_a_kill_at_the_limit(
    program: Callable[..., Program],
) -> None:
    run = program(TERM)
    now = time.time()
    run.view.note = StopNote(before_s=1.0, reason="SIGUSR2", at=now + 10, limit_at=now)
    run.supervisor.look()
    assert run.process.wait(20) == -signal.SIGKILL
    assert run.supervisor.stop == "SIGUSR2"


@pytest.mark.parametrize(
    "numbers",
    [
        (TERM,),
        (),
    ],
    ids=["ignores its signal", "catches none"],
)
def test_a_program_that_has_not_ended_at_the_time_limit_is_killed(
    program: Callable[..., Program], numbers: tuple[int, ...]
) -> None:
    """Otherwise, Slurm kills the job script too, and the job is not requeued."""
    run = program(*numbers)
    now = time.time()
    run.view.note = StopNote(before_s=1.0, reason="SIGUSR2", at=now, limit_at=now + 3600)
    run.supervisor.look()
    assert run.process.poll() is None
    run.view.note = StopNote(before_s=1.0, reason="SIGUSR2", at=now, limit_at=now)
    run.supervisor.look()
    assert run.process.wait(20) == -signal.SIGKILL
    run.supervisor.ended(-signal.SIGKILL)
    assert run.supervisor.stop == "SIGUSR2"
    assert run.supervisor.was_killed is True


@pytest.mark.parametrize(
    ("numbers", "received"),
    [
        ((USR1, TERM), [TERM]),
        ((), []),
    ],
)
def test_a_program_that_has_asked_for_a_requeue_is_ended(
    program: Callable[..., Program],
    monkeypatch: pytest.MonkeyPatch,
    numbers: tuple[int, ...],
    received: list[int],
) -> None:
    """It gets SIGTERM, as after a real requeue, and SIGKILL if it continues."""
    run = program(*numbers)
    run.view.note = StopNote(reason="scontrol", at=time.time(), ends=True)
    run.supervisor.look()
    monkeypatch.setattr(run.supervisor, "_next_look_at", 0.0)
    run.supervisor.look()
    assert run.process.poll() is None or not numbers
    told = [int(run.process.stdout.readline()) for _ in received]
    assert told == received
    assert not run.supervisor.was_killed
    monkeypatch.setattr(run.supervisor, "_kill_at", time.monotonic())  # END_S later
    run.supervisor.look()
    assert run.end() == []
    assert run.supervisor.stop == "scontrol"
    assert run.process.returncode == (-signal.SIGKILL if numbers else -TERM)


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        ({"now": 61.0}, "the run directory cannot be read for 61 s"),
        ({"fenced": "a later attempt writes"}, "a later attempt writes"),
        ({"now": 59.0}, None),
    ],
)
def test_a_program_that_lost_its_run_directory_is_killed(
    program: Callable[..., Program], view: dict[str, object], reason: str | None
) -> None:
    run = program(TERM)
    for name, value in view.items():
        setattr(run.view, name, value)
    run.supervisor.look()
    if reason is None:
        assert run.supervisor.fenced is None
        return
    assert run.process.wait(20) == -signal.SIGKILL
    assert isinstance(run.supervisor.fenced, MachineError)
    assert str(run.supervisor.fenced) == reason


def test_a_program_that_hangs_is_killed(program: Callable[..., Program]) -> None:
    run = program(TERM)
    run.view.hangs = True
    run.supervisor.look()
    assert run.process.wait(20) == -signal.SIGKILL
    assert isinstance(run.supervisor.fenced, Hang)
    assert run.supervisor.stop == ""


def test_a_program_is_looked_at_every_few_seconds(program: Callable[..., Program]) -> None:
    run = program(TERM)
    looks: list[object] = []
    remark = lambda *looked: str(looks.append(looked) or "")  # noqa: E731
    run.supervisor._rules = Rules(delivery.STOP_SIGNALS, 60.0, remark)
    for _ in range(2):
        run.supervisor.look()
    assert len(looks) == 1


def test_a_program_that_cannot_work_is_killed(program: Callable[..., Program]) -> None:
    run = program(problem="script=a.py: starts torchrun")
    run.supervisor.look()
    assert run.process.wait(20) == -signal.SIGKILL
    assert isinstance(run.supervisor.fenced, InputError)


@pytest.mark.parametrize(("now", "moment"), [(99.6, 100.0), (99.8, 101.0)])
def test_all_ranks_are_signalled_at_the_next_whole_second(
    monkeypatch: pytest.MonkeyPatch, now: float, moment: float
) -> None:
    """In which all of them have received Slurm's signal."""
    monkeypatch.setattr(supervise.time, "time", lambda: now)
    assert supervise.moment_together() == moment


def wrapper(*command: str) -> subprocess.Popen[str]:
    return helpers.start([sys.executable, "-c", WRAPPER, *command])


def ended(process: subprocess.Popen[str]) -> tuple[list[object], list[str]]:
    """How the program of a wrapper ended, and its other output."""
    *lines, last = helpers.finish(process).expect(0).lines
    return json.loads(last)["ended"], lines


def signals_of(trap: str) -> list[set[str]]:
    """The blocked and the ignored signals of a program whose wrapper a shell has started after
    ``trap``. Real-time signals do not count.
    """
    command = ["bash", "-c", f'{trap}; exec "$@"', "x", sys.executable, "-c", WRAPPER]
    process = helpers.start([*command, "grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"])
    status = "\n".join(ended(process)[1])
    numbers = [proctree.signal_set(status, name) for name in ("SigBlk", "SigIgn")]
    return [
        {signal.Signals(number).name for number in signals if number < 32} for signals in numbers
    ]


def test_a_program_starts_with_default_signals() -> None:
    """Some shells start a background job with SIGINT ignored, and the wrapper itself blocks
    signals.
    """
    assert signals_of('trap "" INT TERM USR1') == [set(), set()]


def test_a_program_that_ignores_the_end_of_its_terminal_keeps_that() -> None:
    assert signals_of('trap "" HUP') == [set(), {"SIGHUP"}]


def test_what_a_program_leaves_behind_is_killed() -> None:
    """Also what has left its process group, or whose parent has ended."""
    script = "sleep 600 & echo $!; (setsid sleep 600 & echo $!); exit 3"
    (code, stop), lines = ended(wrapper("bash", "-c", script))
    assert stop == ""
    assert len(lines) == 2
    assert code == 3
    helpers.wait_for_the_end_of(map(int, lines), 10)


def test_a_signal_to_all_processes_reaches_a_program_once() -> None:
    """As Slurm sends it with ProctrackType=proctrack/linuxproc."""
    program = "trap 'echo got' TERM; echo $$; for i in 1 2 3; do sleep 0.5; done; exit 5"
    process = wrapper("bash", "-c", program)
    process.stdout.readline()
    for child in (*helpers.children(process.pid), process.pid):
        os.kill(child, TERM)
    out, _ = process.communicate(timeout=20)
    assert out.count("got") == 1
    assert json.loads(out.splitlines()[-1])["ended"] == [5, "SIGTERM"]


def test_a_program_that_a_signal_to_all_has_ended_was_stopped() -> None:
    """The signal arrives at the wrapper a moment later."""
    process = wrapper("bash", "-c", "echo $$; exec sleep 60")
    program = int(process.stdout.readline())
    os.kill(program, TERM)
    while Path(f"/proc/{program}").exists():
        pass
    process.send_signal(TERM)
    assert ended(process)[0] == [-TERM, "SIGTERM"]


def test_orphans_of_a_program_leave_no_zombie() -> None:
    script = "pid=$( (sleep 0.1 >&2 & echo $!) ); sleep 0.5; test -e /proc/$pid; exit $?"
    assert ended(wrapper("bash", "-c", script))[0] == [1, ""]
