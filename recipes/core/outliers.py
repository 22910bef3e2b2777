"""Which of many links, or nodes, is well below the rest? Standard library only."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

SLOW = 0.6  # of the median: less than this is well below


@dataclass(frozen=True)
class Slow(Generic[Name]):
    """median: of all pairs. nodes: those whose own median is well below it, with that; pairs: those between other nodes."""

    median: float
    nodes: dict[Name, float]
    pairs: dict[tuple[Name, Name], float]


def slow(pairs: Mapping[tuple[Name, Name], float]) -> Slow[Name]:
    """What is well below the median of ``pairs``, any unit of which more is better. Nobody is, where there is one pair alone.

    A node counts where its pairs are slow in the middle and those of others are not, worst first: a slow node spoils one pair of
    every other. Takes time in proportion to the pairs.
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
