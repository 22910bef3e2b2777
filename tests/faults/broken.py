"""A small recipe that misbehaves as $FAULT says: the fault tests put it beside the real ones as
recipes/broken.py.

    export FAULT=fail FAULT_RANK=1 FAULT_AT=4
    python launch.py recipe=broken launcher=local ranks_per_node=2 device=cpu

$FAULT is the name of a function below. $FAULT_AT: a step's number, in its forward pass (default 4);
or start, before a checkpoint is looked for. $FAULT_RANK: 1 by default; or all. $FAULT_ATTEMPT: in
that attempt alone. $FAULT_DIR: a folder for marks: ``reached.<rank>`` says that a rank is there,
and ``go`` lets one that waits go on. The model has dropout, batch normalisation and averaged
weights: all that a resumed run could get wrong.
"""

from recipes.core.run import entry

START = entry.begin("broken") if __name__ == "__main__" else None

import ctypes
import faulthandler
import fnmatch
import os
import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from recipes.conf.broken import Config
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.core.errors import Stopped
from recipes.core.train import checkpoint, loop, optimisation, scores, session
from recipes.core.train.checkpoint import State
from recipes.core.data import sampling
from recipes.core.data.sampling import GlobalBatches, Part
from recipes.core.train.run import Run

WAIT_S = 120.0  # for what no test waits for so long


# What can happen. Each gives what the step's loss is multiplied by, if it comes back.


def fail(run: Run) -> float:
    raise ValueError(f"broken on purpose, rank {run.world.rank}")


def fail_later(run: Run) -> float:
    """One rank fails at once, the others by themselves when it has."""
    first = os.environ["FAULT_RANK_FIRST"]
    end = time.monotonic() + WAIT_S
    late = run.world.rank != int(first)
    while late and not (run.attempt.folder / "failed" / f"rank{int(first):04d}.json").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    raise ValueError(f"broken on purpose, {'late' if late else 'first'}, rank {run.world.rank}")


def exit0(run: Run) -> float:
    os._exit(0)


def segv(run: Run) -> float:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler._sigsegv()  # type: ignore[attr-defined]
    return 1.0


def gil(run: Run) -> float:
    """PyDLL, other than CDLL, keeps the interpreter's lock: no Python thread of this process runs,
    whatever signals come.
    """
    reach(run)
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second waits for the first
        libc.pthread_mutex_lock(mutex)
    return 1.0


def busy(run: Run) -> float:
    """A loop of Python that has no end until there is ``go``."""
    reach(run)
    deadline = time.monotonic() + WAIT_S
    go = marks() / "go"
    while not go.exists():
        assert time.monotonic() < deadline, "nobody said go"
    return 1.0


def lock(run: Run) -> float:
    """As `gil`, until somebody writes into the pipe ``pipe``."""
    pipe = os.open(marks() / "pipe", os.O_RDWR)
    reach(run)
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
    return 1.0


def hang(run: Run) -> float:
    time.sleep(WAIT_S)
    return 1.0


def start_slowly(run: Run) -> float:
    """Waits, as a recipe does that first copies gigabytes of data to the node. Returns when the run
    is asked to stop.
    """
    reach(run)
    deadline = time.monotonic() + WAIT_S
    while not run.stop:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    raise Stopped(run.stop.reason)


def wait(run: Run) -> float:
    reach(run)
    deadline = time.monotonic() + WAIT_S
    while not (marks() / "go").exists():
        assert time.monotonic() < deadline, "nobody said go"
        time.sleep(0.01)
    return 1.0


