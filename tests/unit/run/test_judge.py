"""How an attempt ended: `judge` on the records of its ranks and on what their parent saw, and what
`close` writes.
"""

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from recipes.core import files
from recipes.core.errors import Kind
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, judge
from recipes.core.run import record as of_run
from recipes.core.run.judge import End, Outcome
from tests import helpers

HOSTS = ("a", "a", "b", "b")
LOST = (Kind.peer_lost, "RuntimeError: connection closed")
STOP = (0, Kind.stopped, "SIGTERM", {"exit_status": 75})  # a request to stop a program
RUNNING = {"state": "running", "attempt": 0, "step": 7}
KILLED = End(137, {"rank": 1, "host": "a", "exit_status": 137}, "rank 1 on a was killed by SIGKILL")


def judged(
    folder: Path,
    *records: tuple[Any, ...],
    end: End | None = None,
    hosts: tuple[str, ...] = HOSTS,
    begun: bool = True,
    of_program: bool = False,
    status: dict[str, Any] | None = RUNNING,
    taken_by: str = "",
) -> Outcome:
    """The judgement on an attempt whose ranks failed in this order, two seconds apart. A record:
    rank, kind, error, other fields.
    """
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    attempt = helpers.attempt(run_dir, hosts=hosts, step=None)
    if begun:
        attempts.begin(attempt, 0, own=False, of_program=of_program)
    for moment, (rank, kind, error, *more) in enumerate(records, 1):
        words = dict(*more)
        attempts.record(
            attempt,
            rank=rank,
            host=hosts[rank],
            kind=kind,
            error=error,
            moment=2.0 * moment,
            **words,
        )
    if status:
        files.write_json(run_dir / "status.json", {**status, "updated": 0.0})
    if taken_by:
        helpers.attempt(run_dir, launch=taken_by)
    return judge.judge(attempt, end)


@pytest.mark.parametrize(
    ("records", "reason", "rank", "kind"),
    [
        (
            [(0, *LOST), (2, Kind.error, "boom"), (3, Kind.error, "late")],
            "rank 2 on b failed first: boom",
            2,
            Kind.error,
        ),
        (
            [(3, Kind.input, "x", {"exit_status": 2}), (1, Kind.input, "x", {"exit_status": 2})],
            "rank 1 on a failed first: x",
            1,
            Kind.input,
        ),
        (
            [(3, Kind.input, "x", {"exit_status": 2}), (1, Kind.error, "y")],
            "rank 3 on b failed first: x",
            3,
            Kind.input,
        ),
        (
            [(0, *LOST), (3, Kind.disk_full, "full"), (2, Kind.error, "x")],
            "rank 3 on b failed first: full",
            3,
            Kind.disk_full,
        ),
        ([(0, *LOST), (1, Kind.exited, "left")], "rank 1 on a failed first: left", 1, Kind.exited),
        (
            [(1, Kind.hang, "hangs"), (0, Kind.timeout, "x")],
            "rank 1 on a failed first: hangs",
            1,
            Kind.hang,
        ),
        (
            [
                (3, Kind.killed, "x", {"exit_status": 137}),
                (0, Kind.killed, "y", {"exit_status": 134}),
            ],
            "rank 3 on b failed first: x",
            3,
            Kind.killed,
        ),
        (
            [
                (3, Kind.out_of_memory, "x", {"exit_status": 137}),
                (0, Kind.out_of_memory, "y", {"exit_status": 137}),
            ],
            "rank 3 on b failed first: x",
            3,
            Kind.out_of_memory,
        ),
        (
            [(3, Kind.error, "x", {"exit_status": 2}), (0, Kind.error, "y")],
            "rank 3 on b failed first: x",
            3,
            Kind.error,
        ),
        (
            [(3, Kind.run_error, "x"), (1, Kind.run_error, "y")],
            "rank 3 on b failed first: x",
            3,
            Kind.run_error,
        ),
        (
            [(0, *LOST), (1, *LOST), (3, Kind.timeout, "x")],
            "rank 2 on b exited without an error record",
            2,
            Kind.killed,
        ),
        (
            [(3, Kind.timeout, "x"), (2, *LOST), (1, *LOST), (0, *LOST)],
            "rank 3 on b lost its peers: x",
            3,
            Kind.timeout,
        ),
        (
            [(2, *LOST), (3, Kind.timeout, "x"), (1, *LOST), (0, *LOST)],
            "rank 3 on b lost its peers: x",
            3,
            Kind.timeout,
        ),
        ([], "all ranks exited without an error record", None, Kind.killed),
    ],
)
def test_the_first_failure_is_the_earliest_that_no_other_rank_caused(
    tmp_path: Path, records: list[tuple[Any, ...]], reason: str, rank: int | None, kind: Kind
) -> None:
    verdict = judged(tmp_path, *records)
    assert verdict.reason.startswith(reason)
    assert verdict.state == "failed"
    assert verdict.kind == kind
    assert (verdict.first or {}).get("rank") == rank


