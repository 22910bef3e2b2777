"""What Slurm does with the job of a run: its state, what comes next, and how to resume the run."""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core.errors import MachineError, Next, next_of
from recipes.core.run.record import Record
from recipes.core.slurm import client, jobstate
from recipes.core.slurm.jobstate import Job

HOW_TO_RESUME = "to resume, start the run again with the same run_dir="
# Why nothing starts the run again, for each outcome without a requeue.
NOT_REQUEUED: dict[Next | None, str] = {
    Next.cancelled: f"the job was cancelled: {HOW_TO_RESUME}",
    Next.max_requeues: f"not requeued, since max_requeues= is reached: {HOW_TO_RESUME}",
    Next.no_progress: (
        f"not requeued, since its last start completed no step or saved no file: {HOW_TO_RESUME}"
    ),
    Next.requeue_failed: f"not requeued, since scontrol requeue failed: {HOW_TO_RESUME}",
    Next.not_requeued: f"not requeued by Slurm: {HOW_TO_RESUME}",
}


@dataclass(frozen=True)
class Outlook:
    """The job of a run. id: "" outside Slurm. job: None if it is unknown. asked: whether Slurm
    answered. line: one line about the job.
    """

    id: str
    job: Job | None
    asked: bool
    line: str

    @property
    def is_active(self) -> bool:
        """Whether the job has processes now, according to Slurm."""
        return self.job is not None and not self.job.ended and not self.job.waiting


def of_run(run: Record) -> Outlook:
    """The job that was submitted last, or the job that started the run last if only that one has
    not ended.
    """
    of_attempt = run.facts.get("job") or str(run.facts.get("launch", "")).rpartition(".")[0]
    named = dict.fromkeys((str(run.job.get("job_id")), str(of_attempt)))
    ids = [job_id for job_id in named if re.fullmatch(r"\d+(_\d+)?", job_id)]
    if not ids:
        return Outlook("", None, False, "it is not a Slurm job")
    try:
        found = {job_id: client.find(job_id, timeout_s=client.OWN_JOB_S) for job_id in ids}
        jobs = {job_id: job for job_id, job in found.items() if job}
    except MachineError as error:
        return Outlook(ids[0], None, False, str(error))
    cluster = run.facts.get("cluster")
    if cluster and client.cluster_name() not in ("", cluster):  # jobs here are others
        return Outlook(ids[0], None, False, f"its job is on cluster {cluster}")
    chosen = newest(ids, {job_id: job.ended for job_id, job in jobs.items()})
    if not jobs:
        return Outlook(chosen, None, True, f"Slurm no longer knows job {chosen}")
    return Outlook(chosen, jobs[chosen], True, jobstate.describe(jobs[chosen]))


def newest(ids: Sequence[str], ended: Mapping[str, bool]) -> str:
    """Of the job that was submitted last, and the one that started the run last: the first that has
    not ended, else the first that Slurm knows, else the last. "" if there are no ``ids``. ended: of
    those that Slurm knows.
    """
    active = [job_id for job_id in ids if not ended.get(job_id, True)]
    known = [job_id for job_id in ids if job_id in ended]
    return next(iter([*active, *known, *reversed(ids)]), "")


def after_stop(run: Record) -> str:
    """One line on a run that was stopped: what stopped it, the step at which it was saved, and what
    happens next.
    """
    outlook = of_run(run)
    job = outlook.job
    why = NOT_REQUEUED.get(next_of(run.status))
    line = f"stopped by {run.status.get('reason') or 'a signal'}"
    if run.status.get("step"):
        line += f", saved at step {run.status['step']}"
    if outlook.id:
        line += f"; {outlook.line}"

    if job and job.ended:
        why = why or NOT_REQUEUED[job.after_start(0)]
    elif job and job.has_script and not (job.state == jobstate.COMPLETING and why):
        return line  # the job continues, or its batch script decides
    return f"{line}; {why or HOW_TO_RESUME}"


def without_run(job_id: str, root: Path) -> tuple[str, Path | None]:
    """Why a job has no run directory, "" if nothing is known of it, and its log; None unless it has
    ended.

    If Slurm does not know the job any more, the function searches the repository ``root`` for a log
    with the name that the ready scripts choose.
    """
    job = None
    with contextlib.suppress(MachineError):  # without Slurm
        job = client.find(job_id, timeout_s=client.OWN_JOB_S)
    logs = [Path(job.log)] if job else root.glob(f"*-{job_id}.out")
    log = next(filter(os.path.isfile, logs), None)
    if log and (job is None or job.ended):
        return "the job has no run directory, or its run has a newer job", log
    if not job:
        return "", None
    problem = "has no run directory yet" if job.waiting else "has no known run directory"
    return f"the job {problem}: {jobstate.describe(job)}", None
