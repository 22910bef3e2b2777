"""Message passing: every operation of torch.distributed, explained in one line, checked on every rank, and timed.

    python launch.py recipe=collectives launcher=local ranks_per_node=4 device=cpu    # explains and checks each operation
    srun -N2 --ntasks-per-node=8 --gpus-per-node=8 python -m recipes.collectives mode=bench operations=all_reduce sizes=1M..1G
    srun -N4 --ntasks-per-node=1 --gpus-per-node=1 python -m recipes.collectives pairs=true     # finds slow pairs of nodes

Expected: correct results on every rank. How to measure gloo on one machine: docs/doctor.md#bandwidth. On GPUs: not measured.
"""

from recipes.core.run import entry

START = entry.begin("collectives") if __name__ == "__main__" else None

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ReduceOp

from recipes.conf.collectives import Config, Mode, bytes_of, sizes_of
from recipes.core import bandwidth, drawing
from recipes.core.train import session
from recipes.core.bandwidth import Figure
from recipes.core.errors import InputError, RunError
from recipes.core.train.session import Run

T = TypeVar("T")
Answer = tuple[Tensor, Tensor]  # the result and the expected result


@dataclass(frozen=True)
class Here:
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

    def of(self, *ranks: int) -> Tensor:
        """Two numbers for each of ``ranks`` that identify the rank: 10 and 11 for rank 0, 20 and 21 for rank 1."""
        return torch.tensor([10.0 * rank + 10 + i for rank in ranks for i in range(2)], device=self.device)

    def empty(self, ranks: int = 1) -> Tensor:
        return torch.zeros(2 * ranks, device=self.device)

    @property
    def all(self) -> Tensor:
        """The numbers of all ranks, (size, 2)."""
        return self.of(*range(self.size)).view(self.size, 2)


# The lessons. Each performs one operation on every rank and returns the result and the expected result. `learn` prints the docstrings.


def in_turn(here: Here, send: Callable[[], T], receive: Callable[[], T]) -> list[T]:
    """Sends to the next rank of the ring and receives from the previous one: even ranks send first, odd ranks receive first."""
    # In a ring of odd size, the last rank and rank 0, to which it sends, are both even.
    first_alone = here.size % 2 == 1 and here.rank == here.size - 1
    calls = (send, receive) if here.rank % 2 == 0 and not first_alone else (receive, send)
    return [call() for call in calls]


def send_and_recv(here: Here) -> Answer:
    """round the ring; each call waits, so even ranks send first and odd ones receive, or all would wait for ever"""
    came = here.empty()
    in_turn(here, lambda: dist.send(here.of(here.rank), here.right), lambda: dist.recv(came, here.left))
    return came, here.of(here.left)


def isend_and_irecv(here: Here) -> Answer:
    """round the ring without waiting: both are begun at once and waited for at the end; NCCL wants them in turn here too"""
    came = here.empty()
    begun = in_turn(here, lambda: dist.isend(here.of(here.rank), here.right), lambda: dist.irecv(came, here.left))
    for work in begun:
        assert work is not None
        work.wait()
    return came, here.of(here.left)


