"""How fast messages pass between ranks: what is timed, how, and algbw and busbw as nccl-tests gives them (its doc/PERFORMANCE.md)."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp

from recipes.core import outliers
from recipes.core.train.distributed import World

WARM_UP = 2
A_BATCH_S = 0.02  # repetitions are timed together, so that starting the clock on all ranks weighs nothing
MOST_REPEATED, MOST_BATCHES, LEAST_BATCHES = 1000, 50, 3
WIDEST = 16  # names beside each other in a table
SHARE = 0.5  # of the memory that is free, the most that is taken for what is timed
# What a link carries, over what an operation is given: busbw is the same for all operations and any number of ranks, if the
# hardware is all that limits them.
FACTORS: Mapping[str, Callable[[int], float]] = {
    "send_recv": lambda ranks: 1.0,
    "broadcast": lambda ranks: 1.0,
    "reduce": lambda ranks: 1.0,
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "gather": lambda ranks: (ranks - 1) / ranks,
    "scatter": lambda ranks: (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
}
# Of these each rank holds the whole array; of the others it is cut into ranks' parts.
WHOLE = ("send_recv", "broadcast", "reduce", "all_reduce")
Filled = tuple[tuple[Tensor, Tensor | float], ...]


@dataclass(frozen=True)
class Case:
    """One operation in one form: with a result of its own, or in place of what was given.

    fill: tensors and what is put into them, in this order. right: tensors and what they then hold, on this rank.
    """

    form: str
    call: Callable[[], object]
    fill: Filled
    right: Filled


def cases(operation: str, size: int, world: World) -> Iterator[Case]:
    """The forms that torch has of an operation on ``size`` bytes of float32, which is cut into ranks' parts of whole 16 bytes.

    None where no part is left. Each rank gives its number from 1 on; to what is summed `addend` of it, so that sums stay exact.
    """
    n, rank = world.size, world.rank
    count = used_bytes(operation, size, n) // 4 // (1 if operation in WHOLE else n)
    if not count:
        return
    ranks = torch.arange(1.0, n + 1, device=world.device)[:, None]
    mine, addends = rank + 1.0, torch.tensor([addend(i) for i in range(n)], device=world.device)[:, None]
    total = sum(map(addend, range(n)))

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, count, device=world.device)

    own, in_place = "out of place", "in place"
    call: Callable[[], object]
    if operation == "send_recv":
        data, came = zeros(), zeros()
        call = partial(_ring, data, came, (rank + 1) % n, (rank - 1) % n)
        yield Case(own, call, ((data, mine),), ((came, (rank - 1) % n + 1.0),))
    elif operation == "broadcast":
        data = zeros()
        yield Case(in_place, partial(dist.broadcast, data, 0), ((data, mine),), ((data, 1.0),))
    elif operation == "reduce":
        data = zeros()
        yield Case(
            in_place, partial(dist.reduce, data, 0), ((data, addend(rank)),), ((data, total),) if rank == 0 else ()
        )
    elif operation == "all_reduce":
        data = zeros()
        yield Case(in_place, partial(dist.all_reduce, data), ((data, addend(rank)),), ((data, total),))
    elif operation == "gather":
        part, parts = zeros(), list(zeros(n)) if rank == 0 else None
        right = tuple((one, i + 1.0) for i, one in enumerate(parts or []))
        yield Case(own, partial(dist.gather, part, parts, 0), ((part, mine),), right)
    elif operation == "scatter":
        part, parts = zeros(), list(zeros(n)) if rank == 0 else None
        fill = tuple((one, i + 1.0) for i, one in enumerate(parts or []))
        yield Case(own, partial(dist.scatter, part, parts, 0), fill, ((part, mine),))
    elif operation == "all_gather":
        whole = zeros(n)
        for form, part in ((own, zeros()), (in_place, whole[rank])):
            call = partial(dist.all_gather_into_tensor, whole.view(-1), part)
            yield Case(form, call, ((whole, 0.0), (part, mine)), ((whole, ranks),))
    elif operation == "reduce_scatter":
        whole = zeros(n)
        for form, part in ((own, zeros()), (in_place, whole[rank])):
            call = partial(dist.reduce_scatter_tensor, part, whole.view(-1))
            yield Case(form, call, ((whole, addends * addend(rank)),), ((part, total * addend(rank)),))
    elif operation == "all_to_all":
        whole, came = zeros(n), zeros(n)
        yield Case(
            own,
            partial(dist.all_to_all_single, came.view(-1), whole.view(-1)),
            ((whole, ranks * mine),),
            ((came, ranks * mine),),
        )
    else:
        raise ValueError(f"no operation {operation!r}")


def used_bytes(operation: str, size: int, ranks: int) -> int:
    """Bytes of ``size`` that an operation is timed with: whole numbers of float32, or ranks' parts of whole 16 bytes."""
    return size // 4 * 4 if operation in WHOLE else size // (16 * ranks) * 16 * ranks


