"""Where the time of a run went, over all its attempts, by their files. Standard library only."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from recipes.core import files
from recipes.core.errors import Kind, kind_of
from recipes.core.run import attempt as attempts
from recipes.core.run import rows
from recipes.core.run.attempt import Attempt
from recipes.core.run.record import Record, State, ago
from recipes.core.run.rows import number

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
RUNNING = "running"
OVER = "over"


class _Clock:
    """Assigns the time that passes to causes, so that their sum is the time that has passed.

    at: the time before it is assigned. end: the time after it is not.
    """

    def __init__(self, at: float) -> None:
        self.at = at
        self.end = math.inf
        self.seconds = defaultdict[str, float](float)

    def until(self, moment: float, cause: str) -> None:
        """Assigns the time up to a moment, unless that is unknown (NaN) or has passed."""
        moment = min(moment, self.end)
        if moment > self.at:
            self.seconds[cause] += moment - self.at
            self.at = moment


def of_run(run: Record) -> dict[str, Any]:
    """Where the time of a run went, in the form of `total`."""
    saved = run.summary.get("ledger")
    if isinstance(saved, dict):
        return total([saved])
    return total(of_attempts(run.folder, run.end, run.state is State.running))


def of_attempts(run_dir: Path, end: float, is_running: bool) -> list[dict[str, Any]]:
    """Where the time of each attempt went, oldest first, each in the form of `total`. The time in
    the queue belongs to the attempt after it.

    end: of the run, or time.time() if it runs. The list is empty if a clock was set back.
    """
    every = attempts.every(run_dir)[::-1]
    facts = [attempt.facts() for attempt in every]
    opened = [*(number(fact.get("time")) for fact in facts), end]
    if not every or not all(before <= after for before, after in pairwise(opened)):
        return []
    submitted = number(facts[0].get("submitted"))
    clock = _Clock(min(opened[0], submitted) if submitted > 0 else opened[0])
    newest = len(every) - 1
    state = RUNNING if is_running else OVER
    entries = []
    has_ended = True
    for place, (attempt, fact) in enumerate(zip(every, facts, strict=True)):
        clock.seconds.clear()
        clock.end = opened[place]
        if not has_ended:  # nothing has noticed the failure until Slurm has requeued the job
            clock.until(number(fact.get("submitted")), "hang")
        clock.until(clock.end, "restart" if attempt.is_restart else "queue")
        clock.end = opened[place + 1]
        later = [number(each["step"]) for each in facts[place + 1 :] if "step" in each]
        resumed_at = later[0] if later else math.inf
        has_ended = _spend(clock, attempt, fact, resumed_at, "" if place < newest else state)
        gpus = number(fact.get("gpus")) * number(fact.get("nodes"))
        entries.append(_entry(clock.seconds, gpus))
    return entries


def _spend(
    clock: _Clock, attempt: Attempt, facts: Mapping[str, Any], resumed_at: float, now: str
) -> bool:
    """Assigns the time of an attempt from its opening. Returns whether its end is known.

    resumed_at: the step from which the next attempt has continued. now: of the newest attempt, the
    state of the run: RUNNING or OVER.
    """
    start = "restart" if attempt.is_restart else "start"
    _, first = rows.around(attempt.run_dir, attempt.number, 0)
    kept, _ = rows.around(attempt.run_dir, attempt.number, resumed_at + 1)
    last, _ = rows.around(attempt.run_dir, attempt.number + 1, 0)
    begun = number(facts.get("begun_at"))
    clock.until(begun if math.isfinite(begun) else _time(first, attempt), start)
    clock.until(_time(kept, attempt), "training")
    spent = kept.get("spent_s") if kept.get("attempt") == attempt.number else None
    for cause, value in spent.items() if isinstance(spent, dict) else ():
        seconds = min(number(value), clock.seconds["training"])
        if cause in CAUSES and seconds > 0:
            clock.seconds["training"] -= seconds
            clock.seconds[cause] += seconds
    clock.until(_time(last, attempt), "repeated")

    # after the last row: until a failure, and until an end as planned
    work = saving = start
    if facts.get("of_program"):  # it writes no rows
        work = saving = "training"
    elif attempt.has_begun:
        work = "repeated"
        saving = "checkpoint" if last.get("attempt") == attempt.number else "evaluation"
    progress, failed, ended = _end(attempt)
    judgement = files.read_json(attempt.folder / "ended.json") or {}
    if judgement.get("state") in ("done", "preempted"):
        clock.until(clock.end if now else ended, saving)
        return True
    has_failed = math.isfinite(failed)
    clock.until(progress, work)
    clock.until(failed, "hang" if math.isfinite(progress) else work)
    if not has_failed and (judgement or not now):
        clock.until(attempts.newest_heartbeat(attempt), work)
    clock.until(ended, "restart" if has_failed else "hang")
    if now and has_failed:
        clock.until(clock.end, "restart")
    elif now:
        is_training = now == RUNNING and attempt.has_begun
        clock.until(clock.end, "training" if is_training else saving)
    return math.isfinite(ended)


def _entry(seconds: Mapping[str, float], gpus: float) -> dict[str, Any]:
    """Time and, if the number of GPUs is known, the GPU-hours in which no step was done that
    counts. No GPU is held in the queue.
    """
    lost = {
        cause: gpus * value / 3600
        for cause, value in seconds.items()
        if gpus > 0 and cause not in ("queue", "training")
    }
    return total([{"seconds": seconds, "gpu_hours_lost": lost}])


def total(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of several entries: ``wall_s``, ``effective`` (the share of the training that
    counts), and by cause ``seconds`` and ``gpu_hours_lost``.
    """
    sums: dict[str, dict[str, float]] = {}
    for name in ("seconds", "gpu_hours_lost"):
        values = [entry[name] for entry in entries if isinstance(entry.get(name), dict)]
        by_cause = {
            cause: math.fsum(filter(math.isfinite, (number(value.get(cause)) for value in values)))
            for cause in CAUSES
        }
        sums[name] = {cause: round(value, 4) for cause, value in by_cause.items() if value > 0}
    wall_s = math.fsum(sums["seconds"].values())
    effective = sums["seconds"].get("training", 0.0) / wall_s if wall_s else 0.0
    return {"wall_s": round(wall_s, 3), "effective": round(effective, 4), **sums}


def cells(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
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
    _, first_row = rows.around(attempt.run_dir, attempt.number, 0)
    moments = (
        *_end(Attempt(attempt.run_dir, attempt.number - 1)),
        number(facts.get("time")),
        begun - number(facts.get("load_s")),
        begun,
        _time(first_row, attempt),
    )
    durations = [end - start for start, end in pairwise(moments)]
    return {part: seconds for part, seconds in zip(PARTS, durations, strict=True) if seconds >= 0}


def text(seconds: Mapping[str, float]) -> str:
    """Each part with its duration."""
    return ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())


def _end(attempt: Attempt) -> tuple[float, float, float]:
    """When an attempt that failed made progress last, when its first rank failed, and when all had
    ended; NaN if unknown.
    """
    records = attempts.records(attempt)
    failures = [record for record in records if kind_of(record) is not Kind.stopped]
    first = failures[0] if failures else {}
    judgement = files.read_json(attempt.folder / "ended.json") or {}
    return number(first.get("progress")), number(first.get("time")), number(judgement.get("time"))


def _time(row: Mapping[str, Any], attempt: Attempt) -> float:
    """The time of a row of this attempt; NaN for any other row."""
    return number(row.get("time") if row.get("attempt") == attempt.number else None)
