"""The variables that Slurm sets in a job and in its steps. Each function reads only the environment
that it gets.
"""

import re
from collections.abc import Container, Mapping, MutableMapping, Sequence
from typing import NamedTuple

from recipes.core.errors import ConfigError, shown
from recipes.core.variables import number
from recipes.core.slurm import hostlist
from recipes.core.slurm.jobstate import Job

Environ = Mapping[str, str]

# slurm.h: step ids from this value on are not steps of srun. Slurm up to 25.11 sets no step id in a
# batch script. Slurm 26.05 writes the ids as signed numbers: -5 in a batch script, -6 in the shell
# that salloc starts on a node.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
_BATCH_STEP = 0xFFFFFFFB
FIX = "start the ranks with srun, and unset SLURM_* variables that an outer shell left"
# Variables that users and sites set for sbatch, with the option of sbatch that each stands for (""
# for none). Such a variable takes precedence over a directive in a script.
SET_FOR_SBATCH = {"SLURM_CONF": "", "SLURM_CLUSTERS": "clusters", "SBATCH_MEM_PER_NODE": "mem"} | {
    f"SBATCH_{name.upper().replace('-', '_')}": name
    for name in (
        "account",
        "clusters",
        "constraint",
        "mem-per-cpu",
        "mem-per-gpu",
        "partition",
        "qos",
        "reservation",
    )
}
# Variables of an allocation or a launcher, which must not reach a job that is submitted in it.
OF_LAUNCHERS = re.compile(
    r"(SLURM|SRUN|SBATCH|PMI|PMIX(?!_MCA)|OMPI_COMM|TORCHELASTIC)_.*"
    r"|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))|NODE_RANK|MASTER_ADDR"
    r"|RECIPES_(ATTEMPT|CODE|LISTEN_FD|PYTHON|SPEC|TASK)"
)


def left_over(environ: Environ, job: Job) -> list[str]:
    """The variables of an array, a heterogeneous job or a requeue that belong to the outer job, not
    to this job.

    The outer job is the job in which this job was submitted. sbatch passes these variables on (seen
    with Slurm 22.05). With them, this job would use the run directory of the outer job and would
    not be requeued, or its step would not start. job: this one, see `client.own`.
    """
    patterns = []
    if job.id and not job.is_array:
        patterns.append("SLURM_ARRAY_.*")
    if job.id and not job.restarts:
        patterns.append("SLURM_RESTART_COUNT")
    if environ.get("SLURM_JOB_ID_HET_GROUP_0") != environ.get("SLURM_JOB_ID"):
        patterns.append(r"SLURM_HET_SIZE|SLURM_\w+_HET_GROUP_\d+")
    return [name for name in environ if re.fullmatch("|".join(patterns), name)]


def clean(environ: Environ, options: Container[str] = ()) -> dict[str, str]:
    """``environ`` without the variables of an outer allocation or of a launcher in it. The
    variables in `SET_FOR_SBATCH` remain.

    options: the options of sbatch that the job sets itself; a variable for such an option is
    removed.
    """
    kept = {name for name, option in SET_FOR_SBATCH.items() if option not in options}
    return {
        name: value
        for name, value in environ.items()
        if name in kept or not OF_LAUNCHERS.fullmatch(name)
    }


def job_id(environ: Environ) -> str:
    """``<job>``, or ``<array>_<task>`` in an array; "" outside Slurm."""
    array = environ.get("SLURM_ARRAY_JOB_ID")
    task = environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else allocation_id(environ)


def allocation_id(environ: Environ) -> str:
    """The number of the job itself, also for an array task; "" outside Slurm."""
    return environ.get("SLURM_JOB_ID", "")


