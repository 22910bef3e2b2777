"""The text of the script of a `Job`: what sbatch runs, and what a job of submitit runs."""

import shlex

from recipes.core.config import job_keys
from recipes.core.launch.jobs import Job

# Slurm signals the ranks SIGNAL_S seconds before the time limit. In a short job this time is at most SIGNAL_SHARE of
# the time limit. Slurm may send the signal up to 60 s early.
SIGNAL_S, SIGNAL_SHARE = 120, 0.25
# --kill-on-bad-exit=1: one failed rank ends the step. --export=ALL: the ranks have the environment of the script, even
# if the site's sbatch exports nothing. --mem=0: the step has all memory of the job, whatever variables an outer
# allocation has left.
SRUN_OPTIONS = ("--export=ALL", "--kill-on-bad-exit=1", "--wait=60", "--mem=0")


def directives(job: Job) -> dict[str, str]:
    """The options of sbatch for ``job``, by their long names without dashes; "" for an option without a value."""
    keys, runs, minutes = job.keys, len(job.elements), job_keys.minutes(job.keys.time)
    size = {"nodes": str(job.nodes) if job.nodes else f"1-{job.ranks}"}  # without it, submitit 1.5 writes --nodes=1
    kind = f"{keys.gpu_type}:" if keys.gpu_type else ""
    size |= {"ntasks": str(job.ranks)} if job.ranks else {"ntasks-per-node": str(job.ranks_per_node)}
    if job.gpu_for_each_task:
        size["gpus-per-task"] = f"{kind}1"
    elif job.gpus_per_node:
        of_node = f"{kind}{job.gpus_per_node}"
        size |= {"gres": f"gpu:{of_node}"} if job.gpus_by == "--gres" else {"gpus-per-node": of_node}
    return {
        "job-name": keys.name or job.recipe,
        **size,
        "cpus-per-task": str(job.cpus_per_rank),
        "time": str(minutes),
        **dict(job.directives),
        **({"array": f"0-{runs - 1}%{min(keys.parallel or runs, runs)}"} if runs else {}),
        "requeue": "",
        "open-mode": "append",
        "signal": f"USR2@{int(min(SIGNAL_S, SIGNAL_SHARE * 60 * minutes))}",
    }


def sbatch_script(job: Job) -> str:
    """The sbatch script of ``job``, as launcher=print shows it. sbatch/job.sh has what all scripts share."""
    of_sbatch = {**directives(job), "chdir": str(job.root)}
    # The log is in the folder in which the job starts. A job whose log folder is missing fails without a message
    # (sbatch, 0:53).
    of_sbatch["output"] = "%x-%A_%a.out" if job.elements else "%x-%j.out"
    lines = ["#!/bin/bash", "# Made by launch.py. Options of sbatch before the script's name override these."]
    lines += [f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "") for name, value in of_sbatch.items()]
    lines += ["", *(f"export {name}={shlex.quote(value)}" for name, value in job.variables.items())]
    lines += [f". {shlex.quote(job.variables.get('RECIPES_CODE', str(job.root)) + '/sbatch/job.sh')} || exit"]
    if job.arguments:
        lines += [f'set -- {shlex.join(job.arguments)} "$@"']
    if job.elements:  # the arguments of this element of the array
        lines += ["case ${SLURM_ARRAY_TASK_ID:-} in"]
        lines += [f'    {number}) set -- "$@" {shlex.join(words)} ;;' for number, words in enumerate(job.elements)]
        lines += [f'    *) echo "{job.recipe}: this sweep has no run ${{SLURM_ARRAY_TASK_ID:-}}" >&2; exit 2 ;;']
        lines += ["esac"]
    lines += [f'begin {job.recipe} "$@"']
    if job.keys.doctor:
        lines += [f"examine {job.recipe} {job.keys.max_resubmits}"]
    # If each task saw only its own GPU, NCCL could not copy directly between the GPUs of a node.
    of_srun = (*SRUN_OPTIONS, "--gpu-bind=none") if job.gpu_for_each_task else SRUN_OPTIONS
    lines += [
        f'srun --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" {" ".join(of_srun)} "${{step[@]}}" \\',
        f'    "${{inside[@]}}" -u -m recipes.{job.recipe} "${{words[@]}}"',
        f"finish {job.recipe} $?",
    ]
    return "\n".join(lines) + "\n"
