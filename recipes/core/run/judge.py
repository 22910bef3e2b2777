"""How an attempt ended, according to its records and to what its parent saw. Standard library only.

`close` judges and writes. The parent of the ranks calls it; readers call only `judge`.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from recipes.core import files
from recipes.core.errors import (
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_DONE,
    EXIT_MACHINE,
    EXIT_REQUEUE,
    Kind,
    kind_of,
)
from recipes.core.run import attempt as attempts
from recipes.core.run import directory
from recipes.core.run.attempt import Attempt

# The state of an attempt that ended before it began. The status.json of another attempt is not
# changed.
NOT_BEGUN = "not begun"

# Rank, host and what else is known of it: from its error record, from the note of its wrapper, or
# from its parent.
RankFacts = Mapping[str, Any]


@dataclass(frozen=True)
class End:
    """How the processes of an attempt ended, as their parent saw it.

    exit_status: that of srun, or of the first rank to fail; 0 if all exited with 0. first: the
    first process that failed, with ``rank``, ``host`` and ``exit_status``; None if the parent
    cannot know. reason, kind: why, for ``first``. stopped: whether the launch was stopped by a
    signal, and no rank failed before that.
    """

    exit_status: int
    first: RankFacts | None = None
    reason: str = ""
    kind: Kind = Kind.killed
    stopped: bool = False


@dataclass(frozen=True)
class Outcome:
    """The judgement. state: as in ``status.json``, or `NOT_BEGUN`. reason: one line. first: the
    first failing rank, if it is known.
    """

    state: str
    kind: Kind | None = None
    reason: str = ""
    first: RankFacts | None = None
    exit_status: int = 0  # set by `judge`
    step: int = 0

    @property
    def is_of_all(self) -> bool:
        """Whether rank 0 was refused (input, machine): it represents the ranks that are refused for
        the same reason.
        """
        return (
            self.kind is not Kind.error
            and self.exit_status in (EXIT_CONFIG, EXIT_MACHINE)
            and (self.first or {}).get("rank") == 0
        )

    @property
    def line(self) -> str:
        """The reason; without the name of rank 0 if it represents all ranks."""
        if self.first and self.is_of_all:
            return self.first.get("error") or self.reason
        return self.reason


def close(attempt: Attempt, end: End) -> Outcome:
    """Judges an attempt whose processes have all ended. Writes ``ended.json``, and ``status.json``
    unless rank 0 has written its end there.
    """
    outcome = judge(attempt, end)
    of_program = outcome.state != NOT_BEGUN and attempt.facts().get("of_program")
    by_parent = outcome.state in ("failed", "incomplete") or of_program
    with contextlib.suppress(OSError):  # the disk may be full
        judgement = {**asdict(outcome), "line": outcome.line, "time": time.time()}
        files.write_json(attempt.folder / "ended.json", judgement)
        if by_parent or (outcome.state == "preempted" and outcome.first):
            directory.write_status(
                attempt.run_dir,
                outcome.state,
                attempt=attempt.number,
                step=outcome.step,
                reason=outcome.reason,
                kind=outcome.kind,
                first=outcome.first,
            )
    return outcome


def judge(attempt: Attempt, end: End | None = None) -> Outcome:
    """How the attempt ended, by its files. end: None for a reader, which has not seen the processes
    end.
    """
    status = directory.read_status(attempt.run_dir)  # of this or of another attempt
    return replace(_judge(attempt, end, status), step=int(status.get("step") or 0))


def _judge(attempt: Attempt, end: End | None, status: files.Json) -> Outcome:
    """The judgement without its step."""
    facts = attempt.facts()
    records = attempts.records(attempt)
    begun = attempt.has_begun
    written = attempt.only_own(status)
    of_program = facts.get("of_program")
    if written.get("state") == "done":
        return Outcome("done")
    if written.get("state") == "preempted" and not (of_program and end):
        return Outcome(
            "preempted", kind_of(written), written.get("reason") or "", None, EXIT_REQUEUE
        )

    launch = attempts.taken_over_by(attempt)
    if launch:
        reason = f"{attempt.run_dir} was taken over by {launch}; this job is not requeued"
        return Outcome(NOT_BEGUN, Kind.machine, reason, None, EXIT_MACHINE)
    if of_program and begun:
        return _of_program(attempt, records, end)
    if end and end.stopped and not begun:
        reason = "it was stopped before the run began"
        return Outcome(NOT_BEGUN, Kind.stopped, reason, None, EXIT_REQUEUE)

    outcome = _first_failure(records, facts.get("hosts") or (), begun, end)
    state = NOT_BEGUN if not begun and status and not written else outcome.state
    return replace(outcome, state=state, exit_status=_exit_status(outcome, end))


def _exit_status(outcome: Outcome, end: End | None) -> int:
    """That of the first rank that failed, else what the parent saw."""
    first = outcome.first or {}
    return first.get("exit_status") or (end.exit_status if end else 0) or EXIT_CRASH


def _of_program(attempt: Attempt, records: Sequence[RankFacts], end: End | None) -> Outcome:
    """How an attempt of a user's program ended.

    A request to stop makes a later failure of a rank its consequence. A failure makes a later
    request its consequence, since srun then sends SIGTERM to the other ranks.
    """
    ranks = attempts.program_ranks(attempt)
    stops = [record for record in records if _kind(record) is Kind.stopped]
    failures = [record for record in records if _kind(record) is not Kind.stopped]
    exit_status = end.exit_status if end else EXIT_DONE
    if exit_status == 0 and not failures and (is_finished(attempt) or (end and not stops)):
        return Outcome("done")
    known = {record["rank"] for record in failures}
    stopped_tasks = {record["rank"] for record in stops}
    lost = [
        rank
        for rank in ranks
        if rank["ended"] is None and rank["rank"] not in known and rank["task"] not in stopped_tasks
    ]
    is_seen = end is not None and end.first is not None  # the parent has seen which process failed
    # A rank that only lost its connection to a killed wrapper fails too. If many wrappers were
    # killed, srun may have done it after that failure (it does with PMIx).
    are_few = 2 * len(lost) <= len(ranks) and all(
        _kind(record) is Kind.error for record in failures
    )
    if exit_status and lost and not is_seen and (are_few or not failures):
        if len(lost) == len(ranks):
            reason = "srun, or the wrapper of every rank, was killed"
            return Outcome("failed", Kind.killed, reason, None, exit_status)
        reason = f"the wrapper of {_names(lost)} was killed"
        if failures:
            reason += f"; {_who(failures[0])} failed: {failures[0]['error']}"
        first = {**lost[0], "exit_status": exit_status}
        return Outcome("failed", Kind.killed, reason, first, exit_status)

    if stops and (not failures or stops[0]["time"] <= failures[0]["time"]):
        return Outcome("preempted", Kind.stopped, stops[0]["error"], None, EXIT_REQUEUE)
    outcome = _first_failure(failures, (), True, end)
    code = _exit_status(outcome, end)
    early = _exited_early(ranks, outcome.first) if outcome.kind is Kind.error else None
    if outcome.first and early:
        after = f"after that, {_who(outcome.first)} failed: {outcome.first['error']}"
        reason = f"{_who(early)} exited with status 0 before the end of the run; {after}"
        return Outcome("failed", Kind.exited, reason, {**early, "exit_status": code}, code)
    return replace(outcome, exit_status=code)


def is_finished(attempt: Attempt) -> bool:
    """Whether a user's program has written the file ``done`` in the run directory during this
    attempt.
    """
    with contextlib.suppress(OSError):
        began = float(attempt.facts().get("time") or 0.0)
        return (attempt.run_dir / "done").stat().st_mtime >= began - 1.0
    return False


def _exited_early(ranks: Sequence[RankFacts], first: RankFacts | None) -> RankFacts | None:
    """The first rank that exited with status 0 before ``first`` failed by itself; None if most
    ranks had exited.
    """
    if not first or "time" not in first:
        return None
    early = [
        rank
        for rank in ranks
        if rank["ended"] and rank["ended"] < first["time"] and rank["rank"] != first["rank"]
    ]
    if 2 * len(early) > len(ranks):
        return None
    return min(early, key=lambda rank: rank["ended"], default=None)


def _first_failure(
    records: Sequence[RankFacts], hosts: Sequence[str], begun: bool, end: End | None
) -> Outcome:
    """Why the attempt failed, without its exit status. records: of ranks, earliest first. hosts: by
    rank.
    """
    reported = {record["rank"] for record in records}
    by_parent = None
    if end and end.first and end.first["rank"] not in reported:
        by_parent = Outcome("failed", end.kind, end.reason, end.first)
    # the other ranks do not know why this one ended
    if by_parent and by_parent.kind is Kind.killed:
        return by_parent

    causes = [record for record in records if not _kind(record).is_consequence]
    if causes:
        first = _represents(causes)
        kind = _kind(first)
        if kind is Kind.stopped:
            return Outcome("preempted", kind, first["error"], first)
        if first["rank"] is None:
            return Outcome("failed", kind, first["error"])
        return Outcome("failed", kind, f"{_who(first)} failed first: {first['error']}", first)

    late = _late_rank(records)
    if late:
        return Outcome("failed", Kind.timeout, _behind(late), late)
    if not (by_parent or begun or records or hosts):
        return Outcome("failed", Kind.killed, "it ended before the run began")
    if end and end.exit_status == 0 and not records:
        reason = "every rank exited with status 0 before the end of the run"
        return Outcome("incomplete", Kind.exited, reason)
    if by_parent:
        return by_parent
    if not records:
        reason = (
            "all ranks exited without an error record "
            "(killed from outside, or by NCCL: see their logs)"
        )
        return Outcome("failed", Kind.killed, reason)

    silent = [
        {"rank": rank, "host": host} for rank, host in enumerate(hosts) if rank not in reported
    ]
    if silent:
        reason = (
            f"{_names(silent)} exited without an error record "
            "(killed, out of memory, or its node is gone)"
        )
        return Outcome("failed", Kind.killed, reason, silent[0])
    # All ranks only lost the connection to others: a rank that timed out takes precedence, else the
    # earliest.
    first = next((record for record in records if _kind(record) is Kind.timeout), records[0])
    return Outcome("failed", _kind(first), f"{_who(first)} lost its peers: {first['error']}", first)


def _represents(causes: Sequence[RankFacts]) -> RankFacts:
    """The earliest cause. The lowest rank represents ranks that are refused for the same reason."""
    first = causes[0]
    # A user's program may have ended with any exit status, also with one that has another meaning
    # for a recipe.
    is_refused = first["exit_status"] in (EXIT_CONFIG, EXIT_MACHINE)
    if not is_refused or _kind(first) in (Kind.error, Kind.killed):
        return first
    alike = [cause for cause in causes if cause["kind"] == first["kind"]]
    return min(alike, key=lambda cause: cause["rank"])


def _kind(record: RankFacts) -> Kind:
    return kind_of(record) or Kind.error


def _who(rank: RankFacts) -> str:
    return f"rank {rank['rank']} on {rank['host']}"


def _names(ranks: Sequence[RankFacts]) -> str:
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return ", ".join(map(_who, ranks[:4])) + more


def describe(record: RankFacts) -> str:
    """One line on the failure of one rank, for a rank without a parent that judges."""
    late = record.get("behind")
    return _behind(late) if late else f"{_who(record)} failed first: {record['error']}"


def _behind(late: RankFacts) -> str:
    return f"{_who(late)} stayed at {late['at']}, and the other ranks timed out waiting for it"


def _late_rank(records: Sequence[RankFacts]) -> RankFacts | None:
    """The rank for which other ranks timed out; None if there is none."""
    reported: set[int] = set()
    for failure in records:
        # A rank that SIGSTOP has stopped, and that continues only to be ended, reports afterwards
        # that it has lost its peers.
        late = failure.get("behind")
        if late and late["rank"] not in reported:
            return late
        reported.add(failure["rank"])
    return None
