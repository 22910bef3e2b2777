"""One job description, and the two things made of it: the text of an sbatch script, and submitit's parameters.

Values are checked where keys are (recipes/core/config/parser.py) and quoted here: nothing typed reaches a script bare.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core import errors
from recipes.core.config import declare, job_keys, parser, profiles, recipe_conf
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.parser import Settings
from recipes.core.config.run_keys import Device, RunKeys
from recipes.core.errors import ConfigError
from recipes.core.launch import container
from recipes.core.run import scontrol

# Seconds before the time limit at which Slurm signals the ranks, and the most of a short job's time that this may be. It may
# come up to 60 s early.
SIGNAL_S, SIGNAL_SHARE = 120, 0.25
GPU_CPUS = 8  # CPUs of a rank that has a GPU, where nothing else says
# One dead rank ends the step; the ranks have this script's environment also where the site's sbatch exports none.
# A step has all memory of its job, which no variable of an outer allocation can then contradict.
SRUN_OPTIONS = ("--export=ALL", "--kill-on-bad-exit=1", "--wait=60", "--mem=0")
# Variables by which srun asks for GPUs, each with the field of scontrol that shows whether the job itself asked this way. "": no step
# needs this one. It would show each task only one GPU, and srun fails where two of these differ.
ASKS_FOR_GPUS = {
    "SLURM_GPUS": "TresPerJob", "SLURM_GPUS_PER_NODE": "TresPerNode", "SLURM_GPUS_PER_SOCKET": "TresPerSocket",
    "SLURM_GPUS_PER_TASK": "", "SLURM_TRES_PER_TASK": "", "SLURM_NTASKS_PER_GPU": "NtasksPerTRES",
    "SLURM_GPU_BIND": "TresBind", "SLURM_TRES_BIND": "TresBind",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What is submitted: a recipe with its arguments, and what it asks of Slurm.

    arguments: ``key=value`` words behind the recipe. root: the repository, where the job runs. gpus_per_node: 0 asks for none. directives: further sbatch options that have a value. ranks: so many, over
    whichever nodes Slurm finds (``nodes`` of them, where that is not 0), each with a GPU where ``gpus_per_node`` is not 0.
    elements: further arguments of each job of an array, ``parallel`` of which run at once. code: the copy of the repository's code that
    it runs, None for the repository itself.  image, runtime,
    mounts: of the container that the ranks run in; variables: what the env files set, which its inside is to have; bound: the folders
    that it is to have. gpu_type: of the GPUs, in Slurm's words. gpus_by: sbatch's option for GPUs that the site requires, "" for any. snapshot: whether a script makes a copy of the code when it starts.
    """

    recipe: str
    arguments: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_rank: int
    minutes: int
    name: str
    root: Path
    cluster: str = ""
    modules: tuple[str, ...] = ()
    directives: tuple[tuple[str, str], ...] = ()
    resubmits: int | None = None
    ranks: int = 0
    elements: tuple[tuple[str, ...], ...] = ()
    parallel: int = 0
    code: Path | None = None
    image: str = ""
    runtime: str = "auto"
    mounts: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    bound: tuple[str, ...] = ()
    gpu_type: str = ""
    snapshot: bool = True
    gpus_by: str = ""

    @property
    def gpu_for_each_task(self) -> bool:
        """Whether Slurm is asked for one GPU per task."""
        return self.gpus_per_node > 0 and (self.ranks > 0 or self.gpus_by == "--gpus-per-task")

    @property
    def container(self) -> container.Container | None:
        return container.chosen(self.image, self.runtime, self.mounts)


def ranks_per_node(job: JobKeys, device: Device) -> int:
    """Ranks of each node: one for each GPU; on the CPU ``ranks_per_node``, or ``gpus_per_node`` taken as that.

    Raises ConfigError when the keys contradict each other.
    """
    if device is Device.cpu:
        if job.ranks_per_node is not None:
            return job.ranks_per_node
        return job.gpus_per_node or 1
    if job.ranks_per_node is not None and job.ranks_per_node != (job.gpus_per_node or job.ranks_per_node):
        raise ConfigError(
            f"ranks_per_node={job.ranks_per_node}: beside gpus_per_node={job.gpus_per_node}, but there is one rank per GPU;"
            " give gpus_per_node alone, or device=cpu"
        )
    if job.gpus_per_node == 0:
        raise ConfigError("gpus_per_node=0: there is one rank per GPU; without GPUs give device=cpu ranks_per_node=1")
    return job.gpus_per_node or job.ranks_per_node or 1


