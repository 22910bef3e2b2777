"""Waits for a submitted job to end, with or without accounting."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.core import errors
from recipes.core.errors import MachineError
from recipes.core.launch.submit import Submitted
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, queue


def wait(runs: Sequence[Submitted]) -> int:
    """Waits for a job, or all elements of an array. Prints the log of a single job while it grows.

    Returns the first exit status that is not 0, else 0.
    """
    codes = [_wait(run, show=len(runs) == 1) for run in runs]
    return next((code for code in codes if code), errors.EXIT_DONE)


def _wait(submitted: Submitted, show: bool) -> int:
    """Waits for one job to end and returns its exit status. show: whether to print its log."""
    job = _wait_for_end(submitted.job_id, submitted.log if show else None)
    if job and job.never_starts:
        why = f"its dependency {job.fields.get('Dependency')} cannot be met"
        fix = f"cancel the job: scancel {submitted.job_id}"
        print(f"job {submitted.job_id} never starts: {why}; {fix}", file=sys.stderr)
        return errors.EXIT_MACHINE
    state, code = (job.state, job.exit_status) if job else ("", 0)
    status = _status(submitted)
    if state == "COMPLETED" or (not state and status and status["state"] == "done"):
        print(f"job {submitted.job_id}: completed; run directory {submitted.run_dir}")
        return directory.exit_code(status, code)
    reason = f": {status['reason']}" if status and status["reason"] else ""
    print(f"job {submitted.job_id}: {state.lower() or 'ended'}{reason}; log {submitted.log}", file=sys.stderr)
    return directory.exit_code(status, code) or errors.EXIT_CRASH


def _wait_for_end(job_id: str, log: Path | None) -> queue.Job | None:
    """Waits until the job has ended or can never start. Returns it; None if Slurm no longer knows it. log: a file to print meanwhile."""
    interval_s, silent, printed, said = 0.5, False, 0, ""
    while True:
        job, is_over = None, False
        try:
            job, silent = queue.find(job_id), False
            is_over = job is None or job.ended or job.never_starts
        except MachineError as error:
            if not silent:
                print(f"{error}; this does not affect the job: asking Slurm again", file=sys.stderr)
            silent = True
        if log and job and job.waiting and (line := queue.describe(job)) != said:
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


def _status(submitted: Submitted) -> dict[str, Any] | None:
    """The content of ``status.json`` if it is of this job; else None. The run directory may contain an older status."""
    for run_dir in (submitted.run_dir, submitted.run_dir / directory.EVALUATION):
        launch = str(attempts.facts(run_dir).get("launch"))
        if launch.startswith(f"{submitted.job_id}."):
            return directory.read_status(run_dir)
    return None
