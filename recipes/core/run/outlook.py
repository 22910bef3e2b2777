"""What happens next to a run, from its own status and from its job in Slurm's queue. Does not import torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.core import files
from recipes.core.errors import MachineError, Next, next_of
from recipes.core.run import rundir
from recipes.core.run.scontrol import Job, Queue, describe

HOW_TO_RESUME = "to resume, start it again with the same run_dir="
# Why nothing starts the run again, for each outcome without a requeue.
NOT_REQUEUED = {
    Next.cancelled: f"the job was cancelled: {HOW_TO_RESUME}",
    Next.max_requeues: f"not requeued, since max_requeues= is reached: {HOW_TO_RESUME}",
    Next.no_progress: f"not requeued, since its last start completed no step: {HOW_TO_RESUME}",
    Next.requeue_failed: f"not requeued, since scontrol requeue failed: {HOW_TO_RESUME}",
    Next.not_requeued: f"not requeued by Slurm: {HOW_TO_RESUME}",
}


@dataclass(frozen=True)
class Outlook:
    """The job of a run.

    id: the job ID; "" outside Slurm. job: None if Slurm does not know the job or could not be asked. asked: whether
    Slurm answered. line: one line about the job. next: what happens to the job after the newest start of the run; None
    while that start runs, or if nothing is known. submitted_since: whether this job was submitted after the job that
    started the run last.
    """

    id: str
    job: Job | None
    asked: bool
    line: str
    next: Next | None
    submitted_since: bool = False

    @property
    def is_active(self) -> bool:
        """Whether the job has processes now, according to Slurm."""
        return self.job is not None and not self.job.ended and not self.job.waiting


def of_run(run_dir: Path, queue: Queue) -> Outlook:
    """The outlook of the job that was submitted last.

    If that job has ended and the job that started the run last has not, it is the outlook of the latter.
    """
    attempt, described = rundir.owner(run_dir) or {}, files.read_json(run_dir / "job.yaml") or {}
    of_attempt = str(attempt.get("job") or str(attempt.get("launch", "")).rpartition(".")[0])
    if attempt.get("cluster", "") is None:  # outside Slurm, a number is the --rdzv-id of torchrun
        of_attempt = ""
    ids = [one for one in (str(described.get("job_id") or ""), of_attempt) if re.fullmatch(r"\d+(_\d+)?", one)]
    if not ids:
        return Outlook("", None, False, "it is not a Slurm job", None)
    try:
        found = {one: job for one in ids if (job := queue.find(one))}
    except MachineError as error:
        return Outlook(ids[0], None, False, str(error), None)
    if not found:
        return Outlook(ids[-1], None, True, f"Slurm no longer knows job {ids[-1]}", None)
    chosen, job = next(((one, job) for one, job in found.items() if not job.ended), next(iter(found.items())))
    number = str(attempt.get("launch", "")).rpartition(".")[2]
    since = bool(of_attempt) and chosen != of_attempt
    after = job.after_start(int(number) if number.isdecimal() and not since else -1)
    return Outlook(chosen, job, True, describe(job), after, since)


def after_stop(run_dir: Path, status: Mapping[str, Any], queue: Queue) -> str:
    """One line on a run that was stopped: what stopped it, the step at which it was saved, and what happens next."""
    found, recorded = of_run(run_dir, queue), next_of(status)
    saved = f"stopped by {status.get('reason') or 'a signal'}, saved at step {status.get('step')}"
    if found.job is None:  # only the status of the run is known
        why = f" ({found.line})" if found.id else ""
        if recorded in (Next.requeued, Next.held):
            lost = f": {HOW_TO_RESUME}" if found.asked else ""
            return f"{saved}; job {found.id} was requeued, and its state now is unknown{why}{lost}"
        return f"{saved}; {NOT_REQUEUED[recorded] if recorded else HOW_TO_RESUME}{'' if recorded else why}"
    if found.next in (Next.requeued, Next.held):
        return f"{saved}; {'submitted again' if found.submitted_since else 'requeued'}: {found.line}"
    if found.next:
        # The batch script has recorded why it did not requeue the job. While the script ends, Slurm shows the job like
        # a cancelled one.
        is_final = recorded not in (None, Next.requeued, Next.held) and not found.submitted_since
        return f"{saved}; {found.line}; {NOT_REQUEUED[recorded if recorded and is_final else found.next]}"
    if found.job.fields.get("BatchFlag") == "0":  # a job of salloc or srun, which nothing requeues
        return f"{saved}; {HOW_TO_RESUME}"
    return f"{saved}; {found.line}, and its batch script has not ended yet"
