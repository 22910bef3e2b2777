"""The text of an sbatch script, and the parameters of submitit, for a `Job`."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from recipes.core.launch import container
from recipes.core.launch.jobs import Job

# Slurm signals the ranks SIGNAL_S seconds before the time limit. In a short job this time is at most SIGNAL_SHARE of
# the time limit. Slurm may send the signal up to 60 s early.
SIGNAL_S, SIGNAL_SHARE = 120, 0.25
# --kill-on-bad-exit=1: one failed rank ends the step. --export=ALL: the ranks have the environment of the script, even
# if the site's sbatch exports nothing. --mem=0: the step has all memory of the job, whatever variables an outer
# allocation has left.
SRUN_OPTIONS = ("--export=ALL", "--kill-on-bad-exit=1", "--wait=60", "--mem=0")


def directives(job: Job) -> dict[str, str]:
    """The options of sbatch for ``job``, by their long names without dashes.

    An option without a value has the value "".
    """
    size = {"nodes": str(job.nodes) if job.nodes else f"1-{job.ranks}"}  # without it, submitit 1.5 writes --nodes=1
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
        **({"array": f"0-{len(job.elements) - 1}%{at_once(job)}"} if job.elements else {}),
        "requeue": "",
        "open-mode": "append",
        "signal": f"USR2@{int(min(SIGNAL_S, SIGNAL_SHARE * 60 * job.minutes))}",
    }


def at_once(job: Job) -> int:
    """How many elements of the job array run at the same time."""
    return min(job.parallel or len(job.elements), len(job.elements))


def _element(job: Job) -> list[str]:
    """Lines of bash that append the arguments of this array element to the shell's arguments; [] without an array."""
    if not job.elements:
        return []
    lines = [f'    {number}) set -- "$@" {shlex.join(words)} ;;' for number, words in enumerate(job.elements)]
    last = f'    *) echo "{job.recipe}: no run of this sweep has the number ${{SLURM_ARRAY_TASK_ID:-}}" >&2; exit 2 ;;'
    together = (
        'stop "run_dir= after the script would be the run directory of all runs of the sweep: give it to launch.py"'
    )
    apart = f'for word in "$@"; do [ "${{word#run_dir=}}" = "$word" ] || {together}; done'
    return [apart, "case ${SLURM_ARRAY_TASK_ID:-} in", *lines, last, "esac"]


def srun_options(job: Job) -> tuple[str, ...]:
    """The options of srun, except the number of CPUs.

    --gpu-bind=none: if each task saw only its own GPU, NCCL could not copy directly between the GPUs of a node.
    """
    return (*SRUN_OPTIONS, "--gpu-bind=none") if job.gpu_for_each_task else SRUN_OPTIONS


def enter(job: Job, python: str) -> tuple[list[str], list[str]]:
    """Further options of srun, and the command before a rank's Python arguments.

    Without a container, that is only ``python``.
    """
    if not job.container:
        return [], [python]
    code, gpus = job.code or job.root or Path(), job.gpus_per_node > 0
    return container.step(job.container, code, job.bound, dict(job.variables), os.environ, gpus)


def sbatch_script(job: Job, header: Sequence[str] = ()) -> str:
    """The sbatch script of ``job``. header: lines of comment.

    sbatch/job.sh contains the parts that all scripts share.
    """
    options = {**directives(job), "chdir": str(job.root)}
    # The log is in the folder in which the job starts. A job whose log folder is missing fails without a message
    # (sbatch, 0:53).
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
    """The first lines of the batch shell: the variables of the job, and sbatch/job.sh of ``code``."""
    lines = [f"export RECIPES_CLUSTER={shlex.quote(job.cluster)}"] if job.cluster else []
    # Set even without a container, since the site's profile may name one.
    names = {"": job.image, "_RUNTIME": job.runtime, "_MOUNTS": job.mounts}
    lines += [f"export RECIPES_CONTAINER{name}={shlex.quote(value)}" for name, value in names.items()]
    if not job.snapshot:
        lines += ["export RECIPES_SNAPSHOT=false # this job runs the code in the repository"]
    return [*lines, f". {shlex.quote(str(code / 'sbatch/job.sh'))} || exit"]


def submitit_parameters(job: Job, python: str) -> dict[str, object]:
    """The same job as the parameters of ``submitit.SlurmExecutor.update_parameters`` (submitit 1.5).

    python: the Python that runs the recipe and the steps of the batch shell.
    """
    options = directives(job)
    native: dict[str, object] = {
        "job_name": options.pop("job-name"),
        "cpus_per_task": int(options.pop("cpus-per-task")),
        "time": int(options.pop("time")),
        "signal_delay_s": int(options.pop("signal").rpartition("@")[2]),
    }
    if not job.ranks:  # with ranks, both remain in the options, where nodes can be a range
        native |= {"nodes": int(options.pop("nodes")), "ntasks_per_node": int(options.pop("ntasks-per-node"))}
    for name in ("partition", "qos", "constraint", "exclude", "account"):
        if name in options:
            native[name] = options.pop(name)
    for name in {"open-mode", "array"} & options.keys():  # submitit itself writes these options
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
        native["array_parallelism"] = at_once(job)
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
