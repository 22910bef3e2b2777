"""The variables that an outer allocation left in the environment, and how a step gets all GPUs of
its job.
"""

import contextlib
import math
import re
from collections.abc import Container, Mapping

from recipes.core.errors import MachineError
from recipes.core.run import queue

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
    r"|RECIPES_(ATTEMPT|BATCH|BY_CLOCK|CODE|LAUNCH|LISTEN_FD|PYTHON|SCRIPT|STOP_NOTE|TASK)"
)


def left_over(environ: Mapping[str, str], fields: Mapping[str, str]) -> list[str]:
    """The variables of an array, a heterogeneous job or a requeue that belong to the outer job, not
    to this job.

    The outer job is the job in which this job was submitted. sbatch passes these variables on (seen
    with Slurm 22.05). With them, this job would use the run directory of the outer job and would
    not be requeued, or its step would not start. fields: the fields of this job, by scontrol's
    names; {} if they are not known.
    """
    patterns = []
    if fields and "ArrayJobId" not in fields:
        patterns.append("SLURM_ARRAY_.*")
    if fields.get("Restarts") == "0":
        patterns.append("SLURM_RESTART_COUNT")
    if environ.get("SLURM_JOB_ID_HET_GROUP_0") != environ.get("SLURM_JOB_ID"):
        patterns.append(r"SLURM_HET_SIZE|SLURM_\w+_HET_GROUP_\d+")
    return [name for name in environ if re.fullmatch("|".join(patterns), name)]


def all_gpus(fields: Mapping[str, str]) -> str:
    """The value of ``--gpus`` that gives a step all GPUs of a job that requested them per task; ""
    for any other job.

    Without this option, a step with fewer tasks than the job gets only the GPUs of those tasks
    (seen with Slurm 22.05, 24.11 and 26.05).
    """
    tasks = fields.get("NumTasks", "")
    if not tasks.isdecimal():
        return ""
    gpus = []
    for request in queue.gpus(fields.get("TresPerTask", "")).split(","):
        kind, colon, count = request.rpartition(":")
        if count.isdecimal():
            gpus.append(f"{kind}{colon}{int(count) * int(tasks)}")
    tasks_per_gpu = fields.get("NtasksPerTRES", "")
    if not gpus and tasks_per_gpu.isdecimal() and int(tasks_per_gpu):
        return str(math.ceil(int(tasks) / int(tasks_per_gpu)))
    return ",".join(gpus)


def fields_of_job(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The fields of this job, by scontrol's names; {} outside a job, or if the controller does not
    answer.
    """
    # not the variables of the array, which may belong to another job
    job_id = environ.get("SLURM_JOB_ID")
    if job_id:
        with contextlib.suppress(MachineError):
            for job in queue.show(job_id):
                if job.fields.get("JobId") == job_id:
                    return job.fields
    return {}


def clean_environment(environ: Mapping[str, str], options: Container[str] = ()) -> dict[str, str]:
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
