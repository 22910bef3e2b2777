"""Explains why runs ended, or their current state: by their own records, their jobs in Slurm, and
their logs. Never torch.
"""

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core.doctor.patterns import PATTERNS, Pattern
from recipes.core import trust
from recipes.core.errors import InputError, MachineError, shown
from recipes.core.files import ROOT
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, in_use, judge, ledger, outlook, record, source, table
from recipes.core.run.record import Record, State

MOST_EXPLAINED = 3  # patterns
MOST_RESTARTS = 10
MOST_BYTES = 8 << 20  # of each log; the part before its last bytes is not read
LONGEST_LINE = 2000  # characters of a line that is shown
TAIL = 6  # last lines of a log that are shown
SUFFIXES = (".log", ".out", ".err", ".txt")
PRUNED = {"checkpoints", "node_modules", "__pycache__", directory.EVALUATION}
ATTEMPT = "\f"  # the writer of a log begins each attempt with it
# The source code in a traceback, which may contain a text that nothing has printed. srun -l and
# torchrun put the rank before each line.
_SOURCE = re.compile(
    r'^(.{0,100})(  File "[^"\n]+", line \d{1,9}\b.*\n)(?:\1    .*\n)+', re.MULTILINE
)
_OF_RANK = re.compile(r"logs/rank(\d+)\.log")
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")


Section = tuple[str, list[str]]  # the name of a run, and lines about it


@dataclass(frozen=True)
class Log:
    """The newest attempt in a log file. known: for each pattern the first line that contains a text
    of it. tail: the last lines.
    """

    name: str
    known: dict[Pattern, str]
    tail: list[str]


def explain(paths: Sequence[Path]) -> list[Section]:
    """Name and lines of each run in ``paths``: run directories, folders of them, folders or files
    of logs, IDs of jobs, `table.LAST`.

    Raises InputError for a path that cannot be read, or holds neither a run nor a log.
    """
    return [section for path in paths for section in _sections(path)]


def in_one(sections: Sequence[Section]) -> list[str]:
    """The lines of all runs of `explain`, each below its name if there are several."""
    if len(sections) == 1:
        return sections[0][1]
    every = []
    for name, lines in sections:
        every.append(f"{name}:")
        every += [f"  {line}" for line in lines]
    return every


def _sections(path: Path) -> Sequence[Section]:
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
        runs = list(table.run_directories(path)) if is_folder else []
    except (FileNotFoundError, NotADirectoryError):
        runs = []
        every = source.home(ROOT) / "runs"
        # a job ID, or a run directory that does not exist yet
        is_job = re.fullmatch(r"\d+(_\d+)?", path.name)
        if str(path) == table.LAST:
            runs = table.last(every)
        elif is_job:
            runs = table.of_job(every, path.name)
        if runs:
            return explain(runs)
        if is_job:
            why, log = outlook.without_run(path.name, every.parent)
            if why:
                return [(str(path), [why, *(of_logs(log) if log else ())])]
    except OSError as error:
        raise _unreadable(path, error) from None
    if runs == [path]:
        return [table.read_one(path, _of_run)]
    if runs:
        return table.read_each(runs, _of_run)
    return [(shown(path, LONGEST_LINE), of_logs(path))]


def _of_run(run_dir: Path) -> Section:
    lines = [*of_run(run_dir), *_restarts(run_dir)]
    return shown(_short(run_dir), LONGEST_LINE), lines


def _restarts(run_dir: Path) -> list[str]:
    """How long each of the newest restarts took, and its parts."""
    lines = []
    for attempt in attempts.every(run_dir)[:MOST_RESTARTS]:
        parts = ledger.recovery(attempt)
        if parts:
            total = f"attempt {attempt.number} was started again in {sum(parts.values()):.1f} s"
            lines.append(f"{total}: {ledger.text(parts)}")
    return lines


