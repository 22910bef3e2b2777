"""The Slurm job and step of this process: their ids, and the layout of the step's ranks. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from recipes.core.errors import ConfigError, shown
from recipes.core.place.hostlist import HostListError, expand, expand_counts
from recipes.core.place.launcher_variables import Environ, first_set, number

# slurm.h: step ids from this value on are not steps of srun. The two ids in _BATCH_STEPS mean the batch script, since and before
# 20.11. Slurm up to 25.11 sets no step id in a batch script. Slurm 26.05 writes the ids as signed numbers: -5 in a batch script,
# -6 in the shell that salloc starts on a node.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
_BATCH_STEPS = (0xFFFFFFFB, 0xFFFFFFFE)

Item = TypeVar("Item")
FIX_SLURM = "start the ranks with srun, and unset SLURM_* variables that an outer shell left"


@dataclass(frozen=True)
class Layout:
    """The number of a rank, and of its node, in a run."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int  # number of ranks on this node; nodes may have different numbers
    num_nodes: int
    nodes: tuple[str, ...]  # host names in order of node_rank; () if unknown


def in_step(environ: Environ) -> bool:
    """Whether this is a numbered step of srun, and not the batch shell or the shell that salloc starts on a node."""
    if "SLURM_JOB_ID" not in environ or "SLURM_STEP_ID" not in environ:
        return False
    return step_id(environ) < _FIRST_RESERVED_STEP


def in_batch_shell(environ: Environ) -> bool:
    """Whether this process runs in a batch script and was not started by srun."""
    if "SLURM_JOB_ID" not in environ or "SLURM_PROCID" not in environ:
        return False
    return "SLURM_STEP_ID" not in environ or step_id(environ) in _BATCH_STEPS


def slurm_layout(environ: Environ) -> Layout:
    """The step's layout from the variables of srun. `-m cyclic` and `-m arbitrary` scatter the ranks, but the counts are valid."""
    tasks_name = first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes_name = first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    counts_name = first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")

    world_size = number(environ, tasks_name, minimum=1, fix=FIX_SLURM)
    rank = number(environ, "SLURM_PROCID", below=(tasks_name, world_size), fix=FIX_SLURM)
    nodes, counts = _listed(environ, nodes_name, expand), _listed(environ, counts_name, expand_counts)
    if sum(counts) != world_size:
        raise _contradiction(environ, counts_name, f"{sum(counts)} tasks", tasks_name)
    if len(counts) != len(nodes):
        raise _contradiction(environ, counts_name, f"{len(counts)} nodes", nodes_name)

    node_rank = number(environ, "SLURM_NODEID", below=("the number of nodes", len(nodes)), fix=FIX_SLURM)
    if environ.get("SLURMD_NODENAME", nodes[node_rank]) != nodes[node_rank]:
        raise _contradiction(environ, "SLURM_NODEID", nodes[node_rank], "SLURMD_NODENAME")
    tasks_here = (f"the tasks on node {node_rank} ({counts_name})", counts[node_rank])
    local_rank = number(environ, "SLURM_LOCALID", below=tasks_here, fix=FIX_SLURM)
    return Layout(rank, local_rank, node_rank, world_size, counts[node_rank], len(nodes), tuple(nodes))


def _listed(environ: Environ, name: str, expand: Callable[[str], list[Item]]) -> list[Item]:
    """The items of a compressed list in a variable. Raises ConfigError if it is not set or invalid."""
    if name not in environ:
        raise ConfigError(f"{name} is not set: {FIX_SLURM}")
    try:
        return expand(environ[name])
    except HostListError as error:
        raise ConfigError(f"{name}: {error}: {FIX_SLURM}") from None


def _contradiction(environ: Environ, name: str, means: str, other: str) -> ConfigError:
    return ConfigError(f"{name}={shown(environ[name])} means {means}, but {other}={shown(environ[other])}: {FIX_SLURM}")


def step_id(environ: Environ) -> int:
    """SLURM_STEP_ID unsigned, as in slurm.h: 4294967291 for the -5 of Slurm 26.05. Raises ConfigError if it is invalid."""
    if re.fullmatch("-([1-9]|1[0-6])", environ.get("SLURM_STEP_ID", "")):
        return int(environ["SLURM_STEP_ID"]) % 2**32
    return number(environ, "SLURM_STEP_ID")


def job_id(environ: Environ) -> int:
    return number(environ, "SLURM_JOB_ID", default=0)


def restart_count(environ: Environ) -> int:
    """Sum of both launchers' restart counts: torchrun may restart its ranks inside a job that was itself requeued."""
    names = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return sum(number(environ, name, default=0) for name in names)
