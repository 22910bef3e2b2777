"""The rows of ``metrics.jsonl``, as one continuous series. Standard library only."""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from recipes.core import files

LONGEST_ROW = 1 << 22  # bytes; one with the recall of 60,000 classes has half a megabyte
# bytes of the parts in which the file is read: the last one, which many readers need alone, and
# those before it, each up to 16 times as long as the one after it
LAST_PART = 1 << 12
LONGEST_PART = 1 << 20
HIGHEST_STEP = 1 << 53  # that a float represents exactly
# a larger number is a damaged or diverged value; sums and products of values stay finite
HIGHEST = 1e100


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run that count, with rising steps; [] if there are none."""
    return [*newest(run_dir)][::-1]


def newest(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run that count, the newest first. Reads as much of the file as is asked for."""
    for part in counted(parts(run_dir)):
        yield from reversed(part)


def counted(every: Iterator[list[dict[str, Any]]]) -> Iterator[list[dict[str, Any]]]:
    """The rows that count, in the order of `parts`: those without a later row of the same or a lower
    step. A run that was resumed from an earlier step repeats the steps after it.
    """
    lowest = HIGHEST_STEP
    for part in every:
        kept = []
        for row in reversed(part):
            step = row.get("step")
            if type(step) is int and 0 <= step < lowest:
                lowest = step
                kept.append(row)
        yield kept[::-1]


def parts(run_dir: Path) -> Iterator[list[dict[str, Any]]]:
    """The rows of a run, also those that a later attempt replaced, in parts: the last part of the
    file first, each in the order of the file. Damaged and incomplete lines are skipped.
    """
    with contextlib.suppress(OSError), _opened(run_dir) as file:
        end = file.seek(0, os.SEEK_END)
        size = LAST_PART
        head = b""  # of the part that was read: the end of a line that begins before it
        # no row is so long: a damaged file may be a hole on the disk
        while end and len(head) < LONGEST_ROW:
            start = max(0, end - size)
            file.seek(start)
            lines = (file.read(end - start) + head).split(b"\n")
            head = lines.pop(0) if start else b""
            yield _parsed([line for line in lines if line])
            end = start
            size = min(16 * size, LONGEST_PART)


def of_step(run_dir: Path, attempt: int, step: int) -> dict[str, Any]:
    """The row of a step that an attempt has written; {} if there is none. Reads a few lines: their
    order in the file is that of attempt and step.
    """
    place = (attempt, step)
    with contextlib.suppress(OSError), _opened(run_dir) as file:
        low = 0
        high = file.seek(0, os.SEEK_END)
        while low < high:
            middle = (low + high) // 2
            file.seek(max(0, middle - 1))
            if middle:
                file.readline(LONGEST_ROW)  # the end of a line that begins before the middle
            begin = file.tell()
            row = parse(file.readline(LONGEST_ROW))
            of_row = (number(row.get("attempt", 0)), number(row.get("step")))
            if of_row == place:
                return row
            # after the last line, and at a damaged one, the search continues before it
            if begin < high and of_row < place:
                low = file.tell()
            else:
                high = middle
    return {}


def _opened(run_dir: Path) -> IO[bytes]:
    return open(run_dir / "metrics.jsonl", "rb", opener=files.without_links)


def _parsed(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The rows in lines, without those that are damaged."""
    every = []
    with contextlib.suppress(ValueError, RecursionError):  # one call takes half of the time
        every = json.loads(b"[%s]" % b",".join(lines))
    if len(every) != len(lines):
        every = [*map(parse, lines)]
    return [row for row in every if isinstance(row, dict) and row]


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


def whole(value: object) -> int | None:
    """A value from a file as a whole number, without its fraction; None if it is not a number."""
    as_float = number(value)
    return int(as_float) if math.isfinite(as_float) else None


def numbers(value: object) -> list[float]:
    """A list of numbers from a file, each as by `number`; [] if it is not a list."""
    return list(map(number, value)) if isinstance(value, list) else []