def restarts(environ: Environ) -> int:
    """How often the job was requeued."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


def cluster(environ: Environ) -> str:
    """The name of the cluster; "" if unknown."""
    return environ.get("SLURM_CLUSTER_NAME", "")


def end_time(environ: Environ) -> float | None:
    """When the time limit ends the job, as time.time(); None if unknown."""
    return _decimal(environ, "SLURM_JOB_END_TIME")


def with_end_time(end: float) -> dict[str, str]:
    """The variable that `end_time` reads, for ranks that cannot ask Slurm inside a container."""
    return {"SLURM_JOB_END_TIME": str(int(end))}


def cpus_per_task(environ: Environ) -> int | None:
    return _decimal(environ, "SLURM_CPUS_PER_TASK")


def cpus_on_node(environ: Environ) -> int | None:
    return _decimal(environ, "SLURM_CPUS_ON_NODE")


def memory_mb(environ: Environ) -> int | None:
    """The memory of the job on each node in MiB; None if it is not limited by node."""
    return _decimal(environ, "SLURM_MEM_PER_NODE")


def gpus_on_node(environ: Environ) -> int:
    """Number of GPUs that Slurm granted on this node; 0 if unknown."""
    return _decimal(environ, "SLURM_GPUS_ON_NODE") or 0


def gpus_per_node(environ: Environ) -> float:
    """Number of GPUs of the job on each node; the mean, with one GPU per task, if the nodes have
    different numbers of tasks. Raises ConfigError.
    """
    tasks = hostlist.expand_counts(environ.get("SLURM_TASKS_PER_NODE") or "1")
    granted = gpus_on_node(environ)
    return sum(tasks) / len(tasks) if granted and len(set(tasks)) > 1 else granted


def num_nodes(environ: Environ) -> int:
    """The number of nodes of the job."""
    return _decimal(environ, "SLURM_JOB_NUM_NODES") or 1


def tasks_per_node(environ: Environ) -> int | None:
    """The number of tasks of the job on each node; None if the nodes differ, or if it is unknown.
    Raises ConfigError.
    """
    counts = environ.get("SLURM_TASKS_PER_NODE", "")
    different = set(hostlist.expand_counts(counts)) if counts else set()
    return different.pop() if len(different) == 1 else None


def count_tasks(environ: Environ, nodes: Sequence[str]) -> int:
    """The number of tasks of the job on some of its nodes; on all with (). Raises ConfigError."""
    counts = hostlist.expand_counts(environ["SLURM_TASKS_PER_NODE"])
    of_nodes = zip(nodes_of_job(environ), counts, strict=True)
    return sum(count for name, count in of_nodes if name in nodes or not nodes)


def nodes_of_job(environ: Environ) -> list[str]:
    """The names of the nodes of the job; [] outside Slurm. Raises ConfigError."""
    names = environ.get("SLURM_JOB_NODELIST", "")
    return hostlist.expand(names) if names else []


def with_nodes(environ: Environ, nodes: Sequence[str]) -> dict[str, str]:
    """``environ`` as of a job that has only these nodes, for `nodes_of_job`."""
    return {**environ, "SLURM_JOB_NODELIST": ",".join(nodes)}


def orders_by_name(environ: Environ) -> bool:
    """Whether Slurm orders the tasks by the names of their nodes. With a topology plugin, Slurm
    26.05 orders them by the topology.
    """
    return environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "node") == "node"


def with_tasks_per_node(environ: Environ, tasks: int) -> dict[str, str]:
    """The environment of a task with the variable that Lightning requires (2.6); unchanged outside
    a step of Slurm.
    """
    added = {"SLURM_NTASKS_PER_NODE": str(tasks)} if "SLURM_NTASKS" in environ else {}
    return {**added, **environ}


def _decimal(environ: Environ, name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None


def step(environ: Environ) -> str:
    """The ID of the step, ``<job>.<step>``, as Slurm's commands take it."""
    return f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"


def task(environ: Environ) -> str | None:
    """The rank of this task in its step as Slurm wrote it; None outside a step."""
    return environ.get("SLURM_PROCID")


def in_step(environ: Environ) -> bool:
    """Whether this is a numbered step of srun, and not the batch shell or the shell that salloc
    starts on a node.
    """
    is_step = {"SLURM_JOB_ID", "SLURM_STEP_ID"} <= environ.keys()
    return is_step and step_id(environ) < _FIRST_RESERVED_STEP


def step_id(environ: Environ) -> int:
    """The number of the step, unsigned as in slurm.h: 4294967291 for the -5 of Slurm 26.05. Raises
    ConfigError if it is invalid.
    """
    if re.fullmatch("-([1-9]|1[0-6])", environ.get("SLURM_STEP_ID", "")):
        return int(environ["SLURM_STEP_ID"]) % 2**32
    return number(environ, "SLURM_STEP_ID")


def without_step(environ: Environ) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name != "SLURM_STEP_ID"}


def is_in_job(environ: Environ) -> bool:
    return "SLURM_JOB_ID" in environ


def job_number(environ: Environ) -> int:
    """The number of the job; 0 outside Slurm. Raises ConfigError if it is invalid."""
    return number(environ, "SLURM_JOB_ID", default=0)