def describe(settings: Settings, root: Path, base: Path) -> Job:
    """The job that ``settings`` describe. Paths typed are relative to ``base``. Raises ConfigError."""
    job, on_cpu = settings.job, settings.run.device is Device.cpu
    if job.master:
        raise ConfigError(f"master={job.master}: is for launcher=local; with launcher=slurm rank 0's node is known")
    if "," in job.gpus:
        total = sum(map(int, job.gpus.split(",")))
        raise ConfigError(f"gpus={job.gpus}: is for launcher=local; Slurm finds the nodes by itself: give gpus={total}")
    nodes = job.nodes or (0 if job.gpus else 1)
    if job.gpus and int(job.gpus) < max(1, nodes):
        raise ConfigError(f"gpus={job.gpus}: wants one for each of nodes={max(1, nodes)} at least")
    if job.parallel and not settings.sweep:
        raise ConfigError(f"parallel={job.parallel}: is for a sweep of several runs: sweep.KEY=A,B,C")
    if job.node_rank:
        raise ConfigError(
            f"node_rank={job.node_rank}: is for launcher=local; with launcher=slurm srun numbers the nodes"
        )
    ranks = 1 if job.gpus else ranks_per_node(job, settings.run.device)
    workers = getattr(settings.config, "num_workers", 0)
    cpus = job.cpus_per_rank or (max(1, settings.run.cpu_threads) + workers if on_cpu else GPU_CPUS)
    recipe_class, _ = recipe_conf.load(settings.recipe)
    want_printable(root, base)
    words = parser.absolute(settings.typed, (RunKeys, recipe_class), base)
    elements = [parser.absolute(run, (RunKeys, recipe_class), base) for run in settings.sweep]
    if elements and "run_dir" in words:
        parent = words.pop("run_dir")
        elements = [{**run, "run_dir": f"{parent}/{number}"} for number, run in enumerate(elements)]
    bound = (
        sorted({folder for run in elements or [{}] for folder in container_folders(settings, {**words, **run}, root)})
        if job.container
        else []
    )
    profile = profiles.cluster_profile(job.cluster) if job.cluster else {}
    options = ("partition", "account", "qos", "constraint", "exclude", "reservation", "dependency")
    asked = [(name, getattr(job, name)) for name in options if getattr(job, name)]
    extra, gpus_by = job_keys.extra_options(job.extra), profile.get("gpus", "")
    if job.gpus and gpus_by not in ("", "--gpus-per-task") and not on_cpu:
        raise ConfigError(
            f"gpus={job.gpus}: needs --gpus-per-task, and cluster={job.cluster} asks for GPUs by {gpus_by}: give nodes= and gpus_per_node="
        )
    if job.mail:
        asked += [("mail-user", job.mail), ("mail-type", "END,FAIL,REQUEUE")]
    return Job(
        recipe=settings.recipe,
        arguments=tuple(f"{name}={value}" for name, value in words.items()),
        nodes=nodes,
        ranks_per_node=ranks,
        gpus_per_node=0 if on_cpu else ranks,
        cpus_per_rank=cpus,
        minutes=job_keys.minutes(job.time),
        name=job.name or settings.recipe,
        root=root,
        cluster=job.cluster,
        modules=tuple(profile.get("modules", ())),
        directives=tuple({**site_options(profile, extra), **dict(asked), **extra}.items()),
        resubmits=job.max_resubmits if job.doctor else None,
        ranks=int(job.gpus or 0),
        elements=tuple(tuple(f"{name}={value}" for name, value in run.items()) for run in elements),
        parallel=job.parallel,
        image=container.whole(job.container, base),
        runtime=job.container_runtime.name,
        mounts=job.container_mounts,
        variables=tuple(profiles.env_variables(settings.run.network, job.cluster).items()) if job.container else (),
        bound=tuple(bound),
        gpu_type=job.gpu_type,
        snapshot=job.snapshot,
        gpus_by=gpus_by,
    )


