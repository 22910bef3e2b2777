"""What an outer allocation left in the environment of a job, and how its step requests all of its own GPUs."""

import re
from collections.abc import Mapping

from recipes.core.run import scontrol

# Variables by which srun asks for GPUs, each with the field of scontrol that shows whether the job itself asked this way. "": no step
# needs this one. It would show each task only one GPU, and srun fails where two of these differ.
ASKS_FOR_GPUS = {
    "SLURM_GPUS": "TresPerJob", "SLURM_GPUS_PER_NODE": "TresPerNode", "SLURM_GPUS_PER_SOCKET": "TresPerSocket",
    "SLURM_GPUS_PER_TASK": "", "SLURM_TRES_PER_TASK": "", "SLURM_NTASKS_PER_GPU": "NtasksPerTRES",
    "SLURM_GPU_BIND": "TresBind", "SLURM_TRES_BIND": "TresBind",
}  # fmt: skip


def left_over(environ: Mapping[str, str], fields: Mapping[str, str]) -> list[str]:
    """The variables of an array, a heterogeneous job or a requeue that are not this job's, but of the job that it was submitted in.

    By them it would take that job's run directory for its own and not be requeued, or its step would not start. sbatch passes them on
    (seen with Slurm 22.05). ``fields``: the job's, by scontrol's names; {} where they are not known.
    """
    found = []
    if fields and "ArrayJobId" not in fields:
        found += [name for name in environ if name.startswith("SLURM_ARRAY_")]
    if fields.get("Restarts") == "0":
        found += [name for name in environ if name == "SLURM_RESTART_COUNT"]
    if environ.get("SLURM_JOB_ID_HET_GROUP_0") != environ.get("SLURM_JOB_ID"):
        found += [name for name in environ if re.fullmatch(r"SLURM_HET_SIZE|SLURM_\w+_HET_GROUP_\d+", name)]
    return found


def foreign_gpu_requests(environ: Mapping[str, str], fields: Mapping[str, str]) -> list[str]:
    """The variables to unset ahead of srun, since they ask for other GPUs than the job has. A step without them has all of the job's.

    They are left over from an outer allocation, or show each rank one GPU alone (``--gpus-per-task``), between which NCCL could not copy
    directly. A ``--gpu-bind`` of the job itself stays. ``fields``: the job's, by scontrol's names; {} where they are not known.
    """

    def is_own(name: str) -> bool:
        own = fields.get(ASKS_FOR_GPUS[name], "")
        if ASKS_FOR_GPUS[name] == "TresBind":
            bind = scontrol.gpus(own)
            return (
                bool(bind) and bind in (environ[name], scontrol.gpus(environ[name])) and not bind.startswith("per_task")
            )
        return environ[name] in (own, scontrol.gpus(own))

    return [name for name in ASKS_FOR_GPUS if name in environ and not is_own(name)]


def all_gpus(fields: Mapping[str, str]) -> str:
    """The value of ``--gpus`` with which a step has all GPUs of a job that asked for them per task; "" for any other job.

    Without it, a step of fewer tasks has only the GPUs of its own tasks (seen with Slurm 22.05, 24.11 and 26.05).
    """
    tasks, tasks_per_gpu = (fields.get(name, "") for name in ("NumTasks", "NtasksPerTRES"))
    if not tasks.isdecimal():
        return ""
    per_task = (one.rpartition(":") for one in scontrol.gpus(fields.get("TresPerTask", "")).split(","))
    gpus = [f"{kind}{colon}{int(count) * int(tasks)}" for kind, colon, count in per_task if count.isdecimal()]
    if not gpus and tasks_per_gpu.isdecimal() and int(tasks_per_gpu):
        gpus = [str(-(-int(tasks) // int(tasks_per_gpu)))]
    return ",".join(gpus)
