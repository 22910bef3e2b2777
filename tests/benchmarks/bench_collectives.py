"""all_reduce over loopback beside raw TCP, and a model's gradients in buckets beside one by one; two ranks, gloo.

``python -m tests.benchmarks.bench_collectives OUT ROUNDS`` is one of the two ranks that `figures` starts.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision

from recipes.core import entry, local
from recipes.core.bandwidth import FACTORS
from recipes.core.dist import process_group
from recipes.core.local import Layout
from recipes.core.rundir import MachineError
from tests.benchmarks.measure import Figure, Size, interleaved
from tests.helpers import ROOT, clean_environment

LARGE = 64 << 20  # bytes
BUCKET = 25 << 20  # DistributedDataParallel's
EACH = 3  # of a round: the best counts
ROUNDS = 3  # times as many as of other benchmarks: here two ranks and the kernel share what cores there are


def figures(size: Size) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "values.json")
        status = local.run(
            [sys.executable, "-m", __name__, str(out), str(ROUNDS * size.rounds)],
            Layout((2,)),
            None,
            ROOT,
            clean_environment(),
        )
        if status:
            raise MachineError(f"collectives: ended with status {status}; the lines above say why")
        values = json.loads(out.read_text())
    return [
        Figure("collectives, all_reduce", "GB/s", "busbw of 64 MB in DDP's buckets, gloo", "raw TCP, one way", ">= 0.45", values["all_reduce"], values["tcp"],
               "two ranks, loopback", ratio_of="pairs"),
        Figure("collectives, buckets", "GB/s", "ResNet-50's gradients in buckets of 25 MB", "one tensor after another", ">= 2.5",
               values["buckets"], values["tensors"], "two ranks, loopback, gloo", ratio_of="pairs"),
    ]  # fmt: skip


def rank_main(out: Path, rounds: int) -> None:
    start = entry.begin("mnist", ["device=cpu"])
    with process_group(start, torch.device("cpu")) as world:
        values = interleaved(rounds, sides(world.rank))
        if world.rank == 0:
            out.write_text(json.dumps(values))
        dist.barrier()


def sides(rank: int) -> dict[str, Callable[[], float]]:
    """GB/s of each; called by both ranks."""
    connection = connect(rank)
    data = torch.zeros(LARGE // 4)
    gradients = [torch.zeros(p.numel()) for p in torchvision.models.resnet50(weights=None).parameters()]
    total = sum(g.nbytes for g in gradients)
    flat = torch.zeros(total // 4)
    return {
        "tcp": lambda: LARGE / timed(lambda: one_way(connection, rank)) / 1e9,
        "all_reduce": lambda: LARGE * FACTORS["all_reduce"](2) / timed(lambda: in_flight(data)) / 1e9,
        "tensors": lambda: total / timed(lambda: [dist.all_reduce(one) for one in gradients]) / 1e9,
        "buckets": lambda: total / timed(lambda: [dist.all_reduce(one) for one in flat.split(BUCKET // 4)]) / 1e9,
    }


def in_flight(data: torch.Tensor) -> None:
    """One array, as DDP sends gradients: in buckets, each begun without waiting for the one before."""
    for work in [dist.all_reduce(part, async_op=True) for part in data.split(BUCKET // 4)]:
        assert work
        work.wait()


def timed(work: Callable[[], object]) -> float:
    """Seconds, of the slower rank, of the best of a few."""
    taken = []
    for _ in range(EACH):
        dist.barrier()
        begin = time.perf_counter()
        work()
        seconds = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        taken.append(float(seconds))
    return min(taken)


def connect(rank: int) -> socket.socket:
    """A TCP connection between the two ranks, over loopback as gloo's."""
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port[0] = listener.getsockname()[1]
            dist.broadcast(port, 0)
            return listener.accept()[0]
    dist.broadcast(port, 0)
    return socket.create_connection(("127.0.0.1", int(port)))


BUFFER = memoryview(bytearray(LARGE))  # as large as what is reduced: from memory to memory


def one_way(connection: socket.socket, rank: int) -> None:
    """`LARGE` bytes from rank 0 to rank 1, and a byte back when they are there."""
    if rank == 0:
        connection.sendall(BUFFER)
        connection.recv(1)
        return
    there = 0
    while there < LARGE:
        there += connection.recv_into(BUFFER[there:])
    connection.sendall(b".")


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), int(sys.argv[2]))
