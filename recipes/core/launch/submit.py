"""Submits a job to Slurm through submitit, and waits for its end, with or without accounting. Does
not import torch.

submitit's own script replaces itself with the submitted text by exec. The batch shell's process
then runs this text, and receives the signals for the batch shell. No handler of submitit remains.
"""

import contextlib
import dataclasses
import io
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.core import files, trust
from recipes.core.errors import EXIT_CRASH, EXIT_DONE, EXIT_MACHINE, MachineError
from recipes.core.launch import jobs
from recipes.core.launch.jobs import Job
from recipes.core.run import attempt as attempts
from recipes.core.run import directory
from recipes.core.slurm import client, environment, jobstate


PURPOSE = "submitit"  # in the mark of the folder of submitit's files
MARK = "folder.json"


@dataclass(frozen=True)
class Submitted:
    """A job, or an element of a job array, that Slurm has accepted. job: its ID."""

    job: str
    run_dir: Path
    log: Path  # the output of the batch script and of all ranks


def submit(job: Job, python: str, run_dir: str) -> list[Submitted]:
    """Submits ``job`` through submitit and does not wait. Returns the job, or the elements of a job
    array.

    python: the Python of the job. run_dir: the given run directory; "" for the default. Removes the
    variables of an outer allocation from the environment of this process. Raises MachineError with
    Slurm's reason.
    """
    from submitit.core.utils import FailedJobError

    folder = _own_folder(job.root)
    mark = f"recipes-{secrets.token_hex(8)}"
    job = dataclasses.replace(
        job,
        variables={**job.variables, "RECIPES_PYTHON": python},
        directives={"comment": mark, **job.directives},  # a comment in extra= replaces it
    )
    elements = job.elements or ((),)
    path = folder / f"{mark}.sh"
    script = jobs.sbatch_script(job).encode()
    # submitit starts sbatch with the environment of this process
    clean = environment.clean(os.environ, job.directives)
    for name in os.environ.keys() - clean.keys():
        del os.environ[name]
    # submitit prints the errors that it raises.
    with contextlib.redirect_stderr(io.StringIO()), contextlib.ExitStack() as stack:
        stack.callback(os.umask, os.umask(0o077))
        try:
            files.write_bytes(path, script)
            executor = _executor(job, python, folder)
            programs = ["/bin/bash"] * len(elements)
            arguments = [["bash", str(path)]] * len(elements)
            try:
                accepted = executor.map_array(os.execvp, programs, arguments)
            except FailedJobError:
                known = client.find_by_comment(mark)
                if not known:
                    raise
                # sbatch failed, for example by a timeout, after the controller had accepted the
                # job. submitit has left no files for it.
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    client.cancel(known)
                accepted = executor.map_array(os.execvp, programs, arguments)
        except FailedJobError as error:
            raise MachineError(client.refusal(str(error))) from None
        except OSError as error:
            raise MachineError(
                f"{folder}: cannot be written ({error.strerror}): free some space there"
            ) from None
    runs = []
    for number, (words, element) in enumerate(zip(elements, accepted, strict=True)):
        of_run = f"{run_dir}/{number}" if run_dir and job.elements else run_dir
        runs.append(_describe(job, words, element, of_run, script))
    return runs


def _own_folder(root: Path) -> Path:
    """The folder of submitit's files in the repository ``root``, ``runs/submitit``. Jobs execute
    the pickles in it, and Slurm writes logs through the links in it.

    If this user has copied the folder, such as with the runs of another user, or if it has links,
    another folder is made. The links of submitit itself are hidden. Raises MachineError.
    """
    number = 0
    while True:
        number += 1
        folder = root / ("runs/submitit" if number == 1 else f"runs/submitit-{number}")
        trust.private_folder(folder.resolve())
        try:
            entries = list(os.scandir(folder))
            # another submission may write its mark now
            if all(entry.name.startswith(f".{MARK}.") for entry in entries):
                mark = directory.marked(folder, {"purpose": PURPOSE})
                files.write_json(folder / MARK, mark)
                return folder
            mark = files.read_json(folder / MARK)
            is_own = mark.get("purpose") == PURPOSE and directory.is_marked(folder, mark)
            visible = [entry for entry in entries if not entry.name.startswith(".")]
            has_links = not all(entry.is_file(follow_symlinks=False) for entry in visible)
            if (is_own or not trust.user_key()) and not has_links:
                return folder
        except OSError as error:
            raise MachineError(
                f"{folder}: cannot be written ({error.strerror}): free some space there"
            ) from None


def _executor(job: Job, python: str, folder: Path) -> Any:
    """submitit's executor for ``job``, with the same directives as its script but its own log file
    (submitit 1.5).
    """
    import submitit

    # A subclass would have no effect on an array: submitit submits it with a new SlurmExecutor.
    executor_class: Any = submitit.SlurmExecutor
    executor_class._get_job_id_from_submission_command = staticmethod(_job_id)
    client.require_commands()
    # submitit writes an option with the value True without a value
    options = {name.replace("-", "_"): value or True for name, value in job.directives.items()}
    del options["open_mode"]  # submitit writes it too
    # Instead of submitit's own, USR2@90, which would reach a program with stop_before_s=0. It has
    # no effect.
    options.setdefault("signal", "B:CONT@1")
    executor = executor_class(folder=folder, python=f"exec {shlex.quote(python)}")
    executor.update_parameters(
        use_srun=False,
        stderr_to_stdout=True,
        wckey=None,  # some sites refuse submitit's own
        setup=["export PYTHONUTF8=1"],  # paths are UTF-8 in every locale
        additional_parameters=options,
    )
    return executor