def test_a_rank_for_which_the_others_timed_out_is_named(tmp_path: Path) -> None:
    late = {"rank": 2, "host": "b", "at": "step 7 (backward)"}
    verdict = judged(tmp_path, (0, Kind.timeout, "x", {"behind": late}))
    expected = (
        "rank 2 on b stayed at step 7 (backward), and the other ranks timed out waiting for it"
    )
    assert verdict.reason == expected
    assert verdict.first == late
    assert verdict.kind == Kind.timeout
    # it was only stopped for a while
    reported = [
        (2, *LOST),
        (0, Kind.timeout, "x", {"behind": late}),
    ]
    assert judged(tmp_path, *reported).reason.startswith(
        "rank 1 on a, rank 3 on b exited without an error record"
    )
    assert judge.describe({"behind": late}) == expected


def test_a_refused_rank_is_named_unless_rank_0_is_refused_too(tmp_path: Path) -> None:
    refused = (Kind.machine, "no GPU", {"exit_status": 3})
    line = judged(tmp_path, (2, *refused)).line
    assert line == "rank 2 on b failed first: no GPU"
    assert judged(tmp_path, (2, *refused), (0, *refused)).line == "no GPU"


def test_four_ranks_without_a_record_are_named_and_the_others_counted(tmp_path: Path) -> None:
    verdict = judged(tmp_path, (1, *LOST), hosts=tuple(f"h{i}" for i in range(8)))
    assert verdict.reason.startswith(
        "rank 0 on h0, rank 2 on h2, rank 3 on h3, rank 4 on h4 and 3 more exited"
    )
    assert verdict.first == {"rank": 0, "host": "h0"}


def test_a_rank_that_its_parent_saw_killed_comes_first_unless_it_has_a_record(
    tmp_path: Path,
) -> None:
    """Its peers may report an error of their own that its end has caused."""
    verdict = judged(tmp_path, (0, Kind.error, "ValueError: x"), end=KILLED)
    assert verdict.reason == "rank 1 on a was killed by SIGKILL"
    assert verdict.exit_status == 137
    exited = End(1, KILLED.first, "rank 1 on a exited", Kind.exited)
    for record, end, reason in (
        ((0, Kind.error, "x"), exited, "rank 0 on a failed first: x"),
        ((0, *LOST), exited, "rank 1 on a exited"),
        ((1, Kind.hang, "hangs"), KILLED, "rank 1 on a failed first: hangs"),
    ):
        assert judged(tmp_path, record, end=end).reason == reason


