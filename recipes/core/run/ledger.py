"""Where the time of a run went, over all its attempts, by their files. Standard library only."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from recipes.core import files
from recipes.core.errors import Kind, kind_of
from recipes.core.run import attempt as attempts
from recipes.core.run import in_use, rows
from recipes.core.run.attempt import Attempt
from recipes.core.run.record import Record, State, ago
from recipes.core.run.rows import Row, number

# Of the time of a run. queue: in the queue, or not submitted. training: the steps that count.
# repeated: steps that a later attempt did again. hang: no progress, also since the job was
# suspended. restart: from a failure until the ranks train again.
CAUSES = (
    "queue",
    "start",
    "compile",
    "training",
    "repeated",
    "evaluation",
    "checkpoint",
    "data",
    "hang",
    "restart",
)
# of a restart in the same job, from the last progress before the failure
PARTS = (
    "detection",
    "teardown",
    "examination",
    "start",
    "load",
    "first step",
)

Entry = dict[str, Any]  # as `total` returns it


class End(NamedTuple):
    """The end of an attempt that failed, NaN if unknown. progress: the last one of the rank that
    failed first. failed: the failure of this rank. ended: of all ranks.
    """

    progress: float
    failed: float
    ended: float


def of_run(run: Record) -> Entry:
    """Where the time of a run went, in the form of `total`."""
    saved = run.summary.get("ledger")
    if saved:
        return total([saved])
    return total(of_attempts(run.folder, run.end, run.state is State.running))


def of_attempts(run_dir: Path, end: float, is_running: bool) -> list[Entry]:
    """Where the time of each attempt went, oldest first, each in the form of `total`. The time in
    the queue belongs to the attempt after it. A job that was refused because the attempt before
    it still ran is left out.

    end: of the run, or time.time() if it runs; without it, the list is empty. Time by which a clock
    was set back counts as nothing.
    """
    every = list[Attempt]()
    facts = list[files.Json]()
    for attempt in attempts.every(run_dir)[::-1] if math.isfinite(end) else []:
        fact = attempt.facts()
        at = number(fact.get("time"))
        is_refused = every and not attempt.has_begun and at < _alive_until(every[-1])
        # an attempt that could not be described, for example on a full disk, has no time
        if math.isfinite(at) and not is_refused:
            every.append(attempt)
            facts.append(fact)
    if not every:
        return []
    opened = [*(number(fact.get("time")) for fact in facts), end]
    at = number(facts[0].get("submitted") or opened[0])
    has_ended = True
    entries = []
    for place, (attempt, fact) in enumerate(zip(every, facts, strict=True)):
        # a later attempt may have begun at an older checkpoint than the one before it
        begins = [number(each["step"]) for each in facts[place + 1 :] if "step" in each]
        kept = _row_before(attempt, min(begins, default=math.inf) + 1)

        # nothing notices the death of the batch script's node until Slurm requeues the job
        is_requeue = place > 0 and fact.get("job") == facts[place - 1].get("job")
        is_unnoticed = is_requeue and not has_ended
        requeued = number(fact.get("submitted")) if is_unnoticed else math.nan
        gap = "restart" if attempt.is_restart else "queue"
        moments = [(requeued, "hang"), (opened[place], gap)]
        moments += _moments(attempt, fact, kept, is_running if attempt is every[-1] else None)
        seconds = _between(moments, at, opened[place + 1])
        at += math.fsum(seconds.values())

        _take_from_training(seconds, kept.get("spent_s") or {})
        gpus = number(fact.get("gpus")) * number(fact.get("nodes"))
        entries.append(total([{"seconds": seconds, "gpu_hours_lost": _lost(seconds, gpus)}]))
        has_ended = math.isfinite(_end(attempt).ended)
    return entries


def _between(moments: Sequence[tuple[float, str]], at: float, end: float) -> dict[str, float]:
    """Seconds by cause from ``at`` to ``end`` at most. moments: as `_moments` returns them."""
    seconds = defaultdict[str, float](float)
    for moment, cause in moments:
        passed = min(moment, end) - at
        if passed > 0:  # not if the moment is unknown
            seconds[cause] += passed
            at += passed
    return seconds


def _take_from_training(seconds: dict[str, float], spent_s: files.Json) -> None:
    """Moves what rank 0 has measured between its steps to its causes."""
    for cause, value in spent_s.items():
        part = min(number(value), seconds["training"])
        if cause in CAUSES and part > 0:
            seconds["training"] -= part
            seconds[cause] += part


def _lost(seconds: Mapping[str, float], gpus: float) -> dict[str, float]:
    """GPU-hours by cause. No GPU is held in the queue."""
    return {
        cause: gpus * value / 3600
        for cause, value in seconds.items()
        if cause not in ("queue", "training")
    }


def _moments(
    attempt: Attempt, facts: files.Json, kept: Row, is_running: bool | None
) -> list[tuple[float, str]]:
    """The moments of an attempt after its opening, and the cause of the time before each. A later
    one may have passed before, and those that are unknown are NaN.

    kept: the last row that counts; {} if there is none. is_running: whether the run does; None if
    there is a later attempt.
    """
    start = "restart" if attempt.is_restart else "start"
    last = _row_before(attempt, math.inf)
    moments = [
        (number(facts.get("begun_at", _first_row(attempt).get("time"))), start),
        (number(kept.get("time")), "training"),
        (number(last.get("time")), "repeated"),
    ]
    # what the attempt did after its last row, if it then failed, and if it ended as planned
    before_failure = before_end = start
    if facts.get("of_program"):  # it writes no rows
        before_failure = before_end = "training"
    elif attempt.has_begun:
        before_failure = "repeated"
        before_end = "checkpoint" if last else "evaluation"

    end = _end(attempt)
    judgement = attempt.read("ended.json")
    is_newest = is_running is not None
    over = math.inf if is_newest else end.ended
    if judgement.get("state") in ("done", "preempted"):
        return [*moments, (over, before_end)]
    if math.isfinite(end.failed):
        undetected = "hang" if math.isfinite(end.progress) else before_failure
        moments += [(end.progress, before_failure), (end.failed, undetected)]
        return [*moments, (over, "restart")]
    if judgement or not is_newest:
        moments.append((attempts.newest_heartbeat(attempt), before_failure))
        return [*moments, (over, "hang")]
    if is_running and attempt.has_begun:
        # if the run is lost, nothing is known after this moment
        return [*moments, (attempts.newest_heartbeat(attempt) + in_use.WATCH_S, "training")]
    return [*moments, (over, before_end)]


def total(entries: Sequence[Entry]) -> Entry:
    """The sum of several entries: ``wall_s``, ``effective`` (the share of the training that
    counts), and by cause ``seconds`` and, if it is known, ``gpu_hours_lost``.
    """
    sums: dict[str, dict[str, float]] = {}
    for name in ("seconds", "gpu_hours_lost"):
        by_cause = {
            cause: math.fsum(number(entry[name].get(cause, 0.0)) for entry in entries)
            for cause in CAUSES
        }
        sums[name] = {cause: round(value, 4) for cause, value in by_cause.items() if value > 0}
    wall_s = math.fsum(sums["seconds"].values())
    effective = sums["seconds"].get("training", 0.0) / wall_s if wall_s else 0.0
    return {"wall_s": round(wall_s, 3), "effective": round(effective, 4), **sums}


def cells(entries: Sequence[Entry]) -> list[list[str]]:
    """A table of entries in the form of `total`, its head first, with the causes that occur."""
    causes = [cause for cause in CAUSES if any(cause in entry["seconds"] for entry in entries)]
    lines = []
    for entry in entries:
        lost = math.fsum(entry["gpu_hours_lost"].values())
        durations = [ago(entry["seconds"].get(cause, 0.0)) for cause in causes]
        hours = f"{lost:.2f}" if lost else ""
        lines.append([ago(entry["wall_s"]), f"{entry['effective']:.1%}", *durations, hours])
    return [["time", "effective", *causes, "GPU-hours lost"], *lines]


def recovery(attempt: Attempt) -> dict[str, float]:
    """Seconds of each of PARTS, as far as they are known, of an attempt that ``restarts=`` has
    started; {} for any other one.
    """
    if not attempt.is_restart:
        return {}
    facts = attempt.facts()
    begun = number(facts.get("begun_at"))
    moments = (
        *_end(Attempt(attempt.run_dir, attempt.number - 1)),
        number(facts.get("time")),
        begun - number(facts.get("load_s")),
        begun,
        number(_first_row(attempt).get("time")),
    )
    durations = [end - start for start, end in pairwise(moments)]
    return {part: seconds for part, seconds in zip(PARTS, durations, strict=True) if seconds >= 0}


def text(seconds: Mapping[str, float]) -> str:
    """Each part with its duration."""
    return ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())


def _alive_until(attempt: Attempt) -> float:
    """The end of an attempt; of one that is not judged, its newest heartbeat."""
    ended = _end(attempt).ended
    return ended if math.isfinite(ended) else attempts.newest_heartbeat(attempt)


def _end(attempt: Attempt) -> End:
    records = attempts.records(attempt)
    failures = [record for record in records if kind_of(record) is not Kind.stopped]
    first = failures[0] if failures else {}
    judgement = attempt.read("ended.json")
    return End(*map(number, (first.get("progress"), first.get("time"), judgement.get("time"))))


def _first_row(attempt: Attempt) -> Row:
    """The first row of an attempt; {} if it has none."""
    _, row = rows.around(attempt.run_dir, attempt.number, 0)
    return attempt.only_own(row)


def _row_before(attempt: Attempt, step: float) -> Row:
    """The last row of an attempt before ``step``; {} if there is none."""
    row, _ = rows.around(attempt.run_dir, attempt.number, step)
    return attempt.only_own(row)