def of_run(run_dir: Path) -> list[str]:
    """Lines on the state of a run, or why it ended. Reads its logs if it failed."""
    run = record.read(run_dir)
    notes = list[str]()
    if run.refused:
        if run.state is not State.running:
            return _shown(f"the newest start was refused: {run.refused}")
        notes.append(f"a later start was refused: {run.refused}")
    if run.state is State.done:
        return ["status.json says done: nothing failed"]
    if run.state in (State.stopped, State.cancelled):
        return _shown(outlook.after_stop(run))
    slurm = outlook.of_run(run)
    has_job = slurm.job is not None and not slurm.job.ended
    reason, rank = _judgement(run)
    if run.state is State.running:
        where = f"at step {run.step}, status written {record.ago(run.quiet_s)} ago"
        if not reason and _is_alive(run, slurm):
            return _shown(f"it is running, {where}{f'; {slurm.line}' if slurm.id else ''}", *notes)
        notes += [slurm.line] if slurm.id else []
        reason = reason or f"it ended without a final status, {where}"
    elif reason:
        notes += [slurm.line] if has_job else []
    elif has_job or _is_alive(run, slurm):
        return _shown(f"it has not begun: {slurm.line}")
    else:
        begun = (run_dir / "logs").is_dir()
        reason = f"it {'ended before its first status' if begun else 'never began'}; {slurm.line}"
    lines = of_logs(run_dir, reason, rank, batch_logs(run, slurm), _count_ranks(run))
    return lines + _shown(*notes)


def _judgement(run: Record) -> tuple[str, int | None]:
    """Why a run failed, "" if that is unknown, and the first rank to fail, according to the records
    of the run.
    """
    if run.state is State.failed:
        return str(run.status.get("reason") or ""), run.status.get("first_failing_rank")
    attempt = attempts.owner(run.folder) or attempts.newest(run.folder)
    if not attempt or not attempts.records(attempt):
        return "", None
    outcome = judge.judge(attempt)
    return outcome.reason, (outcome.first or {}).get("rank")


def _count_ranks(run: Record) -> int:
    """The number of ranks of the attempt that owns the run, else of the newest one; 0 if it is
    unknown.
    """
    attempt = attempts.owner(run.folder) or attempts.newest(run.folder)
    of_program = attempts.program_ranks(attempt) if attempt else []
    highest = max((int(rank["rank"]) for rank in of_program), default=-1)
    return max(highest + 1, len(run.facts.get("hosts") or ()))


def _is_alive(run: Record, slurm: outlook.Outlook) -> bool:
    is_batch = slurm.job is not None and slurm.job.has_script
    by_slurm = slurm.is_active if is_batch or (slurm.job and not slurm.is_active) else None
    return in_use.is_alive(run.folder, run.facts, by_slurm)


def batch_logs(run: Record, slurm: outlook.Outlook) -> list[Path]:
    """The logs of the run's job: they hold the lines of its batch script, of srun and of Slurm,
    which no rank's log has.

    With sbatch's --error there are two logs. job.yaml names one, and Slurm names the other as long
    as it knows the job.
    """
    is_of_job = slurm.id and run.job.get("job_id") == slurm.id
    named = [record.log_of_job(run.folder, run.job)] if is_of_job else []
    named += [slurm.job.error_log] if slurm.job else []
    return [log for log in map(Path, named) if record.is_log_of(run.folder, log)]


def of_logs(
    path: Path,
    reason: str = "",
    rank: int | None = None,
    more: Sequence[Path] = (),
    ranks: int = 0,
) -> list[str]:
    """Lines on a failed run, by its logs in a run directory, any folder of logs, or one file.

    reason: why it failed, if that is known. rank: the first to fail. more: further logs of the
    run's job. ranks: their number in the newest attempt, since an earlier one may have had more; 0
    if it is unknown. Raises InputError for a path that cannot be read or holds no log.
    """
    is_folder = path.is_dir()
    logs = list[Log]()
    why: object = f"holds no log (*{', *'.join(SUFFIXES)})"
    in_path = _logs_in(path) if is_folder else [path]
    for file in dict.fromkeys([*in_path, *more]):
        is_inside = is_folder and file.is_relative_to(path)
        name = str(file.relative_to(path)) if is_inside else _short(file)
        of_rank = _OF_RANK.fullmatch(name)
        if of_rank and 0 < ranks <= int(of_rank[1]):
            continue
        try:
            logs.append(read_log(file, name))
        except (OSError, ValueError, MachineError) as error:
            why = error
    if not logs and not reason:
        raise _unreadable(path, why)
    return _shown(*_lines(reason, rank, logs))


