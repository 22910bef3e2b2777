"""Two ranks over loopback: what a run with all its services costs beside a bare
DistributedDataParallel loop, and what the ranks lose by averaging their gradients.

The measured run is the unchanged recipe mnist. Its batches also feed a bare loop: the two loops
take their steps in turn. ``python -m tests.benchmarks.bench_step FILE ROUNDS STEPS`` is one of the
two ranks that `figures` starts.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional as F

from recipes import mnist
from recipes.conf.mnist import Config
from recipes.core.data import sampling
from recipes.core.data.in_memory import AugmentedImages, ImageSet
from recipes.core.run import entry
from recipes.core.train import session
from recipes.core.train.session import Run
from recipes.core.train.world import World
from tests.benchmarks.measure import FULL, Figure, Size, interleaved, two_ranks

BATCH_SIZE = 256  # of a rank
STRETCH = 10  # steps of the recipe, or of the bare loop, in turn; with one row of the log in each
# For each round of another benchmark: differences of two per cent are small beside a shared
# machine's noise.
STRETCHES = 16
RANKS_ROUNDS = 2
# One epoch with a constant learning rate, without a checkpoint before its end: see
# bench_checkpoint.
KEYS = (
    "device=cpu",
    "dataset=fake",
    "epochs=1",
    "schedule=constant",
    "warmup=0",
    "checkpoint_every_s=0",
    f"log_every_steps={STRETCH}",
    f"global_batch_size={2 * BATCH_SIZE}",
)


def figures(size: Size) -> list[Figure]:
    values = two_ranks(__name__, size.rounds, size.steps)
    about = f"mnist's net, batch {BATCH_SIZE} a rank, gloo, loopback"
    background = (
        f"{about}; threads and watchdog took {values['background']:.2%} of a core a rank, which "
        "is subtracted"
    )
    return [
        Figure(
            "step, all services",
            "samples/s",
            (
                "the recipe in a run, with log rows, stop check, progress, summed loss, "
                "schedule, watchdog, pulse, fence"
            ),
            "a bare DDP loop",
            ">= 0.98",
            values["recipe"],
            values["bare"],
            background,
            ratio_of="pairs",
        ),
        Figure(
            "step, two ranks",
            "samples/s",
            "gradients averaged",
            "two independent processes at once",
            ">= 0.80",
            values["together"],
            values["alone"],
            about,
            ratio_of="pairs",
        ),
    ]


class BareLoop:
    """The recipe's step from the same first weights, on one rank, or with DDP on all of
    ``world``.
    """

    def __init__(self, cfg: Config, train_set: ImageSet, world: World | None) -> None:
        self._cfg = cfg
        self._labels = train_set.labels
        self._images = AugmentedImages(train_set.images, mnist.MAX_SHIFT)
        self._images.draw(cfg.seed, 0)
        torch.manual_seed(cfg.seed)
        self.net = mnist.Net()
        self._model = world.parallel(self.net) if world else self.net
        self._optimizer = mnist.make_optimizer(cfg, self.net)

    def step(self, indices: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        logits = self._model(mnist.normalise(self._images.take(indices)))
        F.cross_entropy(
            logits, self._labels[indices], label_smoothing=self._cfg.label_smoothing
        ).backward()
        self._optimizer.step()


@dataclass
class Turns:
    """One epoch of batches for the recipe, in stretches of `STRETCH` steps. The bare loop takes the
    same steps in turn.

    A stretch has several steps, because a run sums a step's loss while the next step runs. seconds:
    of each stretch; the recipe's from its first batch until it asks for the batch after its last.
    """

    bare: BareLoop
    stretches: int
    samples: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"recipe": [], "bare": []})
    background: float = 0.0  # share of a core

    @property
    def per_epoch(self) -> int:
        return self.stretches * STRETCH + 1  # the recipe does not ask again after its last step

    @property
    def order(self) -> dict[str, Any]:
        return {}

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[sampling.Part]:
        began = time.perf_counter()
        before = background_ns()
        for turn in range(self.stretches):
            for side in ("bare", "recipe") if turn % 2 else ("recipe", "bare"):
                torch.distributed.barrier()
                start = time.perf_counter()
                for number in range(turn * STRETCH, (turn + 1) * STRETCH):
                    if side == "recipe":
                        yield self.part(number)
                    else:
                        self.bare.step(self.part(number).indices)
                self.seconds[side].append(time.perf_counter() - start)
        self.background = (background_ns() - before) / 1e9 / (time.perf_counter() - began)
        last = self.part(self.per_epoch - 1)
        self.bare.step(last.indices)
        yield last

    def part(self, number: int) -> sampling.Part:
        return sampling.Part(0, number, batch(number, self.samples), 2 * BATCH_SIZE)


def batch(number: int, samples: int) -> Tensor:
    return (torch.arange(BATCH_SIZE) + number * BATCH_SIZE) % samples


def background_ns() -> int:
    """CPU time so far of this rank's pulse and fence threads and of its watchdog. They run beside
    the bare loop too.
    """
    process_folder = Path("/proc/self/task")
    threads = []
    for thread in threading.enumerate():
        if thread.name in ("pulse", "fence"):
            threads.append(process_folder / str(thread.native_id))
    children = []
    for pid in (process_folder / str(os.getpid()) / "children").read_text().split():
        children.append(Path("/proc", pid))
    assert children
    return sum(int((path / "schedstat").read_text().split()[0]) for path in (*threads, *children))


def services(run: Run, cfg: Config, train_set: ImageSet, stretches: int) -> Turns:
    """The recipe and the bare loop in turn. Raises RuntimeError if their weights differ: then their
    work differs.
    """
    bare = BareLoop(cfg, train_set, run.world)
    turns = Turns(bare, stretches, len(train_set))
    run.console.terminal = open(os.devnull, "w")  # for the progress line  # noqa: SIM115
    with mock.patch.object(sampling, sampling.GlobalBatches.__name__, return_value=turns):
        mnist.main(cfg, run)
    pairs = zip(run.state.model.parameters(), bare.net.parameters(), strict=True)
    if not all(torch.allclose(ours, other, rtol=1e-3, atol=1e-4) for ours, other in pairs):
        raise RuntimeError("step, all services: the weights differ, so the work differs")
    return turns


def sides(
    cfg: Config, train_set: ImageSet, world: World, steps: int
) -> dict[str, Callable[[], float]]:
    """Samples/s of both ranks, added, with gradients averaged and without."""

    def side(loop: BareLoop) -> Callable[[], float]:
        numbers = itertools.count()

        def rate() -> float:
            torch.distributed.barrier()
            begin = time.perf_counter()
            for number in itertools.islice(numbers, steps):
                loop.step(batch(number, len(train_set)))
            samples_per_s = steps * BATCH_SIZE / (time.perf_counter() - begin)
            return float(world.sum(torch.tensor(samples_per_s, dtype=torch.float64)))

        return rate

    return {
        name: side(BareLoop(cfg, train_set, ranks))
        for name, ranks in (("together", world), ("alone", None))
    }


def rank_main(file: Path, rounds: int, steps: int) -> None:
    """One of two ranks of a run with all services; rank 0 writes all rates to ``file``."""

    def main(cfg: Config, run: Run) -> Mapping[str, Any]:
        train_set, _ = mnist.load(cfg)
        # the first one does not count
        stretches = max(1, STRETCHES * steps // FULL.steps) * rounds + 1
        turns = services(run, cfg, train_set, stretches)
        samples = STRETCH * 2 * BATCH_SIZE
        values: dict[str, Any] = {
            name: [samples / s for s in seconds[1:]] for name, seconds in turns.seconds.items()
        }
        values["recipe"] = [rate * (1 - turns.background) for rate in values["recipe"]]
        values |= {"background": turns.background}
        values |= interleaved(
            RANKS_ROUNDS * rounds, sides(cfg, train_set, run.world, max(1, steps // 2))
        )
        if run.world.rank == 0:
            file.write_text(json.dumps(values))
        return {}

    # typed, so that the rank ends as in a job, without torch's teardown
    sys.argv[1:] = [
        *KEYS,
        f"run_dir={file.parent / 'run'}",
    ]
    session.run(main, entry.begin("mnist"))


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
