"""Why runs ended, or their current state: by each run's own records, its job in Slurm, and its logs. Never torch."""

import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.core.doctor import diagnosis
from recipes.core.run import source
from recipes.core.files import ROOT
from recipes.core.run import liveness, outlook, rundir, table
from recipes.core.errors import InputError, Kind, kind_of
from recipes.core.run.scontrol import Queue
from recipes.core.doctor.log_events import Own, shown, small_json
from recipes.core.doctor.diagnosis import Explanation

QUIET_S = 120.0  # a run counts as ended after so long without a heartbeat or a written line, where Slurm does not tell


def explain(paths: Sequence[Path], queue: Queue) -> list[str]:
    """Lines on each run in ``paths``: run directories, folders of them, folders or files of logs. One section per run.

    Raises InputError, with one line, for a path that is not there or holds neither a run nor a log.
    """
    sections = [section for path in paths for section in _sections(path, queue)]
    if len(sections) == 1:
        return sections[0][1].lines()
    return [line for name, found in sections for line in (f"{name}:", *(f"  {line}" for line in found.lines()))]


def _sections(path: Path, queue: Queue) -> Iterator[tuple[str, Explanation]]:
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
        folders = list(table.run_directories(path)) if is_folder else []
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            shown(f"{path}: cannot be read ({why}): give a run directory, or a folder or file of logs")
        ) from None
    for folder in folders:
        yield (
            shown(os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)),
            of_run(folder, queue),
        )
    if not folders:
        yield shown(str(path)), diagnosis.of_logs(path)


def of_run(run_dir: Path, queue: Queue) -> Explanation:
    """The state of a run, or why it ended. Reads its logs if it failed."""
    status, refused = small_json(run_dir / "status.json"), small_json(run_dir / "refused.json")
    state, reason = status.get("state"), str(status.get("reason") or "")
    own, notes = Own(), list[str]()
    if refused.get("line") and state == "running":
        notes.append(f"a later launch was refused: {refused['line']}")
    elif refused.get("line") and table.is_newer(run_dir, "refused.json", "status.json"):  # removed when a run begins
        return Explanation(shown(f"it was refused before it began: {refused['line']}"))
    if state == "done":
        return Explanation("status.json says done: nothing failed")
    if state == "preempted":
        return Explanation(shown(outlook.after_stop(run_dir, status, queue)))
    found, quiet_s = outlook.look(run_dir, queue), _quiet_s(run_dir, status)
    if state == "running":
        own = _records(run_dir)
        where = f"at step {table.look(run_dir, time.time()).step}, last wrote {table.ago(quiet_s)} ago"
        if _is_alive(run_dir, found, quiet_s) and not own.verdict:
            by = "" if not found.id else f"; {found.line}"
            return Explanation(shown(f"it is running, {where}{by}"), notes=tuple(notes))
        notes += [found.line] if found.id else []
        own = own if own.verdict else Own(f"it ended without a final status, {where}", kind=Kind.killed)
    elif state in ("failed", "incomplete"):
        own = Own(
            reason, _number(status.get("first_failing_rank")), _host(status.get("first_failing_host")), kind_of(status)
        )
        own = own if own.kind or not own.verdict else replace(own, kind=_records(run_dir).kind)
        if found.job and not found.job.ended:
            notes.append(found.line)
    elif (found.job and not found.job.ended) or _is_alive(run_dir, found, quiet_s):
        return Explanation(shown(f"it has not begun: {found.line}"))
    elif not (run_dir / "attempt.json").exists():
        own = Own(f"it never began; {found.line}")
    else:
        own = Own(f"it ended before its first status; {found.line}", kind=Kind.killed)
    return diagnosis.of_logs(run_dir, own, batch_logs(run_dir, found), tuple(notes))


def _is_alive(run_dir: Path, found: outlook.Outlook, quiet_s: float) -> bool:
    """Whether the run has a process, as far as can be known: by Slurm for a batch job, else by its heartbeat and what it has written.

    salloc keeps a job running after its step has ended.
    """
    is_batch = found.job is not None and found.job.fields.get("BatchFlag") != "0"
    if found.asked and (is_batch or not found.is_active):
        return found.is_active
    return min(quiet_s, time.time() - liveness.newest_heartbeat(run_dir)) < QUIET_S


def _records(run_dir: Path) -> Own:
    """The verdict of the ranks' failure records, where there are any that can be read."""
    try:
        records = list((run_dir / "failures").glob("attempt-*.json"))
        if not records or not all(small_json(path) for path in [*records, run_dir / "attempt.json"]):
            return Own()
        if not rundir.failed_ranks(run_dir, int(small_json(run_dir / "attempt.json")["attempt"])):
            return Own()
        found = rundir.verdict(run_dir)
    except (KeyError, TypeError, ValueError, OSError, AttributeError, RecursionError):
        return Own()
    first = found.first or {}
    return Own(found.reason, first.get("rank"), first.get("host"), found.kind)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _host(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _quiet_s(run_dir: Path, status: dict[str, Any]) -> float:
    """Seconds since the run has last written its status, a row of metrics, or a line of a log."""
    updated = status.get("updated")
    times = [float(updated) if isinstance(updated, (int, float)) else 0.0]
    for path in (run_dir / "metrics.jsonl", *(run_dir / "logs").glob("*.log")):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(0.0, time.time() - max(times))


def batch_logs(run_dir: Path, found: outlook.Outlook) -> list[Path]:
    """The logs of the run's job, with the lines of its batch script, of srun and of Slurm, which are in no rank's log.

    Their paths come from job.yaml, and from Slurm while it knows the job; else from where ``launch.py`` and the ready scripts put them.
    """
    if not found.id:
        return []
    described = small_json(run_dir / "job.yaml")
    root = Path(str(described.get("root") or source.home(ROOT)))
    named = [described.get("log") if described.get("job_id") == found.id else None]
    named += [found.job.fields.get(name) for name in ("StdOut", "StdErr")] if found.job else []
    job = re.escape(found.id)
    paths = [Path(name) for name in named if isinstance(name, str) and name.startswith("/")]
    # Of launch.py: the batch script's own and rank 0's, then one file per further rank.
    paths += _named_in(root / "runs" / "submitit", rf"{job}_\d+_log\.(out|err)")
    if not paths:
        for folder in dict.fromkeys((root, Path.cwd())):
            paths += _named_in(folder, rf".+-{job}\.(out|err)")
    return list(dict.fromkeys(path for path in paths if path.is_file()))


def _named_in(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder / name for name in os.listdir(folder) if re.fullmatch(pattern, name))
    except OSError:
        return []
