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

    arguments: ``key=value`` words behind the recipe. root: the repository, where the job runs; None in a ready script, which
    is submitted from there. gpus_per_node: 0 asks for none. directives: further sbatch options that have a value. ranks: so many, over
    whichever nodes Slurm finds (``nodes`` of them, where that is not 0), each with a GPU where ``gpus_per_node`` is not 0.
    elements: further arguments of each job of an array, ``parallel`` of which run at once. code: the copy of the repository's code that
    it runs, None for the repository itself. environment: the folder of the Python environment, where none is active. image, runtime,
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
    root: Path | None
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
    environment: str = ""
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
        environment=profile.get("environment", ""),
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


def script(job: Job, *, path: str = "", header: Sequence[str] = ()) -> str:
    """The sbatch script of ``job``. ``path``: a ready script's own, relative to the repository; ``header``: lines of comment."""
    options = directives(job)
    if job.root is not None:
        options["chdir"] = str(job.root)
    # In the folder that the job starts in, since that one is always there: a log's folder that is missing fails the job
    # without a word (sbatch, 0:53).
    options["output"] = "%x-%A_%a.out" if job.elements else "%x-%j.out"
    lines = ["#!/bin/bash", *(f"# {line}" for line in header)]
    lines += [f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "") for name, value in options.items()]
    recipe = job.recipe
    lines += ["", *_setup(job)]
    if job.root is None:
        lines += [
            f"[ -f recipes/{recipe}.py ] ||",
            f'    stop "{path}: $PWD is not the repository: cd to its top folder and type sbatch {path}"',
        ]
    lines += [f"environment={shlex.quote(job.environment)}"]
    lines += _CODE.splitlines()
    if job.root is None:
        lines += (MODULES + _CLUSTER).splitlines()
    if job.arguments:
        lines += [f'set -- {shlex.join(job.arguments)} "$@"']
    lines += [
        *_element(job),
        *_PYTHON.splitlines(),
        # On a descriptor of its own: sites have Python print things.
        f'lines=$(RECIPES_SCRIPT="$0" RECIPES_LINES=3 "$python" -m recipes.core.launch.batch begin {recipe} "$@" 3>&1 >&2) || exit',
        'step=() inside=("$python")',
        'eval "$lines" # into a copy of the code, with whole paths',
    ]
    if job.resubmits is not None:
        lines += [f'"$python" -m recipes.core.launch.batch examine {recipe} {job.resubmits} "$@" || exit']
    lines += [
        f'srun --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" {" ".join(srun_options(job))} "${{step[@]}}" \\',
        f'    "${{inside[@]}}" -u -m recipes.{recipe} "$@"',
        f'"$python" -m recipes.core.launch.batch finish {recipe} $? "$@"',
    ]
    return "\n".join(lines) + "\n"


def _setup(job: Job) -> list[str]:
    """What the batch shell does before anything else, in every script."""
    lines = [
        "stop() {",
        '    echo "$1" >&2',
        '    exit "${2:-2}"',
        "}",
        *_SRUN.splitlines(),
        'unset CDPATH "${!SLURM_CPU_BIND@}" "${!SRUN_@}" # left over where this was submitted inside another allocation',
        "unset PYTHONSAFEPATH # python -m imports from the working directory, the code of this job, before anything else",
    ]
    lines += ["export PYTHONUTF8=1 # paths are UTF-8, whatever the locale is"]
    lines += ["export RECIPES_BATCH=1 # the job's run directory is one, whatever steps come before the recipe's"]
    if job.cluster:
        lines += [f"export RECIPES_CLUSTER={shlex.quote(job.cluster)}"]
    if job.root is not None:  # also where there is none: the profile may have one
        names = {"": job.image, "_RUNTIME": job.runtime, "_MOUNTS": job.mounts}
        lines += [f"export RECIPES_CONTAINER{name}={shlex.quote(value)}" for name, value in names.items()]
    if not job.snapshot:
        lines += ["export RECIPES_SNAPSHOT=false # this job runs the repository as it is"]
    return lines + ([*MODULES.splitlines(), f"load {shlex.join(job.modules)}"] if job.modules else [])