def addend(rank: int) -> float:
    """What a rank gives to a sum. Small: float32 is exact up to 2^24, which ranks' own numbers pass from some hundred ranks on."""
    return rank % 13 + 1.0


def _ring(data: Tensor, came: Tensor, to: int, of: int) -> None:
    for work in dist.batch_isend_irecv([P2POp(dist.isend, data, to), P2POp(dist.irecv, came, of)]):
        work.wait()


@dataclass(frozen=True)
class Figure:
    """One operation at one size. size: bytes of the whole array. Seconds are the slowest rank's, over batches of repetitions.

    wrong: how many ranks had a wrong answer.
    """

    operation: str
    form: str
    ranks: int
    size: int
    min_s: float
    median_s: float
    max_s: float
    wrong: int

    @property
    def algbw(self) -> float:
        """1e9 bytes a second, by the median."""
        return self.size / self.median_s / 1e9

    @property
    def busbw(self) -> float:
        """1e9 bytes a second, by the median."""
        return self.algbw * FACTORS[self.operation](self.ranks)

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "algbw": self.algbw, "busbw": self.busbw}

    def line(self) -> str:
        times = "".join(f"{1e6 * seconds:>12,.1f}" for seconds in (self.min_s, self.median_s, self.max_s))
        told = f"{self.wrong} wrong" if self.wrong else "right"
        return f"{self.operation:<15}{self.form:<13}{self.size:>13,}{times}{self.algbw:>9.3f}{self.busbw:>9.3f}  {told}"


HEADING = f"{'operation':<15}{'form':<13}{'bytes':>13}{'min us':>12}{'median us':>12}{'max us':>12}{'algbw':>9}{'busbw':>9}  (GB/s)"


def measure(operation: str, size: int, world: World, budget_s: float) -> list[Figure]:
    """The figures of each form of an operation. Called by all ranks, which get the same. budget_s: of each, about."""
    found = []
    used = used_bytes(operation, size, world.size)
    for case in cases(operation, size, world):
        seconds = seconds_of(case.call, world, budget_s)
        for tensor, value in case.fill:
            tensor.copy_(torch.as_tensor(value, device=world.device))
        case.call()
        right = all(bool((tensor == value).all()) for tensor, value in case.right)
        times = (min(seconds), statistics.median(seconds), max(seconds))
        found.append(Figure(operation, case.form, world.size, used, *times, len(wrong_ranks(right, world))))
    return found


def seconds_of(call: Callable[[], object], world: World, budget_s: float) -> list[float]:
    """Seconds of one ``call``, several times over: each the mean of a batch of repetitions, on the rank that was slowest.

    Called by all ranks, which get the same. budget_s: of all of it, about.
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
    """16M is 16 · 2^20 bytes."""
    for unit, power in (("G", 30), ("M", 20), ("K", 10)):
        if size >= 1 << power and size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)


def synchronize(world: World) -> None:
    """Until this rank's GPU has done what it was given."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def wrong_ranks(right: bool, world: World) -> list[int]:
    """The ranks on which ``right`` is not so; called by all ranks, which get the same."""
    wrong = torch.zeros(world.size, dtype=torch.int32, device=world.device)
    wrong[world.rank] = not right
    dist.all_reduce(wrong)
    return [rank for rank, found in enumerate(wrong.tolist()) if found]