def checked_restarts(environ: Environ) -> int:
    """As `restarts`. Raises ConfigError if it is invalid."""
    return number(environ, "SLURM_RESTART_COUNT", default=0)


def run_id(environ: Environ) -> str | None:
    """`job_id`, with ``.<step>`` for steps after the first; None outside Slurm. Raises ConfigError
    if a number is invalid.
    """
    if not is_in_job(environ):
        return None
    job = str(job_number(environ))
    if "SLURM_ARRAY_TASK_ID" in environ:
        job = f"{number(environ, 'SLURM_ARRAY_JOB_ID')}_{number(environ, 'SLURM_ARRAY_TASK_ID')}"
    step = step_id(environ) if in_step(environ) else 0
    return f"{job}.{step}" if step else job


def refuse_batch_shell(environ: Environ) -> None:
    """Raises ConfigError in the batch shell of a job, where no other rank can join this process."""
    if "SLURM_PROCID" not in environ:
        return
    if "SLURM_JOB_ID" not in environ:
        raise ConfigError(
            f"SLURM_PROCID={shown(environ['SLURM_PROCID'])} is set without SLURM_JOB_ID: {FIX}"
        )
    if "SLURM_STEP_ID" not in environ or step_id(environ) == _BATCH_STEP:
        raise ConfigError(
            f"this process was started in the batch shell of job {job_number(environ)} without "
            "srun, so no other rank can join it: put `srun` in front of the command"
        )


class Layout(NamedTuple):
    """The place of a task in its step. tasks: the number of tasks of each node."""

    rank: int
    local_rank: int
    node_rank: int
    tasks: tuple[int, ...]
    nodes: tuple[str, ...]


def layout(environ: Environ) -> Layout:
    """The step's layout from the variables of srun. `-m cyclic` and `-m arbitrary` scatter the
    ranks, but the counts are valid. Raises ConfigError if they are contradictory.
    """
    world_size = number(environ, "SLURM_STEP_NUM_TASKS", minimum=1, fix=FIX)
    rank = number(environ, "SLURM_PROCID", below=("SLURM_STEP_NUM_TASKS", world_size), fix=FIX)
    nodes_text = environ.get("SLURM_STEP_NODELIST", "")
    counts_text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    try:
        nodes = hostlist.expand(nodes_text)
        counts = hostlist.expand_counts(counts_text)
    except ConfigError as error:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={shown(nodes_text)} "
            f"SLURM_STEP_TASKS_PER_NODE={shown(counts_text)}: {error}: {FIX}"
        ) from None
    counts_name = "SLURM_STEP_TASKS_PER_NODE"
    if sum(counts) != world_size:
        raise _contradiction(environ, counts_name, f"{sum(counts)} tasks", "SLURM_STEP_NUM_TASKS")
    if len(counts) != len(nodes):
        raise _contradiction(environ, counts_name, f"{len(counts)} nodes", "SLURM_STEP_NODELIST")

    below = ("the number of nodes", len(nodes))
    node_rank = number(environ, "SLURM_NODEID", below=below, fix=FIX)
    node = nodes[node_rank]
    if environ.get("SLURMD_NODENAME", node) != node:
        raise _contradiction(environ, "SLURM_NODEID", node, "SLURMD_NODENAME")
    local_size = counts[node_rank]
    below = (f"SLURM_STEP_TASKS_PER_NODE of node {node_rank}", local_size)
    local_rank = number(environ, "SLURM_LOCALID", below=below, fix=FIX)
    return Layout(rank, local_rank, node_rank, tuple(counts), tuple(nodes))


def _contradiction(environ: Environ, name: str, means: str, other: str) -> ConfigError:
    return ConfigError(
        f"{name}={shown(environ[name])} means {means}, but {other}={shown(environ[other])}: {FIX}"
    )


def use_cluster_of_sbatch(environ: MutableMapping[str, str]) -> None:
    """Makes the other commands of Slurm use the clusters that the user has chosen for sbatch."""
    if environ.get("SBATCH_CLUSTERS"):
        environ.setdefault("SLURM_CLUSTERS", environ["SBATCH_CLUSTERS"])


def partition_of_sbatch(environ: Environ) -> str:
    """The partition that the user has chosen for sbatch; "" for the default one."""
    return environ.get("SBATCH_PARTITION", "")
