r"""Message passing: every operation of torch.distributed, explained in one line and checked on
every rank, or timed.

    # explains and checks each operation
    python launch.py recipe=collectives launcher=local ranks_per_node=4 device=cpu
    # measures one of them
    srun -N2 --ntasks-per-node=8 --gpus-per-node=8 python -m recipes.collectives \
        mode=bench operations=all_reduce sizes=1M..1G

Expected: correct results on every rank. How to measure gloo on one machine:
docs/doctor.md#bandwidth. On GPUs: not measured.
"""

from recipes.core.run import entry

START = entry.begin("collectives") if __name__ == "__main__" else None

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ReduceOp

from recipes.conf.collectives import Config, Mode, sizes_of
from recipes.core.errors import RunError, Stopped
from recipes.core.run import watchdog
from recipes.core.train import session
from recipes.core.train.run import Results, Run
from recipes.core.train.world import World

Answer = tuple[Tensor, Tensor]  # the result and the expected result
WARM_UP = 2
BATCHES = 5
LONGEST = 0.25  # of timeout_s, for a batch
# For these operations each rank holds the whole array. For the others the array is divided into one
# part for each rank.
WHOLE = ("send_recv", "broadcast", "reduce", "all_reduce")


def numbers(world: World, *ranks: int) -> Tensor:
    """Two numbers that identify each of ``ranks``: 10 and 11 for rank 0, 20 and 21 for rank 1. The
    default is this rank.
    """
    tens = [10.0 * rank + 10 for rank in ranks or [world.rank]]
    return torch.tensor([ten + i for ten in tens for i in range(2)], device=world.device)


def all_numbers(world: World) -> Tensor:
    """The numbers of all ranks, (size, 2)."""
    return numbers(world, *range(world.size)).view(world.size, 2)


def empty(world: World, ranks: int = 1) -> Tensor:
    return torch.zeros(2 * ranks, device=world.device)


def for_each(world: World) -> Tensor:
    """This rank's numbers once for each rank, times the number of that rank from 1 on."""
    mine = numbers(world)
    return torch.cat([mine * (other + 1) for other in range(world.size)])


def neighbours(world: World) -> tuple[int, int]:
    """The previous and the next rank in the ring of all ranks."""
    return (world.rank - 1) % world.size, (world.rank + 1) % world.size


def in_turn(world: World, send: Callable[[], Any], receive: Callable[[], Any]) -> list[Any]:
    """Sends to the next rank of the ring and receives from the previous one: rank 0 sends first,
    the others receive first.
    """
    calls = (send, receive) if world.rank == 0 else (receive, send)
    return [call() for call in calls]


def at_once(batch: list[P2POp]) -> None:
    """Starts all operations of a batch, then waits for them."""
    for work in dist.batch_isend_irecv(batch):
        work.wait()


# The lessons. Each performs one operation on every rank and returns the result and the expected
# result. `learn` prints the docstring.


def send_and_recv(world: World) -> Answer:
    """sends to the next rank, receives from the previous one; each call blocks, so only rank 0
    sends first: no deadlock
    """
    received = empty(world)
    previous, following = neighbours(world)
    in_turn(
        world,
        lambda: dist.send(numbers(world), following),
        lambda: dist.recv(received, previous),
    )
    return received, numbers(world, previous)


def isend_and_irecv(world: World) -> Answer:
    """the same with calls that do not block: starts both, then waits for both; with NCCL, rank 0
    must still send first
    """
    received = empty(world)
    previous, following = neighbours(world)
    mine = numbers(world)
    for work in in_turn(
        world, lambda: dist.isend(mine, following), lambda: dist.irecv(received, previous)
    ):
        work.wait()
    return received, numbers(world, previous)


def batch_isend_irecv(world: World) -> Answer:
    """exchanges with both neighbours in one batch; NCCL requires a batch here, since single calls
    can deadlock
    """
    previous, following = neighbours(world)
    from_previous = empty(world)
    from_following = empty(world)
    mine = numbers(world)
    batch = [P2POp(dist.isend, mine, following), P2POp(dist.irecv, from_previous, previous)]
    batch += [P2POp(dist.isend, mine, previous), P2POp(dist.irecv, from_following, following)]
    at_once(batch)
    return torch.cat([from_previous, from_following]), numbers(world, previous, following)


def broadcast(world: World) -> Answer:
    """copies rank 0's numbers to all ranks; gives all ranks the same initial weights"""
    values = numbers(world)
    dist.broadcast(values, src=0)
    return values, numbers(world, 0)


def reduce(world: World) -> Answer:
    """adds the numbers of all ranks on rank 0; the tensors of the other ranks are undefined
    afterwards
    """
    values = numbers(world)
    dist.reduce(values, dst=0)
    if world.rank:
        return empty(world), empty(world)
    return values, all_numbers(world).sum(0)


