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
_COUNT = re.compile(r"([1-9][0-9]{0,17})(?:\(x([1-9][0-9]{0,17})\))?")


class HostListError(ValueError):
    """The text is not a list in Slurm's format. The message is one line with the text and the problem."""


def expand(text: str) -> list[str]:
    """The hosts of a Slurm host list, in its order and with its duplicates.

    Accepts every form of the "Slurm host list" in slurm.conf(5): ranges and lists in brackets, zero padding (the width
    of a range is that of its lower end, as in Slurm), several brackets in a name (the last varies fastest), and also
    text after the last bracket. Raises HostListError for anything else, and for more than 65,536 hosts.
    """
    items = re.findall(r"(?:[^,\[]|\[[^]]*\])+", text)
    if ",".join(items) != text:
        items = [text]  # it has an empty item or an open bracket, and is refused as a whole
    hosts: list[str] = []
    try:
        for item in items or [""]:
            hosts += _hosts(item)
            _check_size(len(hosts))
    except HostListError as error:
        raise HostListError(f"host list '{shown(text)}': {error}") from None
    return hosts


def expand_counts(text: str) -> list[int]:
    """The counts of `2(x3),1`: [2, 2, 2, 1], as in SLURM_TASKS_PER_NODE.

    Raises HostListError for a malformed text, a count of zero, or more than 65,536 counts.
    """
    counts: list[int] = []
    try:
        for item in text.split(","):
            match = _COUNT.fullmatch(item)
            if not match:
                raise HostListError(f"'{shown(item)}' is neither a count nor COUNT(xTIMES)")
            times = int(match[2] or 1)
            _check_size(len(counts) + times)
            counts += [int(match[1])] * times
    except HostListError as error:
        raise HostListError(f"counts '{shown(text)}': {error}") from None
    return counts


def _hosts(item: str) -> list[str]:
    """The hosts of one name with any number of brackets."""
    if not item or not _ITEM.fullmatch(item):
        raise HostListError(f"'{shown(item)}' is not a host name with ranges of numbers in brackets")
    parts: list[list[str]] = []
    # split() with one group alternates: text, content of brackets, text, …
    for index, piece in enumerate(re.split(r"\[([^]]*)\]", item)):
        parts.append(_numbers(piece) if index % 2 else [piece])
        _check_size(math.prod(map(len, parts)))
    return list(map("".join, product(*parts)))


def _numbers(ranges: str) -> list[str]:
    """The numbers of `008-011,3`, which is the content of brackets."""
    found: list[str] = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        numbers = range(int(low), int(high or low) + 1)
        if not numbers:
            raise HostListError(f"the range {part} runs backwards")
        _check_size(len(found) + len(numbers))
        found += [f"{n:0{len(low)}d}" for n in numbers]
    return found


def _check_size(size: int) -> None:
    if size > MAX_ITEMS:
        raise HostListError(f"more than {MAX_ITEMS:,} entries")
