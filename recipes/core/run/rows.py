"""The rows of ``metrics.jsonl``, as one continuous series. Standard library only."""

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from recipes.core import files

Row = dict[str, Any]

LONGEST_ROW = 1 << 22  # bytes; one with the recall of 60,000 classes has half a megabyte
# bytes of the parts in which the file is read: the last one, which many readers need alone, and
# those before it, each up to 16 times as long as the one after it
LAST_PART = 1 << 12
LONGEST_PART = 1 << 20
MOST_DAMAGED = 4  # lines in a row, after which a search continues elsewhere
NEWEST = 200  # rows at the end of a long run that are judged, and that `thinned` keeps
PLACE = {"attempt", "step", "total_steps", "epoch", "time"}  # of a row, not metrics
HIGHEST_STEP = 1 << 53  # that a float represents exactly
# a larger number is a damaged or diverged value; sums and products of values stay finite
HIGHEST = 1e100


def rows(run_dir: Path, most: int | None = None) -> list[Row]:
    """The rows of a run that count, with rising steps, or the last ``most`` of them; [] if there
    are none.
    """
    return [*itertools.islice(newest(run_dir), most)][::-1]


def newest(run_dir: Path) -> Iterator[Row]:
    """The rows of a run that count, the newest first. Reads as much of the file as is asked for."""
    for part in counted(parts(run_dir)):
        yield from reversed(part)


def counted(newest_first: Iterator[list[Row]]) -> Iterator[list[Row]]:
    """The rows that count, in the order of `parts`: those that have a step, and no later row of the
    same or a lower step. A run that was resumed from an earlier step repeats the steps after it.
    """
    lowest = HIGHEST_STEP
    for part in newest_first:
        kept = []
        for row in reversed(part):
            step = row.get("step")
            if type(step) is int and 0 <= step < lowest:
                lowest = step
                kept.append(row)
        yield kept[::-1]


def parts(run_dir: Path) -> Iterator[list[Row]]:
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


def around(run_dir: Path, attempt: int, step: float) -> tuple[Row, Row]:
    """The last row before a step of an attempt, and the first row at this step or later; {} for a
    row that does not exist. Rows that a later attempt replaced count too. Reads only a few lines:
    each attempt writes its rows after those of earlier attempts, with rising steps.
    """
    before = Row()
    after = Row()
    with contextlib.suppress(OSError), _opened(run_dir) as file:
        low = 0
        high = file.seek(0, os.SEEK_END)
        while low < high:
            middle = (low + high) // 2
            file.seek(max(0, middle - 1))
            if middle:
                file.readline(LONGEST_ROW)  # the end of a line that begins before the middle
            row = Row()
            for _ in range(MOST_DAMAGED):
                if row or file.tell() >= high:
                    break
                row = parse(file.readline(LONGEST_ROW))
            if row and (number(row.get("attempt")), number(row.get("step"))) < (attempt, step):
                before = row
                low = file.tell()
            else:
                after = row or after
                high = middle
    return before, after


def thinned(run_dir: Path, most: int) -> list[Row]:
    """The rows of a run that count, with rising steps. Of a long run, about ``most`` groups of
    neighbours are left: in each of them the rows with the lowest and the highest value of a metric.

    The memory does not grow with the length of the run. The newest rows all stay.
    """
    kept = list[Row]()  # the newest first
    size = 0
    with contextlib.suppress(OSError):
        size = (run_dir / "metrics.jsonl").lstat().st_size
    for part in counted(parts(run_dir)):
        length = math.ceil(len(part) * size / (most * LONGEST_PART))
        if len(kept) < NEWEST or length <= 2:
            kept += reversed(part)
            continue
        for end in range(len(part), 0, -length):
            kept += reversed(_extremes(part[max(0, end - length) : end]))
    return kept[::-1]


def _extremes(group: Sequence[Row]) -> list[Row]:
    """The first row, the last one, the last one with a list, and those with the lowest and the
    highest value of a metric.
    """
    places = {0, len(group) - 1}
    for name in set[str]().union(*group) - PLACE:
        values: list[Any] = [row.get(name) for row in group]
        kinds = set(map(type, values))
        if list in kinds:
            places.add(max(place for place, value in enumerate(values) if type(value) is list))
        if float not in kinds:
            continue
        finite = values
        if kinds != {float} or not math.isfinite(sum(values)):
            values = [*map(number, values)]
            finite = [*filter(math.isfinite, values)]
        if finite:
            places |= {values.index(min(finite)), values.index(max(finite))}
    return [group[place] for place in sorted(places)]


def _opened(run_dir: Path) -> IO[bytes]:
    return open(run_dir / "metrics.jsonl", "rb", opener=files.without_links)


def _parsed(lines: Sequence[bytes]) -> list[Row]:
    """The rows in lines, without those that are damaged."""
    every = []
    with contextlib.suppress(ValueError, RecursionError):  # one call takes half of the time
        every = json.loads(b"[%s]" % b",".join(lines))
    if len(every) != len(lines):
        every = [*map(parse, lines)]
    return [row for row in every if isinstance(row, dict) and row]


def parse(line: bytes) -> Row:
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
