"""A run of one's own, with the state of its job in Slurm, and where it is found. Never torch."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core import trust
from recipes.core.errors import InputError, Next, next_of, shown
from recipes.core.run import (
    directory,
    efficiency,
    in_use,
    ledger,
    outlook,
    record,
    rows,
    table,
)
from recipes.core.run.record import Record, State
from recipes.core.slurm import client, jobstate


@dataclass(frozen=True)
class Run:
    """A run in the list. steps: of the whole run, 0 if unknown. effective: the share of its time in
    which it has trained, see run/ledger.py. left_s: until the time limit; None
    if unknown.
    """

    folder: str
    recipe: str
    job: str
    state: State
    step: int
    steps: int
    epoch: int | None
    best: Mapping[str, float]
    samples_per_second: float | None
    effective: float | None
    updated: float | None
    left_s: float | None
    starts: int
    nodes: str
    note: str


def in_queue(
    run: Record, job: client.Line | None, alive: bool, has_job: bool, asked: bool = True
) -> tuple[State, str]:
    """The state of a run according to its files and its job, and a note.

    job: its line in the queue; None if it is not there. alive: as of `in_use.is_alive`. has_job:
    whether it was submitted to Slurm. asked: whether Slurm answered.
    """
    if job and job.state in jobstate.WAITING:
        start = f"expected to start at {job.start}" if job.start[:1].isdecimal() else ""
        note = "; ".join(filter(None, (jobstate.with_advice(job.reason), start)))
        if job.held:
            return State.held, note
        return (State.requeued if run.status.get("state") else State.pending), note
    active = State.running if run.state is State.running else State.starting
    if job and alive:
        # the run is being saved, or its job has not ended yet
        is_of_newest = run.status.get("attempt") in [attempt.number for attempt in run.attempts[:1]]
        is_last = job.state == jobstate.COMPLETING or not run.status.get("next")
        return (State.running if is_of_newest and is_last else active), job.nodes
    if run.state is State.done:
        return State.done, ""
    if run.refused and not (alive and run.state is State.running):
        return State.refused, run.refused
    if run.state is State.failed:
        return State.failed, str(run.status.get("reason") or "")
    may_be_queued = has_job and not asked
    if run.state in (State.stopped, State.cancelled):
        if may_be_queued and next_of(run.status) in (None, Next.requeued, Next.held):
            return State.unknown, "Slurm does not answer"
        step = run.status["step"]
        reason = run.status.get("reason") or ""
        return run.state, f"saved at step {step}" if step else f"stopped by {reason}"
    if may_be_queued:
        return State.unknown, "Slurm does not answer"
    if alive:
        return active, ""
    is_cancelled = job is not None and job.state == "CANCELLED"
    if run.state is State.running:
        if is_cancelled:
            return State.cancelled, "it ended before it wrote its final status"
        return State.lost, "it ended without a final status"
    if is_cancelled:
        return State.cancelled, "before it began"
    return (State.cancelled if has_job else State.lost), "it never began"


def read(folder: Path, jobs: Mapping[str, client.Line] | None, cluster: str = "") -> Run:
    """A run in the list. jobs: the lines of the queue; None without Slurm. cluster: its name; "" if
    it is unknown.
    """
    run = record.read(folder)
    # those of a run that is done are not needed
    facts = {} if run.state is State.done and run.job else run.facts
    of_files = {"job_id": run.job, "job": facts}
    copied = [each for each in of_files.values() if each and directory.is_copied(folder, each)]
    named = [each.get(name) for name, each in of_files.items() if each not in copied]
    ids = [str(job_id) for job_id in named if job_id]
    elsewhere = facts.get("cluster") if cluster else ""
    if elsewhere and elsewhere != cluster:
        jobs = None
    lines = {job_id: jobs[job_id] for job_id in ids if jobs and job_id in jobs}
    job_id = outlook.newest(ids, {key: line.state in jobstate.ENDED for key, line in lines.items()})
    job = lines.get(job_id)
    alive = facts not in copied and in_use.is_alive(folder, facts, _has_processes(run, job_id, job))
    state, note = in_queue(run, job, alive, bool(ids), jobs is not None)
    notes = [note, f"a copy of {copied[0].get('run_dir')}" if copied else ""]
    if state is State.unknown and elsewhere:
        notes = [f"its job is on cluster {elsewhere}"]

    notes.append(str(run.summary.get("efficiency") or ""))
    if state is State.running:  # of others, only the last row is read
        notes.append(efficiency.verdict(run.newest_rows, facts, run.keys))
    of_newest = {**run.row, **run.summary}
    best = run.best or table.results(of_newest)
    hidden = ("step", *table.OF_TRAINING)
    numbers = {key: _finite(value) for key, value in best.items() if key not in hidden}
    return Run(
        folder=str(run.folder),
        recipe=run.recipe,
        job=job_id,
        state=state,
        step=run.step,
        steps=rows.whole(run.summary.get("steps") or run.row.get("total_steps")) or 0,
        epoch=rows.whole(run.row.get("epoch")),
        best={key: number for key, number in numbers.items() if number is not None},
        samples_per_second=_finite(of_newest.get("samples_per_second")),
        effective=ledger.of_run(run)["effective"] or None,
        updated=_finite(run.status.get("updated")),
        left_s=job.left_s if job and state is State.running else None,
        starts=len(run.attempts),
        nodes=job.nodes if job else "",
        note=shown("; ".join(filter(None, notes)), 300),
    )


def _has_processes(run: Record, job_id: str, job: client.Line | None) -> bool | None:
    """Whether a job has processes of the run. None if Slurm does not know: it may be the job of
    another user. An interactive job (salloc) outlives its steps.
    """
    is_active = job is not None and job.state not in {*jobstate.ENDED, *jobstate.WAITING}
    if is_active and run.job.get("job_id") == job_id:  # only a batch script writes job.yaml
        return True
    has_ended = run.state not in (State.running, State.not_begun)
    return False if has_ended or (job and not is_active) else None


def _finite(value: object) -> float | None:
    """A number from a file; None if it is none."""
    number = rows.number(value)
    return number if math.isfinite(number) else None


def find(words: Sequence[str], root: Path) -> list[Path]:
    """The run directories that ``words`` name: folders, job IDs, array elements or ``last``; all of
    ``runs/`` without words.

    Raises InputError for a word that names none, and MachineError for a link of another user.
    """
    every = root / "runs"
    folders = list[Path]()
    for word in words or [str(every)]:
        if word == table.LAST:
            named = table.last(every)
        elif word.replace("_", "").isdecimal():  # also if another user has made a folder 1234
            named = table.of_job(every, word)
        elif word and os.path.isdir(word):
            # another user's link could lead to any run of this user
            folder = trust.resolved(Path(word), to_same_owner=True)
            named = table.find([folder], may_be_empty=True)
        else:
            named = []
        if not named:
            raise InputError(_why_none(word, root))
        folders += named
    return list(dict.fromkeys(folders))


def _why_none(word: str, root: Path) -> str:
    """Why ``word`` names no run directory, and what to do."""
    fix = f"give a run directory, a job ID, or {table.LAST}"
    why = ""
    if word.replace("_", "").isdecimal():
        why, log = outlook.without_run(word, root)
        if log:
            return f"{word}: {why}: read its log, {log}"
    unknown = "no run was found" if word else "names no run (is a variable not set?)"
    return f"{shown(word) or repr(word)}: {why or unknown}: {fix}"
