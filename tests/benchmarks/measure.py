"""What every benchmark here shares: how much to do, both sides in turn, and the figure that comes of it."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Size:
    """How much a benchmark does. rounds: counted measurements of each side; images: of the training set; steps: of a round."""

    rounds: int
    images: int
    steps: int


FULL = Size(rounds=7, images=60_000, steps=40)
TINY = Size(rounds=1, images=2000, steps=2)  # to see that a benchmark works; its figures mean nothing


@dataclass(frozen=True)
class Figure:
    """Ours against theirs, in ``unit``, all values in the order measured. target: what ours / theirs is to be, as in ``"<= 0.20"``."""

    name: str
    unit: str
    ours_is: str
    theirs_is: str
    target: str
    ours: list[float]
    theirs: list[float]
    note: str = ""
    ratio: float = field(init=False)
    met: bool = field(init=False)

    def __post_init__(self) -> None:
        ratio = statistics.median(self.ours) / statistics.median(self.theirs)
        sign, bound = self.target.split()
        object.__setattr__(self, "ratio", ratio)
        object.__setattr__(self, "met", {"<=": ratio <= float(bound), ">=": ratio >= float(bound)}[sign])

    def __str__(self) -> str:
        ours, theirs = (_spread(side, self.unit) for side in (self.ours, self.theirs))
        note = f"  [{self.note}]" if self.note else ""
        return (
            f"{self.name}: {self.ours_is} {ours}, {self.theirs_is} {theirs}, ratio {self.ratio:.3g}, "
            f"target {self.target}, {'met' if self.met else 'MISSED'}{note}"
        )


def _spread(values: list[float], unit: str) -> str:
    """The median with its unit, and the least and the greatest in brackets."""
    shown = (statistics.median(values), min(values), max(values))
    median, low, high = (f"{v:,.0f}" if v >= 1000 else f"{v:.3g}" for v in shown)
    return f"{median} {unit} ({low} to {high})"


def interleaved(rounds: int, sides: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """What each side gives, ``rounds`` times in turn, so that a machine that is busy for a while is so for all of them.

    One round before them, in which caches fill, does not count; every other round goes through the sides backwards.
    """
    values: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            value = sides[name]()
            if turn:
                values[name].append(value)
    return values


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
