"""The place of this process among all processes of a run. `detect` is a pure function from an environment to a RankInfo."""

from __future__ import annotations

import ipaddress
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from recipes.core.place.hostlist import HostListError, expand, expand_counts

Environ = Mapping[str, str]


class RankError(ValueError):
    """The environment is contradictory or incomplete. The message is one line with the variable, its value and the fix."""


@dataclass(frozen=True)
class RankInfo:
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int  # number of ranks on this node; nodes may have different numbers
    num_nodes: int
    master_addr: str  # "" for one process that needs no rendezvous
    master_port: int  # 0 for one process that needs no rendezvous
    launcher: str  # "env", "slurm", "openmpi", "pmi" or "single"
    nodes: tuple[str, ...]  # host names in order of node_rank; () if unknown
    in_slurm: bool  # inside a Slurm job, with any launcher
    run_id: str | None  # "<job>" or "<array>_<task>", with ".<step>" for steps after the first; None outside Slurm
    restart_count: int  # number of earlier attempts of this job


@dataclass(frozen=True)
class _Layout:
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    num_nodes: int
    nodes: tuple[str, ...] = ()


_SINGLE = _Layout(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, num_nodes=1)

# Variables that mpirun sets: rank, size, and the pairs that may hold rank and size on the node.
# Open MPI: docs.open-mpi.org, "Environment variables set for MPI applications"; observed with 4.1.
# PMI: Hydra (MPICH 4.0, Intel MPI) sets MPI_LOCAL*, Cray PALS sets PMI_LOCAL_*.
_MPI = {
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        (("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),),
    ),
    "pmi": (
        "PMI_RANK",
        "PMI_SIZE",
        (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")),
    ),
}

# slurm.h: step ids from this value on are not steps of srun. The two ids in _BATCH_STEPS mean the batch script, since and before
# 20.11. Slurm up to 25.11 sets no step id in a batch script. Slurm 26.05 writes the ids as signed numbers: -5 in a batch script,
# -6 in the shell that salloc starts on a node.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
_BATCH_STEPS = (0xFFFFFFFB, 0xFFFFFFFE)

# The form that the resolver accepts. It raises for an empty label and for a longer one.
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")

_MEND_SLURM = "start the ranks with srun, and unset SLURM_* variables that an outer shell left"


def detect(environ: Environ) -> RankInfo:
    """This process's place in the run, from the environment only. Nothing else is read.

    The innermost launcher takes precedence:
    1. "env": RANK with WORLD_SIZE and LOCAL_RANK, as torchrun sets them, also inside a Slurm step. MASTER_ADDR and
       MASTER_PORT are required if WORLD_SIZE > 1. If GROUP_RANK is missing (variables set by hand) and the numbers equal
       those of the Slurm task, the layout is Slurm's. Otherwise it is equal nodes of LOCAL_WORLD_SIZE ranks, filled one
       after the other. LOCAL_WORLD_SIZE may be omitted if MASTER_ADDR is a loopback address (one node). Anything else is
       an error.
    2. "openmpi", "pmi": mpirun or mpiexec, unless its rank and size are those of the Slurm step (`srun --mpi=pmi2`).
       MPI gives no node number, so equal nodes that are filled one after the other are required. MASTER_ADDR is required
       if there are several nodes.
    3. "slurm": a task of srun. The step's variables take precedence over the job's. Nodes may have different numbers of
       tasks. With `-m arbitrary` on several nodes MASTER_ADDR is required, since no variable says where rank 0 is.
    4. "single": one process, also in the shell of salloc.

    A preset MASTER_ADDR or MASTER_PORT takes precedence, each separately. A world of one rank gets "" and 0 unless both
    are set.

    Raises RankError if variables are contradictory, malformed or missing, or in the batch shell without srun.
    """
    if "RANK" in environ:
        return _from_env(environ)
    for launcher, (rank, size, local) in _MPI.items():
        if rank in environ and not _is_slurm_task(environ, rank, size, local):
            return _from_mpi(environ, launcher)
    if in_step(environ):
        return _from_slurm(environ)
    return _alone(environ)


def port_for(job_id: int, step_id: int = 0, restart_count: int = 0) -> int:
    """A port from 10000 to 32767. This is below Linux's default ephemeral range, whose ports clients may already use.

    The formula is linear, so that jobs up to 270 ids apart, each with up to 21 steps and 4 attempts, never have the same port.
    """
    return 10_000 + (84 * job_id + 4 * step_id + restart_count) % 22_768


def _from_env(environ: Environ) -> RankInfo:
    world_size = _number(environ, "WORLD_SIZE", least=1, mend="set it beside RANK, or unset RANK")
    rank = _number(environ, "RANK", below=("WORLD_SIZE", world_size))
    if world_size > 1 or "LOCAL_RANK" in environ:
        local_rank = _number(environ, "LOCAL_RANK", mend="set it beside RANK: this rank's number on its node")
    else:
        local_rank = 0
    master_addr, master_port = _preset_addr(environ), _preset_port(environ)
    if world_size > 1:
        for name, value in (("MASTER_ADDR", master_addr), ("MASTER_PORT", master_port)):
            if not value:
                raise RankError(f"{name} is not set, but WORLD_SIZE={world_size}: set it to rank 0's, on every rank")
    layout = _env_layout(environ, rank, world_size, local_rank, master_addr)
    return _info(environ, "env", layout, master_addr, master_port)


def _env_layout(environ: Environ, rank: int, world_size: int, local_rank: int, master_addr: str) -> _Layout:
    local_names = (("LOCAL_RANK", "LOCAL_WORLD_SIZE"),)
    if "GROUP_RANK" not in environ and _is_slurm_task(environ, "RANK", "WORLD_SIZE", local_names):
        return _slurm_layout(environ)

    if world_size == 1 or "LOCAL_WORLD_SIZE" in environ:
        local_size = _number(environ, "LOCAL_WORLD_SIZE", default=1, least=1)
    elif _is_loopback(master_addr) and local_rank == rank:
        local_size = world_size
    else:
        raise RankError(
            f"LOCAL_WORLD_SIZE is not set, but RANK={rank} and WORLD_SIZE={world_size}: set it to the number of ranks "
            "on this node, or start with torchrun or srun"
        )
    if local_rank >= local_size:
        raise RankError(f"LOCAL_RANK={local_rank} must be below LOCAL_WORLD_SIZE={local_size}: mend one of them")

    if "GROUP_RANK" in environ:
        num_nodes = _group_world_size(environ, world_size, local_size)
        node_rank = _number(environ, "GROUP_RANK", below=("GROUP_WORLD_SIZE", num_nodes))
    else:
        mend = "set GROUP_RANK and GROUP_WORLD_SIZE: this node's number and the number of nodes"
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        node_rank, num_nodes = _equal_blocks(names, rank, local_rank, world_size, local_size, mend)
        _require_equal(environ, "GROUP_WORLD_SIZE", num_nodes)
    return _Layout(rank, local_rank, node_rank, world_size, local_size, num_nodes)


def _group_world_size(environ: Environ, world_size: int, local_size: int) -> int:
    if "GROUP_WORLD_SIZE" not in environ and world_size % local_size == 0:
        return world_size // local_size
    num_nodes = _number(environ, "GROUP_WORLD_SIZE", least=1, mend="set it to the number of nodes")
    # Every other node has at least one rank. A single node has all ranks.
    most = world_size - num_nodes + 1
    if local_size > most or (num_nodes == 1 and local_size != world_size):
        raise RankError(
            f"LOCAL_WORLD_SIZE={local_size} contradicts WORLD_SIZE={world_size} on GROUP_WORLD_SIZE={num_nodes} nodes: "
            "mend one of them, or start with torchrun"
        )
    return num_nodes


def _from_mpi(environ: Environ, launcher: str) -> RankInfo:
    rank_name, size_name, local_names = _MPI[launcher]
    mend = "start the ranks with mpirun or srun"
    world_size = _number(environ, size_name, least=1, mend=mend)
    rank = _number(environ, rank_name, below=(size_name, world_size))
    local_rank_name, local_size_name = next((pair for pair in local_names if pair[0] in environ), local_names[0])
    if world_size == 1:
        layout = _SINGLE
    else:
        local_size = _number(environ, local_size_name, least=1, mend=mend)
        local_rank = _number(environ, local_rank_name, below=(local_size_name, local_size), mend=mend)
        names = (rank_name, local_rank_name, size_name, local_size_name)
        mend = "start with srun, or give every node the same number of ranks (mpirun --map-by ppr:N:node)"
        node_rank, num_nodes = _equal_blocks(names, rank, local_rank, world_size, local_size, mend)
        layout = _Layout(rank, local_rank, node_rank, world_size, local_size, num_nodes)
    _require_equal(environ, "WORLD_SIZE", world_size)
    _require_equal(environ, "LOCAL_RANK", layout.local_rank)

    master_addr, master_port = _preset_addr(environ), _preset_port(environ)
    if layout.num_nodes > 1 and not master_addr:
        raise RankError(
            f"MASTER_ADDR is not set, but {size_name}={world_size} ranks are on {layout.num_nodes} nodes: set it to "
            "the first node's host name on all of them (mpirun -x MASTER_ADDR=HOST, or mpiexec -genv MASTER_ADDR HOST)"
        )
    if world_size > 1:
        # The ranks are not all in the same Slurm step: those of the first node are in the shell that called mpirun, the others
        # in the step of its daemons. Open MPI's namespace is the same for all ranks of one mpirun, and only for them.
        run = _job_id(environ) + zlib.crc32(environ.get("PMIX_NAMESPACE", "").encode(errors="replace"))
        master_addr = master_addr or "127.0.0.1"
        master_port = master_port or port_for(run, 0, _restart_count(environ))
    return _info(environ, launcher, layout, master_addr, master_port)


def _from_slurm(environ: Environ) -> RankInfo:
    layout = _slurm_layout(environ)
    _require_equal(environ, "WORLD_SIZE", layout.world_size)
    _require_equal(environ, "LOCAL_RANK", layout.local_rank)
    master_addr, master_port = _preset_addr(environ), _preset_port(environ)
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary" and layout.num_nodes > 1 and not master_addr:
        raise RankError(
            "SLURM_DISTRIBUTION=arbitrary may put rank 0 on any node: "
            "set MASTER_ADDR to the first host of SLURM_HOSTFILE"
        )
    if layout.world_size > 1:
        port = port_for(_job_id(environ), _step_id(environ), _restart_count(environ))
        master_addr, master_port = master_addr or layout.nodes[0], master_port or port
    return _info(environ, "slurm", layout, master_addr, master_port)


def _slurm_layout(environ: Environ) -> _Layout:
    """The step's layout from the variables of srun. `-m cyclic` and `-m arbitrary` scatter the ranks, but the counts are valid."""
    tasks_name = _first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes_name = _first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    counts_name = _first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    num_nodes_name = _first_set(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")

    world_size = _number(environ, tasks_name, least=1, mend=_MEND_SLURM)
    rank = _number(environ, "SLURM_PROCID", below=(tasks_name, world_size), mend=_MEND_SLURM)
    try:
        nodes = expand(_text(environ, nodes_name, _MEND_SLURM))
        counts = expand_counts(_text(environ, counts_name, _MEND_SLURM))
    except HostListError as error:
        raise RankError(f"{nodes_name} or {counts_name} is malformed: {error}: {_MEND_SLURM}") from None
    if sum(counts) != world_size:
        raise _contradiction(environ, counts_name, f"{sum(counts)} tasks", tasks_name)
    if len(counts) != len(nodes):
        raise _contradiction(environ, counts_name, f"{len(counts)} nodes", nodes_name)
    if num_nodes_name in environ and _number(environ, num_nodes_name) != len(nodes):
        raise _contradiction(environ, nodes_name, f"{len(nodes)} nodes", num_nodes_name)

    nodes, counts = _in_order_of_node_id(environ, nodes, counts)
    node_rank = _number(environ, "SLURM_NODEID", below=("the number of nodes", len(nodes)), mend=_MEND_SLURM)
    if environ.get("SLURMD_NODENAME", nodes[node_rank]) != nodes[node_rank]:
        raise _contradiction(environ, "SLURM_NODEID", nodes[node_rank], "SLURMD_NODENAME")
    here = (f"the tasks on node {node_rank} ({counts_name})", counts[node_rank])
    local_rank = _number(environ, "SLURM_LOCALID", below=here, mend=_MEND_SLURM)
    return _Layout(rank, local_rank, node_rank, world_size, counts[node_rank], len(nodes), tuple(nodes))


def _in_order_of_node_id(environ: Environ, nodes: list[str], counts: list[int]) -> tuple[list[str], list[int]]:
    """Nodes and their counts of tasks, in the order of node ids.

    A step over several components of a heterogeneous job lists its nodes by name, but numbers them by component.
    Observed with Slurm 22.05: components node[2-3] and node1 give SLURM_STEP_NODELIST=node[1-3], and node1 is number 2.
    """
    if "SLURM_HET_SIZE" not in environ:
        return nodes, counts
    ordered: list[str] = []
    step = set(nodes)
    for i in range(_number(environ, "SLURM_HET_SIZE", least=1, below=("the most components", 1024))):
        name = f"SLURM_JOB_NODELIST_HET_GROUP_{i}"
        try:
            component = expand(_text(environ, name, _MEND_SLURM))
        except HostListError as error:
            raise RankError(f"{name} is malformed: {error}: {_MEND_SLURM}") from None
        ordered += [node for node in component if node in step]
        if len(ordered) > len(nodes):
            break
    if sorted(ordered) != sorted(nodes):
        raise RankError(
            f"SLURM_HET_SIZE={_show(environ['SLURM_HET_SIZE'])}: not each of the step's nodes {_show(','.join(nodes))} "
            "is in one component of the job: give the components nodes of their own"
        )
    count_of = dict(zip(nodes, counts, strict=True))
    return ordered, [count_of[node] for node in ordered]


def _alone(environ: Environ) -> RankInfo:
    if "SLURM_PROCID" in environ and "SLURM_JOB_ID" not in environ:
        raise RankError(f"SLURM_PROCID={_show(environ['SLURM_PROCID'])} is set without SLURM_JOB_ID: {_MEND_SLURM}")
    if in_batch_shell(environ):
        raise RankError(
            f"this process was started in the batch shell of job {_job_id(environ)} without srun, so no other rank can "
            "join it: put `srun` in front of the command"
        )
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        if name in environ:
            raise RankError(
                f"{name}={_show(environ[name])} is set without RANK: unset it for one process, "
                "or start the ranks with srun or torchrun"
            )
    return _info(environ, "single", _SINGLE, _preset_addr(environ), _preset_port(environ))


def _info(environ: Environ, launcher: str, layout: _Layout, master_addr: str, master_port: int) -> RankInfo:
    if layout.world_size == 1 and not (master_addr and master_port):
        master_addr, master_port = "", 0
    return RankInfo(
        rank=layout.rank,
        local_rank=layout.local_rank,
        node_rank=layout.node_rank,
        world_size=layout.world_size,
        local_world_size=layout.local_world_size,
        num_nodes=layout.num_nodes,
        master_addr=master_addr,
        master_port=master_port,
        launcher=launcher,
        nodes=layout.nodes,
        in_slurm="SLURM_JOB_ID" in environ,
        run_id=_run_id(environ, launcher),
        restart_count=_restart_count(environ),
    )


def _equal_blocks(
    names: tuple[str, str, str, str], rank: int, local_rank: int, world_size: int, local_size: int, mend: str
) -> tuple[int, int]:
    """(node rank, number of nodes) for equal nodes that are filled one after the other. Raises RankError for other layouts."""
    if world_size % local_size or rank % local_size != local_rank:
        values = (rank, local_rank, world_size, local_size)
        shown = " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise RankError(f"{shown} are not those of equal nodes filled one after the other: {mend}")
    return rank // local_size, world_size // local_size


def in_step(environ: Environ) -> bool:
    """Whether this is a numbered step of srun, and not the batch shell or the shell that salloc starts on a node."""
    if "SLURM_JOB_ID" not in environ or "SLURM_STEP_ID" not in environ:
        return False
    return _step_id(environ) < _FIRST_RESERVED_STEP


def in_batch_shell(environ: Environ) -> bool:
    if "SLURM_JOB_ID" not in environ or "SLURM_PROCID" not in environ:
        return False
    return "SLURM_STEP_ID" not in environ or _step_id(environ) in _BATCH_STEPS


def _is_slurm_task(environ: Environ, rank: str, size: str, local_names: tuple[tuple[str, str], ...]) -> bool:
    """Whether the variables of a launcher, if set, equal those of the Slurm step."""
    if not in_step(environ) or "SLURM_PROCID" not in environ:
        return False
    tasks = _first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    pairs = [(rank, "SLURM_PROCID"), (size, tasks), *((local_rank, "SLURM_LOCALID") for local_rank, _ in local_names)]
    if any(environ[mine] != environ.get(slurms) for mine, slurms in pairs if mine in environ):
        return False
    local_size = str(_slurm_layout(environ).local_world_size)
    return all(environ.get(name, local_size) == local_size for _, name in local_names)


def _run_id(environ: Environ, launcher: str) -> str | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    job = str(_job_id(environ))
    if "SLURM_ARRAY_TASK_ID" in environ:
        job = f"{_number(environ, 'SLURM_ARRAY_JOB_ID')}_{_number(environ, 'SLURM_ARRAY_TASK_ID')}"
    # The ranks of one mpirun are in different steps (see _from_mpi) and must agree on one id.
    step = _step_id(environ) if launcher in ("env", "slurm") and in_step(environ) else 0
    return f"{job}.{step}" if step else job


def _step_id(environ: Environ) -> int:
    """SLURM_STEP_ID unsigned, as in slurm.h: 4294967291 for the -5 of Slurm 26.05. Raises RankError if it is invalid."""
    if re.fullmatch("-([1-9]|1[0-6])", environ.get("SLURM_STEP_ID", "")):
        return int(environ["SLURM_STEP_ID"]) % 2**32
    return _number(environ, "SLURM_STEP_ID")


def _job_id(environ: Environ) -> int:
    return _number(environ, "SLURM_JOB_ID", default=0)


def _restart_count(environ: Environ) -> int:
    """Sum of both launchers' restart counts: torchrun may restart its ranks inside a job that was itself requeued."""
    names = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return sum(_number(environ, name, default=0) for name in names)


def _preset_addr(environ: Environ) -> str:
    """MASTER_ADDR without the brackets of an IPv6 address; "" if it is not set."""
    if "MASTER_ADDR" not in environ:
        return ""
    given = environ["MASTER_ADDR"]
    address = given[1:-1] if given.startswith("[") and given.endswith("]") else given
    is_name = address == given and len(address) <= 253 and _HOST_NAME.fullmatch(address)
    if not is_name and not _is_ipv6(address):
        raise RankError(
            f"MASTER_ADDR={_show(given)} is neither a host name nor an address: "
            "set it to one, with the port in MASTER_PORT, or unset it"
        )
    return address


def _preset_port(environ: Environ) -> int:
    """MASTER_PORT; 0 if it is not set."""
    if "MASTER_PORT" not in environ:
        return 0
    return _number(environ, "MASTER_PORT", least=1, below=("the number of ports", 65_536))


def _is_ipv6(address: str) -> bool:
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    # ipaddress accepts any character in a zone such as that of fe80::1%eth0.
    return re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?", address) is not None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _number(
    environ: Environ,
    name: str,
    *,
    default: int | None = None,
    least: int = 0,
    below: tuple[str, int] | None = None,
    mend: str = "mend it or unset it",
) -> int:
    """The variable as a plain decimal number. Raises RankError if it is missing and has no default, or if it is out of range."""
    if name not in environ:
        if default is None:
            raise RankError(f"{name} is not set: {mend}")
        return default
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
        raise RankError(f"{name}={_show(text)} is not a whole number from {least} on: {mend}")
    if below and int(text) >= below[1]:
        raise RankError(f"{name}={text} must be below {below[0]}={below[1]}: {mend}")
    return int(text)


def _text(environ: Environ, name: str, mend: str) -> str:
    if name not in environ:
        raise RankError(f"{name} is not set: {mend}")
    return environ[name]


def _require_equal(environ: Environ, name: str, value: int) -> None:
    if name in environ and _number(environ, name) != value:
        raise RankError(f"{name}={environ[name]} contradicts the launcher, which says {value}: unset it")


def _first_set(environ: Environ, *names: str) -> str:
    return next((name for name in names if name in environ), names[-1])


def _contradiction(environ: Environ, name: str, means: str, other: str) -> RankError:
    return RankError(f"{name}={_show(environ[name])} means {means}, but {other}={_show(environ[other])}: {_MEND_SLURM}")


def _show(text: str, limit: int = 80) -> str:
    """The text as one printable line, with quotes only if they are necessary."""
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    return shown if re.fullmatch(r"[\w.,()\[\]:-]+", shown, re.ASCII) else repr(shown)
