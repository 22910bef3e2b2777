"""Two ranks over loopback: what `loop.steps` and all services of a run cost beside a bare DistributedDataParallel loop, and what the
ranks lose by averaging their gradients.

``python -m tests.benchmarks.bench_step OUT ROUNDS STEPS`` is one of the two ranks that `figures` starts.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F

from recipes import mnist
from recipes.conf.mnist import Config
from recipes.core.data import in_memory
from recipes.core.data.sampling import Shard
from recipes.core.run import entry
from recipes.core.train import loop, session
from recipes.core.train.checkpoint import State
from recipes.core.train.run import Run
from recipes.core.train.world import World
from tests.benchmarks.measure import Figure, Size, interleaved, two_ranks

BATCH_SIZE = 256  # of a rank
STRETCH = 10  # steps of the run, or of the bare loop, in turn; with one row of the log in each
# For each round of another benchmark: differences of two per cent are small beside a shared machine's noise.
STRETCHES, RANKS_ROUNDS = 16, 2
Batch = tuple[Tensor, Tensor]  # images, labels


def figures(size: Size) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rates.json")
        two_ranks(__name__, out, size.rounds, size.steps)
        values = json.loads(out.read_text())
    about = f"mnist's net, batch {BATCH_SIZE} a rank, gloo, loopback"
    background = f"{about}; threads and watchdog took {values['background']:.2%} of a core a rank, which is subtracted"
    return [
        Figure(
            "step, all services", "samples/s", "steps of a run, with log rows, stop check, progress, summed loss, schedule, watchdog, pulse, fence",
            "a bare DDP loop", ">= 0.98", values["run"], values["bare"], background, ratio_of="pairs",
        ),
        Figure(
            "step, two ranks", "samples/s", "gradients averaged", "two independent processes at once", ">= 0.80",
            values["together"], values["alone"], about, ratio_of="pairs",
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class BareStep:
    """One forward pass, backward pass and optimiser step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __call__(self, batch: Batch) -> None:
        images, labels = batch
        self.optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()

    @property
    def weights(self) -> list[Tensor]:
        return list(self.model.parameters())


def fresh() -> tuple[mnist.Net, torch.optim.Optimizer]:
    """The network with the same weights each time, and its optimiser."""
    torch.manual_seed(0)
    net = mnist.Net()
    return net, mnist.make_optimizer(Config(), net)


def made_batches() -> list[Batch]:
    made, _ = in_memory.fake(16 * BATCH_SIZE, 10, (1, 28, 28), 10)
    return list(zip(mnist.normalise(made.images).split(BATCH_SIZE), made.labels.split(BATCH_SIZE), strict=True))


@dataclass
class Turns:
    """Batches for `loop.steps`, in stretches of `STRETCH` steps; between two stretches the bare loop takes as many steps.

    A stretch has several steps, because `steps` sums a step's loss while the next step runs. No checkpoint falls into one: see
    bench_checkpoint. seconds: of each stretch; the run's from its first batch until it asks for the batch after its last.
    """

    bare: BareStep
    batches: list[Batch]
    stretches: int
    world_size: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"run": [], "bare": []})
    background: float = 0.0  # share of a core

    @property
    def global_batch_size(self) -> int:
        return self.world_size * BATCH_SIZE

    @property
    def order(self) -> dict[str, Any]:
        return {}

    @property
    def per_epoch(self) -> int:
        return self.stretches * STRETCH + 1  # the run does not ask again after its last step

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Shard]:
        began, before = time.perf_counter(), background_ns()
        for turn in range(self.stretches):
            numbers = range(turn * STRETCH, (turn + 1) * STRETCH)
            for side in ("bare", "run") if turn % 2 else ("run", "bare"):
                torch.distributed.barrier()
                start = time.perf_counter()
                for number in numbers:
                    if side == "run":
                        yield self.shard(number)
                    else:
                        self.bare(self.batch(number))
                self.seconds[side].append(time.perf_counter() - start)
        self.background = (background_ns() - before) / 1e9 / (time.perf_counter() - began)
        yield self.shard(self.per_epoch - 1)

    def shard(self, number: int) -> Shard:
        return Shard(0, number, torch.arange(BATCH_SIZE), self.global_batch_size)

    def batch(self, number: int) -> Batch:
        return self.batches[number % len(self.batches)]


def background_ns() -> int:
    """CPU time so far of this rank's pulse and fence threads and of its watchdog, which run beside the bare loop too."""
    own = Path("/proc/self/task")
    threads = [own / str(thread.native_id) for thread in threading.enumerate() if thread.name in ("pulse", "fence")]
    children = [Path("/proc", pid) for pid in (own / str(os.getpid()) / "children").read_text().split()]
    assert children
    return sum(int((path / "schedstat").read_text().split()[0]) for path in (*threads, *children))


def services(run: Run, cfg: Config, stretches: int) -> Turns:
    """`loop.steps` and the bare loop in turn."""
    bare, (net, optimizer) = bare_parallel(run.world), fresh()
    turns = Turns(bare, made_batches(), stretches, run.world.size)
    run.terminal = open(os.devnull, "w")  # for the progress line  # noqa: SIM115
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    run.resume(State(net, optimizer, scheduler), turns)
    model = run.world.parallel(net)
    for step in loop.steps(run, cfg, model, turns, dict):
        for shard in step.shards:
            if shard.batch == turns.per_epoch - 1 and not all(map(close, net.parameters(), bare.weights)):
                raise RuntimeError("step, all services: the weights differ, so the work differs")
            images, labels = turns.batch(shard.batch)
            step.backward(F.cross_entropy(model(images), labels, reduction="none"))
        optimizer.step()
        scheduler.step()
    return turns


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def bare_parallel(world: World) -> BareStep:
    net, optimizer = fresh()
    return BareStep(world.parallel(net), optimizer)


def sides(world: World, steps: int) -> dict[str, Callable[[], float]]:
    """Samples/s of both ranks, added, with gradients averaged and without."""

    def side(step: BareStep) -> Callable[[], float]:
        endless = itertools.cycle(made_batches())

        def rate() -> float:
            torch.distributed.barrier()
            begin = time.perf_counter()
            for batch in itertools.islice(endless, steps):
                step(batch)
            own = steps * BATCH_SIZE / (time.perf_counter() - begin)
            return float(world.sum(torch.tensor(own, dtype=torch.float64)))

        return rate

    return {"together": side(bare_parallel(world)), "alone": side(BareStep(*fresh()))}


def rank_main(out: Path, rounds: int, steps: int) -> None:
    """One of two ranks of a run with all services; rank 0 writes all rates to ``out``."""

    def main(cfg: Config, run: Run) -> Mapping[str, Any]:
        turns = services(run, cfg, STRETCHES * rounds + 1)
        samples = STRETCH * turns.global_batch_size
        values: dict[str, Any] = {name: [samples / s for s in seconds[1:]] for name, seconds in turns.seconds.items()}
        values["run"] = [rate * (1 - turns.background) for rate in values["run"]]
        values |= {"background": turns.background} | interleaved(
            RANKS_ROUNDS * rounds, sides(run.world, max(1, steps // 2))
        )
        if run.world.rank == 0:
            out.write_text(json.dumps(values))
        return {}

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    keys = [
        "device=cpu",
        "dataset=fake",
        "epochs=1",
        f"log_every_steps={STRETCH}",
        f"global_batch_size={2 * BATCH_SIZE}",
        f"run_dir={out.parent / 'run'}",
    ]
    session.run(main, entry.begin("mnist", keys))


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
