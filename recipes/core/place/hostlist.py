"""Slurm's compressed lists: host lists such as `rack[1-2]n[008-011],login` and counts such as `2(x3),1`."""

from __future__ import annotations

import math
import re
from itertools import product

from recipes.core.errors import shown

MAX_ITEMS = 65_536  # Slurm's MAX_SLURM_NODES; also keeps a malicious list from filling the memory

_NAME = r"[A-Za-z0-9._-]*"
_RANGE = r"[0-9]{1,18}(?:-[0-9]{1,18})?"
_ITEM = re.compile(rf"{_NAME}(?:\[{_RANGE}(?:,{_RANGE})*\]{_NAME})*")
_COUNT = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?")

_Range = tuple[int, int, int]  # low, high, width
_Part = str | list[_Range]  # an item is a sequence of parts


class HostListError(ValueError):
    """The text is not a list in Slurm's format. The message is one line with the text and the problem."""


def expand(text: str) -> list[str]:
    """The hosts of a Slurm host list, in its order and with its duplicates.

    Accepts every form of the "Slurm host list" in slurm.conf(5): ranges and lists in brackets, zero padding (the width
    of a range is that of its lower end, as in Slurm), several brackets in a name (the last varies fastest), and also
    text after the last bracket. Raises HostListError for anything else, and for more than 65,536 hosts, before it
    creates any host name.
    """
    try:
        items = [_parse_item(item) for item in _split_outside_brackets(text)]
        _check_size(sum(map(_size, items)))
    except HostListError as error:
        raise HostListError(f"host list '{shown(text)}': {error}") from None
    return [host for item in items for host in map("".join, product(*map(_values, item)))]


def expand_counts(text: str) -> list[int]:
    """The counts of `2(x3),1`: [2, 2, 2, 1], as in SLURM_TASKS_PER_NODE.

    Raises HostListError for a malformed text, a count of zero, or more than 65,536 counts.
    """
    try:
        runs = [_parse_count(item) for item in text.split(",")]
        _check_size(sum(times for _, times in runs))
    except HostListError as error:
        raise HostListError(f"counts '{shown(text)}': {error}") from None
    return [count for count, times in runs for _ in range(times)]


def _split_outside_brackets(text: str) -> list[str]:
    items = re.findall(r"(?:[^,\[]|\[[^]]*\])+", text)
    # If the text has an empty item or an open bracket, _parse_item refuses the whole of it.
    return items if items and ",".join(items) == text else [text]


def _parse_item(item: str) -> list[_Part]:
    if not item or not _ITEM.fullmatch(item):
        raise HostListError(f"'{shown(item)}' is not a host name with ranges of numbers in brackets")
    # split() with one group alternates: text, content of brackets, text, …
    pieces = re.split(r"\[([^]]*)\]", item)
    return [list(map(_parse_range, piece.split(","))) if i % 2 else piece for i, piece in enumerate(pieces)]


def _parse_range(part: str) -> _Range:
    ends = part.split("-")
    low, high = int(ends[0]), int(ends[-1])
    if high < low:
        raise HostListError(f"the range {part} runs backwards")
    return low, high, len(ends[0])


def _parse_count(item: str) -> tuple[int, int]:
    match = _COUNT.fullmatch(item)
    count, times = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
    if not count or not times:
        raise HostListError(f"'{shown(item)}' is neither a count nor COUNT(xTIMES)")
    return count, times


def _size(item: list[_Part]) -> int:
    return math.prod(sum(high - low + 1 for low, high, _ in part) for part in item if not isinstance(part, str))


def _values(part: _Part) -> list[str]:
    if isinstance(part, str):
        return [part]
    return [f"{n:0{width}d}" for low, high, width in part for n in range(low, high + 1)]


def _check_size(size: int) -> None:
    if size > MAX_ITEMS:
        raise HostListError(f"more than {MAX_ITEMS:,} entries")