def _job_id(output: str) -> str:
    """The ID in sbatch's line. A wrapper of the site may print other lines that have "job" and a
    number. Raises submitit's FailedJobError, as if sbatch had failed.
    """
    from submitit.core.utils import FailedJobError

    ids = re.findall(r"^Submitted batch job (\d+)", output, re.MULTILINE)
    if not ids:
        raise FailedJobError(f"sbatch printed no job ID: {output}")
    return str(ids[-1])


def _describe(
    job: Job, words: tuple[str, ...], accepted: Any, run_dir: str, script: bytes
) -> Submitted:
    """Records ``script`` and the description of a job, or of one element of an array, in its run
    directory.

    words: the arguments of this element. accepted: submitit's job. run_dir: the given run
    directory; "" for the default.
    """
    job_id = str(accepted.job_id)
    log = Path(accepted.paths.stdout)
    folder = directory.choose(run_dir, job.recipe, job_id, job.root)
    root = str(job.root)
    try:
        # of an earlier job with this ID: `batch.begin` refuses the new one
        if run_dir or not attempts.every(folder):
            jobs.record(
                folder,
                script,
                job_id,
                job.recipe,
                (*job.arguments, *words),
                root=root,
                code=job.variables.get("RECIPES_CODE", root),
                log=str(log),
                variables=jobs.of_site(os.environ),
            )
    except (OSError, MachineError) as error:  # the job is already in the queue
        why = f"cannot be written ({error.strerror})" if isinstance(error, OSError) else str(error)
        raise MachineError(
            f"run_dir={folder}: {why}, so job {job_id} will fail: scancel {job_id}"
        ) from None
    return Submitted(job_id, folder, log)


def wait(runs: Sequence[Submitted]) -> int:
    """Waits for a job, or all elements of an array. Prints the log of a single job while it grows.

    Returns the first exit status that is not 0, else 0.
    """
    codes = [_wait(run, show=len(runs) == 1) for run in runs]
    return next(filter(None, codes), EXIT_DONE)


def _wait(submitted: Submitted, show: bool) -> int:
    """Waits for one job to end and returns its exit status. show: whether to print its log."""
    job_id = submitted.job
    job = _wait_for_end(job_id, submitted.log if show else None)
    if job and job.never_starts:
        print(
            f"job {job_id} never starts: its dependency {job.options.get('dependency')} cannot be "
            f"met; cancel the job: scancel {job_id}",
            file=sys.stderr,
        )
        return EXIT_MACHINE
    state = job.state if job else ""
    code = job.exit_status if job else 0
    status = _status(submitted)
    if state == "COMPLETED" or (not state and status.get("state") == "done"):
        print(f"job {job_id}: completed; run directory {submitted.run_dir}")
        return directory.exit_code(status, code)
    reason = f": {status['reason']}" if status.get("reason") else ""
    how = state.lower() or "ended"
    if status.get("state") == "preempted" and state != "CANCELLED":
        how = "stopped"  # its batch script ended with EXIT_REQUEUE
    print(f"job {job_id}: {how}{reason}; log {submitted.log}", file=sys.stderr)
    return directory.exit_code(status, code) or EXIT_CRASH


def _wait_for_end(job_id: str, log: Path | None) -> jobstate.Job | None:
    """Waits until the job has ended or can never start. Returns it; None if Slurm no longer knows
    it. log: a file to print meanwhile.
    """
    interval_s = 0.5
    silent = False
    printed = 0
    said = ""
    while True:
        job = None
        is_over = False
        try:
            job = client.find(job_id)
            silent = False
            is_over = job is None or job.ended or job.never_starts
        except MachineError as error:
            if not silent:
                print(f"{error}; the job is not affected; asking Slurm again", file=sys.stderr)
            silent = True
        line = jobstate.describe(job) if log and job and job.waiting else said
        if line != said:
            said = line
            print(line, flush=True)
        if log and log.exists():
            with open(log, "rb") as file:
                file.seek(printed)
                printed += sys.stdout.buffer.write(file.read())
            sys.stdout.flush()
        if is_over:
            return job
        time.sleep(interval_s)
        interval_s = min(5.0, interval_s * 1.1)  # reduces the load on the controller


def _status(submitted: Submitted) -> dict[str, Any]:
    """The content of ``status.json`` if it is of this job; else {}. The run directory may contain
    an older status.
    """
    for run_dir in (submitted.run_dir, submitted.run_dir / directory.EVALUATION):
        launch = str(attempts.facts(run_dir).get("launch"))
        if launch.startswith(f"{submitted.job}."):
            return directory.read_status(run_dir)
    return {}