def memory(run: Run) -> float:
    """A tensor larger than what this process may have."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return float(torch.ones(8 << 30, dtype=torch.uint8)[0])


def exceed(run: Run) -> float:
    """Uses more memory than the job has."""
    blocks = []
    while True:
        blocks.append(bytearray(b"x" * (32 << 20)))


def nan(run: Run) -> float:
    return float("nan")


def shape(run: Run) -> float:
    """Called by all ranks: one has a longer tensor than the others."""
    torch.distributed.all_reduce(torch.ones(3 + run.world.rank))
    return 1.0


def operation(run: Run) -> float:
    """Called by all ranks: one broadcasts where the others add up."""
    values = torch.ones(3)
    if run.world.rank:
        torch.distributed.all_reduce(values)
    else:
        torch.distributed.broadcast(values, 0)
    return 1.0


class Sleepy(torch.utils.data.Dataset[int]):
    """Notes the process that loads a sample, and takes WAIT_S for it, or until there is ``go``. Of
    the module, since Python 3.14 sends it to that process.
    """

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        write(self.mark, str(os.getpid()))
        deadline = time.monotonic() + WAIT_S
        while not (marks() / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return i


def loader(run: Run) -> float:
    """A loader process that sleeps over a sample; its process id is in worker.<rank>."""
    samples = Sleepy(marks() / f"worker.{run.world.rank}")
    options = {"multiprocessing_context": "fork", "generator": torch.Generator()}
    loader = torch.utils.data.DataLoader(samples, num_workers=1, **options)  # type: ignore[arg-type]
    next(iter(loader))
    return 1.0


def hold_save(run: Run) -> float:
    """From now on a checkpoint's way to the disk takes until there is ``go``."""
    flush = os.fsync

    def held(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if "/checkpoints/" in os.readlink(f"/proc/self/fd/{number}"):
            wait(run)
        flush(number)

    os.fsync = held  # type: ignore[assignment]
    return 1.0


def blind(run: Run) -> float:
    """This rank does not see what is named as $FAULT_HIDE, for $FAULT_S seconds, as where a
    network's file system is behind.
    """
    until = time.monotonic() + float(os.environ["FAULT_S"])
    candidates = checkpoint.candidates
    exists = Path.exists

    def is_seen(path: Path) -> bool:
        return time.monotonic() > until or not fnmatch.fnmatch(path.name, os.environ["FAULT_HIDE"])

    checkpoint.candidates = lambda folder: list(filter(is_seen, candidates(folder)))
    Path.exists = lambda path, **options: (  # type: ignore[method-assign]
        is_seen(path) and exists(path, **options)
    )
    reach(run)
    return 1.0


def another_model(run: Run) -> float:
    """Nothing at any step: the model is a unit wider, of the same keys."""
    return 1.0


# Where and when it happens.


def marks() -> Path:
    return Path(os.environ["FAULT_DIR"])


def write(path: Path, text: str) -> None:
    """Under its name when it is whole."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.rename(path)


def reach(run: Run) -> None:
    if "FAULT_DIR" in os.environ:
        write(marks() / f"reached.{run.world.rank}", str(time.time()))


def misbehave(run: Run, where: str) -> float:
    """Does what $FAULT says, if this is the place, the rank and the attempt."""
    name = os.environ.get("FAULT", "")
    rank = os.environ.get("FAULT_RANK", "1")
    number = str(run.attempt.number)
    is_here = where == os.environ.get("FAULT_AT", "4")
    is_this_rank = rank in ("all", str(run.world.rank))
    is_this_attempt = os.environ.get("FAULT_ATTEMPT", number) == number
    if not (name and is_here and is_this_rank and is_this_attempt):
        return 1.0
    # or what is to be there afterwards may be lost with this rank
    saver = run.checkpoints.saver
    if saver and name != "hold_save":
        saver.wait()
    return float(globals()[name](run))


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, i: int) -> int:
        return i


@dataclass(frozen=True)
class Loaded:
    """A Source whose samples the workers of a DataLoader have touched."""

    batches: GlobalBatches
    method: str

    @property
    def per_epoch(self) -> int:
        return self.batches.per_epoch

    @property
    def order(self) -> dict[str, Any]:
        return self.batches.order

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Part]:
        parts = list(self.batches.epoch(epoch, first_batch))
        order = [part.indices.tolist() for part in parts]
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_sampler=order, num_workers=2, multiprocessing_context=self.method
        )
        for part, indices in zip(parts, loader, strict=True):
            assert torch.equal(part.indices, indices)
            yield part


def main(cfg: Config, run: Run) -> Mapping[str, Any]:
    world = run.world
    torch.manual_seed(cfg.seed)
    random = sampling.generator(cfg.seed, 0, stream=2)
    inputs = torch.randn(cfg.samples, 8, generator=random).to(world.device)
    labels = torch.randint(0, 4, (cfg.samples,), generator=random).to(world.device)
    width = cfg.width + 1 if os.environ.get("FAULT") == "another_model" else cfg.width
    net = nn.Sequential(
        nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 4)
    ).to(world.device)
    model = world.parallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), cfg.lr)
    batches = GlobalBatches(cfg.samples, cfg.global_batch_size, cfg.seed, *world.data)
    batches.require_full(world.data.size, cfg.accumulate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    ema = optimisation.averaged(run, net, 0.9, 0, batches)

    def evaluate() -> dict[str, Any]:
        part = sampling.share(len(inputs), *world.data)
        if cfg.evaluate_s:
            write(run.dir / f"evaluating.{world.rank}", "")
        return scores.accuracy(run, lambda net: answers(net, part))

    def answers(net: nn.Module, part: slice) -> Iterator[tuple[Tensor, Tensor]]:
        for piece in range(100 if cfg.evaluate_s else 1):
            time.sleep(cfg.evaluate_s / 100)
            if piece == 0:
                yield net(inputs[part]), labels[part]
            else:
                yield net(inputs[:0]), labels[:0]

    misbehave(run, "start")
    run.resume(State(net, optimizer, scheduler, ema), batches)
    source = Loaded(batches, cfg.workers) if cfg.workers else batches
    for step in loop.steps(run, cfg, model, source, evaluate):
        for part in step.parts:
            time.sleep(cfg.pace_s)
            factor = misbehave(run, str(run.step + 1))
            indices = part.indices.to(world.device)
            step.backward(
                F.cross_entropy(model(inputs[indices]), labels[indices], reduction="none") * factor
            )
        optimizer.step()
        scheduler.step()
    return run.results


if START:
    session.run(main, START)
