"""`recipes.collectives`' figure of all_reduce beside raw TCP, and `World.parallel` beside an
all_reduce a tensor; two ranks, gloo.

``python -m tests.benchmarks.bench_collectives OUT ROUNDS`` is one of the two ranks that `figures`
starts.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn

from recipes import collectives
from recipes.core.run import entry
from recipes.core.train.rendezvous import process_group
from recipes.core.train.world import World
from tests.benchmarks.measure import FULL, Figure, Size, interleaved, two_ranks

LARGE = 64 << 20  # bytes
SECONDS = 0.3  # of a measurement, about
ROUNDS = 3  # for each round of another benchmark: here two ranks and the kernel share the cores


def figures(size: Size) -> list[Figure]:
    values = two_ranks(__name__, ROUNDS * size.rounds if size == FULL else 1)
    return [
        Figure(
            "collectives, all_reduce",
            "GB/s",
            "busbw of 64 MB, gloo",
            "raw TCP, one way",
            ">= 0.45",
            values["all_reduce"],
            values["tcp"],
            "two ranks, loopback",
            ratio_of="pairs",
        ),
        Figure(
            "collectives, gradients",
            "GB/s",
            "ResNet-50's, averaged by World.parallel",
            "one tensor after another",
            ">= 2.5",
            values["parallel"],
            values["tensors"],
            "two ranks, loopback, gloo",
            ratio_of="pairs",
        ),
    ]


def rank_main(out: Path, rounds: int) -> None:
    start = entry.begin("mnist", ["device=cpu"])
    torch.set_num_threads(1)
    with process_group(start, torch.device("cpu")) as world:
        values = interleaved(rounds, sides(world))
        if world.rank == 0:
            out.write_text(json.dumps(values))
        dist.barrier()


def sides(world: World) -> dict[str, Callable[[], float]]:
    """GB/s of each, timed by the code of `recipes.collectives`; called by both ranks."""
    connection = connect(world.rank)
    weights = Weights()
    parallel = world.parallel(weights)
    total = sum(p.nbytes for p in weights.parameters())

    def in_buckets() -> None:
        weights.zero_grad()
        parallel().backward()

    def one_by_one() -> None:
        weights.zero_grad()
        weights().backward()
        for p in weights.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= world.size

    def gb_per_s(count: int, call: Callable[[], object]) -> float:
        return count / statistics.median(collectives.seconds_of(call, world, SECONDS)) / 1e9

    return {
        "tcp": lambda: gb_per_s(LARGE, lambda: one_way(connection, world.rank)),
        "all_reduce": lambda: collectives.measure("all_reduce", LARGE, world, SECONDS)[2],
        "tensors": lambda: gb_per_s(total, one_by_one),
        "parallel": lambda: gb_per_s(total, in_buckets),
    }


class Weights(nn.Module):
    """ResNet-50's parameters, and a loss with gradients that cost little to compute: ones."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torchvision.models.resnet50(weights=None).parameters())

    def forward(self) -> Tensor:
        return torch.stack([p.sum() for p in self.all]).sum()


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
    """`LARGE` bytes from rank 0 to rank 1, and a byte back when they have arrived."""
    if rank == 0:
        connection.sendall(BUFFER)
        connection.recv(1)
        return
    arrived = 0
    while arrived < LARGE:
        arrived += connection.recv_into(BUFFER[arrived:])
    connection.sendall(b".")


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), int(sys.argv[2]))
