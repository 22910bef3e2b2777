"""The job that is submitted to Slurm, made from the settings of a launch.

The values are checked where the keys are declared (recipes/core/config), and are quoted where a script is made
(scripts.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.core import errors, files
from recipes.core.config import job_keys, profiles
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.parser import Settings
from recipes.core.config.run_keys import Device
from recipes.core.errors import ConfigError
from recipes.core.launch import container
from recipes.core.run import queue

GPU_CPUS = 8  # default number of CPUs of a rank that has a GPU
CPU_WORKERS = 6  # default number of CPUs for the loader of a rank that has none


@dataclass(frozen=True)
class Job:
    """A recipe with its arguments, and the resources and options that it requests from Slurm."""

    recipe: str
    arguments: tuple[str, ...]  # ``key=value`` words for the recipe
    keys: JobKeys
    nodes: int  # 0: any number, if `ranks` is not 0
    ranks_per_node: int
    gpus_per_node: int  # 0: requests no GPUs
    cpus_per_rank: int
    root: Path  # the repository, where the job runs
    directives: tuple[tuple[str, str], ...]  # further options of sbatch with their values
    ranks: int  # total number, on nodes that Slurm chooses; 0 if it is nodes times ranks_per_node
    elements: tuple[tuple[str, ...], ...]  # further arguments of each element of a job array
    # Exported for sbatch/job.sh: the site, the container, and the code and the Python of the job if they are chosen at submission.
    variables: Mapping[str, str]
    gpus_by: str  # the option of sbatch that must request GPUs at this site; "" for any option

    @property
    def gpu_for_each_task(self) -> bool:
        """Whether Slurm is asked for one GPU per task."""
        return self.gpus_per_node > 0 and (self.ranks > 0 or self.gpus_by == "--gpus-per-task")


def record(run_dir: Path, script: bytes, description: Mapping[str, object]) -> None:
    """Writes job.sh and job.yaml to the run directory, so that a pending job is visible. Raises OSError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    # The atomic rename replaces a symbolic link that another user may have planted.
    files.write_bytes(run_dir / "job.sh", script)
    files.write_json(run_dir / "job.yaml", description)


def options_of(fields: Mapping[str, str]) -> list[str]:
    """Options of sbatch that submit a ready script again as this job, from `queue.Job.fields`: its size, time and partition.

    [] for a job of launch.py, whose script has them.
    """
    if Path(fields.get("Command", "").split(" ")[0]).parent.name == "submitit":
        return []
    per_node = fields.get("NtasksPerN:B:S:C", "0").partition(":")[0]
    found = {
        "nodes": fields.get("NumNodes"),
        **({"ntasks": fields.get("NumTasks")} if per_node == "0" else {"ntasks-per-node": per_node}),
        "gpus-per-node": queue.gpus(fields.get("TresPerNode", "")) or "0",
        "cpus-per-task": fields.get("CPUs/Task"),
        "time": fields.get("TimeLimit"),
        **{name: fields.get(name.capitalize()) for name in ("partition", "account")},
        "qos": fields.get("QOS"),
    }
    return [f"--{name}={value}" for name, value in found.items() if value not in (None, "", "(null)", "N/A")]


def ranks_per_node(job: JobKeys, device: Device) -> int:
    """The number of ranks on each node: one per GPU.

    On the CPU it is ``ranks_per_node``, else the value of ``gpus_per_node``. Raises ConfigError if the keys contradict
    each other.
    """
    if device is Device.cpu:
        return job.ranks_per_node or job.gpus_per_node or 1
    if job.ranks_per_node and job.gpus_per_node and job.ranks_per_node != job.gpus_per_node:
        raise ConfigError(
            f"ranks_per_node={job.ranks_per_node}: there is one rank per GPU; give gpus_per_node= alone, or device=cpu"
        )
    if job.gpus_per_node == 0:
        raise ConfigError("gpus_per_node=0: there is one rank per GPU; without GPUs give device=cpu ranks_per_node=1")
    return job.gpus_per_node or job.ranks_per_node or 1