@pytest.mark.parametrize(
    ("records", "facts", "end", "state", "status"),
    [
        ([], {"status": {"state": "done", "attempt": 0, "step": 7}}, End(143), "done", 0),
        (
            [(2, Kind.error, "x")],
            {"status": {"state": "preempted", "attempt": 0, "step": 7}},
            End(143),
            "preempted",
            75,
        ),
        ([], {}, End(0), "incomplete", 1),
        ([(0, *LOST)], {}, End(0), "failed", 1),
        ([], {}, End(137), "failed", 137),
        ([(2, Kind.input, "x", {"exit_status": 2})], {}, End(143), "failed", 2),
        # An attempt that has not begun.
        (
            [(0, Kind.machine, "x", {"exit_status": 3})],
            {"begun": False, "status": {**RUNNING, "attempt": 8}},
            End(1),
            "not begun",
            3,
        ),
        (
            [(0, Kind.machine, "x", {"exit_status": 3})],
            {"begun": False, "status": {**RUNNING, "state": "failed"}},
            End(1),
            "failed",
            3,
        ),
        (
            [(0, Kind.machine, "x", {"exit_status": 3})],
            {"begun": False, "status": None},
            End(1),
            "failed",
            3,
        ),
        ([(0, Kind.error, "x")], {"begun": False}, End(1), "failed", 1),
        ([], {"begun": False, "status": {**RUNNING, "attempt": 8}}, KILLED, "not begun", 137),
        ([], {"begun": False, "status": None}, End(143, stopped=True), "not begun", 75),
        ([], {"taken_by": "9.0"}, End(3), "not begun", 3),
        ([], {}, End(143, stopped=True), "failed", 143),
        (
            [(2, Kind.stopped, "SIGTERM", {"exit_status": 75}), (0, *LOST)],
            {},
            End(143),
            "preempted",
            75,
        ),
        # A program of the user: done if all ranks exit with 0. srun ends the other ranks of one
        # that has failed with SIGTERM.
        ([], {"of_program": True}, End(0), "done", 0),
        ([(2, Kind.error, "x", {"exit_status": 3})], {"of_program": True}, End(0), "failed", 3),
        (
            [STOP],
            {"of_program": True, "status": {**RUNNING, "state": "preempted"}},
            End(0),
            "preempted",
            75,
        ),
        (
            [STOP, (2, Kind.error, "lost", {"exit_status": 1})],
            {"of_program": True},
            End(1),
            "preempted",
            75,
        ),
        (
            [(2, Kind.error, "x", {"exit_status": 1}), STOP],
            {"of_program": True},
            End(1),
            "failed",
            1,
        ),
        (
            [(2, Kind.killed, "x", {"exit_status": 137})],
            {"of_program": True, "status": {**RUNNING, "state": "preempted"}},
            End(137),
            "failed",
            137,
        ),
        (
            [],
            {"of_program": True, "status": {**RUNNING, "state": "preempted"}},
            End(137),
            "failed",
            137,
        ),
    ],
)
def test_the_state_and_the_exit_status_follow(
    tmp_path: Path,
    records: list[tuple[Any, ...]],
    facts: dict[str, Any],
    end: End,
    state: str,
    status: int,
) -> None:
    verdict = judged(tmp_path, *records, end=end, **facts)
    assert verdict.state == state
    assert verdict.step == (7 if facts.get("status", RUNNING) else 0)
    assert verdict.exit_status == status


