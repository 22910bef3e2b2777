"""Explains why runs ended, or their current state: by their own records, their jobs in Slurm, and their logs. Never torch."""

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.core.doctor import diagnosis
from recipes.core.doctor.diagnosis import NO_RECORD, Explanation, RunRecord
from recipes.core.doctor.log_events import LONGEST_LINE, small_json
from recipes.core.errors import Kind, kind_of, shown
from recipes.core.files import ROOT
from recipes.core.run import attempt as attempts
from recipes.core.run import judge, source, table
from recipes.core.run import queue as slurm_queue
from recipes.core.run.queue import Outlook, Queue

QUIET_S = 120.0  # a run has ended if it wrote neither a heartbeat nor a line for so long, where Slurm does not know


def explain(paths: Sequence[Path], queue: Queue) -> list[str]:
    """Lines on each run in ``paths``: run directories, folders of them, folders or files of logs. One section per run.

    Raises InputError for a path that cannot be read, or holds neither a run nor a log.
    """
    sections = [section for path in paths for section in _sections(path, queue)]
    if len(sections) == 1:
        return sections[0][1].lines()
    return [line for name, found in sections for line in (f"{name}:", *(f"  {line}" for line in found.lines()))]


def _sections(path: Path, queue: Queue) -> Iterator[tuple[str, Explanation]]:
    try:
        folders = list(table.run_directories(path)) if os.path.isdir(path) else []
    except OSError as error:
        raise diagnosis.unreadable(path, error) from None
    for folder in folders:
        name = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else folder
        yield shown(name, LONGEST_LINE), of_run(folder, queue)
    if not folders:
        yield shown(path, LONGEST_LINE), diagnosis.of_logs(path)


def of_run(run_dir: Path, queue: Queue) -> Explanation:
    """The state of a run, or why it ended. Reads its logs if it failed."""
    status, refused = small_json(run_dir / "status.json"), judge.refusal(run_dir)
    state, record, notes = status.get("state"), NO_RECORD, list[str]()
    if refused and state == "running":
        notes.append(f"a later launch was refused: {refused}")
    elif refused:
        return Explanation(f"it was refused before it began: {refused}")
    if state == "done":
        return Explanation("status.json says done: nothing failed")
    if state == "preempted":
        return Explanation(slurm_queue.after_stop(run_dir, status, queue))
    slurm, quiet_s = slurm_queue.of_run(run_dir, queue), _quiet_s(run_dir, status)
    if state == "running":
        record = _of_ranks(run_dir)
        where = f"at step {table.read_run(run_dir, time.time()).step}, last wrote {table.ago(quiet_s)} ago"
        if _is_alive(run_dir, slurm, quiet_s) and not record.verdict:
            return Explanation(f"it is running, {where}{f'; {slurm.line}' if slurm.id else ''}", notes=tuple(notes))
        notes += [slurm.line] if slurm.id else []
        record = record if record.verdict else RunRecord(f"it ended without a final status, {where}", kind=Kind.killed)
    elif state in ("failed", "incomplete"):
        rank, host = status.get("first_failing_rank"), status.get("first_failing_host")
        record = RunRecord(
            str(status.get("reason") or ""),
            rank if isinstance(rank, int) else None,
            host if isinstance(host, str) else None,
            kind_of(status) or _of_ranks(run_dir).kind,
        )
        if slurm.job and not slurm.job.ended:
            notes.append(slurm.line)
    elif (slurm.job and not slurm.job.ended) or _is_alive(run_dir, slurm, quiet_s):
        return Explanation(f"it has not begun: {slurm.line}")
    elif not attempts.facts(run_dir):
        record = RunRecord(f"it never began; {slurm.line}")
    else:
        record = RunRecord(f"it ended before its first status; {slurm.line}", kind=Kind.killed)
    return diagnosis.of_logs(run_dir, record, batch_logs(run_dir, slurm), tuple(notes))


def _is_alive(run_dir: Path, slurm: Outlook, quiet_s: float) -> bool:
    """Whether the run has a process: by Slurm for a batch job, otherwise by its heartbeat and its last line.

    An interactive job (salloc) outlives its steps.
    """
    is_batch = slurm.job is not None and slurm.job.fields.get("BatchFlag") != "0"
    if slurm.asked and (is_batch or not slurm.is_active):
        return slurm.is_active
    owner = attempts.owner(run_dir)
    return min(quiet_s, time.time() - attempts.newest_heartbeat(owner) if owner else quiet_s) < QUIET_S


def _of_ranks(run_dir: Path) -> RunRecord:
    """The judgement on the records of the ranks, if there are any."""
    attempt = attempts.owner(run_dir) or attempts.newest(run_dir)
    if not attempt or not attempts.records(attempt):
        return NO_RECORD
    found = judge.judge(judge.gather(attempt))
    first = found.first or {}
    return RunRecord(found.reason, first.get("rank"), first.get("host"), found.kind)


def _quiet_s(run_dir: Path, status: dict[str, Any]) -> float:
    """Seconds since the run last wrote its status, a row of metrics, or a line of a log."""
    updated = status.get("updated")
    times = [float(updated) if isinstance(updated, (int, float)) else 0.0]
    for path in (run_dir / "metrics.jsonl", *(run_dir / "logs").glob("*.log")):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(0.0, time.time() - max(times))


def batch_logs(run_dir: Path, slurm: Outlook) -> list[Path]:
    """The logs of the run's job: they hold the lines of its batch script, of srun and of Slurm, which no rank's log has.

    Their paths come from job.yaml, and from Slurm while it knows the job; otherwise from where ``launch.py`` and the ready scripts
    put them.
    """
    if not slurm.id:
        return []
    described = small_json(run_dir / "job.yaml")
    root = Path(str(described.get("root") or source.home(ROOT)))
    named = [described.get("log") if described.get("job_id") == slurm.id else None]
    named += [slurm.job.fields.get(name) for name in ("StdOut", "StdErr")] if slurm.job else []
    number = re.escape(slurm.id)
    paths = [Path(name) for name in named if isinstance(name, str) and name.startswith("/")]
    # launch.py: one file for the job. Jobs that were submitted by an older version have further files, one for each rank.
    paths += _named_in(root / "runs" / "submitit", rf"{number}_\d+_log\.(out|err)")
    if not paths:
        for folder in dict.fromkeys((root, Path.cwd())):
            paths += _named_in(folder, rf".+-{number}\.(out|err)")
    return list(dict.fromkeys(path for path in paths if path.is_file()))


def _named_in(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder / name for name in os.listdir(folder) if re.fullmatch(pattern, name))
    except OSError:
        return []
