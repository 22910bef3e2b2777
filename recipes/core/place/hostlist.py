"""Slurm's compressed lists: host lists such as `rack[1-2]n[008-011],login` and counts such as `2(x3),1`."""

from __future__ import annotations

import re
from itertools import chain, product

from recipes.core.errors import shown

MAX_ITEMS = 65_536  # Slurm's MAX_SLURM_NODES; also keeps a malicious list from filling the memory
MAX_NAME = 255  # characters of a name; DNS allows no longer name

_NUMBER = re.compile(r"[0-9]{1,18}")
_NAME = re.compile(r"[A-Za-z0-9._-]*")
_COUNT = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?")


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
        _check_size(sum(_size(item) for item in items))
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


# An item is a sequence of parts. A part is a list of ranges (low, high, width) or a plain text.
_Range = tuple[int, int, int]
_Part = str | list[_Range]


def _split_outside_brackets(text: str) -> list[str]:
    items, start, inside = [], 0, False
    for i, char in enumerate(text):
        if char == "[":
            if inside:
                raise HostListError("brackets inside brackets")
            inside = True
        elif char == "]":
            if not inside:
                raise HostListError("`]` without `[`")
            inside = False
        elif char == "," and not inside:
            items.append(text[start:i])
            start = i + 1
    if inside:
        raise HostListError("`[` without `]`")
    return [*items, text[start:]]


def _parse_item(item: str) -> list[_Part]:
    if not item:
        raise HostListError("an empty name")
    # split() with one group alternates: text, content of brackets, text, …
    pieces = re.split(r"\[([^]]*)\]", item)
    parts = [_parse_ranges(piece) if i % 2 else _parse_name(piece) for i, piece in enumerate(pieces)]
    if sum(map(_width, parts)) > MAX_NAME:
        raise HostListError(f"a name of more than {MAX_NAME} characters")
    return parts


def _parse_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise HostListError(f"'{shown(name)}' has a character that no host name has")
    return name


def _parse_ranges(inside: str) -> list[_Range]:
    return [_parse_range(part) for part in inside.split(",")]


def _parse_range(part: str) -> _Range:
    ends = part.split("-")
    if len(ends) > 2 or not all(_NUMBER.fullmatch(end) for end in ends):
        raise HostListError(f"'{shown(part)}' in brackets is neither a number nor a range of numbers")
    low, high = int(ends[0]), int(ends[-1])
    if high < low:
        raise HostListError(f"the range {part} runs backwards")
    return low, high, len(ends[0])


def _parse_count(item: str) -> tuple[int, int]:
    match = _COUNT.fullmatch(item)
    if not match:
        raise HostListError(f"'{shown(item)}' is neither a count nor COUNT(xTIMES)")
    count, times = int(match[1]), int(match[2] or 1)
    if not count or not times:
        raise HostListError(f"'{shown(item)}' counts zero")
    return count, times


def _size(item: list[_Part]) -> int:
    size = 1
    for part in item:
        if not isinstance(part, str):
            size *= sum(high - low + 1 for low, high, _ in part)
    return size


def _width(part: _Part) -> int:
    """Number of characters of the longest text that a part represents."""
    return len(part) if isinstance(part, str) else max(max(width, len(str(high))) for _, high, width in part)


def _values(part: _Part) -> list[str]:
    if isinstance(part, str):
        return [part]
    return list(chain.from_iterable((f"{n:0{width}d}" for n in range(low, high + 1)) for low, high, width in part))


def _check_size(size: int) -> None:
    if size > MAX_ITEMS:
        raise HostListError(f"more than {MAX_ITEMS:,} entries")
