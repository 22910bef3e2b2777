"""Explains why runs ended, or their current state: by their own records, their jobs in Slurm, and their logs. Never torch."""

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recipes.core.doctor import logs
from recipes.core.doctor.logs import LONGEST_LINE, Event, Log
from recipes.core.doctor.patterns import Level
from recipes.core.errors import Kind, kind_of, shown
from recipes.core.files import ROOT, read_json
from recipes.core.run import attempt as attempts
from recipes.core.run import judge, source, table
from recipes.core.run import queue as slurm_queue
from recipes.core.run.queue import Outlook, Queue

QUIET_S = 120.0  # a run has ended if it wrote neither a heartbeat nor its status for so long, where Slurm does not know
MOST_CAUSES, TAIL = 3, 6  # patterns that are explained, and last lines of a log that are shown


class Judgement(NamedTuple):
    """What a run's records say about its end. verdict: one line, "" if they do not say. rank, host: the first to fail."""

    verdict: str = ""
    rank: int | None = None
    host: str | None = None
    kind: Kind | None = None


NO_RECORD = Judgement()


def judgement(run_dir: Path) -> Judgement:
    """The judgement of a run that has ended."""
    status = read_json(run_dir / "status.json") or {}
    if status.get("state") in ("failed", "incomplete"):
        rank, host = status.get("first_failing_rank"), status.get("first_failing_host")
        return Judgement(str(status.get("reason") or ""), rank, host, kind_of(status))
    attempt = attempts.owner(run_dir) or attempts.newest(run_dir)
    try:
        if not attempt or not attempts.records(attempt):
            return NO_RECORD
        found = judge.judge(judge.gather(attempt))
    except (KeyError, TypeError, ValueError, AttributeError):  # a damaged record
        return NO_RECORD
    first = found.first or {}
    return Judgement(found.reason, first.get("rank"), first.get("host"), found.kind)


def explain(paths: Sequence[Path], queue: Queue) -> list[str]:
    """Lines on each run in ``paths``: run directories, folders of them, folders or files of logs. One section per run.

    Raises InputError for a path that cannot be read, or holds neither a run nor a log.
    """
    sections = [section for path in paths for section in _sections(path, queue)]
    if len(sections) == 1:
        return sections[0][1]
    return [line for name, found in sections for line in (f"{name}:", *(f"  {line}" for line in found))]


def _sections(path: Path, queue: Queue) -> Iterator[tuple[str, list[str]]]:
    try:
        folders = list(table.run_directories(path)) if path.is_dir() else []
    except (OSError, ValueError) as error:
        raise logs.unreadable(path, error) from None
    for folder in folders:
        yield shown(_short(folder), LONGEST_LINE), of_run(folder, queue)
    if not folders:
        yield shown(path, LONGEST_LINE), of_logs(path)


def of_run(run_dir: Path, queue: Queue) -> list[str]:
    """Lines on the state of a run, or why it ended. Reads its logs if it failed."""
    status, refused = read_json(run_dir / "status.json") or {}, judge.refusal(run_dir)
    state, notes = status.get("state"), list[str]()
    if refused and state == "running":
        notes.append(f"a later launch was refused: {refused}")
    elif refused:
        return _shown(f"it was refused before it began: {refused}")
    if state == "done":
        return ["status.json says done: nothing failed"]
    if state == "preempted":
        return _shown(slurm_queue.after_stop(run_dir, status, queue))
    slurm, quiet_s, found = slurm_queue.of_run(run_dir, queue), _quiet_s(status), judgement(run_dir)
    if state == "running":
        where = f"at step {table.read_run(run_dir, time.time()).step}, last wrote {table.ago(quiet_s)} ago"
        if not found.verdict and _is_alive(run_dir, slurm, quiet_s):
            return _shown(f"it is running, {where}{f'; {slurm.line}' if slurm.id else ''}", *notes)
        notes += [slurm.line] if slurm.id else []
        if not found.verdict:
            found = Judgement(f"it ended without a final status, {where}", kind=Kind.killed)
    elif found.verdict:
        notes += [slurm.line] if slurm.job and not slurm.job.ended else []
    elif (slurm.job and not slurm.job.ended) or _is_alive(run_dir, slurm, quiet_s):
        return _shown(f"it has not begun: {slurm.line}")
    else:
        begun = (run_dir / "logs").is_dir()
        found = Judgement(
            f"it {'ended before its first status' if begun else 'never began'}; {slurm.line}", kind=Kind.killed
        )
    return of_logs(run_dir, found, batch_logs(run_dir, slurm)) + _shown(*notes)


def _is_alive(run_dir: Path, slurm: Outlook, quiet_s: float) -> bool:
    """Whether the run has a process: by Slurm for a batch job, otherwise by its heartbeat and its status.

    An interactive job (salloc) outlives its steps.
    """
    is_batch = slurm.job is not None and slurm.job.fields.get("BatchFlag") != "0"
    if slurm.asked and (is_batch or not slurm.is_active):
        return slurm.is_active
    owner = attempts.owner(run_dir)
    return min(quiet_s, time.time() - attempts.newest_heartbeat(owner) if owner else quiet_s) < QUIET_S


def _quiet_s(status: dict[str, Any]) -> float:
    """Seconds since the run last updated its status."""
    updated = status.get("updated")
    return max(0.0, time.time() - (float(updated) if isinstance(updated, (int, float)) else 0.0))


