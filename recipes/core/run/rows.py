"""The rows of ``metrics.jsonl``, as one continuous series. Standard library only."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.core import files

LONGEST_ROW = 1 << 20  # bytes
HIGHEST_STEP = 1 << 53  # that a float represents exactly
# a larger number is a damaged or diverged value; sums and products of values stay finite
HIGHEST = 1e100


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run, with rising steps; [] if there are none.

    A row replaces all rows before it whose step is the same or higher: the run was resumed from an
    earlier step. Damaged and incomplete lines are skipped.
    """
    found: list[dict[str, Any]] = []
    for row in every(run_dir):
        step = row.get("step")
        if type(step) is int and 0 <= step < HIGHEST_STEP:
            while found and found[-1]["step"] >= step:
                found.pop()
            found.append(row)
    return found


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


def best(found: Sequence[dict[str, Any]], keys: Mapping[str, Any]) -> tuple[str, float, int] | None:
    """The name, value and step of the best evaluation in rows, by the keys best_metric and
    best_mode of a run; None if there is none.
    """
    name = str(keys.get("best_metric") or "val_top1")
    sign = -1 if keys.get("best_mode") == "min" else 1
    values = [
        (sign * value, -row["step"])
        for row in found
        if math.isfinite(value := number(row.get(name)))
    ]
    return (name, sign * max(values)[0], -max(values)[1]) if values else None


def parse(line: bytes) -> dict[str, Any]:
    """The row in a line; {} if the line is damaged: it is being written, or a kill has cut it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def number(value: object) -> float:
    """A value from a file as a number; NaN if it is not one, or not finite."""
    is_number = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= HIGHEST
    )
    return float(value) if is_number else math.nan  # type: ignore[arg-type]


def numbers(value: object) -> list[float]:
    """A list of numbers from a file, each as by `number`; [] if it is not a list."""
    return list(map(number, value)) if isinstance(value, list) else []
