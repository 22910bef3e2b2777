"""Message passing: every operation of torch.distributed, explained in one line and checked on every rank, or timed.

    python launch.py recipe=collectives launcher=local ranks_per_node=4 device=cpu    # explains and checks each operation
    srun -N2 --ntasks-per-node=8 --gpus-per-node=8 python -m recipes.collectives mode=bench operations=all_reduce sizes=1M..1G

Expected: correct results on every rank. How to measure gloo on one machine: docs/doctor.md#bandwidth. On GPUs: not measured.
"""

from recipes.core.run import entry

START = entry.begin("collectives") if __name__ == "__main__" else None

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ReduceOp

from recipes.conf.collectives import Config, Mode, sizes_of
from recipes.core import bandwidth
from recipes.core.train import session
from recipes.core.errors import RunError, Stopped
from recipes.core.train.run import Run

T = TypeVar("T")
Answer = tuple[Tensor, Tensor]  # the result and the expected result


@dataclass(frozen=True)
class ThisRank:
    """The arguments of a lesson: this rank among ``size`` ranks, its neighbours in the ring, and a store that all ranks can read."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store

    @property
    def right(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def left(self) -> int:
        return (self.rank - 1) % self.size

    def numbers_of(self, *ranks: int) -> Tensor:
        """Two numbers for each of ``ranks`` that identify the rank: 10 and 11 for rank 0, 20 and 21 for rank 1."""
        return torch.tensor([10.0 * rank + 10 + i for rank in ranks for i in range(2)], device=self.device)

    def empty(self, ranks: int = 1) -> Tensor:
        return torch.zeros(2 * ranks, device=self.device)

    @property
    def all_numbers(self) -> Tensor:
        """The numbers of all ranks, (size, 2)."""
        return self.numbers_of(*range(self.size)).view(self.size, 2)


# The lessons. Each performs one operation on every rank and returns the result and the expected result. `learn` prints the docstring.


def in_turn(this: ThisRank, send: Callable[[], T], receive: Callable[[], T]) -> list[T]:
    """Sends to the next rank of the ring and receives from the previous one: even ranks send first, odd ranks receive first."""
    # In a ring of odd size, the last rank and rank 0, to which it sends, are both even.
    first_alone = this.size % 2 == 1 and this.rank == this.size - 1
    calls = (send, receive) if this.rank % 2 == 0 and not first_alone else (receive, send)
    return [call() for call in calls]


def send_and_recv(this: ThisRank) -> Answer:
    """sends to the next rank, receives from the previous one; each call blocks, so odd ranks receive first: no deadlock"""
    received = this.empty()
    in_turn(this, lambda: dist.send(this.numbers_of(this.rank), this.right), lambda: dist.recv(received, this.left))
    return received, this.numbers_of(this.left)


def isend_and_irecv(this: ThisRank) -> Answer:
    """the same with calls that do not block: starts both, then waits for both; NCCL requires the same order"""
    received = this.empty()
    begun = in_turn(
        this, lambda: dist.isend(this.numbers_of(this.rank), this.right), lambda: dist.irecv(received, this.left)
    )
    for work in begun:
        assert work is not None
        work.wait()
    return received, this.numbers_of(this.left)


def batch_isend_irecv(this: ThisRank) -> Answer:
    """exchanges with both neighbours in one batch; NCCL requires a batch here, since single calls can deadlock"""
    from_left, from_right = this.empty(), this.empty()
    mine = this.numbers_of(this.rank)
    batch = [P2POp(dist.isend, mine, this.right), P2POp(dist.irecv, from_left, this.left)]
    batch += [P2POp(dist.isend, mine, this.left), P2POp(dist.irecv, from_right, this.right)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return torch.cat([from_left, from_right]), this.numbers_of(this.left, this.right)


def broadcast(this: ThisRank) -> Answer:
    """copies rank 0's numbers to all ranks; gives all ranks the same initial weights"""
    values = this.numbers_of(this.rank)
    dist.broadcast(values, src=0)
    return values, this.numbers_of(0)


def reduce(this: ThisRank, op: ReduceOp.RedOpType, expected: Callable[[Tensor], Tensor]) -> Answer:
    """combines the numbers of all ranks on rank 0; the tensors of the other ranks are undefined afterwards"""
    values = this.numbers_of(this.rank)
    dist.reduce(values, dst=0, op=op)
    return (values, expected(this.all_numbers)) if this.rank == 0 else (this.empty(), this.empty())


def all_reduce(this: ThisRank, op: ReduceOp.RedOpType, expected: Callable[[Tensor], Tensor]) -> Answer:
    """combines the numbers of all ranks on every rank; averages gradients"""
    values = this.numbers_of(this.rank)
    dist.all_reduce(values, op=op)
    return values, expected(this.all_numbers)


def gather(this: ThisRank) -> Answer:
    """collects the numbers of all ranks on rank 0"""
    there = [this.empty() for _ in range(this.size)] if this.rank == 0 else None
    dist.gather(this.numbers_of(this.rank), there, dst=0)
    return (torch.stack(there), this.all_numbers) if there else (this.empty(), this.empty())


def scatter(this: ThisRank) -> Answer:
    """the reverse of gather: rank 0 sends a different part to each rank"""
    received = this.empty()
    dist.scatter(received, list(this.all_numbers) if this.rank == 0 else None, src=0)
    return received, this.numbers_of(this.rank)


def all_gather(this: ThisRank) -> Answer:
    """collects the numbers of all ranks on every rank"""
    there = this.empty(this.size)
    dist.all_gather_into_tensor(there, this.numbers_of(this.rank))
    return there.view(this.size, 2), this.all_numbers


