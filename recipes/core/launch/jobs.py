"""The job that is submitted to Slurm, made from the settings of a launch, and its script.

The values are checked where the keys are declared (recipes/core/config), and are quoted in
`sbatch_script`.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core import errors, trust
from recipes.core.config import job_keys, key_value, profiles
from recipes.core.config.parser import Settings
from recipes.core.errors import ConfigError
from recipes.core.files import Json
from recipes.core.launch import container
from recipes.core.run import directory
from recipes.core.slurm import jobstate, script
from recipes.core.variables import Environ

GPU_CPUS = 8  # default number of CPUs of a rank that has a GPU
CPU_WORKERS = 6  # default number of CPUs for the loader of a rank that has none
# Slurm signals the ranks SIGNAL_S seconds before the time limit. In a short job this time is at
# most SIGNAL_SHARE of the time limit. Slurm may send the signal up to 60 s early.
SIGNAL_S = 120
SIGNAL_SHARE = 0.25
# The options of sbatch that a ready script is submitted again with.
OF_SUBMISSION = (
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "gpus-per-node",
    "cpus-per-task",
    "time",
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "mem",
    "mem-per-cpu",
    "mem-per-gpu",
)
# The variables that a script is submitted again with. A script of launch.py exports most of them.
OF_SITE = (
    "RECIPES_CLUSTER",
    "RECIPES_CONTAINER",
    "RECIPES_CONTAINER_RUNTIME",
    "RECIPES_CONTAINER_MOUNTS",
    "RECIPES_DATA",
    "RECIPES_SNAPSHOT",
)


@dataclass(frozen=True)
class Job:
    """A recipe with its arguments, and the options with which it is submitted to Slurm."""

    recipe: str
    arguments: tuple[str, ...]  # ``key=value`` words for the recipe
    keys: job_keys.JobKeys
    ranks: int
    root: Path  # the repository, where the job runs
    # options of sbatch by their long names without dashes; "" for one without a value
    directives: Mapping[str, str]
    elements: tuple[tuple[str, ...], ...]  # further arguments of each element of a job array
    # Exported for sbatch/job.sh: the site, the container, and the code and the Python of the job if
    # they are chosen at submission.
    variables: Mapping[str, str]


def record(
    run_dir: Path, text: bytes, job_id: str, recipe: str, arguments: Sequence[str], **more: object
) -> None:
    """Writes job.sh and job.yaml to the run directory, so that a pending job is visible. Raises
    OSError, and MachineError if the run directory is another user's.

    more: ``root`` (the repository), ``code`` (its snapshot), ``log``, and ``options`` of sbatch and
    ``variables`` with which the script is submitted again.
    """
    trust.own_folder(run_dir)
    # The atomic rename replaces a symbolic link that another user may have planted.
    trust.write_own(run_dir / "job.sh", text)
    real = os.path.realpath(run_dir)
    of_job = {"job_id": job_id, "recipe": recipe, "arguments": arguments, "run_dir": real}
    digest = hashlib.sha256(text).hexdigest()
    write_description(run_dir, {**of_job, "script": digest, **more})
    if "root" in more:
        directory.note_job(run_dir, job_id, Path(str(more["root"])))


def write_description(run_dir: Path, description: Json) -> None:
    """Writes job.yaml with its mark. Raises OSError."""
    content = directory.marked(run_dir, description)
    trust.write_own(run_dir / "job.yaml", json.dumps(content, indent=1).encode() + b"\n")


def of_site(environ: Environ) -> dict[str, str]:
    """The variables of the user's shell that choose the site, the container and the data of a
    job.
    """
    return {name: environ[name] for name in OF_SITE if name in environ}


def options_of(job: jobstate.Job, text: str) -> list[str]:
    """Options of sbatch that submit the script of this job again: its size, time, partition and
    memory. text: of the script.

    [] for a script that launch.py has submitted, which has them, and if the job is not known.
    """
    if not job.id or "\nexport RECIPES_PYTHON=" in text:
        return []
    options = dict(job.options)
    options.setdefault("gpus-per-node", "0")
    if "--gpus-per-node" not in text:  # it requests none, or in another way
        del options["gpus-per-node"]
    return [f"--{name}={options[name]}" for name in OF_SUBMISSION if name in options]


def ranks_per_node(settings: Settings) -> int:
    """The number of ranks on each node: one per GPU.

    On the CPU it is ``ranks_per_node``, else the value of ``gpus_per_node``. Raises ConfigError if
    the keys contradict each other.
    """
    gpus = settings.job.gpus_per_node
    ranks = settings.job.ranks_per_node
    if settings.run.on_cpu:
        return ranks or gpus or 1
    if gpus == 0:
        raise ConfigError(
            "gpus_per_node=0: there is one rank per GPU; "
            "without GPUs give device=cpu ranks_per_node=1"
        )
    if ranks and gpus and ranks != gpus:
        raise ConfigError(
            f"ranks_per_node={ranks}: there is one rank per GPU; "
            "give gpus_per_node= alone, or device=cpu"
        )
    return gpus or ranks or 1


def through(settings: Settings) -> str:
    """What starts the ranks of a user's program on a node, instead of the job; "" if the job starts
    the ranks.
    """
    name = getattr(getattr(settings.config, "through", None), "name", "rank")
    return "" if name == "rank" else name


def own_words(settings: Settings) -> dict[str, str]:
    """Keys of a program that starts its own ranks, which follow from job keys. Raises ConfigError
    for those that do not fit.
    """
    job = settings.job
    by = through(settings)
    if not by:
        return {}
    if job.gpus:
        raise ConfigError(
            f"gpus={job.gpus}: through={by} needs the same number on each node: "
            "give nodes= and gpus_per_node="
        )
    on_cpu = settings.run.on_cpu
    problem = ""
    if job.ranks_per_node and by == "node":
        problem = "through=node starts one process per node: leave it out"
    elif job.ranks_per_node and not on_cpu:
        problem = f"through={by} starts one rank per GPU: give gpus_per_node={job.ranks_per_node}"
    if problem:
        raise ConfigError(f"ranks_per_node={job.ranks_per_node}: {problem}")
    processes = settings.config.nproc_per_node
    if on_cpu and by != "node":
        processes = processes or ranks_per_node(settings)
    return {"nproc_per_node": str(processes)} if processes else {}


def describe(settings: Settings, root: Path) -> Job:
    """The job that ``settings`` describe. root: the repository. Raises ConfigError."""
    job = settings.job
    profile = profiles.cluster_profile(job.cluster)
    _check_keys(settings, profile.get("gpus", ""))
    require_printable(root, Path.cwd())
    keys = settings.typed | own_words(settings)
    archive = keys.get("environment")
    if archive and not os.path.isfile(archive):
        raise ConfigError(f"environment={errors.shown(archive, 4096)}: no such file")
    elements = list(settings.sweep)
    if elements and "run_dir" in keys:
        parent = keys.pop("run_dir")
        elements = [{**run, "run_dir": f"{parent}/{number}"} for number, run in enumerate(elements)]
    variables = {  # set even without a container, since the site's profile may name one
        "RECIPES_CONTAINER": container.absolute_image(job.container, Path.cwd()),
        "RECIPES_CONTAINER_RUNTIME": job.container_runtime.name,
        "RECIPES_CONTAINER_MOUNTS": job.container_mounts,
    }
    if job.cluster:
        variables["RECIPES_CLUSTER"] = job.cluster
    if not job.snapshot:
        variables["RECIPES_SNAPSHOT"] = "false"
    return Job(
        recipe=settings.recipe,
        arguments=tuple(key_value.words_of(keys)),
        keys=job,
        ranks=int(job.gpus or 0) or (job.nodes or 1) * ranks_per_node(settings),
        root=root,
        directives=_directives(settings, profile, len(elements)) | {"chdir": str(root)},
        elements=tuple(tuple(key_value.words_of(run)) for run in elements),
        variables=variables,
    )


def _check_keys(settings: Settings, gpus_by: str) -> None:
    """Raises ConfigError for job keys that contradict each other or belong to launcher=local."""
    job = settings.job
    for name in ("master", "node_rank"):
        value = getattr(job, name)
        if value:
            raise ConfigError(
                f"{name}={value}: is for launcher=local: "
                "leave it out, since the ranks get it from Slurm's variables"
            )
    if job.parallel and not settings.sweep:
        raise ConfigError(
            f"parallel={job.parallel}: requires a sweep of several runs: sweep.KEY=A,B,C"
        )
    if not job.gpus:
        return
    if settings.run.spare or settings.run.min_nodes:
        raise ConfigError(
            f"gpus={job.gpus}: spare= and min_nodes= need the same number of ranks on each node: "
            "give nodes= and gpus_per_node="
        )
    nodes = job.nodes or 1
    problem = ""
    if "," in job.gpus:
        total = sum(map(int, job.gpus.split(",")))
        problem = (
            "a list is for launcher=local: "
            f"give the total, gpus={total}, since Slurm chooses the nodes"
        )
    elif int(job.gpus) < nodes:
        problem = f"must be at least nodes={nodes}, one GPU per node"
    elif gpus_by not in ("", "--gpus-per-task") and not settings.run.on_cpu:
        problem = f"cluster={job.cluster} requires {gpus_by}: give nodes= and gpus_per_node="
    if problem:
        raise ConfigError(f"gpus={job.gpus}: {problem}")


def _directives(settings: Settings, profile: Mapping[str, str], runs: int) -> dict[str, str]:
    """The options of sbatch. Those of `_fixed` replace those of extra=, and these replace those of
    the profile's `extra` and of the keys. runs: of a sweep; 0 for a single run.
    """
    job = settings.job
    options = {"job-name": job.name or settings.recipe}
    options |= _size(settings, profile.get("gpus", "--gpus-per-node"))
    names = ("partition", "account", "qos", "constraint", "exclude", "reservation", "dependency")
    options |= {name: getattr(job, name) for name in names if getattr(job, name)}
    if job.mail:
        options |= {"mail-user": job.mail, "mail-type": "END,FAIL,REQUEUE"}
    for text in (profile.get("extra", ""), job.extra):
        extra = job_keys.extra_options(text)
        if "gres" in extra and "gres" in options:  # the GPUs of a profile with gpus: --gres
            extra["gres"] = f"{options['gres']},{extra['gres']}"
        options |= extra
    # a value of extra=--requeue=… (expedite, from Slurm 25.11 on) stays
    return options | {"requeue": options.get("requeue", "")} | _fixed(settings, runs)


def _size(settings: Settings, gpus_by: str) -> dict[str, str]:
    """The options for nodes, tasks, GPUs, CPUs and time. gpus_by: the option that requests GPUs.

    A task is a rank, or with through= the launcher that starts all ranks of a node.
    """
    job = settings.job
    on_cpu = settings.run.on_cpu
    if job.gpus:  # anywhere: one task for each
        gpus = int(job.gpus)
        ranks = tasks = 1
        gpus_by = "--gpus-per-task"
        # without it, submitit 1.5 writes --nodes=1
        options = {"nodes": str(job.nodes or f"1-{gpus}"), "ntasks": str(gpus)}
    else:
        ranks = ranks_per_node(settings)
        tasks = 1 if through(settings) else ranks
        nodes = (job.nodes or 1) + settings.run.spare
        options = {"nodes": str(nodes), "ntasks-per-node": str(tasks)}

    if not on_cpu:
        kind = "gpu:" if gpus_by == "--gres" else ""
        kind += f"{job.gpu_type}:" if job.gpu_type else ""
        count = ranks // tasks if gpus_by == "--gpus-per-task" else ranks
        options[gpus_by.removeprefix("--")] = f"{kind}{count}"
    cpus = GPU_CPUS
    if on_cpu:
        workers = settings.config.num_workers
        cpus = max(1, settings.run.cpu_threads) + (CPU_WORKERS if workers < 0 else workers)
        ranks = int(own_words(settings).get("nproc_per_node", ranks))
    cpus = (job.cpus_per_rank or cpus) * ranks // tasks
    return options | {"cpus-per-task": str(cpus), "time": str(job_keys.minutes(job.time))}


def _fixed(settings: Settings, runs: int) -> dict[str, str]:
    """The options on which the batch script relies. runs: as for `_directives`."""
    options = {"open-mode": "append"}
    if runs:
        options["array"] = f"0-{runs - 1}%{min(settings.job.parallel or runs, runs)}"
    if settings.run.spare or settings.run.min_nodes:
        options["no-kill"] = ""  # the job survives the loss of a node
    # Of a program of the user, only the batch shell is signalled: see sbatch/job.sh.
    shell = "B:" if settings.config.program else ""
    notice = notice_s(settings, 60.0 * job_keys.minutes(settings.job.time))
    if notice:
        options["signal"] = f"{shell}USR2@{max(1, int(notice))}"
    return options


def signal_s(settings: Settings) -> float:
    """How many seconds before the time limit a job of hours is signalled: SIGNAL_S, or
    stop_before_s= for a program of the user.
    """
    is_set = settings.config.program and "stop_before_s" in settings.typed
    return settings.run.stop_before_s if is_set else SIGNAL_S


def notice_s(settings: Settings, limit_s: float | None) -> float | None:
    """`signal_s`, at most SIGNAL_SHARE of the time limit; None if there is no limit, or no signal.
    limit_s: inf means no limit.
    """
    if not limit_s or math.isinf(limit_s) or not signal_s(settings):
        return None
    return min(signal_s(settings), SIGNAL_SHARE * limit_s)


def sbatch_script(job: Job) -> str:
    """The sbatch script of ``job``, as launcher=print shows it."""
    doctor = f"examine {job.recipe} {job.keys.max_resubmits}" if job.keys.doctor else ""
    code = job.variables.get("RECIPES_CODE", str(job.root))
    return script.render(
        job.recipe, code, job.directives, job.variables, job.arguments, job.elements, doctor
    )


def require_printable(*folders: Path) -> None:
    """Raises ConfigError for a folder with an unprintable character in its name.

    A line break in a folder's name could end a line of a script, and the shell would run the rest
    of the name as a command.
    """
    for folder in folders:
        if not str(folder).isprintable():
            raise ConfigError(
                f"folder {errors.shown(folder)}: has a character in its name that cannot be "
                "printed: rename it"
            )