def all_reduce(world: World) -> Answer:
    """combines the numbers of all ranks on every rank, by sum, product, max, min and avg; averages
    gradients
    """
    operations = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.AVG)
    results = [numbers(world) for _ in operations]
    for values, operation in zip(results, operations, strict=True):
        dist.all_reduce(values, op=operation)
    every = all_numbers(world)
    expected = [every.sum(0), every.prod(0), every.amax(0), every.amin(0), every.mean(0)]
    return torch.stack(results), torch.stack(expected)


def gather(world: World) -> Answer:
    """collects the numbers of all ranks on rank 0"""
    there = [empty(world) for _ in range(world.size)] if world.rank == 0 else None
    dist.gather(numbers(world), there, dst=0)
    return (torch.stack(there), all_numbers(world)) if there else (empty(world), empty(world))


def scatter(world: World) -> Answer:
    """the reverse of gather: rank 0 sends a different part to each rank"""
    received = empty(world)
    dist.scatter(received, list(all_numbers(world)) if world.rank == 0 else None, src=0)
    return received, numbers(world)


def all_gather(world: World) -> Answer:
    """collects the numbers of all ranks on every rank"""
    there = empty(world, world.size)
    dist.all_gather_into_tensor(there, numbers(world))
    return there.view(world.size, 2), all_numbers(world)


def reduce_scatter(world: World) -> Answer:
    """each rank has a part for every rank; each rank receives the sum of the parts for it; the
    first half of an all_reduce
    """
    received = empty(world)
    dist.reduce_scatter_tensor(received, for_each(world))
    return received, all_numbers(world).sum(0) * (world.rank + 1)


def all_to_all(world: World) -> Answer:
    """each rank sends a different part to every rank"""
    received = empty(world, world.size)
    dist.all_to_all_single(received, for_each(world))
    return received.view(world.size, 2), all_numbers(world) * (world.rank + 1)


def subgroups(world: World) -> Answer:
    """all_reduce among the even ranks and among the odd ranks; every rank must create every
    group
    """
    parities = range(min(2, world.size))
    groups = [
        cast(dist.ProcessGroup, dist.new_group(list(range(parity, world.size, 2))))
        for parity in parities
    ]
    values = numbers(world)
    dist.all_reduce(values, group=groups[world.rank % 2])
    for group in groups:
        dist.destroy_process_group(group)
    return values, all_numbers(world)[world.rank % 2 :: 2].sum(0)


def barrier(world: World) -> Answer:
    """no rank continues before all have arrived; the last rank arrives 0.1 s late"""
    if world.rank == world.size - 1:
        time.sleep(0.1)
        world.store.add("the last rank has arrived", 1)  # returns only when the store has it
    dist.barrier()
    return torch.tensor(world.store.check(["the last rank has arrived"])), torch.tensor(True)


BETWEEN_TWO = (send_and_recv, isend_and_irecv, batch_isend_irecv)  # require at least 2 ranks
LESSONS = (
    *BETWEEN_TWO,
    broadcast,
    reduce,
    all_reduce,
    gather,
    scatter,
    all_gather,
    reduce_scatter,
    all_to_all,
    subgroups,
    barrier,
)


def learn(run: Run) -> None:
    """Runs each lesson on every rank. Raises RunError, on all ranks, if a result is wrong."""
    world = run.world
    run.say(f"{'operation':<20}{'result':<16}what it does")
    for lesson in LESSONS:
        name = lesson.__name__
        if world.size == 1 and lesson in BETWEEN_TWO:
            run.say(f"{name:<20}{'-':<16}requires at least 2 ranks")
            continue
        with world.meeting():
            result, expected = lesson(world)
        answers = world.gather(bytes([torch.allclose(result.double(), expected.double())]))
        wrong = [rank for rank, answer in enumerate(answers) if answer == b"\0"]
        if wrong:
            first = f"the first is rank {wrong[0]} on {world.hosts[wrong[0]]}"
            count = f"{len(wrong)} of {world.size} ranks"
            raise RunError(f"{name}: the result is wrong on {count}; {first}")
        what_it_does = " ".join((lesson.__doc__ or "").split())
        run.say(f"{name:<20}{f'ok on {world.size} ranks':<16}{what_it_does}")


# The measurement, with algbw and busbw as defined by nccl-tests (doc/PERFORMANCE.md).


def measure(operation: str, size: int, world: World, budget_s: float) -> tuple[float, float, float]:
    """Seconds of an operation on ``size`` bytes (`used_bytes`), its algbw and its busbw in GB/s
    (1e9 bytes per second).

    Called by all ranks, which get the same result. budget_s: approximate duration of the
    measurement.
    """
    seconds = statistics.median(seconds_of(call_of(operation, size, world), world, budget_s))
    algbw = size / seconds / 1e9
    return seconds, algbw, algbw * bus_factor(operation, world.size)


