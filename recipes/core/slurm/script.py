"""The batch script of a job. sbatch/job.sh has what all batch scripts share."""

import shlex
from collections.abc import Mapping, Sequence

FOLDER = "sbatch"  # the ready scripts, in the repository
SHARED = f"{FOLDER}/job.sh"
# --kill-on-bad-exit=1: one failed rank ends the step. --export=ALL: the ranks have the environment
# of the script, even if the site's sbatch exports nothing. --mem=0: the step has all memory of the
# job, whatever variables an outer allocation has left.
STEP_OPTIONS = ("--export=ALL", "--kill-on-bad-exit=1", "--wait=60", "--mem=0")


def render(
    recipe: str,
    code: str,
    directives: Mapping[str, str],
    variables: Mapping[str, str],
    arguments: Sequence[str],
    elements: Sequence[Sequence[str]] = (),
    examination: str = "",
) -> str:
    """The text of a batch script.

    code: the folder of the code that the job runs. directives: the options of sbatch, by their long
    names without dashes; "" for one without a value. variables: exported. arguments: the words of
    the recipe. elements: further words of each element of a job array. examination: a line that
    runs before the ranks.
    """
    # The log is in the folder in which the job starts. A job whose log folder is missing fails
    # without a message (sbatch, 0:53).
    options = {**directives, "output": "%x-%A_%a.out" if elements else "%x-%j.out"}
    lines = [
        "#!/bin/bash",
        "# Made by launch.py. Options of sbatch before the script's name override these.",
    ]
    for name, value in options.items():
        lines.append(f"#SBATCH --{name}={shlex.quote(value)}" if value else f"#SBATCH --{name}")
    lines.append("")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines.append(f". {shlex.quote(f'{code}/{SHARED}')} || exit")
    if arguments:
        lines.append(f'set -- {shlex.join(arguments)} "$@"')
    if elements:  # the arguments of this element of the array; typed ones take precedence
        lines.append("case ${SLURM_ARRAY_TASK_ID:-} in")
        for number, words in enumerate(elements):
            lines.append(f'    {number}) set -- {shlex.join(words)} "$@" ;;')
        lines.append(
            f'    *) echo "{recipe}: this sweep has no run ${{SLURM_ARRAY_TASK_ID:-}}" >&2; '
            "exit 2 ;;"
        )
        lines.append("esac")
    lines.append(f'begin {recipe} "$@"')
    if examination:
        lines.append(examination)
    of_srun = " ".join(STEP_OPTIONS)
    if "gpus-per-task" in directives:
        # If each task saw only its own GPU, NCCL could not copy directly between GPUs of a node.
        of_srun += " --gpu-bind=none"
    lines += [
        "while next_step; do",
        f'    srun --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" {of_srun} "${{step[@]}}" \\',
        f'        "${{inside[@]}}" -u -m recipes.{recipe} "${{words[@]}}"',
        "    step_ended $?",
        "done",
    ]
    return "\n".join(lines) + "\n"
