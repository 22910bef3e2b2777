"""One node's part of the doctor's bandwidth test: an all_reduce over one rank of each node, and
exchanges between pairs of nodes.

It repeats both with each GPU of the nodes in turn, since each may have its own way to the network.

``python -m recipes.core.doctor.linkcheck JSON``, with the arguments of `main` as a JSON object. It
prints a line of JSON after each step, so that the doctor knows where it hangs. It does not measure
as `recipes.collectives` does, which needs the World of a training run, and collectives to agree on
repetitions; this test sends as little as possible over a network that may be broken.
"""

import datetime
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from recipes.core.errors import one_line

SIZE = 16 << 20  # bytes in each direction of a pair, and of the all_reduce
TRIES = 5


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def main(
    backend: str,
    nodes: list[int],
    rank: int,
    gpus: int,
    host: str,
    port: int,
    listener: int | None,
    timeout_s: float,
) -> None:
    """nodes: node_rank of each rank. gpus: number of GPUs to test on each node (the smallest number
    of all nodes), or 1 on CPUs. host, port: of rank 0. listener: rank 0's listening socket, None on
    others.
    """
    size = len(nodes)
    timeout = datetime.timedelta(seconds=timeout_s)
    half_time = time.monotonic() + timeout_s / 2
    store = dist.TCPStore(
        host,
        port,
        size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    say(at="the creation of the process group")
    for gpu in range(gpus):
        device = torch.device("cpu")
        of_gpu = f" with GPU {gpu} of each node" if gpus > 1 else ""
        if backend == "nccl":
            device = torch.device("cuda", gpu)
            torch.cuda.set_device(device)
        late = torch.tensor([time.monotonic() > half_time], dtype=torch.int32, device=device)
        dist.all_reduce(late)
        if gpu and int(late):
            break  # a job so large that there is no time for all GPUs
        say(at=f"the first collective{of_gpu}")
        seconds, is_correct = all_reduce(device, rank, size)
        say(
            at=f"an all_reduce{of_gpu}",
            busbw=SIZE / seconds * 2 * (size - 1) / size / 1e9,
            correct=is_correct,
        )
        for mask in masks(size):
            pair(nodes, rank, mask, device, gpu)
            say(at=f"the exchange between nodes {mask} apart in the list of nodes{of_gpu}")
            dist.barrier()
    say(at="the end", ended=True)
    dist.barrier()
    if rank == 0:
        time.sleep(0.5)  # the store ends with this rank
    os._exit(0)  # destroying a group that has lost a rank may never return


def all_reduce(device: torch.device, rank: int, size: int) -> tuple[float, bool]:
    """The shortest time of several, in seconds, and whether the sum is correct. A collective."""
    data = torch.zeros(SIZE // 4, device=device)
    taken = []
    for _ in range(TRIES):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(data)
        synchronize(device)
        taken.append(time.perf_counter() - begin)
    data.fill_(rank % 13 + 1)  # small, so that float32 holds the sum of any number of ranks
    dist.all_reduce(data)
    return min(taken), bool((data == sum(other % 13 + 1 for other in range(size))).all())


def masks(count: int) -> list[int]:
    """The masks of the rounds: in each, i and i ^ mask are partners. At most four, in a job of any
    size.

    The highest bit is always included, so that each node has a partner in some round.
    """
    bits = max(0, count - 1).bit_length()
    return sorted({1 << bit for bit in (0, 1, bits // 2, bits - 1) if 0 <= bit < bits})


def pair(nodes: list[int], rank: int, mask: int, device: torch.device, gpu: int) -> None:
    """Exchanges data with the partner of this round, in both directions at once. The lower rank
    prints the bandwidth.
    """
    if (peer := rank ^ mask) >= len(nodes):
        return
    data, received = (torch.zeros(SIZE, dtype=torch.uint8, device=device) for _ in range(2))
    taken = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, data, peer), dist.P2POp(dist.irecv, received, peer)]
        )
        for work in works:
            work.wait()
        synchronize(device)
        taken.append(time.perf_counter() - begin)
    if rank < peer:
        say(pair=[nodes[rank], nodes[peer], gpu, SIZE / min(taken) / 1e9])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    try:
        main(**json.loads(sys.argv[1]))
    except Exception as error:
        say(error=one_line(error))
        os._exit(1)