def _logs_in(folder: Path) -> list[Path]:
    """The logs in a folder and the folders in it. Links to folders are not followed."""
    logs = list[Path]()
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in PRUNED and not f.startswith("."))
        logs += [Path(place, name) for name in sorted(names) if name.endswith(SUFFIXES)]
    return logs


def read_log(path: Path, name: str) -> Log:
    """The newest attempt in an ordinary file. Raises OSError, and MachineError if another user's
    link leads to it.
    """
    with open(path, "rb", opener=trust.without_links_of_others) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
        data = file.read(MOST_BYTES)
    # Without colours, which may separate words of a text. A progress bar ends its lines with a
    # carriage return.
    text = _COLOUR.sub("", data.decode("utf-8", "replace")).replace("\r", "\n")
    text = text.rpartition(ATTEMPT)[2]
    lines = [line for line in text.split("\n") if line.strip()]
    parts = [
        (part, pattern)
        for pattern in PATTERNS
        for part in pattern.texts.split(" | ")
        if part in text
    ]
    known: dict[Pattern, str] = {}
    for line in _SOURCE.sub(r"\1\2", text).split("\n") if parts else []:
        first = next((pattern for part, pattern in parts if part in line), None)
        if first:
            known.setdefault(first, line[:LONGEST_LINE].strip())
    return Log(name, known, [line[:LONGEST_LINE].rstrip() for line in lines[-TAIL:]])


def _lines(reason: str, rank: int | None, logs: Sequence[Log]) -> list[str]:
    """The reason, the known lines with their fixes, and the end of the log of the first rank to
    fail.
    """
    first = f"logs/rank{rank}.log"
    logs = sorted(logs, key=lambda log: log.name != first)
    by_pattern: dict[Pattern, list[Log]] = {}
    for log in logs:
        for pattern in log.known:
            by_pattern.setdefault(pattern, []).append(log)
    # of one level, those in the log of that rank first
    patterns = sorted(by_pattern, key=lambda pattern: pattern.level)
    last = logs[-1:]
    clue = f"no known cause in {_files(logs)}"
    if patterns:
        last = by_pattern[patterns[0]]
        clue = f"most likely cause in the logs: {patterns[0].name}"
    if logs and logs[0].name == first:
        last = logs
    lines = [reason or clue]
    for pattern in patterns[:MOST_EXPLAINED]:
        log = by_pattern[pattern][0]
        files = _files(by_pattern[pattern])
        lines += [
            f"{pattern.level.name}: {pattern.name} ({files}): {pattern.means}",
            f"  do: {pattern.fix}",
            f"  {log.name}: {log.known[pattern]}",
        ]
    for log in last[:1]:
        lines += [f"{log.name} ends:", *(f"  | {line}" for line in log.tail)] if log.tail else []
    return lines


def _files(logs: Sequence[Log]) -> str:
    return f"{len(logs)} file{'s' * (len(logs) != 1)}"


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _shown(*lines: str) -> list[str]:
    return [shown(line, LONGEST_LINE) for line in lines]


def _unreadable(path: Path, error: object) -> InputError:
    why = getattr(error, "strerror", None) or error
    fix = f"give a run directory, a job ID, {table.LAST}, or a log or a folder of logs"
    return InputError(shown(f"{path}: {why}: {fix}", LONGEST_LINE))
