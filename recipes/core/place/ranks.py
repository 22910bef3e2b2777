"""The place of this process among all processes of a run. `detect` is a pure function from an
environment to a RankInfo.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from recipes.core.errors import ConfigError, shown
from recipes.core.place.hostlist import expand, expand_counts

Environ = Mapping[str, str]

# slurm.h: step ids from this value on are not steps of srun. Slurm up to 25.11 sets no step id in a
# batch script. Slurm 26.05 writes the ids as signed numbers: -5 in a batch script, -6 in the shell
# that salloc starts on a node.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
_BATCH_STEP = 0xFFFFFFFB
FIX_SLURM = "start the ranks with srun, and unset SLURM_* variables that an outer shell left"

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
    if "PMI_RANK" in environ and environ["PMI_RANK"] != environ.get("SLURM_PROCID"):
        raise ConfigError(
            f"PMI_RANK={shown(environ['PMI_RANK'])}: mpiexec is not supported: "
            "start the ranks with srun"
        )
    if in_step(environ):
        layout = _slurm_layout(environ)
        if layout.rank == 0 and layout.node_rank and not environ.get("MASTER_ADDR"):
            raise ConfigError(
                f"SLURM_NODEID={layout.node_rank}: rank 0 must be on the first node of the step, "
                "where the others look for it: "
                "remove -m arbitrary and SLURM_HOSTFILE, or set MASTER_ADDR on every rank"
            )
        port = port_for(job_id(environ), step_id(environ), restart_count(environ))
        return _info(environ, layout, layout.nodes[0], port)
    return _alone(environ)


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
    if in_step(environ) and not {"GROUP_RANK", "LOCAL_WORLD_SIZE"} & environ.keys():
        return _slurm_layout(environ)
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
    rest = {name: value for name, value in environ.items() if name != "SLURM_STEP_ID"}
    run = job_id(environ) + zlib.crc32(environ.get("PMIX_NAMESPACE", "").encode(errors="replace"))
    master = {"MASTER_PORT": str(port_for(run, 0, restart_count(environ)))}
    if of_mpi.get("WORLD_SIZE") == of_mpi.get("LOCAL_WORLD_SIZE"):
        master["MASTER_ADDR"] = "127.0.0.1"
    return {**master, **rest, **of_mpi}


def _alone(environ: Environ) -> RankInfo:
    if "SLURM_PROCID" in environ:
        if "SLURM_JOB_ID" not in environ:
            raise ConfigError(
                f"SLURM_PROCID={shown(environ['SLURM_PROCID'])} is set without SLURM_JOB_ID: "
                f"{FIX_SLURM}"
            )
        if "SLURM_STEP_ID" not in environ or step_id(environ) == _BATCH_STEP:
            raise ConfigError(
                f"this process was started in the batch shell of job {job_id(environ)} without "
                "srun, so no other rank can join it: put `srun` in front of the command"
            )
    return _info(environ, RankInfo(0, 0, 0, 1, 1, num_nodes=1, nodes=()))


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
        in_slurm="SLURM_JOB_ID" in environ,
        run_id=_run_id(environ),
        restart_count=restart_count(environ),
    )


def _run_id(environ: Environ) -> str | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    job = str(job_id(environ))
    if "SLURM_ARRAY_TASK_ID" in environ:
        job = f"{number(environ, 'SLURM_ARRAY_JOB_ID')}_{number(environ, 'SLURM_ARRAY_TASK_ID')}"
    step = step_id(environ) if in_step(environ) else 0
    return f"{job}.{step}" if step else job


def in_step(environ: Environ) -> bool:
    """Whether this is a numbered step of srun, and not the batch shell or the shell that salloc
    starts on a node.
    """
    is_step = {"SLURM_JOB_ID", "SLURM_STEP_ID"} <= environ.keys()
    return is_step and step_id(environ) < _FIRST_RESERVED_STEP


def _slurm_layout(environ: Environ) -> RankInfo:
    """The step's layout from the variables of srun. `-m cyclic` and `-m arbitrary` scatter the
    ranks, but the counts are valid.
    """
    world_size = number(environ, "SLURM_STEP_NUM_TASKS", minimum=1, fix=FIX_SLURM)
    rank = number(
        environ, "SLURM_PROCID", below=("SLURM_STEP_NUM_TASKS", world_size), fix=FIX_SLURM
    )
    nodes_text = environ.get("SLURM_STEP_NODELIST", "")
    counts_text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    try:
        nodes = expand(nodes_text)
        counts = expand_counts(counts_text)
    except ConfigError as error:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={shown(nodes_text)} "
            f"SLURM_STEP_TASKS_PER_NODE={shown(counts_text)}: {error}: {FIX_SLURM}"
        ) from None
    counts_name = "SLURM_STEP_TASKS_PER_NODE"
    if sum(counts) != world_size:
        raise _contradiction(environ, counts_name, f"{sum(counts)} tasks", "SLURM_STEP_NUM_TASKS")
    if len(counts) != len(nodes):
        raise _contradiction(environ, counts_name, f"{len(counts)} nodes", "SLURM_STEP_NODELIST")

    below = ("the number of nodes", len(nodes))
    node_rank = number(environ, "SLURM_NODEID", below=below, fix=FIX_SLURM)
    node = nodes[node_rank]
    if environ.get("SLURMD_NODENAME", node) != node:
        raise _contradiction(environ, "SLURM_NODEID", node, "SLURMD_NODENAME")
    local_size = counts[node_rank]
    below = (f"SLURM_STEP_TASKS_PER_NODE of node {node_rank}", local_size)
    local_rank = number(environ, "SLURM_LOCALID", below=below, fix=FIX_SLURM)
    return RankInfo(rank, local_rank, node_rank, world_size, local_size, len(nodes), tuple(nodes))


def _contradiction(environ: Environ, name: str, means: str, other: str) -> ConfigError:
    return ConfigError(
        f"{name}={shown(environ[name])} means {means}, but {other}={shown(environ[other])}: "
        f"{FIX_SLURM}"
    )


def step_id(environ: Environ) -> int:
    """SLURM_STEP_ID unsigned, as in slurm.h: 4294967291 for the -5 of Slurm 26.05. Raises
    ConfigError if it is invalid.
    """
    if re.fullmatch("-([1-9]|1[0-6])", environ.get("SLURM_STEP_ID", "")):
        return int(environ["SLURM_STEP_ID"]) % 2**32
    return number(environ, "SLURM_STEP_ID")


def job_id(environ: Environ) -> int:
    return number(environ, "SLURM_JOB_ID", default=0)


def restart_count(environ: Environ) -> int:
    """Sum of both launchers' restart counts: torchrun may restart its ranks inside a job that was
    itself requeued.
    """
    names = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return sum(number(environ, name, default=0) for name in names)


def number(
    environ: Environ,
    name: str,
    *,
    default: int | None = None,
    minimum: int = 0,
    below: tuple[str, int] | None = None,
    fix: str = "correct it or unset it",
) -> int:
    """The value of a variable as a whole number.

    below: what the number must be less than, in words and as a number. fix: ends each message.
    Raises ConfigError if the variable is not set and has no default, is not a plain decimal number,
    or is out of range.
    """
    if name not in environ:
        if default is None:
            raise ConfigError(f"{name} is not set: {fix}")
        return default
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < minimum:
        raise ConfigError(
            f"{name}={shown(text)}: must be a whole number of at least {minimum}: {fix}"
        )
    if below and int(text) >= below[1]:
        raise ConfigError(f"{name}={text}: must be less than {below[1]} ({below[0]}): {fix}")
    return int(text)


def require_equal(environ: Environ, name: str, value: int) -> None:
    """Raises ConfigError if a variable is set to another number than ``value``, which follows from
    the launcher.
    """
    if name in environ and number(environ, name) != value:
        raise ConfigError(
            f"{name}={environ[name]}: must be {value} here: unset it, "
            "or start the ranks with srun or torchrun"
        )
