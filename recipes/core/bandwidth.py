"""Bandwidth of messages between ranks: the operations, their timing, and algbw and busbw as defined by nccl-tests (doc/PERFORMANCE.md)."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp

from recipes.core.train.world import World

WARM_UP = 2
A_BATCH_S = 0.02  # repetitions are timed in batches, so that the cost of synchronising the ranks is negligible
MOST_REPEATED, MOST_BATCHES, LEAST_BATCHES = 1000, 50, 3
# For these operations each rank holds the whole array. For the others the array is divided into one part for each rank.
WHOLE = ("send_recv", "broadcast", "reduce", "all_reduce")
Filled = tuple[tuple[Tensor, Tensor | float], ...]


@dataclass(frozen=True)
class Case:
    """One operation.

    fill: tensors and the values to write into them before the call, in this order. expected: tensors and their values after the call,
    on this rank.
    """

    call: Callable[[], object]
    fill: Filled
    expected: Filled


def make_case(operation: str, size: int, world: World) -> Case:
    """An operation on ``size`` bytes of float32, of which it uses `used_bytes`.

    Each rank contributes its number plus 1. To a sum it contributes `addend` of its number, so that sums are exact.
    """
    count = used_bytes(operation, size, world.size) // 4
    return _whole_case(operation, count, world) if operation in WHOLE else _part_case(operation, count, world)


def _whole_case(operation: str, count: int, world: World) -> Case:
    """An operation for which each rank holds the whole array of ``count`` numbers."""
    rank, total = world.rank, sum(map(addend, range(world.size)))
    data = torch.zeros(count, device=world.device)
    if operation == "send_recv":
        received = torch.zeros_like(data)
        right, left = (rank + 1) % world.size, (rank - 1) % world.size
        return Case(partial(_ring, data, received, right, left), ((data, rank + 1.0),), ((received, left + 1.0),))
    if operation == "broadcast":
        return Case(partial(dist.broadcast, data, 0), ((data, rank + 1.0),), ((data, 1.0),))
    if operation == "reduce":
        return Case(partial(dist.reduce, data, 0), ((data, addend(rank)),), ((data, total),) if rank == 0 else ())
    return Case(partial(dist.all_reduce, data), ((data, addend(rank)),), ((data, total),))


def _part_case(operation: str, count: int, world: World) -> Case:
    """An operation for which the array of ``count`` numbers is divided into one part for each rank."""
    n, rank, own = world.size, world.rank, world.rank + 1.0
    whole, part = torch.zeros(n, count // n, device=world.device), torch.zeros(count // n, device=world.device)
    ranks = torch.arange(1.0, n + 1, device=world.device)[:, None]
    of_each = tuple((row, i + 1.0) for i, row in enumerate(whole)) if rank == 0 else ()
    rows = list(whole) if rank == 0 else None
    if operation == "gather":
        return Case(partial(dist.gather, part, rows, 0), ((part, own),), of_each)
    if operation == "scatter":
        return Case(partial(dist.scatter, part, rows, 0), of_each, ((part, own),))
    if operation == "all_gather":
        call = partial(dist.all_gather_into_tensor, whole.view(-1), part)
        return Case(call, ((whole, 0.0), (part, own)), ((whole, ranks),))
    if operation == "reduce_scatter":
        addends = torch.tensor([addend(i) for i in range(n)], device=world.device)[:, None]
        call = partial(dist.reduce_scatter_tensor, part, whole.view(-1))
        return Case(call, ((whole, addends * addend(rank)),), ((part, float(addends.sum()) * addend(rank)),))
    received = torch.zeros_like(whole)
    call = partial(dist.all_to_all_single, received.view(-1), whole.view(-1))
    return Case(call, ((whole, ranks * own),), ((received, ranks * own),))


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


def addend(rank: int) -> float:
    """The value that a rank contributes to a sum. It is small, since float32 is exact only up to 2^24.

    With the ranks' own numbers, sums would exceed that from some hundred ranks on.
    """
    return rank % 13 + 1.0


def _ring(data: Tensor, received: Tensor, to: int, source: int) -> None:
    for work in dist.batch_isend_irecv([P2POp(dist.isend, data, to), P2POp(dist.irecv, received, source)]):
        work.wait()


@dataclass(frozen=True)
class Figure:
    """The result of one operation at one size. size: bytes of the whole array.

    Times in seconds are those of the slowest rank, over batches of repetitions. wrong: number of ranks with a wrong result.
    """

    operation: str
    ranks: int
    size: int
    min_s: float
    median_s: float
    max_s: float
    wrong: int

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth in GB/s (1e9 bytes per second), from the median time."""
        return self.size / self.median_s / 1e9

    @property
    def busbw(self) -> float:
        """Bus bandwidth in GB/s (1e9 bytes per second), from the median time."""
        return self.algbw * bus_factor(self.operation, self.ranks)

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "algbw": self.algbw, "busbw": self.busbw}

    def line(self) -> str:
        times = "".join(f"{1e6 * seconds:>12,.1f}" for seconds in (self.min_s, self.median_s, self.max_s))
        result = f"wrong on {self.wrong} ranks" if self.wrong else "ok"
        return f"{self.operation:<15}{self.size:>13,}{times}{self.algbw:>9.3f}{self.busbw:>9.3f}  {result}"


HEADING = f"{'operation':<15}{'bytes':>13}{'min us':>12}{'median us':>12}{'max us':>12}{'algbw':>9}{'busbw':>9}  (GB/s)"


def measure(operation: str, size: int, world: World, budget_s: float) -> Figure:
    """Measures an operation. Called by all ranks, which get the same result. budget_s: approximate time in seconds."""
    case = make_case(operation, size, world)
    seconds = seconds_of(case.call, world, budget_s)
    for tensor, value in case.fill:
        tensor.copy_(torch.as_tensor(value, device=world.device))
    case.call()
    is_correct = all(bool((tensor == value).all()) for tensor, value in case.expected)
    times = (min(seconds), statistics.median(seconds), max(seconds))
    used = used_bytes(operation, size, world.size)
    return Figure(operation, world.size, used, *times, len(wrong_ranks(is_correct, world)))


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
    longer = max(1.0, budget_s / (MOST_BATCHES * A_BATCH_S))
    repeated = max(1, int(longer * min(MOST_REPEATED, A_BATCH_S / once)))
    batches = max(LEAST_BATCHES, min(MOST_BATCHES, int(budget_s / (repeated * once))))
    return slowest([batch(repeated) for _ in range(batches)])


def synchronize(world: World) -> None:
    """Waits until this rank's GPU has completed its queued work."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def wrong_ranks(is_correct: bool, world: World) -> list[int]:
    """The ranks on which ``is_correct`` is False. Called by all ranks, which get the same result."""
    wrong = torch.zeros(world.size, dtype=torch.int32, device=world.device)
    wrong[world.rank] = not is_correct
    dist.all_reduce(wrong)
    return [rank for rank, found in enumerate(wrong.tolist()) if found]
