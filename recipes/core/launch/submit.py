"""Submits a job to Slurm through submitit. Does not import torch."""

import contextlib
import dataclasses
import io
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.core import files
from recipes.core.errors import MachineError
from recipes.core.launch import allocation, controller, scripts
from recipes.core.launch.jobs import Job
from recipes.core.run import directory

if TYPE_CHECKING:
    import submitit


@dataclass(frozen=True)
class Submitted:
    """A job that Slurm has accepted.

    log: the file with the output of rank 0 and srun's own messages. elements: the elements of a job array; run_dir and
    log are then those of the first element.
    """

    job_id: str
    run_dir: Path
    log: Path
    elements: tuple["Submitted", ...] = ()


@contextlib.contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Replaces the environment of this process within the ``with`` block, since submitit starts sbatch with it."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def submit(job: Job, python: str, run_dir: str) -> Submitted:
    """Submits ``job`` through submitit and does not wait.

    run_dir: the given run directory as an absolute path; "" for the default. Each task of submitit replaces itself with
    the recipe through exec. Therefore neither its signal handler nor the objects that it unpickles remain between Slurm
    and the ranks. Raises MachineError with Slurm's reason.
    """
    import submitit

    folder = files.private_folder(job.root, "submitit")  # the job files in it are pickles, which a job executes
    parent = Path(run_dir) if run_dir else job.root / "runs" / job.recipe
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"run_dir={parent}: cannot be made ({error.strerror}); give another run_dir=") from None
    _, inside = scripts.enter(job, python)
    commands = [
        [*inside, "-u", "-m", f"recipes.{job.recipe}", *job.arguments, *words] for words in job.elements or [()]
    ]
    environ = allocation.clean_environment(os.environ, scripts.directives(job))
    with _environment(environ), files.umask(0o077), contextlib.redirect_stderr(io.StringIO()):
        # submitit prints the errors that it raises.
        try:
            executor = _executor(job, python)
            if job.elements:
                accepted = executor.map_array(os.execvp, [inside[0]] * len(commands), commands)
            else:
                accepted = [executor.submit(os.execvp, inside[0], commands[0])]
        except (submitit.core.utils.FailedSubmissionError, submitit.core.utils.FailedJobError) as error:
            raise MachineError(controller.refusal(str(error), "sbatch", job)) from None
        except OSError as error:
            raise MachineError(f"{folder}: cannot be written ({error.strerror}): {directory.FIX_JOB_FILES}") from None
    if not job.elements:
        return _describe(job, accepted[0], run_dir, commands[0])
    elements = []
    for number, words in enumerate(job.elements):
        element = dataclasses.replace(job, arguments=(*job.arguments, *words), elements=(), parallel=0)
        of_element = f"{run_dir}/{number}" if run_dir else ""
        elements.append(_describe(element, accepted[number], of_element, commands[number]))
    array = elements[0].job_id.partition("_")[0]
    return dataclasses.replace(elements[0], job_id=array, elements=tuple(elements))


def submission_text(job: Job, python: str) -> str:
    """The text of the script that `submit` submits."""
    executor = _executor(job, python)
    if job.elements:
        executor.parameters["map_count"] = len(job.elements)
    # submitit 1.5 has no public function that returns the text without submitting it.
    return str(executor._make_submission_file_text(executor._submitit_command_str, ""))


def _executor(job: Job, python: str) -> "submitit.SlurmExecutor":
    import submitit

    for program in ("sbatch", "srun"):
        if shutil.which(program) is None:
            raise MachineError(
                f"there is no Slurm on this machine (no {program} on the PATH): launcher=local runs the recipe here"
            )
    # With pyxis, submitit's own process runs in the container too.
    inside = scripts.enter(job, python)[1] if job.container and job.container.runtime == "pyxis" else [python]
    executor = submitit.SlurmExecutor(folder=job.root / "runs/submitit", python=shlex.join(inside))
    executor.update_parameters(**scripts.submitit_parameters(job, python))
    return executor


def _describe(job: Job, accepted: "submitit.Job[object]", run_dir: str, command: list[str]) -> Submitted:
    """Writes the submitted script and job.yaml to the run directory.

    job: a job without elements, or one element. run_dir: the given run directory; "" for the default. command: the
    command of its ranks.
    """
    job_id, log = str(accepted.job_id), Path(accepted.paths.stdout)
    folder = directory.choose(run_dir, job.recipe, job_id, job.root)
    folder = directory.for_examination(folder) if job.recipe == "doctor" else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        script = Path(accepted.paths.submission_file).read_bytes()
        files.write_whole(folder / "job.sh", lambda file: file.write(script))  # replaces a planted symbolic link
        files.write_json(folder / "job.yaml", {"job_id": job_id, **job.as_json(), "command": command, "log": str(log)})
    except OSError as error:  # the job is already in the queue and will fail with the same error
        print(f"run_dir={folder}: cannot be written ({error.strerror}), so job {job_id} will fail", file=sys.stderr)
    return Submitted(job_id, folder, log)
