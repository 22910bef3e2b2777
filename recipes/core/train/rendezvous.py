"""How the ranks meet: the store that they share, what each tells the others, the process group."""

import contextlib
import datetime
import os
import socket
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from recipes.core import files
from recipes.core.errors import MachineError, shown
from recipes.core.place.keepalive import NodeLinks
from recipes.core.place.ranks import RankInfo
from recipes.core.run import attempt as attempts, entry, watchdog
from recipes.core.train.device import check_mig, choose_backend, take_gpu
from recipes.core.train.torch_errors import is_port_in_use, peer_text
from recipes.core.train.world import TEARDOWN_S, TORCH_TIMEOUT, World
from recipes.core.slurm import environment

# the other ranks wait less than rank 0 by this, but at least this share
EARLIER_S = 10.0
SHARE_EARLIER = 0.75


@contextlib.contextmanager
def process_group(start: entry.Start, device: torch.device) -> Iterator[World]:
    """The process group of all ranks, destroyed within `TEARDOWN_S`. Raises MachineError if they do
    not meet within ``timeout_s``.
    """
    info = start.ranks
    run = start.settings.run
    backend = choose_backend(run.backend, device)
    if device.type == "cuda":
        take_gpu(device)
    if backend == "nccl":
        check_mig(info, os.environ, torch.cuda.nccl.version())
    clock = start.pulse.clock
    host = _host_of_rank_0(info, run.timeout_s, clock)
    store = _meet(info, host, backend, run.timeout_s)
    hosts = _exchange_hosts(store, info, run.timeout_s, clock)
    links = _link_nodes(store, info, host)
    start.pulse.beat(watchdog.START)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=TORCH_TIMEOUT,
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        problem = f"cannot join the process group of {info.world_size} ranks ({peer_text(error)})"
        raise MachineError(f"{hosts[info.rank]}: rank {info.rank} {problem}") from None
    try:
        world = World(info, device, backend, hosts, store, run.timeout_s, start.pulse, links)
        with world.telling_pulses():
            yield world
    finally:
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(TEARDOWN_S)


def _host_of_rank_0(info: RankInfo, timeout_s: float, clock: watchdog.RunningClock) -> str:
    """The address of rank 0. Raises MachineError.

    With a topology plugin, Slurm 26.05 orders the tasks by the topology, and its list of nodes by
    their names. So rank 0 may not be on the first node of the list. It writes its host into the
    folder of the attempt that the batch script has opened.
    """
    if (
        environment.orders_by_name(os.environ)
        or info.num_nodes == 1
        or info.master_addr not in info.nodes[:1]
        or "MASTER_ADDR" in os.environ
    ):
        return info.master_addr
    attempt = attempts.given(os.environ)
    node = info.nodes[info.node_rank]
    if not attempt:
        if info.rank == 0 and info.node_rank:
            fix = (
                f"give srun the option -m plane={info.local_world_size}, or set MASTER_ADDR={node}"
            )
            raise MachineError(f"{node}: has rank 0, but is not the first node of this job: {fix}")
        return info.master_addr

    path = attempt.folder / f"rank0-{environment.step_id(os.environ)}.json"
    if info.rank == 0:
        files.write_json(path, {"host": node})
        return node
    end = clock.now() + timeout_s
    while not (content := files.read_json(path)):
        if clock.now() > end:
            raise MachineError(
                f"{node}: did not see {path}, which rank 0 writes, "
                f"within {timeout_s:g} s (timeout_s): give a run_dir that all nodes share"
            )
        time.sleep(0.2)
    return str(content["host"])


def _meet(info: RankInfo, host: str, backend: str, timeout_s: float) -> dist.Store:
    """Connects to the store that all ranks of this attempt share. host: of rank 0."""
    if info.world_size == 1:
        return dist.HashStore()
    here = socket.gethostname()
    # torchrun's agent already serves the store at that port, and keeps it for every restart of its
    # ranks.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = os.environ.pop("RECIPES_LISTEN_FD", None)
    # A rank that cannot reach rank 0 knows the reason. It reports the reason before rank 0 times
    # out and ends the others.
    if info.rank:
        timeout_s = max(timeout_s - EARLIER_S, SHARE_EARLIER * timeout_s)
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        # TCPStore would repeat it until its timeout, which only helps if the name server is busy.
        if error.errno != socket.EAI_AGAIN:
            problem = f"cannot resolve {host}, the host of rank 0 ({error.strerror})"
            fix = "set MASTER_ADDR to the IP address of that host"
            raise MachineError(f"{here}: {problem}: {fix}") from None

    try:
        store: dist.Store = dist.TCPStore(
            host,
            info.master_port,
            info.world_size,
            is_master=info.rank == 0 and not served,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=int(listener) if listener else None,
        )
    except RuntimeError as error:
        why = str(error).strip().split("\n")[0]
        problem = f"rank {info.rank} cannot reach rank 0 at {host}:{info.master_port} ({why})"
        problem += ": check MASTER_ADDR and that rank 0 is running"
        if is_port_in_use(error):
            problem = f"port {info.master_port} is in use; set MASTER_PORT to another for all ranks"
        raise MachineError(f"{here}: {problem}") from None
    # A rank of another job with the same port and node, or with another backend, finds no keys here
    # and reports that.
    job = (info.run_id or "").partition(".")[0]
    store = dist.PrefixStore(f"{job}-attempt-{info.restart_count}-{backend}", store)
    store.set_timeout(TORCH_TIMEOUT)
    return store


def _link_nodes(store: dist.Store, info: RankInfo, host: str) -> NodeLinks:
    """Connects one rank of each node with rank 0. host: of rank 0."""
    links = NodeLinks()
    if info.num_nodes > 1 and info.rank == 0:
        store.set("links", str(links.listen(info.world_size)))
    elif info.num_nodes > 1 and info.local_rank == 0:
        links.connect(host, int(store.get("links")), info.rank)
    return links


def _exchange_hosts(
    store: dist.Store, info: RankInfo, timeout_s: float, clock: watchdog.RunningClock
) -> tuple[str, ...]:
    """The host name of each rank. Raises MachineError if a rank does not arrive within
    ``timeout_s``.
    """
    store.set(f"host/{info.rank}", socket.gethostname())
    names = [f"host/{rank}" for rank in range(info.world_size)]
    store.add("connected", 1)
    end = clock.now() + timeout_s
    pause_s = 0.01
    # not wait(), since torch logs a warning for each that times out
    while store.add("connected", 0) < info.world_size:
        if clock.now() > end:
            missing = [str(i) for i, name in enumerate(names) if not store.check([name])]
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            late = f"rank {', '.join(missing[:8])}{more} of {info.world_size} did not connect"
            limit = f"within {timeout_s:g} s (timeout_s)"
            raise MachineError(f"{socket.gethostname()}: {late} {limit}")
        time.sleep(pause_s)
        pause_s = min(1.0, 2 * pause_s)
    return tuple(shown(text.decode(errors="replace")) for text in store.multi_get(names))
