"""What the step loop's services cost beside a bare loop, and what two ranks lose by averaging their gradients.

``python -m tests.benchmarks.bench_step OUT ROUNDS STEPS`` is one of the two ranks that `two_ranks` starts.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F

from recipes import mnist
from recipes.conf.mnist import Config
from recipes.core import config, data, dist, entry, local, metrics, preempt, ranks, train
from recipes.core.checkpoint import State
from recipes.core.data import Shard
from recipes.core.entry import Start
from recipes.core.local import Layout
from recipes.core.rundir import MachineError
from recipes.core.session import Run
from tests.benchmarks.measure import Figure, Size, interleaved, one_thread
from tests.helpers import ROOT, clean_environment

BATCH_SIZE = 256  # of a rank
MODEL = f"mnist's net, batch {BATCH_SIZE}"
# For each round of another benchmark: two per cent are little beside a shared machine's noise.
SERVICES_ROUNDS, RANKS_ROUNDS = 4, 2
Batch = tuple[Tensor, Tensor]  # images, labels


def figures(size: Size) -> list[Figure]:
    return [services(size), two_ranks(size)]


def services(size: Size) -> Figure:
    """`train.fit` with all that it does besides, on one rank, and a bare loop that takes turns with it step by step."""
    rounds = SERVICES_ROUNDS * size.rounds
    with one_thread(), tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        turns = Turns(BareStep(*fresh()), made_batches(), (rounds + 1) * size.steps)
        fitted = fit(turns, Path(folder))
        if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(fitted, turns.bare.weights, strict=True)):
            raise RuntimeError("step, services: other weights at the end, so other work")
    sums = {name: [sum(seconds[i : i + size.steps]) for i in range(size.steps, turns.total, size.steps)] for name, seconds in turns.seconds.items()}  # fmt: skip
    rates = {name: [size.steps * BATCH_SIZE / seconds for seconds in values] for name, values in sums.items()}
    ours_is = "fit with rows, stop check, progress, summed loss, schedule"
    return Figure(
        "step, services", "samples/s", ours_is, "a bare loop", ">= 0.98", rates["fit"], rates["bare"], MODEL, ratio_of="pairs"
    )  # fmt: skip


def two_ranks(size: Size) -> Figure:
    """Two processes over loopback that average their gradients, and the same two each by itself, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rates.json")
        command = [
            sys.executable,
            "-m",
            __name__,
            str(out),
            str(RANKS_ROUNDS * size.rounds),
            str(max(1, size.steps // 2)),
        ]
        status = local.run(command, Layout((2,)), None, ROOT, clean_environment())
        if status:
            raise MachineError(f"step, two ranks: ended with status {status}; the lines above say why")
        values = json.loads(out.read_text())
    return Figure(
        "step, two ranks", "samples/s", "gradients averaged (DDP, gloo, loopback)", "two independent processes at once", ">= 0.80",
        values["together"], values["alone"], MODEL, ratio_of="pairs",
    )  # fmt: skip


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
    made, _ = data.fake(16 * BATCH_SIZE, 10, (1, 28, 28), 10)
    return list(zip(mnist.normalise(made.images).split(BATCH_SIZE), made.labels.split(BATCH_SIZE), strict=True))


@dataclass
class Turns:
    """Batches for `train.fit`; between two of its steps, as it asks for the next batch, the bare loop takes one.

    seconds: of each step; fit's from the moment it gets a batch until it asks for the next one.
    """

    bare: BareStep
    batches: list[Batch]
    total: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"fit": [], "bare": []})
    global_batch_size: int = BATCH_SIZE
    seed: int = 0
    data: str = ""

    @property
    def num_samples(self) -> int:
        return self.per_epoch * BATCH_SIZE

    @property
    def per_epoch(self) -> int:
        return self.total + 1  # fit does not ask again after its last step

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Shard]:
        indices = torch.arange(BATCH_SIZE)
        for number in range(self.total):
            start = time.perf_counter()
            self.bare(self.batches[number % len(self.batches)])
            self.seconds["bare"].append(time.perf_counter() - start)
            start = time.perf_counter()
            yield Shard(epoch, number, indices, BATCH_SIZE)
            self.seconds["fit"].append(time.perf_counter() - start)
        yield Shard(epoch, self.total, indices, BATCH_SIZE)


def fit(turns: Turns, folder: Path) -> list[Tensor]:
    """One run of `train.fit` over ``turns``, a progress line and a metrics file included; the weights after all steps that count."""
    keys = ["device=cpu", "dataset=fake", "epochs=1", f"global_batch_size={BATCH_SIZE}"]
    start = Start(config.parse(keys, recipe="mnist", environ={}), ranks.detect({}), {}, None)
    weights: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(dist.process_group(start, torch.device("cpu")))
        terminal = stack.enter_context(open("/dev/null", "w"))
        rows = metrics.Rows(folder / "metrics.jsonl")
        stack.callback(rows.close)
        net, optimizer = fresh()
        state = State(net, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
        run = Run(start.settings, world, folder, 0, "", preempt.StopFlag(), terminal, rows, state=state)
        (folder / "checkpoints").mkdir()
        (folder / "attempt.json").write_text('{"attempt": 0, "launch": ""}')

        def loss_sum(shard: Shard) -> Tensor:
            if shard.batch == turns.total:
                weights.extend(p.detach().clone() for p in net.parameters())
            images, labels = turns.batches[shard.batch % len(turns.batches)]
            return F.cross_entropy(net(images), labels, reduction="sum")

        train.fit(run, start.settings.config, net, turns, loss_sum, dict)
    return weights


def rank_main(out: Path, rounds: int, steps: int) -> None:
    """One of two ranks: in turn with gradients averaged and without; rank 0 writes both ranks' samples/s, added, to ``out``."""
    start = entry.begin("mnist", ["device=cpu"])
    torch.set_num_threads(1)
    batches = made_batches()
    with dist.process_group(start, torch.device("cpu")) as world:

        def side(step: BareStep) -> Callable[[], float]:
            endless = itertools.cycle(batches)

            def rate() -> float:
                torch.distributed.barrier()
                begin = time.perf_counter()
                for batch in itertools.islice(endless, steps):
                    step(batch)
                own = steps * BATCH_SIZE / (time.perf_counter() - begin)
                return float(world.sum(torch.tensor(own, dtype=torch.float64)))

            return rate

        net, optimizer = fresh()
        sides = {"together": side(BareStep(world.parallel(net), optimizer)), "alone": side(BareStep(*fresh()))}
        values = interleaved(rounds, sides)
        if world.rank == 0:
            out.write_text(json.dumps(values))
        torch.distributed.barrier()


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
