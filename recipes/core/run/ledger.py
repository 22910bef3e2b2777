"""Where the time of a run went, over all its attempts, by their files. Standard library only."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from recipes.core import files
from recipes.core.errors import Kind, kind_of
from recipes.core.run import attempt as attempts
from recipes.core.run import rows
from recipes.core.run.attempt import Attempt
from recipes.core.run.rows import number

# of a restart in the same job, from the last progress before the failure
PARTS = (
    "detection",
    "teardown",
    "examination",
    "start",
    "load",
    "first step",
)


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
        _time(rows.around(attempt.run_dir, attempt.number, 0)[1], attempt.number),
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


def _time(row: Mapping[str, Any], attempt: int) -> float:
    """The time of a row of this attempt; NaN for any other row."""
    return number(row.get("time") if row.get("attempt") == attempt else None)