def batch_logs(run_dir: Path, slurm: Outlook) -> list[Path]:
    """The logs of the run's job: they hold the lines of its batch script, of srun and of Slurm, which no rank's log has.

    Their paths come from job.yaml, and from Slurm while it knows the job.
    """
    if not slurm.id:
        return []
    described = read_json(run_dir / "job.yaml") or {}
    named = [described.get("log") if described.get("job_id") == slurm.id else None]
    named += [slurm.job.fields.get(name) for name in ("StdOut", "StdErr")] if slurm.job else []
    paths = [Path(name) for name in named if isinstance(name, str) and name.startswith("/")]
    # launch.py: one file for the batch script and rank 0, and one for each other rank.
    folder = Path(str(described.get("root") or source.home(ROOT))) / "runs" / "submitit"
    of_rank = re.compile(rf"{re.escape(slurm.id)}_\d+_log\.(out|err)")
    paths += sorted(path for path in folder.glob("*_log.*") if of_rank.fullmatch(path.name))
    return list(dict.fromkeys(path for path in paths if path.is_file()))


def of_logs(path: Path, found: Judgement = NO_RECORD, more: Sequence[Path] = ()) -> list[str]:
    """Lines on a failed run, by its logs in a run directory, any folder of logs, or one file.

    more: further logs of the run's job. Raises InputError for a path that cannot be read or holds no log.
    """
    try:
        is_folder = path.is_dir()
    except ValueError as error:
        raise logs.unreadable(path, error) from None
    files = logs.files_in(path) if is_folder else [path]
    of_torchrun = {file.parent.parent for file in files if re.fullmatch(r"(stdout|stderr)\.log", file.name)}
    read, unread = list[Log](), list[tuple[Path, object]]()
    for file in dict.fromkeys((*files, *more)):
        name = str(file.relative_to(path)) if file.is_relative_to(path) and is_folder else _short(file)
        rank = logs.rank_in_name(name if file in files else file.name, len(of_torchrun) == 1)
        try:
            # rank 0's file of launch.py is also the batch script's
            read.append(logs.read(file, name, rank if file in files else rank or None))
        except (OSError, ValueError) as error:
            unread.append((file, error))
    if not read and not found.verdict:
        raise logs.unreadable(*(unread or [(path, f"holds no log (*{', *'.join(logs.SUFFIXES)})")])[0])
    events = [event for number, log in enumerate(read) for event in logs.events(log, number)]
    events.sort(key=lambda event: (event.pattern.level, event.of_file, event.offset))
    lines = _lines(found, read, events)
    if unread:
        lines.append(f"not read: {unread[0][0]}" + (f", and {len(unread) - 1} more" if unread[1:] else ""))
    return _shown(*lines)


def _lines(found: Judgement, read: Sequence[Log], events: Sequence[Event]) -> list[str]:
    """The verdict, the causes with their fixes, and the end of the log of the first rank to fail."""
    first = events[0] if events else None
    # Where a rank left no record or saw only that others were gone, the cause in a log says more than the record.
    is_blind = found.kind in (Kind.peer_lost, Kind.killed) and first and first.rank is not None
    if not found.verdict or (is_blind and first and first.pattern.level in (Level.cause, Level.error)):
        found = _by_events(found, events, len(read))
    events = sorted(events, key=lambda event: (event.pattern.level, event.rank != found.rank))
    own = [log for log in read if log.rank == found.rank and found.rank is not None]
    of_first = own or ([read[first.of_file]] if first else list(read[-1:]))
    counted = {event.pattern: _count([e for e in events if e.pattern is event.pattern]) for event in events}
    chosen = [pattern for pattern in counted if first and pattern.level <= max(first.pattern.level, Level.error)]
    lines = [found.verdict]
    for pattern in chosen[:MOST_CAUSES]:
        event = next(event for event in events if event.pattern is pattern)
        lines += [f"{pattern.level.name}: {counted[pattern]}: {pattern.means}", f"  do: {pattern.fix}"]
        lines.append(f"  {event.where}: {event.line}")
    if rest := [counted[pattern] for pattern in counted if pattern not in chosen[:MOST_CAUSES]]:
        lines.append(f"also: {', '.join(rest)}")
    if of_first and (tail := of_first[0].tail(TAIL)):
        lines += [f"{of_first[0].name} ends:", *(f"  | {line}" for line in tail)]
    return lines


def _by_events(found: Judgement, events: Sequence[Event], files: int) -> Judgement:
    """The judgement by the logs alone. events: sorted, causes first."""
    if not events:
        return Judgement(f"no known cause in {files} file{'s' * (files != 1)}")
    pattern = events[0].pattern
    if pattern.level is Level.whole_job:
        return Judgement(f"the whole job was ended, and no rank is to blame: {pattern.name}")
    named = [event for event in events if event.pattern is pattern and (event.rank is not None or event.host)]
    rank, host = (named[0].rank, named[0].host) if named else (None, None)
    if host is None and rank is not None:  # as the run's records, or another line, say
        host = found.host if rank == found.rank else next((e.host for e in events if e.rank == rank and e.host), None)
    who = " on ".join(filter(None, ("" if rank is None else f"rank {rank}", host)))
    if pattern.level is Level.consequence:
        verdict = (
            f"{who or 'a rank'} reported first, but only a consequence ({pattern.name}); the logs do not show its cause"
        )
    else:
        verdict = f"{who} failed first: " if who else "the first error, on a rank that the logs do not name: "
        verdict += pattern.name
    return Judgement(verdict, rank, host)


def _count(events: Sequence[Event]) -> str:
    """A pattern with the number of ranks that printed it, or of files where no rank is named."""
    ranks, files = {e.rank for e in events if e.rank is not None}, {e.of_file for e in events}
    count = len(ranks or files)
    return f"{events[0].pattern.name} ({count} {'rank' if ranks else 'file'}{'s' * (count != 1)})"


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _shown(*lines: str) -> list[str]:
    return [shown(line, LONGEST_LINE) for line in lines]