def describe(settings: Settings, root: Path, base: Path) -> Job:
    """The job that ``settings`` describe. Typed paths are relative to ``base``. Raises ConfigError."""
    job, on_cpu = settings.job, settings.run.device is Device.cpu
    profile = profiles.cluster_profile(job.cluster) if job.cluster else {}
    gpus_by = profile.get("gpus", "")
    _check_keys(settings, gpus_by)
    ranks = 1 if job.gpus else ranks_per_node(job, settings.run.device)
    workers = getattr(settings.config, "num_workers", 0)
    workers = CPU_WORKERS if workers < 0 else workers
    cpus = job.cpus_per_rank or (max(1, settings.run.cpu_threads) + workers if on_cpu else GPU_CPUS)
    require_printable(root, base)
    words = settings.absolute(settings.typed, base)
    elements = [settings.absolute(run, base) for run in settings.sweep]
    if elements and "run_dir" in words:
        parent = words.pop("run_dir")
        elements = [{**run, "run_dir": f"{parent}/{number}"} for number, run in enumerate(elements)]
    variables = {  # set even without a container, since the site's profile may name one
        "RECIPES_CONTAINER": container.absolute_image(job.container, base),
        "RECIPES_CONTAINER_RUNTIME": job.container_runtime.name,
        "RECIPES_CONTAINER_MOUNTS": job.container_mounts,
    }
    variables |= {"RECIPES_CLUSTER": job.cluster} if job.cluster else {}
    variables |= {} if job.snapshot else {"RECIPES_SNAPSHOT": "false"}
    return Job(
        recipe=settings.recipe,
        arguments=tuple(f"{name}={value}" for name, value in words.items()),
        keys=job,
        nodes=job.nodes or (0 if job.gpus else 1),
        ranks_per_node=ranks,
        gpus_per_node=0 if on_cpu else ranks,
        cpus_per_rank=cpus,
        root=root,
        directives=tuple(_directives(job, profile).items()),
        ranks=int(job.gpus or 0),
        elements=tuple(tuple(f"{name}={value}" for name, value in run.items()) for run in elements),
        variables=variables,
        gpus_by=gpus_by,
    )


def _check_keys(settings: Settings, gpus_by: str) -> None:
    """Raises ConfigError for job keys that contradict each other or that belong to launcher=local."""
    job = settings.job
    for name in ("master", "node_rank"):
        if value := getattr(job, name):
            fix = "leave it out, since the ranks get it from Slurm's variables"
            raise ConfigError(f"{name}={value}: is for launcher=local: {fix}")
    if "," in job.gpus:
        total = sum(map(int, job.gpus.split(",")))
        fix = f"give the total, gpus={total}, since Slurm chooses the nodes"
        raise ConfigError(f"gpus={job.gpus}: a list is for launcher=local: {fix}")
    if job.gpus and int(job.gpus) < max(1, job.nodes or 0):
        raise ConfigError(f"gpus={job.gpus}: must be at least nodes={max(1, job.nodes or 0)}, one GPU per node")
    if job.parallel and not settings.sweep:
        raise ConfigError(f"parallel={job.parallel}: requires a sweep of several runs: sweep.KEY=A,B,C")
    if job.gpus and gpus_by not in ("", "--gpus-per-task") and settings.run.device is not Device.cpu:
        raise ConfigError(f"gpus={job.gpus}: cluster={job.cluster} requires {gpus_by}: give nodes= and gpus_per_node=")


def _directives(job: JobKeys, profile: Mapping[str, str]) -> dict[str, str]:
    """Further options of sbatch: those of the job keys, then of the profile's `extra`, then of extra=."""
    names = ("partition", "account", "qos", "constraint", "exclude", "reservation", "dependency")
    options = {name: getattr(job, name) for name in names if getattr(job, name)}
    if job.mail:
        options |= {"mail-user": job.mail, "mail-type": "END,FAIL,REQUEUE"}
    return options | job_keys.extra_options(profile.get("extra", "")) | job_keys.extra_options(job.extra)


def require_printable(*folders: Path) -> None:
    """Raises ConfigError for a folder with an unprintable character in its name.

    A line break in a folder's name could end a line of a script, and the shell would run the rest of the name as a
    command.
    """
    for folder in folders:
        if not str(folder).isprintable():
            raise ConfigError(
                f"folder {errors.shown(folder)}: has a character in its name that cannot be printed: rename it"
            )
