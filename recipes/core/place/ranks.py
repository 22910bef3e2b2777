"""The place of this process among all processes of a run. `detect` is a pure function from an environment to a RankInfo."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from recipes.core.errors import shown
from recipes.core.place.launcher_variables import (
    Environ,
    RankError,
    is_loopback,
    master_addr_of,
    master_port_of,
    number,
    require_equal,
)
from recipes.core.place.slurm_step import (
    FIX_SLURM,
    Layout,
    in_batch_shell,
    in_step,
    is_slurm_task,
    job_id,
    restart_count,
    slurm_layout,
    step_id,
)


@dataclass(frozen=True)
class RankInfo:
    """The place of a process among all processes of a run."""

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


_SINGLE = Layout(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, num_nodes=1)

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
        if rank in environ and not is_slurm_task(environ, rank, size, local):
            return _from_mpi(environ, launcher)
    if in_step(environ):
        return _from_slurm(environ)
    return _alone(environ)


def port_for(job: int, step: int, restarts: int) -> int:
    """A port from 10000 to 32767. This is below Linux's default ephemeral range, whose ports clients may already use.

    The formula is linear, so that jobs up to 270 ids apart, each with up to 21 steps and 4 attempts, never have the same port.
    """
    return 10_000 + (84 * job + 4 * step + restarts) % 22_768


def _from_env(environ: Environ) -> RankInfo:
    world_size = number(environ, "WORLD_SIZE", minimum=1, fix="set it to the number of ranks, or unset RANK")
    rank = number(environ, "RANK", below=("WORLD_SIZE", world_size))
    if world_size > 1 or "LOCAL_RANK" in environ:
        local_rank = number(environ, "LOCAL_RANK", fix="set it to the number of this rank on its node")
    else:
        local_rank = 0
    master_addr, master_port = master_addr_of(environ), master_port_of(environ)
    if world_size > 1:
        for name, value in (("MASTER_ADDR", master_addr), ("MASTER_PORT", master_port)):
            if not value:
                raise RankError(
                    f"{name} is not set, but WORLD_SIZE={world_size}: set it to that of rank 0 on every rank"
                )
    layout = _env_layout(environ, rank, world_size, local_rank, master_addr)
    return _info(environ, "env", layout, master_addr, master_port)


def _env_layout(environ: Environ, rank: int, world_size: int, local_rank: int, master_addr: str) -> Layout:
    local_names = (("LOCAL_RANK", "LOCAL_WORLD_SIZE"),)
    at_most = ("1 + WORLD_SIZE", 1 + world_size)
    if "GROUP_RANK" not in environ and is_slurm_task(environ, "RANK", "WORLD_SIZE", local_names):
        return slurm_layout(environ)

    if world_size == 1 or "LOCAL_WORLD_SIZE" in environ:
        local_size = number(environ, "LOCAL_WORLD_SIZE", default=1, minimum=1, below=at_most)
    elif is_loopback(master_addr) and local_rank == rank:
        local_size = world_size
    else:
        raise RankError(
            f"LOCAL_WORLD_SIZE is not set, but RANK={rank} and WORLD_SIZE={world_size}: set it to the number of ranks "
            "on this node, or start with torchrun or srun"
        )
    if local_rank >= local_size:
        raise RankError(f"LOCAL_RANK={local_rank} must be less than LOCAL_WORLD_SIZE={local_size}: correct one of them")

    if "GROUP_RANK" in environ:
        num_nodes = number(environ, "GROUP_WORLD_SIZE", minimum=1, below=at_most, fix="set it to the number of nodes")
        node_rank = number(environ, "GROUP_RANK", below=("GROUP_WORLD_SIZE", num_nodes))
    else:
        fix = "set GROUP_RANK and GROUP_WORLD_SIZE: the number of this node, and the number of nodes"
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        node_rank, num_nodes = _equal_blocks(names, rank, local_rank, world_size, local_size, fix)
        require_equal(environ, "GROUP_WORLD_SIZE", num_nodes)
    return Layout(rank, local_rank, node_rank, world_size, local_size, num_nodes)


def _from_mpi(environ: Environ, launcher: str) -> RankInfo:
    rank_name, size_name, local_names = _MPI[launcher]
    fix = "start the ranks with mpirun or srun"
    world_size = number(environ, size_name, minimum=1, fix=fix)
    rank = number(environ, rank_name, below=(size_name, world_size))
    local_rank_name, local_size_name = next((pair for pair in local_names if pair[0] in environ), local_names[0])
    if world_size == 1:
        layout = _SINGLE
    else:
        local_size = number(environ, local_size_name, minimum=1, fix=fix)
        local_rank = number(environ, local_rank_name, below=(local_size_name, local_size), fix=fix)
        names = (rank_name, local_rank_name, size_name, local_size_name)
        fix = "start with srun, or give every node the same number of ranks (mpirun --map-by ppr:N:node)"
        node_rank, num_nodes = _equal_blocks(names, rank, local_rank, world_size, local_size, fix)
        layout = Layout(rank, local_rank, node_rank, world_size, local_size, num_nodes)
    master_addr, master_port = master_addr_of(environ), master_port_of(environ)
    if layout.num_nodes > 1 and not master_addr:
        raise RankError(
            f"MASTER_ADDR is not set, but {size_name}={world_size} ranks are on {layout.num_nodes} nodes: set it to "
            "the first node's host name on all of them (mpirun -x MASTER_ADDR=HOST, or mpiexec -genv MASTER_ADDR HOST)"
        )
    if world_size > 1:
        # The ranks are not all in the same Slurm step: those of the first node are in the shell that called mpirun, the others
        # in the step of its daemons. Open MPI's namespace is the same for all ranks of one mpirun, and only for them.
        run = job_id(environ) + zlib.crc32(environ.get("PMIX_NAMESPACE", "").encode(errors="replace"))
        master_addr = master_addr or "127.0.0.1"
        master_port = master_port or port_for(run, 0, restart_count(environ))
    return _info(environ, launcher, layout, master_addr, master_port)


def _equal_blocks(
    names: tuple[str, str, str, str], rank: int, local_rank: int, world_size: int, local_size: int, fix: str
) -> tuple[int, int]:
    """(node rank, number of nodes) for equal nodes that are filled one after the other. Raises RankError for other layouts."""
    if world_size % local_size or rank % local_size != local_rank:
        values = (rank, local_rank, world_size, local_size)
        given = " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise RankError(f"{given}: must be those of equal nodes that are filled one after the other: {fix}")
    return rank // local_size, world_size // local_size


def _from_slurm(environ: Environ) -> RankInfo:
    layout = slurm_layout(environ)
    master_addr, master_port = master_addr_of(environ), master_port_of(environ)
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary" and layout.num_nodes > 1 and not master_addr:
        raise RankError(
            "SLURM_DISTRIBUTION=arbitrary may put rank 0 on any node: "
            "set MASTER_ADDR to the first host of SLURM_HOSTFILE"
        )
    if layout.world_size > 1:
        port = port_for(job_id(environ), step_id(environ), restart_count(environ))
        master_addr, master_port = master_addr or layout.nodes[0], master_port or port
    return _info(environ, "slurm", layout, master_addr, master_port)


def _alone(environ: Environ) -> RankInfo:
    if "SLURM_PROCID" in environ and "SLURM_JOB_ID" not in environ:
        raise RankError(f"SLURM_PROCID={shown(environ['SLURM_PROCID'])} is set without SLURM_JOB_ID: {FIX_SLURM}")
    if in_batch_shell(environ):
        raise RankError(
            f"this process was started in the batch shell of job {job_id(environ)} without srun, so no other rank can "
            "join it: put `srun` in front of the command"
        )
    return _info(environ, "single", _SINGLE, master_addr_of(environ), master_port_of(environ))


def _info(environ: Environ, launcher: str, layout: Layout, master_addr: str, master_port: int) -> RankInfo:
    require_equal(environ, "WORLD_SIZE", layout.world_size)
    require_equal(environ, "LOCAL_RANK", layout.local_rank)
    if layout.world_size == 1 and not (master_addr and master_port):
        master_addr, master_port = "", 0
    return RankInfo(
        **vars(layout),
        master_addr=master_addr,
        master_port=master_port,
        launcher=launcher,
        in_slurm="SLURM_JOB_ID" in environ,
        run_id=_run_id(environ, launcher),
        restart_count=restart_count(environ),
    )


def _run_id(environ: Environ, launcher: str) -> str | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    job = str(job_id(environ))
    if "SLURM_ARRAY_TASK_ID" in environ:
        job = f"{number(environ, 'SLURM_ARRAY_JOB_ID')}_{number(environ, 'SLURM_ARRAY_TASK_ID')}"
    # The ranks of one mpirun are in different steps (see _from_mpi) and must agree on one id.
    step = step_id(environ) if launcher in ("env", "slurm") and in_step(environ) else 0
    return f"{job}.{step}" if step else job