def reduce_scatter(this: ThisRank) -> Answer:
    """each rank has a part for every rank; each rank receives the sum of its parts; the first half of an all_reduce"""
    parts = torch.cat([this.numbers_of(this.rank) * (other + 1) for other in range(this.size)])
    received = this.empty()
    dist.reduce_scatter_tensor(received, parts)
    return received, this.all_numbers.sum(0) * (this.rank + 1)


def all_to_all(this: ThisRank) -> Answer:
    """each rank sends a different part to every rank"""
    parts = torch.cat([this.numbers_of(this.rank) * (other + 1) for other in range(this.size)])
    received = this.empty(this.size)
    dist.all_to_all_single(received, parts)
    return received.view(this.size, 2), this.all_numbers * (this.rank + 1)


def subgroups(this: ThisRank) -> Answer:
    """all_reduce among the even ranks and among the odd ranks; every rank must create every group"""
    parities = range(min(2, this.size))
    groups = [cast(dist.ProcessGroup, dist.new_group(list(range(parity, this.size, 2)))) for parity in parities]
    values = this.numbers_of(this.rank)
    dist.all_reduce(values, group=groups[this.rank % 2])
    for group in groups:
        dist.destroy_process_group(group)
    return values, this.all_numbers[this.rank % 2 :: 2].sum(0)


def barrier(this: ThisRank) -> Answer:
    """no rank continues before all have arrived; the last rank arrives 0.1 s late"""
    if this.rank == this.size - 1:
        time.sleep(0.1)
        this.store.add("the last rank has arrived", 1)  # returns only when the store has it
    dist.barrier()
    return torch.tensor(this.store.check(["the last rank has arrived"])), torch.tensor(True)


Lesson = Callable[[ThisRank], Answer]


def lessons() -> Iterator[tuple[str, str, Lesson]]:
    """Name, explanation and function of each lesson, in the order in which to learn them."""
    for lesson in (send_and_recv, isend_and_irecv, batch_isend_irecv, broadcast):
        yield lesson.__name__, str(lesson.__doc__), lesson
    kinds: tuple[tuple[str, ReduceOp.RedOpType, Callable[[Tensor], Tensor]], ...] = (
        ("sum", ReduceOp.SUM, lambda numbers: numbers.sum(0)),
        ("product", ReduceOp.PRODUCT, lambda numbers: numbers.prod(0)),
        ("max", ReduceOp.MAX, lambda numbers: numbers.amax(0)),
        ("min", ReduceOp.MIN, lambda numbers: numbers.amin(0)),
        ("avg", ReduceOp.AVG, lambda numbers: numbers.mean(0)),
    )
    for reducing in (reduce, all_reduce):
        for name, op, expected in kinds:
            yield f"{reducing.__name__} {name}", str(reducing.__doc__), partial(reducing, op=op, expected=expected)
    for lesson in (gather, scatter, all_gather, reduce_scatter, all_to_all, subgroups, barrier):
        yield lesson.__name__, str(lesson.__doc__), lesson


def learn(run: Run) -> None:
    """Runs each lesson on every rank. Raises RunError, on all ranks, if a result is wrong."""
    world = run.world
    this = ThisRank(world.rank, world.size, world.device, world.store)
    run.say(f"{'operation':<20}{'result':<16}what it does")
    previous_text = ""
    for name, text, lesson in lessons():
        if world.size == 1 and name in ("send_and_recv", "isend_and_irecv", "batch_isend_irecv"):
            run.say(f"{name:<20}{'-':<16}requires at least 2 ranks")
            continue
        with world.meeting():
            result, expected = lesson(this)
        is_wrong = torch.zeros(world.size, dtype=torch.int32, device=world.device)
        is_wrong[world.rank] = not torch.allclose(result.double(), expected.double())
        dist.all_reduce(is_wrong)
        if wrong := is_wrong.nonzero().flatten().tolist():
            first = f"the first is rank {wrong[0]} on {world.hosts[wrong[0]]}"
            raise RunError(f"{name}: the result is wrong on {len(wrong)} of {world.size} ranks; {first}")
        run.say(f"{name:<20}{f'ok on {world.size} ranks':<16}{text if text != previous_text else 'as above'}")
        previous_text = text


def bench(run: Run, cfg: Config) -> dict[str, Any]:
    """Measures each operation at each size. Rank 0 prints one line per measurement. Returns each operation's highest busbw and shortest time."""
    world = run.world
    best, fastest = dict[str, float](), dict[str, float]()  # GB/s; microseconds of the smallest size
    run.say(f"{'operation':<15}{'bytes':>13}{'us':>12}{'algbw':>9}{'busbw':>9}  (GB/s)")
    for operation in cfg.chosen_operations():
        if operation == "send_recv" and world.size == 1:
            run.say(f"{operation:<15}requires at least 2 ranks")
            continue
        sizes = dict.fromkeys(bandwidth.used_bytes(operation, size, world.size) for size in sizes_of(cfg.sizes))
        for size in sizes:
            with world.meeting():
                figure = bandwidth.measure(operation, size, world, cfg.seconds)
            columns = f"{1e6 * figure.seconds:>12,.1f}{figure.algbw:>9.3f}{figure.busbw:>9.3f}"
            run.say(f"{operation:<15}{figure.size:>13,}{columns}")
            best[operation] = max(round(figure.busbw, 4), best.get(operation, 0.0))
            fastest[operation] = min(round(1e6 * figure.seconds, 1), fastest.get(operation, math.inf))
            if reason := run.agree_to_stop():
                raise Stopped(reason)
    return {"busbw": best, "latency_us": fastest}


def main(cfg: Config, run: Run) -> Mapping[str, Any]:
    run.begin()
    if cfg.mode is Mode.bench:
        return bench(run, cfg)
    learn(run)
    return {}


if START:
    session.run(main, START)