def judged_program(
    folder: Path,
    *records: tuple[int, Kind, float],
    ended: tuple[float | None, ...] = (),
    ranks_per_task: int = 1,
    end: End | None = None,
    done_s: float | None = None,
) -> Outcome:
    """The judgement on a program of the user. A record: rank or task, kind, time. ended: by rank,
    when it exited with 0.

    done_s: when the program has written the file ``done``, in seconds after the begin of the
    attempt.
    """
    attempt = helpers.attempt(Path(tempfile.mkdtemp(dir=folder)), hosts=(), step=None)
    attempts.begin(attempt, 0, own=False, of_program=True)
    for rank, moment in enumerate(ended):
        attempts.note_rank(attempt, rank, rank // ranks_per_task, f"host{rank // 2}", moment)
    for rank, kind, moment in records:
        name, code = ("stop", 75) if kind is Kind.stopped else ("rank", 40 + rank)
        attempts.record(
            attempt,
            rank=rank,
            host=f"host{rank // 2}",
            kind=kind,
            error=f"{kind.value} {rank}",
            exit_status=code,
            moment=moment,
            name=name,
        )
    if done_s is not None:
        (attempt.run_dir / "done").touch()
        moment = attempt.facts()["time"] + done_s
        os.utime(attempt.run_dir / "done", (moment, moment))
    return judge.judge(attempt, end)


STOPPED = Kind.stopped
ERROR = Kind.error


@pytest.mark.parametrize(
    ("records", "state", "reason"),
    [
        ([(0, STOPPED, 5.0), (1, ERROR, 5.1)], "preempted", "stopped 0"),
        ([(1, STOPPED, 5.0), (0, STOPPED, 6.0), (2, Kind.killed, 9.0)], "preempted", "stopped 1"),
        ([(0, ERROR, 4.9), (1, STOPPED, 5.0)], "failed", "rank 0 on host0 failed first: error 0"),
        (
            [(3, ERROR, 4.9), (2, STOPPED, 5.0), (1, ERROR, 6.0)],
            "failed",
            "rank 3 on host1 failed first: error 3",
        ),
        ([(3, ERROR, 5.0), (3, STOPPED, 5.0)], "preempted", "stopped 3"),  # a rank has both records
    ],
)
def test_a_stop_before_the_first_failure_of_a_program_is_its_cause(
    tmp_path: Path, records: list[tuple[int, Kind, float]], state: str, reason: str
) -> None:
    verdict = judged_program(tmp_path, *records, ended=(6.0,) * 4, end=End(1))
    assert verdict.state == state
    assert verdict.reason == reason
    assert verdict.exit_status == (75 if state == "preempted" else 40 + verdict.first["rank"])
    assert judged_program(tmp_path, *records, ended=(None,) * 4).state == state  # for a reader


@pytest.mark.parametrize(
    ("done_s", "records", "code", "state"),
    [
        (5.0, [(0, STOPPED, 5.0)], 0, "done"),
        (None, [(0, STOPPED, 5.0)], 0, "preempted"),
        (-0.5, [(0, STOPPED, 5.0)], 0, "done"),  # a file system may have whole seconds
        (-60.0, [(0, STOPPED, 5.0)], 0, "preempted"),  # an earlier attempt has written it
        (5.0, [(0, STOPPED, 5.0)], 1, "preempted"),
        (5.0, [(0, STOPPED, 5.0), (1, ERROR, 6.0)], 0, "preempted"),
        (None, [], 0, "done"),
    ],
)
def test_a_program_that_was_stopped_is_done_if_it_says_so(
    tmp_path: Path,
    done_s: float | None,
    records: list[tuple[int, Kind, float]],
    code: int,
    state: str,
) -> None:
    ended = (8.0, 8.0)
    verdict = judged_program(tmp_path, *records, ended=ended, end=End(code), done_s=done_s)
    assert verdict.state == state


def test_ranks_whose_wrappers_were_killed_are_named(tmp_path: Path) -> None:
    """Signals go to the wrapper of a task. With a launcher, several ranks have one."""
    verdict = judged_program(tmp_path, ended=(8.0, None, 8.0), end=End(137))
    assert verdict.state == "failed"
    assert verdict.kind == Kind.killed
    assert verdict.reason == "the wrapper of rank 1 on host0 was killed"
    assert verdict.first["rank"] == 1
    assert verdict.first["host"] == "host0"
    assert verdict.first["exit_status"] == 137
    # by the parent, with launcher=local
    seen = judged_program(tmp_path, ended=(8.0, None, None), end=KILLED)
    assert seen.reason == KILLED.reason
    assert seen.exit_status == 137
    six = judged_program(tmp_path, ended=(8.0, *(None,) * 6), end=End(137))
    named = ", ".join(f"rank {rank} on host{rank // 2}" for rank in range(1, 5))
    assert six.reason == f"the wrapper of {named} and 2 more was killed"
    all_lost = judged_program(tmp_path, ended=(None, None), end=End(143))
    assert all_lost.reason == "srun, or the wrapper of every rank, was killed"
    assert all_lost.first is None
    ended = (8.0, 8.0, None, None)
    stopped = judged_program(tmp_path, (1, STOPPED, 5.0), ended=ended, ranks_per_task=2, end=End(1))
    assert stopped.state == "preempted"
    ended = (8.0, 8.0, 8.0, None)
    other = judged_program(tmp_path, (0, STOPPED, 5.0), ended=ended, ranks_per_task=2, end=End(9))
    assert other.state == "failed"
    assert other.first["rank"] == 3
    assert other.exit_status == 9


def test_the_killed_wrapper_is_named_and_not_the_rank_that_lost_it(tmp_path: Path) -> None:
    ended = (None, None, 6.0, 6.0)
    verdict = judged_program(tmp_path, (0, ERROR, 5.0), (2, STOPPED, 5.5), ended=ended, end=End(1))
    killed, failed = verdict.reason.split("; ")
    assert killed == "the wrapper of rank 1 on host0 was killed"
    assert failed == "rank 0 on host0 failed: error 0"
    assert verdict.state == "failed"
    assert verdict.first["rank"] == 1
    assert verdict.exit_status == 1
    cause = judged_program(tmp_path, (0, Kind.out_of_memory, 5.0), ended=ended, end=End(137))
    assert cause.first["rank"] == 0
    half = judged_program(tmp_path, (0, ERROR, 5.0), ended=(None, None, None, 6.0), end=End(1))
    assert half.first["rank"] == 1
    many = judged_program(tmp_path, (0, ERROR, 5.0), ended=(None,) * 4, end=End(1))
    assert many.first["rank"] == 0


@pytest.mark.parametrize(
    ("ended", "kind", "early"),
    [
        ((3.0, 2.0, None, None), ERROR, 1),
        ((3.0, 2.0, 2.5, None), ERROR, None),  # of most ranks
        ((6.0, None, None, None), ERROR, None),  # after the failure
        ((3.0, None, None, None), Kind.killed, None),
        ((3.0, 2.0, None, 1.0), ERROR, 1),  # rank 3 is the one that failed
    ],
)
def test_the_few_ranks_that_exited_before_another_one_failed_are_its_cause(
    tmp_path: Path, ended: tuple[float | None, ...], kind: Kind, early: int | None
) -> None:
    ended = tuple(moment or 7.0 for moment in ended[:3]) + ended[3:]
    verdict = judged_program(tmp_path, (3, kind, 5.0), ended=ended, end=End(1))
    failed = f"rank 3 on host1 failed{'' if early else ' first'}: {kind.value} 3"
    reason = (
        f"rank {early} on host0 exited with status 0 before the end of the run; "
        f"after that, {failed}"
    )
    assert verdict.reason == (reason if early else failed)
    assert verdict.first["rank"] == (early or 3)
    assert verdict.exit_status == 43
    assert verdict.kind is (Kind.exited if early else kind)


def closed(
    run_dir: Path,
    end: End,
    state: str = "running",
    rank: int | None = None,
    kind: Kind = Kind.error,
) -> tuple[Outcome, dict[str, Any]]:
    """Closes a new attempt in which rank ``rank`` has failed. The outcome, and ``status.json``."""
    attempt = helpers.attempt(run_dir, hosts=HOSTS)
    directory.write_status(run_dir, state, attempt=attempt.number, step=7)
    if rank is not None:
        attempts.record(attempt, rank=rank, host=HOSTS[rank], kind=kind, error="ValueError: boom")
    outcome = judge.close(attempt, end)
    assert (files.read_json(attempt.folder / "ended.json") or {})["state"] == outcome.state
    return outcome, directory.read_status(run_dir) or {}


def test_close_writes_the_judgement_into_the_status(tmp_path: Path) -> None:
    # replaces that of a rank
    assert closed(tmp_path / "other", KILLED, state="failed")[1]["reason"] == KILLED.reason
    _, status = closed(tmp_path, End(1), rank=2)
    assert status["state"] == "failed"
    assert status["attempt"] == 0
    assert status["step"] == 7
    assert status["kind"] == "error"
    assert status["reason"] == "rank 2 on b failed first: ValueError: boom"
    assert status["first_failing_rank"] == 2
    assert status["first_failing_host"] == "b"
    assert status["exit_status"] == 1
    _, status = closed(tmp_path, End(0))
    assert status["state"] == "incomplete"
    assert status["attempt"] == 1
    _, status = closed(tmp_path, End(75), rank=0, kind=Kind.stopped)  # before its first step
    assert status["state"] == "preempted"
    assert status["attempt"] == 2
    assert status["kind"] == "stopped"


@pytest.mark.parametrize("state", ["done", "preempted"])
def test_close_does_not_change_a_status_that_rank_0_has_written(tmp_path: Path, state: str) -> None:
    outcome, status = closed(tmp_path, KILLED, state=state, rank=2)
    assert outcome.state == state
    assert status["state"] == state
    assert status["reason"] == ""


def test_close_does_not_change_the_status_of_another_attempt(tmp_path: Path) -> None:
    first = helpers.attempt(tmp_path, launch="1.0", job="1")
    second = helpers.attempt(tmp_path, launch="2.0", job="2")
    directory.write_status(tmp_path, "running", attempt=1, step=5)
    before = directory.read_status(tmp_path)
    outcome = judge.close(first, End(3))
    assert outcome.reason == f"{tmp_path} was taken over by 2.0; this job is not requeued"
    # killed in its start; the second one runs
    never = helpers.attempt(tmp_path, launch="3.0", job="2", step=None)
    assert judge.close(never, End(143)).state == "not begun"
    assert directory.read_status(tmp_path) == before
    assert judge.close(second, End(1)).state == "failed"


def test_a_refused_attempt_leaves_its_line_and_not_the_status(tmp_path: Path) -> None:
    closed(tmp_path, End(0), state="done")
    before = directory.read_status(tmp_path)
    refused = helpers.attempt(tmp_path, step=None)
    attempts.record(
        refused, rank=0, host="a", kind=Kind.input, error="lr=1 becomes 2", exit_status=2
    )
    assert judge.close(refused, End(143)).exit_status == 2
    assert directory.read_status(tmp_path) == before
    assert of_run.read(tmp_path).refused == "lr=1 becomes 2"
    directory.write_status(tmp_path, "done", attempt=0, step=9)  # the run has ended since then
    assert of_run.read(tmp_path).refused == ""
    judge.close(helpers.attempt(tmp_path, step=None), End(143, stopped=True))
    assert of_run.read(tmp_path).refused == ""


def test_close_returns_the_judgement_if_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = helpers.attempt(tmp_path)
    directory.write_status(tmp_path, "running", attempt=0, step=5)

    def full(*arguments: object, **words: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_json", full)
    outcome = judge.close(attempt, End(1))
    assert outcome.state == "failed"
    assert outcome.step == 5
    assert outcome.exit_status == 1
