"""The rows of ``metrics.jsonl``, as one continuous series. Standard library only."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.core import files

LONGEST_ROW = 1 << 22  # bytes; one with the recall of 60,000 classes has half a megabyte
HIGHEST_STEP = 1 << 53  # that a float represents exactly
# a larger number is a damaged or diverged value; sums and products of values stay finite
HIGHEST = 1e100


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run, with rising steps; [] if there are none.

    A row replaces all rows before it whose step is the same or higher: the run was resumed from an
    earlier step. Damaged and incomplete lines are skipped.
    """
    kept: list[dict[str, Any]] = []
    for row in every(run_dir):
        step = row.get("step")
        if type(step) is int and 0 <= step < HIGHEST_STEP:
            while kept and kept[-1]["step"] >= step:
                kept.pop()
            kept.append(row)
    return kept


def every(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run in the order of the file, also those that a later attempt replaced; {} for
    a damaged line.
    """
    with (
        contextlib.suppress(OSError),
        open(run_dir / "metrics.jsonl", "rb", opener=files.without_links) as file,
    ):
        while line := file.readline(LONGEST_ROW):
            if len(line) == LONGEST_ROW:  # no row is so long: a damaged file may have no end
                return
            yield parse(line)


def best(
    of_run: Sequence[dict[str, Any]], keys: Mapping[str, Any]
) -> tuple[str, float, int] | None:
    """The name, value and step of the best evaluation in rows, by the keys best_metric and
    best_mode of a run; None if there is none.
    """
    name = str(keys.get("best_metric") or "val_top1")
    sign = -1 if keys.get("best_mode") == "min" else 1
    values = [(number(row.get(name)), row["step"]) for row in of_run]
    known = [(value, step) for value, step in values if math.isfinite(value)]
    if not known:
        return None
    value, step = max(known, key=lambda pair: sign * pair[0])  # the first of equal ones
    return name, value, step


def parse(line: bytes) -> dict[str, Any]:
    """The row in a line; {} if the line is damaged: it is being written, or a kill has cut it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def number(value: object) -> float:
    """A value from a file as a number; NaN if it is not one, or not finite."""
    if type(value) in (int, float) and abs(value) <= HIGHEST:  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    return math.nan


def numbers(value: object) -> list[float]:
    """A list of numbers from a file, each as by `number`; [] if it is not a list."""
    return list(map(number, value)) if isinstance(value, list) else []