# bash runs a trap only when the command in the foreground has ended, so srun runs in the background. srun passes SIGUSR1 on to
# the ranks. SIGTERM is not passed on: Slurm sends it to the ranks itself, and srun would end before they have saved.
_SRUN = """\
srun() { # a signal to this shell alone (--signal=B:USR1@60, scancel --batch) reaches the ranks, which save
    command srun "$@" &
    ranks=$!
    while
        signalled=''
        wait "$ranks"
        status=$?
        [ -n "$signalled" ]
    do :; done
    ranks=''
    return "$status"
}
ranks='' signalled=''
trap signalled=1 TERM
trap 'signalled=1; [ -z "$ranks" ] || kill -s USR1 "$ranks" 2>/dev/null' USR1 USR2
"""


MODULES = """\
load() {
    type module >/dev/null 2>&1 || . /etc/profile # not there where the login shell is none of sh's kin
    type module >/dev/null 2>&1 || stop "cluster=$RECIPES_CLUSTER: $(hostname) has no command module"
    for module; do
        module load "$module" || stop "cluster=$RECIPES_CLUSTER: module load $module failed on $(hostname)"
    done
}
"""


# A job that is queued again, or submitted again without bad nodes, has its copy of the code (batch.begin makes it).
_CODE = """\
repository=$PWD code=${RECIPES_CODE:-}
had=$PWD/runs/code/job-${SLURM_JOB_ID:-}
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || [ ! -d "$had" ] || code=$had
[ ! -d "$code" ] || cd "$code" || exit
unset RECIPES_CODE
export RECIPES_SOURCE=$PWD # where Python has to import the recipe from
"""

# The site's profile of a ready script: cluster=NAME behind its name, or the environment's.
_CLUSTER = """\
words=()
for word in "$@"; do
    case $word in
        cluster=*) export RECIPES_CLUSTER="${word#cluster=}" ;;
        *) words+=("$word") ;;
    esac
done
set -- "${words[@]}"
if [ -n "${RECIPES_CLUSTER:-}" ]; then
    [ -z "${RECIPES_CLUSTER//[A-Za-z0-9_-]/}" ] || stop "cluster=: wants letters, digits, _ and - only"
    profile=env/clusters/$RECIPES_CLUSTER.yaml
    [ -f "$profile" ] || stop "cluster=$RECIPES_CLUSTER: there is no $profile"
    while read -r module || [ -n "$module" ]; do # the last line may lack its end
        load "$module"
    done < <(sed -n '/^modules:/,/^[a-z_]*:/{s/ *#.*//;s/^ *- *//p}' "$profile")
    environment=$(sed -n 's/ *#.*//;s/ *$//;s/^environment: *//p' "$profile")
fi
"""

_PYTHON = """\
conda=${CONDA_PREFIX:-}
[ "${CONDA_DEFAULT_ENV:-}" != base ] || conda='' # conda activates base in each of its users' shells: base comes last
active=${VIRTUAL_ENV:-$conda}
case :$PATH: in *":$conda/bin:"*"${VIRTUAL_ENV:-}/bin:"*) active=${conda:-$active} ;; esac # activated later
if [ -n "$active" ] && [ -n "${environment:-}" ] && [ ! "$active" -ef "$environment" ]; then
    echo "the active environment $active is used, not environment: $environment of cluster=${RECIPES_CLUSTER:-}" >&2
fi
active=${active:-${environment:-}}
[ -n "$active" ] || [ -x "$repository/.venv/bin/python" ] || active=${CONDA_PREFIX:-}
if [ -n "$active" ]; then
    python=$active/bin/python
    [ -x "$python" ] || stop "there is no $python on $(hostname): make that environment where all nodes see it" 3
    export PATH="${python%/*}:$PATH" # ahead of what modules have put there
elif [ -x "$repository/.venv/bin/python" ]; then
    python=$repository/.venv/bin/python
else
    stop "no Python environment: activate yours before sbatch, or make one here with: make install"
fi
"""


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
    setup, words = _setup(job), shlex.join(job.arguments)
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
