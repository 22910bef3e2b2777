"""Slurm's compressed lists: host lists such as `rack[1-2]n[008-011],login` and counts such as
`2(x3),1`.
"""

import re
from itertools import product

from recipes.core.errors import ConfigError, shown

MAX_RANGE = 65_536  # Slurm's MAX_SLURM_NODES

_NAME = r"[A-Za-z0-9._-]*"
_RANGE = r"[0-9]{1,18}(?:-[0-9]{1,18})?"
_ITEM = re.compile(rf"{_NAME}(?:\[{_RANGE}(?:,{_RANGE})*\]{_NAME})*")
_COUNT = re.compile(r"([1-9][0-9]{0,17})(?:\(x([1-9][0-9]{0,17})\))?")


def expand(text: str) -> list[str]:
    """The hosts of a Slurm host list, in its order and with its duplicates.

    Accepts every form of the "Slurm host list" in slurm.conf(5): ranges and lists in brackets, zero
    padding (the width of a range is that of its lower end, as in Slurm), several brackets in a name
    (the last varies fastest), and also text after the last bracket. Raises ConfigError for anything
    else, and for a range of more than 65,536 hosts.
    """
    items = re.findall(r"(?:[^,\[]|\[[^]]*\])+", text)
    if not items or ",".join(items) != text:
        items = [text]  # it has an empty item or an open bracket, and is refused as a whole
    return [host for item in items for host in _hosts(item)]


def expand_counts(text: str) -> list[int]:
    """The counts of `2(x3),1`: [2, 2, 2, 1], as in SLURM_TASKS_PER_NODE. Raises ConfigError, also
    for a count of zero.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if not match:
            raise ConfigError(f"'{shown(item)}' is neither a count nor COUNT(xTIMES)")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _hosts(item: str) -> list[str]:
    """The hosts of one name with any number of brackets."""
    if not item or not _ITEM.fullmatch(item):
        raise ConfigError(f"'{shown(item)}' is not a host name with ranges of numbers in brackets")
    # split() with one group alternates: text, content of brackets, text, …
    pieces = re.split(r"\[([^]]*)\]", item)
    parts = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ["".join(name) for name in product(*parts)]


def _numbers(ranges: str) -> list[str]:
    """The numbers of `008-011,3`, which is the content of brackets."""
    padded: list[str] = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        numbers = range(int(low), int(high or low) + 1)
        if not numbers:
            raise ConfigError(f"the range {part} ends before it begins")
        if len(numbers) > MAX_RANGE:
            raise ConfigError(f"the range {part} has more than {MAX_RANGE:,} numbers")
        padded += [f"{n:0{len(low)}d}" for n in numbers]
    return padded