def call_of(operation: str, size: int, world: World) -> Callable[[], object]:
    """An operation on ``size`` bytes of float32, as `used_bytes` returns them."""
    n = world.size
    rank = world.rank
    count = size // 4
    whole = torch.zeros(count, device=world.device)
    if operation == "send_recv":
        received = torch.zeros_like(whole)
        previous, following = neighbours(world)
        return lambda: at_once(
            [P2POp(dist.isend, whole, following), P2POp(dist.irecv, received, previous)]
        )
    if operation == "broadcast":
        return partial(dist.broadcast, whole, 0)
    if operation == "reduce":
        return partial(dist.reduce, whole, 0)
    if operation == "all_reduce":
        return partial(dist.all_reduce, whole)
    if operation == "all_to_all":
        return partial(dist.all_to_all_single, torch.zeros_like(whole), whole)
    part = torch.zeros(count // n, device=world.device)
    parts = list(whole.view(n, -1)) if rank == 0 else None
    if operation == "gather":
        return partial(dist.gather, part, parts, 0)
    if operation == "scatter":
        return partial(dist.scatter, part, parts, 0)
    if operation == "all_gather":
        return partial(dist.all_gather_into_tensor, whole, part)
    assert operation == "reduce_scatter"
    return partial(dist.reduce_scatter_tensor, part, whole)


def used_bytes(operation: str, size: int, ranks: int) -> int:
    """``size`` rounded down to bytes that an operation can use, a multiple of 4, or of 16 for each
    rank; at least one multiple.
    """
    unit = 4 if operation in WHOLE else 16 * ranks
    return max(1, size // unit) * unit


def bus_factor(operation: str, ranks: int) -> float:
    """Bytes that a link carries, divided by the bytes of the operation.

    With it, busbw is the same for all operations and any number of ranks, if only the hardware
    limits them.
    """
    if operation in ("send_recv", "broadcast", "reduce"):
        return 1.0
    share = (ranks - 1) / ranks
    return 2 * share if operation == "all_reduce" else share


def seconds_of(call: Callable[[], object], world: World, budget_s: float) -> list[float]:
    """Durations of one ``call`` in seconds. Each is the mean over a batch of repetitions, on the
    slowest rank.

    Called by all ranks, which get the same result. budget_s: approximate total time, in seconds.
    """

    def batch(repeated: int) -> float:
        world.pulse.beat(watchdog.WAITING)  # timeout_s applies to each batch
        dist.barrier()
        synchronize(world)
        start_s = time.perf_counter()
        for _ in range(repeated):
            call()
        synchronize(world)
        return (time.perf_counter() - start_s) / repeated

    def slowest(seconds: list[float]) -> list[float]:
        durations = torch.tensor(seconds, dtype=torch.float64, device=world.device)
        dist.all_reduce(durations, ReduceOp.MAX)
        return list(durations.tolist())

    once = slowest([min(batch(1) for _ in range(WARM_UP))])[0]
    batches = max(BATCHES, math.ceil(budget_s / (LONGEST * world.timeout_s)))
    repeated = max(1, int(budget_s / (batches * once)))
    return slowest([batch(repeated) for _ in range(batches)])


def synchronize(world: World) -> None:
    """Waits until this rank's GPU has completed its queued work."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def bench(run: Run, cfg: Config) -> dict[str, Any]:
    """Measures each operation at each size. Rank 0 prints one line per measurement. Returns each
    operation's highest busbw and shortest time.
    """
    world = run.world
    # GB/s; microseconds of the smallest size
    highest = dict[str, float]()
    fastest = dict[str, float]()
    run.say(f"{'operation':<15}{'bytes':>13}{'us':>12}{'algbw':>9}{'busbw':>9}  (GB/s)")
    for operation in cfg.chosen_operations():
        if operation == "send_recv" and world.size == 1:
            run.say(f"{operation:<15}requires at least 2 ranks")
            continue
        usable = [used_bytes(operation, size, world.size) for size in sizes_of(cfg.sizes)]
        for size in dict.fromkeys(usable):
            with world.meeting():
                seconds, algbw, busbw = measure(operation, size, world, cfg.seconds)
            run.say(f"{operation:<15}{size:>13,}{1e6 * seconds:>12,.1f}{algbw:>9.3f}{busbw:>9.3f}")
            highest[operation] = max(round(busbw, 4), highest.get(operation, 0.0))
            fastest[operation] = min(round(1e6 * seconds, 1), fastest.get(operation, math.inf))
            reason = run.agree_to_stop()
            if reason:
                raise Stopped(reason)
    return {"busbw": highest, "latency_us": fastest}


def main(cfg: Config, run: Run) -> Results:
    run.start()
    if cfg.mode is Mode.bench:
        return bench(run, cfg)
    learn(run)
    return {}


if START:
    session.run(main, START)
