"""Bandwidth of messages between ranks: the operations, their timing, and algbw and busbw as defined by nccl-tests (doc/PERFORMANCE.md)."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp

from recipes.core import outliers
from recipes.core.train.world import World

WARM_UP = 2
A_BATCH_S = 0.02  # repetitions are timed in batches, so that the cost of synchronising the ranks is negligible
MOST_REPEATED, MOST_BATCHES, LEAST_BATCHES = 1000, 50, 3
WIDEST = 16  # maximum number of columns of a table
SHARE = 0.5  # maximum share of the free memory that the timed arrays use
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


def shown_size(size: int) -> str:
    """A size in bytes as a short text: 16M means 16 · 2^20 bytes."""
    for unit, power in (("G", 30), ("M", 20), ("K", 10)):
        if size >= 1 << power and size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)


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


def that_fit(sizes: Sequence[int], world: World, say: Callable[[str], None]) -> list[int]:
    """The sizes for which two arrays per rank fit into the free memory of the node that has the least. Logs how many do not fit.

    Called by all ranks.
    """
    if world.device.type == "cuda":
        room = torch.cuda.mem_get_info(world.device)[0] * SHARE
    else:
        room = free_memory() * SHARE / world.ranks.local_world_size
    least = torch.tensor([room], dtype=torch.float64, device=world.device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    fitting = [size for size in sizes if 2 * size <= float(least)]
    if left := [size for size in sizes if size not in fitting]:
        room_gb = float(least) / 1e9
        say(
            f"{len(left)} sizes of at least {min(left):,} bytes are left out: two arrays must fit into {room_gb:.1f} GB per rank"
        )
    return fitting


def free_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process can allocate: Linux's estimate for the machine, or the limit of its cgroups.

    root: the folder that contains ``proc`` and ``sys``.
    """
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    room = [next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))]
    groups = root / "proc/self/cgroup"
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":  # cgroup version 2 has a single tree
            tree, limit = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            tree, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = tree / path.lstrip("/")
        for place in (folder, *folder.parents):  # the limit of a parent group applies to its child groups too
            with contextlib.suppress(OSError, ValueError):  # no limit
                room.append(int((place / limit).read_text()))
    return min(room)


def best(found: Iterable[Figure]) -> dict[str, float]:
    """The highest busbw of each operation, in GB/s."""
    fastest: dict[str, float] = {}
    for figure in found:
        fastest[figure.operation] = round(max(figure.busbw, fastest.get(figure.operation, 0.0)), 4)
    return fastest


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of ``count`` members once, in rounds in which no member occurs twice (round-robin by the circle method)."""
    seats = list(range(count)) + ([-1] if count % 2 else [])
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def first_ranks(world: World) -> list[int]:
    """The first rank of each node; all ranks if there is only one node."""
    if world.ranks.num_nodes == 1:
        return list(range(world.size))
    return [rank for rank, host in enumerate(world.hosts) if host not in world.hosts[:rank]]


def every_pair(world: World, members: Sequence[int], size: int, budget_s: float) -> Tensor:
    """Bytes per second in each direction between each pair of the ranks ``members``: (m, m), NaN on the diagonal.

    Pairs that have no rank in common are measured at the same time. Called by all ranks, which get the same result.
    """
    found: dict[tuple[int, int], float] = {}
    for pairs in rounds(len(members)):
        for one, other in pairs:
            if world.rank in (members[one], members[other]):
                peer = members[other] if world.rank == members[one] else members[one]
                found[one, other] = exchange(world, peer, size, budget_s)
        dist.barrier()
    of_all_ranks: list[Any] = [None] * world.size
    dist.all_gather_object(of_all_ranks, found)
    whole = torch.full((len(members), len(members)), float("nan"), dtype=torch.float64)
    for rank in members:
        for (one, other), value in of_all_ranks[rank].items():
            if rank == members[one]:  # use the clock of only one rank of each pair
                whole[one, other] = whole[other, one] = value
    return whole


def pair_lines(found: Tensor, names: Sequence[str]) -> list[str]:
    """Lines for the matrix (m, m) in GB/s: a table if it is not too wide, the median, and the slow nodes and pairs."""
    rows: list[list[float]] = found.tolist()
    lines = []
    if len(names) <= WIDEST:
        width = max(7, *(len(name) + 2 for name in names))
        lines = ["".join(f"{name:>{width}}" for name in ("GB/s", *names))]
        for name, row in zip(names, rows, strict=True):
            lines.append(f"{name:>{width}}" + "".join(f"{'-' if v != v else f'{v:.3f}':>{width}}" for v in row))
    slow = outliers.slow(
        {(names[i], names[j]): rows[i][j] for i in range(len(names)) for j in range(i + 1, len(names))}
    )
    lines.append(f"median {slow.median:.3f} GB/s each way")
    lines += [f"{name} is slow: {value:.3f} GB/s, the median of its pairs" for name, value in slow.nodes.items()]
    lines += [f"{one} and {other} are slow: {value:.3f} GB/s" for (one, other), value in slow.pairs.items()]
    return lines


def exchange(world: World, peer: int, size: int, budget_s: float) -> float:
    """Median bytes per second between this rank and ``peer``, in both directions at once. Only these two ranks call it."""
    data, received = (torch.zeros(size, dtype=torch.uint8, device=world.device) for _ in range(2))

    def both_ways() -> float:
        begin = time.perf_counter()
        _ring(data, received, peer, peer)
        synchronize(world)
        return time.perf_counter() - begin

    once = min(both_ways() for _ in range(WARM_UP))  # the first one also opens the connection
    count = torch.tensor([max(3, min(100, int(budget_s / once)))], device=world.device)
    if world.rank < peer:  # the lower rank decides how often both repeat
        dist.send(count, peer)
    else:
        dist.recv(count, peer)
    return size / statistics.median(both_ways() for _ in range(int(count)))