def batch_isend_irecv(here: Here) -> Answer:
    """to both neighbours at once, as one batch: what NCCL wants, which could wait for ever with single ones"""
    from_left, from_right = here.empty(), here.empty()
    mine = here.of(here.rank)
    batch = [P2POp(dist.isend, mine, here.right), P2POp(dist.irecv, from_left, here.left)]
    batch += [P2POp(dist.isend, mine, here.left), P2POp(dist.irecv, from_right, here.right)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return torch.cat([from_left, from_right]), here.of(here.left, here.right)


def broadcast(here: Here) -> Answer:
    """one rank's numbers to all: here rank 0's; how all ranks begin with the same weights"""
    values = here.of(here.rank)
    dist.broadcast(values, src=0)
    return values, here.of(0)


def reduce(here: Here, op: ReduceOp.RedOpType, right: Callable[[Tensor], Tensor]) -> Answer:
    """all ranks' numbers into one, on one rank: here on rank 0; the others' are of no use afterwards"""
    values = here.of(here.rank)
    dist.reduce(values, dst=0, op=op)
    return (values, right(here.all)) if here.rank == 0 else (here.empty(), here.empty())


def all_reduce(here: Here, op: ReduceOp.RedOpType, right: Callable[[Tensor], Tensor]) -> Answer:
    """all ranks' numbers into one, on every rank; how gradients are averaged"""
    values = here.of(here.rank)
    dist.all_reduce(values, op=op)
    return values, right(here.all)


def gather(here: Here) -> Answer:
    """all ranks' numbers side by side, on one rank: here on rank 0"""
    there = [here.empty() for _ in range(here.size)] if here.rank == 0 else None
    dist.gather(here.of(here.rank), there, dst=0)
    return (torch.stack(there), here.all) if there else (here.empty(), here.empty())


def scatter(here: Here) -> Answer:
    """the other way round: rank 0 has a part for each rank, and each gets its own"""
    came = here.empty()
    dist.scatter(came, list(here.all) if here.rank == 0 else None, src=0)
    return came, here.of(here.rank)


def all_gather(here: Here) -> Answer:
    """all ranks' numbers side by side, on every rank"""
    there = here.empty(here.size)
    dist.all_gather_into_tensor(there, here.of(here.rank))
    return there.view(here.size, 2), here.all


def reduce_scatter(here: Here) -> Answer:
    """every rank has a part for each; the parts for one rank are summed, and it gets that: half of an all_reduce"""
    parts = torch.cat([here.of(here.rank) * (other + 1) for other in range(here.size)])
    came = here.empty()
    dist.reduce_scatter_tensor(came, parts)
    return came, here.all.sum(0) * (here.rank + 1)


def all_to_all(here: Here) -> Answer:
    """every rank has a part for each, and gets the part of each that is for it: the parts change places"""
    parts = torch.cat([here.of(here.rank) * (other + 1) for other in range(here.size)])
    came = here.empty(here.size)
    dist.all_to_all_single(came, parts)
    return came.view(here.size, 2), here.all * (here.rank + 1)


def subgroups(here: Here) -> Answer:
    """an all_reduce among the even ranks and one among the odd, at once; every rank has to make every group"""
    parities = range(min(2, here.size))
    groups = [cast(dist.ProcessGroup, dist.new_group(list(range(parity, here.size, 2)))) for parity in parities]
    values = here.of(here.rank)
    dist.all_reduce(values, group=groups[here.rank % 2])
    for group in groups:
        dist.destroy_process_group(group)
    return values, here.all[here.rank % 2 :: 2].sum(0)


def barrier(here: Here) -> Answer:
    """nobody goes on before all have come: the last rank comes 0.1 s late and leaves word, which all find when they leave"""
    if here.rank == here.size - 1:
        time.sleep(0.1)
        here.store.add("the last has come", 1)  # returns only when the store has it
    dist.barrier()
    return torch.tensor(here.store.check(["the last has come"])), torch.tensor(True)


Lesson = Callable[[Here], Answer]


def lessons() -> Iterator[tuple[str, str, Lesson]]:
    """Name, explanation and function of each lesson, in the order in which they are best learnt."""
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
        for name, op, right in kinds:
            yield f"{reducing.__name__} {name}", str(reducing.__doc__), partial(reducing, op=op, right=right)
    for lesson in (gather, scatter, all_gather, reduce_scatter, all_to_all, subgroups, barrier):
        yield lesson.__name__, str(lesson.__doc__), lesson


def attempt(run: Run, name: str, call: Callable[[], Any]) -> tuple[Any, str]:
    """Returns the result of ``call``, and why the backend does not support it ("" if it does). Raises any other error.

    Called by all ranks, which get the same reason. name: unique in a run.
    """
    result, why = None, ""
    try:
        with run.world.meeting():
            result = call()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        why = " ".join(str(error).split())[:120]
        missing = any(sign in why.lower() for sign in ("support", "not implemented", "cannot use"))
        # "operation not supported" can also be an error of the device.
        if not missing or "CUDA error" in why or "NCCL error" in why:
            raise
    run.world.store.set(f"{name}/{run.world.rank}", why)
    answers = run.world.read([f"{name}/{rank}" for rank in range(run.world.size)])
    return result, next((answer for answer in answers if answer), "")


def learn(run: Run) -> dict[str, Any]:
    """Runs each lesson on every rank. Raises RunError, on all ranks, if a result is wrong."""
    world, missing = run.world, []
    here = Here(world.rank, world.size, world.device, world.store)
    run.say(f"{'operation':<20}{'on every rank':<16}what it does")
    told = ""
    for name, text, lesson in lessons():
        if world.size == 1 and name in ("send_and_recv", "isend_and_irecv", "batch_isend_irecv"):
            run.say(f"{name:<20}{'-':<16}takes two ranks or more")
            continue
        answer, why = attempt(run, f"learn/{name}", partial(lesson, here))
        if why:
            missing.append(name)
            run.say(f"{name:<20}{'-':<16}{world.backend} does not have it: {why}")
            continue
        came, right = answer
        if wrong := bandwidth.wrong_ranks(torch.allclose(came.double(), right.double()), world):
            raise RunError(
                f"{name}: a wrong answer on rank {wrong[0]} on {world.hosts[wrong[0]]} (of {len(wrong)} ranks)"
            )
        run.say(f"{name:<20}{f'right on {world.size}':<16}{text if text != told else 'as above'}")
        told = text
    return {"missing": missing}


def bench(run: Run, cfg: Config) -> dict[str, Any]:
    """Measures each operation at each size, in each form that torch has. Rank 0 writes one row of JSON per measurement."""
    world, missing = run.world, []
    sizes = bandwidth.that_fit(sizes_of(cfg.sizes), world, run.say)
    found: list[Figure] = []
    with open(run.dir / "bandwidth.jsonl" if world.rank == 0 else os.devnull, "w", encoding="utf-8") as file:
        run.say(bandwidth.HEADING)
        for operation in cfg.chosen_operations():
            if operation == "send_recv" and world.size == 1:
                run.say(f"{operation:<15}takes two ranks or more")
                continue
            small = [size for size in sizes if not bandwidth.used_bytes(operation, size, world.size)]
            if small:
                least = 4 if operation in bandwidth.WHOLE else 16 * world.size
                run.say(f"{operation:<15}{', '.join(map(str, small))} bytes left out: must be at least {least}")
            for size in (size for size in sizes if size not in small):
                made, why = attempt(
                    run, f"{operation}/{size}", partial(bandwidth.measure, operation, size, world, cfg.seconds)
                )
                if why:
                    missing.append(operation)
                    run.say(f"{operation:<15}{world.backend} does not have it: {why}")
                    break
                for figure in made:
                    run.say(figure.line())
                    file.write(json.dumps(figure.row()) + "\n")
                found += made
                run.stop_where_asked()
    if world.rank == 0 and any(figure.busbw for figure in found):
        drawing.bandwidths(found, run.dir / "bandwidth.png", run.say)
    if wrong := [f for f in found if f.wrong]:
        raise RunError(
            f"{wrong[0].operation} of {bandwidth.shown_size(wrong[0].size)}: {wrong[0].wrong} ranks had a wrong answer"
        )
    return {"missing": missing, "busbw": bandwidth.best(found)}


def pairs(run: Run, cfg: Config) -> dict[str, Any]:
    """Measures every pair of nodes by their first ranks; on a single node, every pair of ranks. Disjoint pairs run at the same time."""
    world = run.world
    members = bandwidth.first_ranks(world)
    if len(members) < 2:
        raise InputError("pairs=true: takes two ranks or more")
    found = bandwidth.every_pair(world, members, bytes_of(cfg.pair_size), cfg.seconds) / 1e9
    one_node = world.ranks.num_nodes == 1
    names = [f"rank {rank}" if one_node else world.hosts[rank] for rank in members]
    for line in bandwidth.pair_lines(found, names):
        run.say(line)
    if world.rank == 0:
        drawing.matrix(found.tolist(), names, run.dir / "pairs.png", run.say)
    return {
        "pairs": names,
        "pairs_gb_per_s": [[None if one != one else round(one, 4) for one in row] for row in found.tolist()],
    }


def main(cfg: Config, run: Run) -> Mapping[str, Any]:
    run.begin()
    if cfg.pairs:
        return pairs(run, cfg)
    return learn(run) if cfg.mode is Mode.learn else bench(run, cfg)


if START:
    session.run(main, START)