def site_options(profile: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """sbatch's options for nodes by a site's profile, where ``extra`` does not have an option in their place."""
    options = {name: profile[name] for name in ("mem", "segment", "switches") if name in profile}
    if extra.keys() & {"mem-per-cpu", "mem-per-gpu"}:  # sbatch refuses them beside --mem
        options.pop("mem", None)
    exclusive = profile.get("exclusive", "false")
    return options | ({} if exclusive == "false" else {"exclusive": exclusive.replace("true", "")})


def want_printable(*folders: Path) -> None:
    """Raises ConfigError for a folder whose name could end a line of a script, what follows being run."""
    for folder in folders:
        if not str(folder).isprintable():
            raise ConfigError(
                f"folder {errors.shown(folder)}: has a character in its name that cannot be printed; give it another"
            )


def container_folders(settings: Settings, words: Mapping[str, str], root: Path) -> list[str]:
    """The folders that a run's container has to have, by absolute ``words``. Raises ConfigError for one that cannot be named to it."""
    recipe_class, _ = recipe_conf.load(settings.recipe)
    paths = [*declare.path_keys((RunKeys, recipe_class)), "network", "resume"]
    links = [Path(os.path.realpath(root / name)) for name in ("runs", "data")]  # they may lead to other disks
    around = {name: os.environ.get(name, "") for name in ("RECIPES_DATA", "TORCH_HOME")}
    around["data_dir"] = getattr(settings.config, "data_dir", "")  # also the site profile's
    found = container.folders({**around, **settings.from_run, **words}, [*paths, *around], [root, *links])
    for folder in found:
        if set(folder) & set(":,"):
            raise ConfigError(
                f"{errors.shown(folder)}: a folder with : or , in its name cannot be shown to a container"
            )
    return found


def directives(job: Job) -> dict[str, str]:
    """sbatch's options for ``job``, long names without dashes; an empty value is an option that takes none."""
    size = {"nodes": str(job.nodes)} if job.nodes else {}
    kind = f"{job.gpu_type}:" if job.gpu_type else ""
    size |= {"ntasks": str(job.ranks)} if job.ranks else {"ntasks-per-node": str(job.ranks_per_node)}
    if job.gpu_for_each_task:
        size["gpus-per-task"] = f"{kind}1"
    elif job.gpus_per_node:
        of_node = f"{kind}{job.gpus_per_node}"
        size |= {"gres": f"gpu:{of_node}"} if job.gpus_by == "--gres" else {"gpus-per-node": of_node}
    return {
        "job-name": job.name,
        **size,
        "cpus-per-task": str(job.cpus_per_rank),
        "time": str(job.minutes),
        **dict(job.directives),
        **({"array": f"0-{len(job.elements) - 1}%{_at_once(job)}"} if job.elements else {}),
        "requeue": "",
        "open-mode": "append",
        "signal": f"USR2@{int(min(SIGNAL_S, SIGNAL_SHARE * 60 * job.minutes))}",
    }


def _at_once(job: Job) -> int:
    return min(job.parallel or len(job.elements), len(job.elements))


def _element(job: Job) -> list[str]:
    """Shell lines that add the arguments of this element of the array to those that are there."""
    if not job.elements:
        return []
    lines = [f'    {number}) set -- "$@" {shlex.join(words)} ;;' for number, words in enumerate(job.elements)]
    last = f'    *) echo "{job.recipe}: no run of this sweep has the number ${{SLURM_ARRAY_TASK_ID:-}}" >&2; exit 2 ;;'
    together = 'stop "run_dir= behind the script would be that of all runs of the sweep: give it to launch.py"'
    apart = f'for word in "$@"; do [ "${{word#run_dir=}}" = "$word" ] || {together}; done'
    return [apart, "case ${SLURM_ARRAY_TASK_ID:-} in", *lines, last, "esac"]


def srun_options(job: Job) -> tuple[str, ...]:
    """Beside the CPUs. With a GPU of its own shown to each task NCCL could not copy from one to another of a node."""
    return (*SRUN_OPTIONS, "--gpu-bind=none") if job.gpu_for_each_task else SRUN_OPTIONS


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


def enter(job: Job, python: str) -> tuple[list[str], list[str]]:
    """Further options of srun, and what stands before a rank's arguments to Python: ``python`` itself, where there is no container."""
    if not job.container:
        return [], [python]
    code, gpus = job.code or job.root or Path(), job.gpus_per_node > 0
    return container.step(job.container, code, job.bound, dict(job.variables), os.environ, gpus)


def script(job: Job, header: Sequence[str] = ()) -> str:
    """The sbatch script of ``job``. header: lines of comment. sbatch/job.sh holds what all scripts share."""
    options = {**directives(job), "chdir": str(job.root)}
    # In the folder that the job starts in: a job whose log folder is missing fails without a message (sbatch, 0:53).
    options["output"] = "%x-%A_%a.out" if job.elements else "%x-%j.out"
    lines = ["#!/bin/bash", *(f"# {line}" for line in header)]
    lines += [f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "") for name, value in options.items()]
    lines += ["", *_setup(job, job.root)]
    if job.arguments:
        lines += [f'set -- {shlex.join(job.arguments)} "$@"']
    lines += [*_element(job), f'begin {job.recipe} "$@"']
    if job.resubmits is not None:
        lines += [f"examine {job.recipe} {job.resubmits}"]
    lines += [
        f'srun --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" {" ".join(srun_options(job))} "${{step[@]}}" \\',
        f'    "${{inside[@]}}" -u -m recipes.{job.recipe} "${{words[@]}}"',
        f"finish {job.recipe} $?",
    ]
    return "\n".join(lines) + "\n"


