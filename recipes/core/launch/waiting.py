"""Waits for a submitted job to end, with or without accounting."""

import sys
import time
from pathlib import Path
from typing import Any

from recipes.core import errors
from recipes.core.errors import MachineError
from recipes.core.launch.submit import Submitted
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, queue


def wait_for_all(submitted: Submitted) -> int:
    """Waits for each element of an array.

    Returns the exit status of the first element whose exit status is not 0, else 0.
    """
    codes = [wait(element, show=False) for element in submitted.elements]
    return next((code for code in codes if code), errors.EXIT_DONE)


def wait(submitted: Submitted, patience_s: float = 300.0, show: bool = True) -> int:
    """Waits for the job to end and returns its exit status. show: whether to print the job's log while waiting.

    patience_s: how long to ask again, in seconds, if the controller does not answer. Raises MachineError after this
    time.
    """
    job = _wait_for_end(submitted, patience_s, show)
    if job and job.never_starts:
        why = f"its dependency {job.fields.get('Dependency')} cannot be met"
        print(f"job {submitted.job_id} never starts: {why}; remove it: scancel {submitted.job_id}", file=sys.stderr)
        return errors.EXIT_MACHINE
    state, code = (job.state, job.exit_status) if job else ("", 0)
    status = _status(submitted)
    if state == "COMPLETED" or (not state and status and status["state"] == "done"):
        print(f"job {submitted.job_id}: completed; run directory {submitted.run_dir}")
        return directory.exit_code(status, code)
    reason = f": {status['reason']}" if status and status["reason"] else ""
    if status and status["state"] == "preempted":
        asks = queue.Queue()
        reason = f": {queue.after_stop(submitted.run_dir, status, asks)}"
    print(f"job {submitted.job_id}: {state.lower() or 'ended'}{reason}; log {submitted.log}", file=sys.stderr)
    return directory.exit_code(status, code) or errors.EXIT_CRASH


def _wait_for_end(submitted: Submitted, patience_s: float, show: bool) -> queue.Job | None:
    """Waits until the job has ended or can never start. Returns it; None if Slurm does not know it any more."""
    printed_bytes, interval_s, silent_since, reported = 0, 0.5, 0.0, (False, 0)
    while True:
        job, is_over = None, False
        try:
            job = queue.find(submitted.job_id)
            is_over, silent_since = job is None or job.ended, 0.0
        except MachineError as error:
            if not silent_since:
                print(f"{error}; the job continues, and Slurm is asked for {patience_s:g} s more", file=sys.stderr)
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > patience_s:
                raise MachineError(f"job {submitted.job_id} continues, but {error}") from None
        if job and job.never_starts:
            return job
        printed_bytes = _follow(submitted.log, printed_bytes) if show else 0
        if job and job.waiting and (job.held, job.restarts) != reported:
            reported = (job.held, job.restarts)
            print(queue.describe(job), file=sys.stderr)
        if is_over:
            break
        time.sleep(interval_s)
        interval_s = min(5.0, interval_s * 1.1)  # reduces the load on the controller
    if show:
        time.sleep(0.2)  # the last lines may still be on their way
        _follow(submitted.log, printed_bytes)
    return job


def _status(submitted: Submitted) -> dict[str, Any] | None:
    """The content of ``status.json`` if it is of this job; else None. The run directory may contain an older status."""
    for run_dir in (submitted.run_dir, submitted.run_dir / directory.EVALUATION):
        launch = str(attempts.facts(run_dir).get("launch"))
        if launch.startswith(f"{submitted.job_id}."):
            return directory.read_status(run_dir)
    return None


def _follow(log: Path, start: int) -> int:
    """Copies the content of ``log`` from byte ``start`` on to stdout. Returns the new position."""
    try:
        with open(log, "rb") as file:
            file.seek(start)
            content = file.read()
    except FileNotFoundError:
        return start
    sys.stdout.flush()
    sys.stdout.buffer.write(content)
    sys.stdout.flush()
    return start + len(content)
