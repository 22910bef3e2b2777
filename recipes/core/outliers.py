"""Finds the links and nodes that are much slower than the others. Standard library only."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

SLOW = 0.6  # a value below this fraction of the median is slow


@dataclass(frozen=True)
class Slow(Generic[Name]):
    """The slow nodes and pairs.

    median: the median of all pairs. nodes: each slow node and the median of its pairs. pairs: the slow pairs between
    other nodes.
    """

    median: float
    nodes: dict[Name, float]
    pairs: dict[tuple[Name, Name], float]


def slow(pairs: Mapping[tuple[Name, Name], float]) -> Slow[Name]:
    """Finds the nodes and pairs whose value is below `SLOW` times the median of ``pairs``.

    A value can have any unit in which a larger value is better. A node is slow if the median of its pairs is below that
    limit, since one slow node makes one pair of every other node slow. The slowest node comes first. A single pair
    gives no result. The time is proportional to the number of pairs.
    """
    if not pairs:
        return Slow(0.0, {}, {})
    middle = median(pairs.values())
    below = {pair: value for pair, value in pairs.items() if value < SLOW * middle}
    of_node: dict[Name, list[float]] = {}
    for pair, value in pairs.items():
        for name in pair:
            of_node.setdefault(name, []).append(value)
    nodes = {
        name: median(values) for name, values in of_node.items() if len(values) > 1 and median(values) < SLOW * middle
    }
    left = {pair: value for pair, value in below.items() if not nodes.keys() & set(pair)}
    return Slow(middle, dict(sorted(nodes.items(), key=lambda found: found[1])), left)
