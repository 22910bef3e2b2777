"""Explains why runs ended, or their current state: by their own records, their jobs in Slurm, and their logs. Never torch."""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from recipes.core.doctor import logs
from recipes.core.doctor.logs import LONGEST_LINE, Log
from recipes.core.doctor.patterns import Pattern
from recipes.core.errors import MachineError, shown
from recipes.core.files import ROOT, read_json
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, in_use, judge, source, table
from recipes.core.run import queue as slurm_queue
from recipes.core.run.queue import Outlook

QUIET_S = 120.0  # a run has ended if it wrote neither a heartbeat nor its status for so long, where Slurm does not know
MOST_EXPLAINED = 3  # patterns


class Judgement(NamedTuple):
    """Why a run ended."""

    line: str = ""  # "" if it is unknown
    rank: int | None = None  # the first to fail; None if it is unknown


UNKNOWN = Judgement()


def judgement(run_dir: Path) -> Judgement:
    """What the records of a run that has ended say about its end."""
    status = read_json(run_dir / "status.json") or {}
    if status.get("state") in ("failed", "incomplete"):
        return Judgement(str(status.get("reason") or ""), status.get("first_failing_rank"))
    attempt = attempts.owner(run_dir) or attempts.newest(run_dir)
    if not attempt or not attempts.records(attempt):
        return UNKNOWN
    found = judge.judge(judge.gather(attempt))
    return Judgement(found.reason, (found.first or {}).get("rank"))


def explain(paths: Sequence[Path]) -> list[str]:
    """Lines on each run in ``paths``: run directories, folders of them, folders or files of logs. One section per run.

    Raises InputError for a path that cannot be read, or holds neither a run nor a log.
    """
    sections = [section for path in paths for section in _sections(path)]
    if len(sections) == 1:
        return sections[0][1]
    return [line for name, found in sections for line in (f"{name}:", *(f"  {line}" for line in found))]


def _sections(path: Path) -> Iterator[tuple[str, list[str]]]:
    try:
        exists = bool(path.stat())  # exists() is also False for a path that may not be read, from Python 3.14 on
        folders = list(table.run_directories(path)) if path.is_dir() else []
    except (FileNotFoundError, NotADirectoryError):
        exists, folders = False, []
    except OSError as error:
        raise logs.unreadable(path, error) from None
    # A job ID, or a run directory that does not exist yet.
    if not exists and re.fullmatch(r"\d+(_\d+)?", path.name):
        if folders := sorted((source.home(ROOT) / "runs").glob(f"*/{path.name}")):
            return (yield from (section for folder in folders for section in _sections(folder)))
        with contextlib.suppress(MachineError):
            if job := slurm_queue.find(path.name):
                return (yield str(path), [f"it has no run directory yet: {slurm_queue.describe(job)}"])
    for folder in folders:
        yield shown(_short(folder), LONGEST_LINE), of_run(folder)
    if not folders:
        yield shown(path, LONGEST_LINE), of_logs(path)


def of_run(run_dir: Path) -> list[str]:
    """Lines on the state of a run, or why it ended. Reads its logs if it failed."""
    status, not_begun = directory.read_status(run_dir) or {}, judge.why_not_begun(run_dir)
    state, notes = status.get("state"), list[str]()
    if not_begun and state == "running":
        notes.append(f"a later launch did not begin: {not_begun}")
    elif not_begun:
        return _shown(f"the newest launch did not begin: {not_begun}")
    if state == "done":
        return ["status.json says done: nothing failed"]
    if state == "preempted":
        return _shown(slurm_queue.after_stop(run_dir, status))
    slurm, found = slurm_queue.of_run(run_dir), judgement(run_dir)
    quiet_s = max(0.0, time.time() - status.get("updated", 0.0))  # since the run last updated its status
    if state == "running":
        where = f"at step {table.read_run(run_dir, time.time()).step}, status written {table.ago(quiet_s)} ago"
        if not found.line and _is_alive(run_dir, slurm, quiet_s):
            return _shown(f"it is running, {where}{f'; {slurm.line}' if slurm.id else ''}", *notes)
        notes += [slurm.line] if slurm.id else []
        if not found.line:
            found = Judgement(f"it ended without a final status, {where}")
    elif found.line:
        notes += [slurm.line] if slurm.job and not slurm.job.ended else []
    elif (slurm.job and not slurm.job.ended) or _is_alive(run_dir, slurm, quiet_s):
        return _shown(f"it has not begun: {slurm.line}")
    else:
        begun = (run_dir / "logs").is_dir()
        found = Judgement(f"it {'ended before its first status' if begun else 'never began'}; {slurm.line}")
    return of_logs(run_dir, found, batch_logs(run_dir, slurm)) + _shown(*notes)


