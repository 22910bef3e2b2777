"""Bandwidth of messages between ranks: the operations, their timing, and algbw and busbw as defined by nccl-tests (doc/PERFORMANCE.md)."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp

from recipes.core.train.world import World

WARM_UP, BATCHES = 2, 5
# For these operations each rank holds the whole array. For the others the array is divided into one part for each rank.
WHOLE = ("send_recv", "broadcast", "reduce", "all_reduce")


class Figure(NamedTuple):
    """The result of one operation at one size. size: bytes of the whole array. Bandwidths are in GB/s (1e9 bytes per second)."""

    size: int
    seconds: float
    algbw: float
    busbw: float


def measure(operation: str, size: int, world: World, budget_s: float) -> Figure:
    """Measures an operation on ``size`` bytes (`used_bytes`). Called by all ranks, which get the same result. budget_s: seconds, about."""
    seconds = statistics.median(seconds_of(call_of(operation, size, world), world, budget_s))
    algbw = size / seconds / 1e9
    return Figure(size, seconds, algbw, algbw * bus_factor(operation, world.size))


def call_of(operation: str, size: int, world: World) -> Callable[[], object]:
    """An operation on ``size`` bytes of float32, as `used_bytes` returns them."""
    n, rank, count = world.size, world.rank, size // 4
    whole = torch.zeros(count, device=world.device)
    if operation == "send_recv":
        return partial(_ring, whole, torch.zeros_like(whole), (rank + 1) % n, (rank - 1) % n)
    if operation == "broadcast":
        return partial(dist.broadcast, whole, 0)
    if operation == "reduce":
        return partial(dist.reduce, whole, 0)
    if operation == "all_reduce":
        return partial(dist.all_reduce, whole)
    if operation == "all_to_all":
        return partial(dist.all_to_all_single, torch.zeros_like(whole), whole)
    part, parts = torch.zeros(count // n, device=world.device), list(whole.view(n, -1)) if rank == 0 else None
    if operation == "gather":
        return partial(dist.gather, part, parts, 0)
    if operation == "scatter":
        return partial(dist.scatter, part, parts, 0)
    if operation == "all_gather":
        return partial(dist.all_gather_into_tensor, whole, part)
    assert operation == "reduce_scatter"
    return partial(dist.reduce_scatter_tensor, part, whole)


def used_bytes(operation: str, size: int, ranks: int) -> int:
    """``size`` rounded down to bytes that an operation can use, a multiple of 4, or of 16 for each rank; at least one multiple."""
    unit = 4 if operation in WHOLE else 16 * ranks
    return max(1, size // unit) * unit


def bus_factor(operation: str, ranks: int) -> float:
    """Bytes that a link carries, divided by the bytes of the operation.

    With it, busbw is the same for all operations and any number of ranks, if only the hardware limits them.
    """
    if operation in ("send_recv", "broadcast", "reduce"):
        return 1.0
    share = (ranks - 1) / ranks
    return 2 * share if operation == "all_reduce" else share


def _ring(data: Tensor, received: Tensor, to: int, source: int) -> None:
    for work in dist.batch_isend_irecv([P2POp(dist.isend, data, to), P2POp(dist.irecv, received, source)]):
        work.wait()


def seconds_of(call: Callable[[], object], world: World, budget_s: float) -> list[float]:
    """Durations of one ``call`` in seconds. Each is the mean over a batch of repetitions, on the slowest rank.

    Called by all ranks, which get the same result. budget_s: approximate total time, in seconds.
    """

    def batch(repeated: int) -> float:
        dist.barrier()
        synchronize(world)
        begin = time.perf_counter()
        for _ in range(repeated):
            call()
        synchronize(world)
        return (time.perf_counter() - begin) / repeated

    def slowest(seconds: list[float]) -> list[float]:
        found = torch.tensor(seconds, dtype=torch.float64, device=world.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [float(one) for one in found.tolist()]

    once = slowest([min(batch(1) for _ in range(WARM_UP))])[0]
    repeated = max(1, int(budget_s / (BATCHES * once)))
    return slowest([batch(repeated) for _ in range(BATCHES)])


def synchronize(world: World) -> None:
    """Waits until this rank's GPU has completed its queued work."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
