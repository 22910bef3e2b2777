"""The place of this process among all processes of a run. `detect` is a pure function from an
environment to a RankInfo.
"""

import re
import zlib
from dataclasses import dataclass, replace

from recipes.core.errors import ConfigError, shown
from recipes.core.variables import Environ, number, require_equal
from recipes.core.slurm import environment

# Names of torchrun's variables with those of Open MPI (docs.open-mpi.org, "Environment variables
# set for MPI applications").
_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


@dataclass(frozen=True)
class RankInfo:
    """The place of a process among all processes of a run."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int  # number of ranks on this node; nodes may have different numbers
    num_nodes: int
    nodes: tuple[str, ...]  # host names in order of node_rank; () if unknown
    master_addr: str = ""  # "" for one process that needs no rendezvous
    master_port: int = 0  # 0 for one process that needs no rendezvous
    in_slurm: bool = False  # inside a Slurm job, with any launcher
    # "<job>" or "<array>_<task>", with ".<step>" for steps after the first; None outside Slurm
    run_id: str | None = None
    restart_count: int = 0  # number of earlier attempts of this job


def detect(environ: Environ) -> RankInfo:
    """This process's place in the run, from the environment only. Nothing else is read.

    The innermost launcher takes precedence:
    1. RANK with WORLD_SIZE and LOCAL_RANK, as torchrun sets them, also inside a Slurm step.
       MASTER_ADDR and MASTER_PORT are required if WORLD_SIZE > 1. If GROUP_RANK and
       LOCAL_WORLD_SIZE are missing (variables set by hand from those of a Slurm task), the layout
       is Slurm's. If only GROUP_RANK is missing, it is equal nodes of LOCAL_WORLD_SIZE ranks,
       numbered node by node. Anything else is an error.
    2. Open MPI's mpirun, whose variables mean the same. MASTER_ADDR is required if there are
       several nodes.
    3. A task of srun. Nodes may have different numbers of tasks. With `-m arbitrary` on several
       nodes MASTER_ADDR must be set, since no variable says where rank 0 is.
    4. One process, also in the shell of salloc.

    A preset MASTER_ADDR or MASTER_PORT takes precedence, each separately. A world of one rank gets
    "" and 0 unless both are set.

    Raises ConfigError if variables are contradictory, malformed or missing, in the batch shell
    without srun, and for mpiexec of MPICH or Intel MPI.
    """
    if "RANK" in environ:
        return _from_env(environ)
    if _OPEN_MPI["RANK"] in environ:
        return _from_env(_of_open_mpi(environ))
    # equal under srun --mpi=pmi2
    if "PMI_RANK" in environ and environ["PMI_RANK"] != environment.task(environ):
        raise ConfigError(
            f"PMI_RANK={shown(environ['PMI_RANK'])}: mpiexec is not supported: "
            "start the ranks with srun"
        )
    if environment.in_step(environ):
        layout = _of_step(environ)
        if layout.rank == 0 and layout.node_rank and not environ.get("MASTER_ADDR"):
            raise ConfigError(
                f"SLURM_NODEID={layout.node_rank}: rank 0 must be on the first node of the step, "
                "where the others look for it: "
                "remove -m arbitrary and SLURM_HOSTFILE, or set MASTER_ADDR on every rank"
            )
        step = environment.step_id(environ)
        port = port_for(environment.job_number(environ), step, restart_count(environ))
        return _info(environ, layout, layout.nodes[0], port)
    environment.refuse_batch_shell(environ)
    return _info(environ, RankInfo(0, 0, 0, 1, 1, num_nodes=1, nodes=()))


def port_for(job: int, step: int, restarts: int) -> int:
    """A port from 10000 to 32767. This is below Linux's default ephemeral range, whose ports
    clients may already use.

    The formula is linear, so that jobs up to 270 ids apart, each with up to 21 steps and 4
    attempts, never have the same port.
    """
    return 10_000 + (84 * job + 4 * step + restarts) % 22_768


def _from_env(environ: Environ) -> RankInfo:
    world_size = number(
        environ, "WORLD_SIZE", minimum=1, fix="set it to the number of ranks, or unset RANK"
    )
    rank = number(environ, "RANK", below=("WORLD_SIZE", world_size))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if world_size > 1 and not environ.get(name):
            raise ConfigError(
                f"{name} is not set, but WORLD_SIZE={world_size}: on every rank, set MASTER_ADDR "
                "to rank 0's host and MASTER_PORT to a free port there"
            )
    return _info(environ, _env_layout(environ, rank, world_size))


def _env_layout(environ: Environ, rank: int, world_size: int) -> RankInfo:
    if environment.in_step(environ) and not {"GROUP_RANK", "LOCAL_WORLD_SIZE"} & environ.keys():
        return _of_step(environ)
    at_most = ("1 + WORLD_SIZE", 1 + world_size)
    local_size = number(
        environ,
        "LOCAL_WORLD_SIZE",
        default=1 if world_size == 1 else None,
        minimum=1,
        below=at_most,
        fix="set it to the number of ranks on this node, or start with torchrun or srun",
    )
    local_rank = number(
        environ,
        "LOCAL_RANK",
        default=0 if world_size == 1 else None,
        below=("LOCAL_WORLD_SIZE", local_size),
        fix="set it to the index of this rank on its node, from 0",
    )
    if "GROUP_RANK" in environ:
        num_nodes = number(
            environ,
            "GROUP_WORLD_SIZE",
            minimum=1,
            below=at_most,
            fix="set it to the number of nodes",
        )
        node_rank = number(environ, "GROUP_RANK", below=("GROUP_WORLD_SIZE", num_nodes))
    else:
        if world_size % local_size or rank % local_size != local_rank:
            raise ConfigError(
                f"RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={world_size} "
                f"LOCAL_WORLD_SIZE={local_size}: do not fit together: without GROUP_RANK, "
                "every node must have LOCAL_WORLD_SIZE ranks, numbered node by node: "
                "use srun or torchrun, or set GROUP_RANK and GROUP_WORLD_SIZE"
            )
        node_rank = rank // local_size
        num_nodes = world_size // local_size
        require_equal(environ, "GROUP_WORLD_SIZE", num_nodes)
    return RankInfo(rank, local_rank, node_rank, world_size, local_size, num_nodes, nodes=())


def _of_open_mpi(environ: Environ) -> Environ:
    """The environment with mpirun's variables under torchrun's names, and with a port."""
    of_mpi = {name: environ[mpi] for name, mpi in _OPEN_MPI.items() if mpi in environ}
    # The ranks are not all in the same Slurm step: those of the first node are in the shell that
    # called mpirun, the others in the step of its daemons. Open MPI's namespace is the same for all
    # ranks of one mpirun, and only for them.
    rest = environment.without_step(environ)
    namespace = environ.get("PMIX_NAMESPACE", "").encode(errors="replace")
    run = environment.job_number(environ) + zlib.crc32(namespace)
    master = {"MASTER_PORT": str(port_for(run, 0, restart_count(environ)))}
    if of_mpi.get("WORLD_SIZE") == of_mpi.get("LOCAL_WORLD_SIZE"):
        master["MASTER_ADDR"] = "127.0.0.1"
    return {**master, **rest, **of_mpi}


def _info(
    environ: Environ, layout: RankInfo, default_addr: str = "", default_port: int = 0
) -> RankInfo:
    require_equal(environ, "RANK", layout.rank)
    require_equal(environ, "WORLD_SIZE", layout.world_size)
    require_equal(environ, "LOCAL_RANK", layout.local_rank)
    master_addr = environ.get("MASTER_ADDR", "").strip("[]")  # the brackets of an IPv6 address
    master_port = number(
        environ, "MASTER_PORT", default=0, minimum=1, below=("the number of ports", 65_536)
    )
    if len(layout.nodes) > 1 and re.fullmatch(r"localhost|127(\.\d+){3}|::1", master_addr):
        raise ConfigError(
            f"MASTER_ADDR={master_addr}: is this machine itself, but the ranks are on "
            f"{layout.num_nodes} nodes: unset it, or set it to the host of rank 0"
        )
    if layout.world_size > 1:
        master_addr = master_addr or default_addr
        master_port = master_port or default_port
    elif not (master_addr and master_port):
        master_addr = ""
        master_port = 0
    return replace(
        layout,
        master_addr=master_addr,
        master_port=master_port,
        in_slurm=environment.is_in_job(environ),
        run_id=environment.run_id(environ),
        restart_count=restart_count(environ),
    )


def _of_step(environ: Environ) -> RankInfo:
    rank, local_rank, node_rank, tasks, nodes = environment.layout(environ)
    of_node = tasks[node_rank]
    return RankInfo(rank, local_rank, node_rank, sum(tasks), of_node, len(nodes), nodes)


def restart_count(environ: Environ) -> int:
    """Sum of both launchers' restart counts: torchrun may restart its ranks inside a job that was
    itself requeued.
    """
    of_torchrun = number(environ, "TORCHELASTIC_RESTART_COUNT", default=0)
    return environment.checked_restarts(environ) + of_torchrun
