"""What every benchmark here shares: how much to do, both sides in turn, and the figure that comes
of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.helpers import ROOT, clean_environment

# Starts two ranks on this machine, if the words of a Python command follow.
TWO_RANKS = (
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--local-addr=127.0.0.1",
    "--nproc-per-node=2",
)


@dataclass(frozen=True)
class Size:
    """How much a benchmark does.

    rounds: counted measurements of each side; images: of a small set; steps: of a round; photos:
    large JPEGs; small_files: files of the smaller of two folders whose memory is compared; least_s:
    how long one measurement of an input takes at least.
    """

    rounds: int
    images: int
    steps: int
    photos: int
    small_files: int
    least_s: float


FULL = Size(rounds=7, images=60_000, steps=40, photos=240, small_files=5000, least_s=0.5)
# To see that a benchmark works; its figures mean nothing.
TINY = Size(rounds=1, images=2000, steps=2, photos=20, small_files=40, least_s=0)


@dataclass(frozen=True)
class Figure:
    """Ours against theirs, in ``unit``, all values in the order measured.

    target: the bound of ours / theirs, as in ``"<= 0.20"``. ratio_of: ``medians``; ``means``; or
    ``pairs``, the median of the ratios of each of ours to the one of theirs that was measured with
    it.
    """

    name: str
    unit: str
    ours_is: str
    theirs_is: str
    target: str
    ours: list[float]
    theirs: list[float]
    note: str = ""
    ratio_of: str = "medians"
    ratio: float = field(init=False)
    met: bool = field(init=False)

    def __post_init__(self) -> None:
        ratio = _ratio(self.ours, self.theirs, self.ratio_of)
        sign, bound = self.target.split()
        object.__setattr__(self, "ratio", ratio)
        object.__setattr__(
            self, "met", {"<=": ratio <= float(bound), ">=": ratio >= float(bound)}[sign]
        )

    def __str__(self) -> str:
        ours, theirs = (_spread(side, self.unit) for side in (self.ours, self.theirs))
        note = f"  [{self.note}]" if self.note else ""
        target = f"target {self.target}, {'met' if self.met else 'MISSED'}"
        return (
            f"{self.name}: {self.ours_is} {ours}, {self.theirs_is} {theirs}, ratio "
            f"{self.ratio:.3g}, {target}{note}"
        )


def _ratio(ours: list[float], theirs: list[float], of: str) -> float:
    if of == "pairs":
        return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))
    if of == "means":
        return statistics.fmean(ours) / statistics.fmean(theirs)
    assert of == "medians"
    return statistics.median(ours) / statistics.median(theirs)


def _spread(values: list[float], unit: str) -> str:
    """The median with its unit, and the least and the greatest in brackets."""
    shown = (statistics.median(values), min(values), max(values))
    median, low, high = (f"{v:,.0f}" if v >= 1000 else f"{v:.3g}" for v in shown)
    return f"{median} {unit} ({low} to {high})"


def interleaved(rounds: int, sides: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """What each side gives, ``rounds`` times in turn, so that a machine that is busy for a while is
    so for all of them.

    One round before them, in which caches fill, does not count; every other round goes through the
    sides backwards. A single round, which only shows that it works, has none before it.
    """
    values: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(int(rounds == 1), rounds + 1):
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            value = sides[name]()
            if turn:
                values[name].append(value)
    return values


def python(*words: object, **environ: str) -> str:
    """The stdout of a Python command in the project's folder; its stderr is shown. Raises
    RuntimeError if it fails.
    """
    command = [sys.executable, *map(str, words)]
    environment = clean_environment(**environ)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def two_ranks(module: str, *words: object) -> dict[str, Any]:
    """What rank 0 of two ranks of ``python -m module FILE words``, on this machine, writes to FILE
    as JSON.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "values.json")
        python(*TWO_RANKS, "-m", module, file, *words, OMP_NUM_THREADS="1")
        return json.loads(file.read_text())


def samples_per_s(
    epochs: Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]], least_s: float = 0.0
) -> float:
    """(images, labels) per second of CPU time of this process, over whole epochs: one, or as many
    as take ``least_s``.

    The sides compute in one thread and wait for nothing. So their CPU time tells their speed also
    on a busy machine.
    """
    start = time.process_time()
    samples = 0
    seconds = 0.0
    while not samples or seconds < least_s:
        samples += sum(len(labels) for _, labels in epochs())
        seconds = time.process_time() - start
    return samples / seconds


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in one thread for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """As `one_thread`; and what this thread does, and threads that it starts, have one core
    together.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        with one_thread():
            yield
    finally:
        os.sched_setaffinity(0, before)


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