def _setup(job: Job, code: Path) -> list[str]:
    """The first lines of the batch shell: the job's variables, and sbatch/job.sh of ``code``."""
    lines = [f"export RECIPES_CLUSTER={shlex.quote(job.cluster)}"] if job.cluster else []
    # Also where there is no container: the profile may name one.
    names = {"": job.image, "_RUNTIME": job.runtime, "_MOUNTS": job.mounts}
    lines += [f"export RECIPES_CONTAINER{name}={shlex.quote(value)}" for name, value in names.items()]
    if not job.snapshot:
        lines += ["export RECIPES_SNAPSHOT=false # this job runs the code in the repository"]
    return [*lines, f". {shlex.quote(str(code / 'sbatch/job.sh'))} || exit"]


def submitit_parameters(job: Job, python: str) -> dict[str, object]:
    """The same job for ``submitit.SlurmExecutor.update_parameters`` (submitit 1.5). ``python``: that runs the recipe."""
    options = directives(job)
    native: dict[str, object] = {
        "job_name": options.pop("job-name"),
        "nodes": int(options.pop("nodes")) if "nodes" in options else None,
        "ntasks_per_node": int(options.pop("ntasks-per-node")) if "ntasks-per-node" in options else None,
        "cpus_per_task": int(options.pop("cpus-per-task")),
        "time": int(options.pop("time")),
        "signal_delay_s": int(options.pop("signal").rpartition("@")[2]),
    }
    for name in ("partition", "qos", "constraint", "exclude", "account"):
        if name in options:
            native[name] = options.pop(name)
    for name in {"open-mode", "array"} & options.keys():  # submitit writes these by itself
        del options[name]
    batch = [python, "-m", "recipes.core.launch.batch"]
    finish = shlex.join([*batch, "finish", job.recipe])
    setup, words = _setup(job, job.code or job.root), shlex.join(job.arguments)
    if job.modules:
        setup += [f"load {shlex.join(job.modules)}"]
    if job.container:
        setup += container.exports(job.container, dict(job.variables))
    if job.code:
        setup += [f"cd {shlex.quote(str(job.code))} || exit"]
    setup += [f"export RECIPES_SOURCE={shlex.quote(str(job.code or job.root))}"]
    if job.elements:
        native["array_parallelism"] = _at_once(job)
        setup, words = [*setup, f"set -- {words}", *_element(job)], '"$@"'
    if job.resubmits is not None:
        setup += [f"{shlex.join([*batch, 'examine', job.recipe, str(job.resubmits)])} {words} || exit"]
    return {
        **native,
        "wckey": None,  # some sites refuse submitit's own
        "stderr_to_stdout": True,
        "additional_parameters": {**{name: value or True for name, value in options.items()}, "chdir": str(job.root)},
        "srun_args": [f"--cpus-per-task={job.cpus_per_rank}", *srun_options(job), *enter(job, python)[0]],
        "setup": setup,
        "teardown": [f"{finish} $? {words}"],
    }