def that_fit(sizes: Sequence[int], world: World, say: Callable[[str], None]) -> list[int]:
    """The sizes of which two arrays a rank fit into the memory that is free, on the node that has least; tells of the others."""
    if world.device.type == "cuda":
        room = torch.cuda.mem_get_info(world.device)[0] * SHARE
    else:
        room = free_memory() * SHARE / world.ranks.local_world_size
    least = torch.tensor([room], dtype=torch.float64, device=world.device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    fitting = [size for size in sizes if 2 * size <= float(least)]
    if left := [size for size in sizes if size not in fitting]:
        say(
            f"{len(left)} sizes from {min(left):,} bytes on are left out: a rank has {float(least) / 1e9:.1f} GB for two arrays"
        )
    return fitting


def free_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process could take: Linux's estimate of the machine's, or what its cgroups leave of a job's share.

    root: where ``proc`` and ``sys`` are.
    """
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    left = [next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))]
    groups = root / "proc/self/cgroup"
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.exists() else ():
        number, controllers, path = line.split(":", 2)
        alone = number == "0"  # version 2 has one tree
        if not alone and "memory" not in controllers.split(","):
            continue
        tree = root / "sys/fs/cgroup" / ("" if alone else "memory")
        folder = tree / path.lstrip("/")
        limit, used, of_all = ("max", "current", "") if alone else ("limit_in_bytes", "usage_in_bytes", "total_")
        for place in (folder, *folder.parents):  # a group has no more than those that it is in
            with contextlib.suppress(OSError, ValueError):
                most, taken = (int((place / f"memory.{name}").read_text()) for name in (limit, used))
                stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                cached = sum(int(stat.get(f"{of_all}{name}", 0)) for name in ("active_file", "inactive_file"))
                left.append(most - taken + cached)
            if place == tree:
                break
    return max(0, min(left))


def best(found: Iterable[Figure]) -> dict[str, float]:
    """The highest busbw of each operation, in GB/s."""
    fastest: dict[str, float] = {}
    for figure in found:
        fastest[figure.operation] = round(max(figure.busbw, fastest.get(figure.operation, 0.0)), 4)
    return fastest


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of ``count`` once, in rounds in which nobody stands twice: a tournament, by the circle method."""
    seats = list(range(count)) + ([-1] if count % 2 else [])
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def first_ranks(world: World) -> list[int]:
    """The first rank of each node; all ranks where there is one node."""
    if world.ranks.num_nodes == 1:
        return list(range(world.size))
    return [rank for rank, host in enumerate(world.hosts) if host not in world.hosts[:rank]]


def every_pair(world: World, members: Sequence[int], size: int, budget_s: float) -> Tensor:
    """Bytes a second each way between every two of the ranks ``members``, (m, m), NaN with themselves; on all ranks.

    As many pairs at a time as do not meet. Called by all ranks.
    """
    found: dict[tuple[int, int], float] = {}
    for pairs in rounds(len(members)):
        for one, other in pairs:
            if world.rank in (members[one], members[other]):
                peer = members[other] if world.rank == members[one] else members[one]
                found[one, other] = exchange(world, peer, size, budget_s)
        dist.barrier()
    everybodys: list[Any] = [None] * world.size
    dist.all_gather_object(everybodys, found)
    whole = torch.full((len(members), len(members)), float("nan"), dtype=torch.float64)
    for rank in members:
        for (one, other), value in everybodys[rank].items():
            if rank == members[one]:  # one clock a pair
                whole[one, other] = whole[other, one] = value
    return whole


def pair_lines(found: Tensor, names: Sequence[str]) -> list[str]:
    """The matrix (m, m) in GB/s as a table, where it is not too wide, and which node or pair is slow."""
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
    """Bytes a second, each way at once, between this rank and ``peer``: the median. The two call it, and nobody else."""
    data, came = (torch.zeros(size, dtype=torch.uint8, device=world.device) for _ in range(2))

    def both_ways() -> float:
        begin = time.perf_counter()
        _ring(data, came, peer, peer)
        synchronize(world)
        return time.perf_counter() - begin

    once = min(both_ways() for _ in range(WARM_UP))  # the first one connects, too
    count = torch.tensor([max(3, min(100, int(budget_s / once)))], device=world.device)
    if world.rank < peer:  # both repeat as often as the lower one says
        dist.send(count, peer)
    else:
        dist.recv(count, peer)
    return size / statistics.median(both_ways() for _ in range(int(count)))