def _is_alive(run_dir: Path, slurm: Outlook, quiet_s: float) -> bool:
    """Whether the run has a process: by Slurm for a batch job, otherwise by its heartbeat and its status.

    An interactive job (salloc) outlives its steps.
    """
    is_batch = slurm.job is not None and slurm.job.fields.get("BatchFlag") != "0"
    if slurm.asked and (is_batch or not slurm.is_active):
        return slurm.is_active
    if in_use.is_running(attempts.facts(run_dir)) is False:
        return False
    owner = attempts.owner(run_dir)
    return min(quiet_s, time.time() - attempts.newest_heartbeat(owner) if owner else quiet_s) < QUIET_S


def batch_logs(run_dir: Path, slurm: Outlook) -> list[Path]:
    """The logs of the run's job: they hold the lines of its batch script, of srun and of Slurm, which no rank's log has.

    Their paths come from job.yaml, and from Slurm while it knows the job.
    """
    described = read_json(run_dir / "job.yaml") or {}
    named = [described.get("log") if slurm.id and described.get("job_id") == slurm.id else None]
    named += [slurm.job.fields.get(name) for name in ("StdOut", "StdErr")] if slurm.job else []
    paths = [Path(name) for name in named if isinstance(name, str) and name.startswith("/")]
    return [path for path in paths if path.is_file()]


def of_logs(path: Path, found: Judgement = UNKNOWN, more: Sequence[Path] = ()) -> list[str]:
    """Lines on a failed run, by its logs in a run directory, any folder of logs, or one file.

    more: further logs of the run's job. Raises InputError for a path that cannot be read or holds no log.
    """
    is_folder, read = path.is_dir(), list[Log]()
    why: object = f"holds no log (*{', *'.join(logs.SUFFIXES)})"
    for file in dict.fromkeys((*(logs.files_in(path) if is_folder else [path]), *more)):
        name = str(file.relative_to(path)) if file.is_relative_to(path) and is_folder else _short(file)
        try:
            read.append(logs.read(file, name))
        except (OSError, ValueError) as error:
            why = error
    if not read and not found.line:
        raise logs.unreadable(path, why)
    return _shown(*_lines(found, read))


def _lines(found: Judgement, read: Sequence[Log]) -> list[str]:
    """The judgement, the known lines with their fixes, and the end of the log of the first rank to fail."""
    own = f"logs/rank{found.rank}.log"
    read = sorted(read, key=lambda log: log.name != own)
    by_pattern: dict[Pattern, list[Log]] = {}
    for log in read:
        for pattern in log.known:
            by_pattern.setdefault(pattern, []).append(log)
    patterns = sorted(by_pattern, key=lambda pattern: pattern.level)  # of one level, the own ones of that rank first
    files = f"{len(read)} file{'s' * (len(read) != 1)}"
    lines = [found.line or (f"closest to a cause: {patterns[0].name}" if patterns else f"no known cause in {files}")]
    for pattern in patterns[:MOST_EXPLAINED]:
        log, count = by_pattern[pattern][0], len(by_pattern[pattern])
        lines.append(f"{pattern.level.name}: {pattern.name} ({count} file{'s' * (count != 1)}): {pattern.means}")
        lines += [f"  do: {pattern.fix}", f"  {log.name}: {log.known[pattern]}"]
    if read:
        last = read[0] if read[0].name == own else by_pattern[patterns[0]][0] if patterns else read[-1]
        lines += [f"{last.name} ends:", *(f"  | {line}" for line in last.tail)] if last.tail else []
    return lines


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _shown(*lines: str) -> list[str]:
    return [shown(line, LONGEST_LINE) for line in lines]
