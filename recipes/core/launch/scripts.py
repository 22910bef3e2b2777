"""The text of the script of a `Job`: what sbatch runs, and what a job of submitit runs."""

import shlex

from recipes.core.launch.jobs import Job

# --kill-on-bad-exit=1: one failed rank ends the step. --export=ALL: the ranks have the environment of the script, even
# if the site's sbatch exports nothing. --mem=0: the step has all memory of the job, whatever variables an outer
# allocation has left.
SRUN_OPTIONS = ("--export=ALL", "--kill-on-bad-exit=1", "--wait=60", "--mem=0")


def sbatch_script(job: Job) -> str:
    """The sbatch script of ``job``, as launcher=print shows it. sbatch/job.sh has what all scripts share."""
    # The log is in the folder in which the job starts. A job whose log folder is missing fails without a message
    # (sbatch, 0:53).
    options = {**job.directives, "output": "%x-%A_%a.out" if job.elements else "%x-%j.out"}
    lines = ["#!/bin/bash", "# Made by launch.py. Options of sbatch before the script's name override these."]
    lines += [f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "") for name, value in options.items()]
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
    of_srun = (*SRUN_OPTIONS, "--gpu-bind=none") if "gpus-per-task" in job.directives else SRUN_OPTIONS
    lines += [
        f'srun --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" {" ".join(of_srun)} "${{step[@]}}" \\',
        f'    "${{inside[@]}}" -u -m recipes.{job.recipe} "${{words[@]}}"',
        f"finish {job.recipe} $?",
    ]
    return "\n".join(lines) + "\n"
