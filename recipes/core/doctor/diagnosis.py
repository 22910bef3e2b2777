"""Why a run failed, by its logs: the first rank and host to fail, and the known causes with their fixes."""

import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core.doctor import log_events
from recipes.core.doctor.log_events import LONGEST_LINE, Event, LogReader
from recipes.core.doctor.signatures import Level, Signature
from recipes.core.errors import InputError, Kind, shown
from recipes.core.run import attempt as attempts

CAUSES = (Level.cause, Level.error)
HINTS = (Level.hint,)
CONSEQUENCES = (Level.consequence,)


@dataclass(frozen=True)
class RunRecord:
    """What a run's records say about its end: a line, "" where there are none; the first rank to fail, its host, and the kind."""

    verdict: str = ""
    rank: int | None = None
    host: str | None = None
    kind: Kind | None = None


NO_RECORD = RunRecord()


@dataclass(frozen=True)
class Found:
    """A signature that is in the logs. count: of ranks, or of files where no rank is named. where: file and line."""

    signature: Signature
    count: int
    of: str
    line: str
    where: str


@dataclass(frozen=True)
class Explanation:
    """Why a run failed. verdict: one line. rank, host: the first to fail, None where unknown. error: the line that shows it, or "";
    where: its file and line. causes: sorted by level, then by place in the files. notes: what limits this explanation."""

    verdict: str
    rank: int | None = None
    host: str | None = None
    error: str = ""
    where: str = ""
    causes: tuple[Found, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """At most twenty lines: the verdict, up to four causes with their fixes, and the names of the others.

        Hints are shown in full only where there is no cause, and consequences only where there is no hint.
        """
        lines = [self.verdict]
        if self.error:
            lines.append(f"  {self.where}: {self.error}")
        by_level = [self._of(*levels) for levels in (CAUSES, HINTS, CONSEQUENCES)]
        chosen = next((found[:4] for found in by_level if found), [])
        for found in chosen:
            signature = found.signature
            lines += [f"{signature.level.name}: {_counted(found)}: {signature.means}", f"  do: {signature.fix}"]
            if (found.where, found.line) != (self.where, self.error):
                lines.append(f"  {found.where}: {found.line}")
        titles = {"also": (*CAUSES, *HINTS), "followed": CONSEQUENCES, "harmless": (Level.harmless,)}
        for title, levels in titles.items():
            if rest := [found for found in self._of(*levels) if found not in chosen]:
                more = f", and {len(rest) - 6} more" if len(rest) > 6 else ""
                lines.append(f"{title}: {', '.join(map(_counted, rest[:6]))}{more}")
        return [shown(line, LONGEST_LINE) for line in lines + list(self.notes[:3])]

    def _of(self, *levels: Level) -> list[Found]:
        return [found for found in self.causes if found.signature.level in levels]


def unreadable(path: Path, why: object) -> InputError:
    why = getattr(why, "strerror", None) or why
    return InputError(shown(f"{path}: {why}: give a run directory, or a folder or file of logs", LONGEST_LINE))


def of_logs(
    path: Path, record: RunRecord = NO_RECORD, batch_logs: Sequence[Path] = (), notes: tuple[str, ...] = ()
) -> Explanation:
    """Reads the logs of a failed run: a run directory, any folder of logs, or one file. It changes nothing.

    batch_logs: further logs of the run's job. notes: shown before the other notes. Raises InputError for a path that cannot be read
    or holds no log.
    """
    path = Path(path)
    try:
        is_file = not stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    files, left_out = ([path], "") if is_file else log_events.log_files(path)
    logs = LogReader({} if is_file else log_events.hosts_of(path))
    nodes_of_torchrun = {file.parent.parent for file in files if re.fullmatch(r"(stdout|stderr)\.log", file.name)}
    for number, file in enumerate(files):
        name = file.name if is_file else str(file.relative_to(path))
        logs.read(number, file, shown(name, 120), log_events.rank_in_name(name, len(nodes_of_torchrun) == 1))
    for number, file in enumerate(batch_logs, len(files)):
        name = os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)
        rank = log_events.rank_in_name(file.name, False) or None  # rank 0's file is also the batch script's
        logs.read(number, file, shown(name, LONGEST_LINE), rank)
    if not logs.files and not record.verdict:
        no_log = f"holds no log ({', '.join('*' + suffix for suffix in log_events.SUFFIXES)})"
        raise unreadable(path, logs.unread[0] if logs.unread else no_log)
    more = [left_out] if left_out else []
    attempt = None if is_file else attempts.facts(path).get("attempt")
    if isinstance(attempt, int) and attempt > 0:
        more.append(f"the logs also hold {attempt} earlier attempt{'s' * (attempt > 1)}: a cause may be an old one")
    if logs.unread:
        more.append(f"not read: {logs.unread[0]}" + (f", and {len(logs.unread) - 1} more" if logs.unread[1:] else ""))
    if not record.verdict and logs.recap:
        rank, host, verdict = logs.recap
        record = RunRecord(verdict, rank, host)
    return _explanation(logs, record, (*notes, *more))


def _explanation(logs: LogReader, record: RunRecord, notes: tuple[str, ...]) -> Explanation:
    events = logs.sorted_events()
    first = events[0] if events and events[0].signature.level is not Level.harmless else None
    rank, host, verdict = None, None, ""
    if first and not first.signature.whole_job:
        named = [e for e in events if e.signature is first.signature and (e.rank is not None or e.host)]
        first = first if first.rank is not None or first.host or not named else named[0]
        rank, host = first.rank, first.host
    # Where a rank left no record or saw only that others were gone, the cause in a log says more than the record.
    hides_cause = record.kind in (Kind.peer_lost, Kind.killed)
    if record.verdict and not (hides_cause and first and first.signature.level in CAUSES and rank is not None):
        verdict, rank, host = record.verdict, record.rank, record.host
        if rank is not None:
            first = next((e for e in events if e.rank == rank and e.signature.level is not Level.harmless), None)
    elif first is None:
        last = f"; the last line, in {logs.last[0]}: {logs.last[1]}" if logs.last[1] else ": they are empty"
        verdict = f"no known cause in {logs.files} file{'s' * (logs.files != 1)}{last}"
    elif first.signature.whole_job:
        verdict = f"the whole job was ended, and no rank is to blame: {first.signature.name}"
    elif first.signature.level is Level.consequence and (missing := _missing(events, logs.ranks())):
        rank, what = missing
        host = logs.hosts.get(rank)
        verdict = f"{_who(rank, host)} {what}"
    elif first.signature.level is Level.consequence:
        verdict = f"{_who(rank, host) or 'a rank'} reported first, but only a consequence ({first.signature.name}); the logs do not show its cause"
    else:
        who = _who(rank, host)
        verdict = f"{who} failed first: " if who else "the first error, on a rank that the logs do not name: "
        verdict += first.signature.name
    where, error = (first.where, first.line) if first else ("", "")
    if record.verdict and not record.kind and not first:  # a run that never began
        where, error = logs.last
    if first and first.order in logs.later:
        notes = (logs.later[first.order], *notes)
    return Explanation(shown(verdict, LONGEST_LINE), rank, host, error, where, tuple(_grouped(events)), notes)


def _missing(events: Sequence[Event], ranks: Collection[int]) -> tuple[int, str] | None:
    """Where the logs hold only consequences: the rank that was behind the others, or the only one that reported nothing."""
    collective: dict[int, int] = {}  # of each rank, the earliest collective that timed out
    for event in events:
        number = re.search(r"SeqNum=(\d{1,18}),", event.line)
        if number and event.rank is not None:
            collective[event.rank] = min(int(number[1]), collective.get(event.rank, 1 << 62))
    least = min(collective.values(), default=0)
    behind = sorted(rank for rank, number in collective.items() if number == least)
    if behind and 2 * len(behind) < len(collective):
        return behind[0], f"was behind: it waited in collective {least}, the others in {max(collective.values())}"
    silent = set(ranks) - {event.rank for event in events if event.signature.level is not Level.harmless}
    if len(silent) == 1 and len(ranks) > 2:
        return silent.pop(), "reported nothing, while all others lost a rank or timed out: look at its log first"
    return None


def _grouped(events: list[Event]) -> Iterator[Found]:
    """Each signature once, in the order of its first event."""
    by_name: dict[str, list[Event]] = {}
    for event in events:
        by_name.setdefault(event.signature.name, []).append(event)
    for group in by_name.values():
        ranks, files = {e.rank for e in group if e.rank is not None}, {e.path for e in group}
        of = "rank" if ranks else "file"
        yield Found(group[0].signature, len(ranks) or len(files), of, group[0].line, group[0].where)


def _who(rank: int | None, host: str | None) -> str:
    return f"rank {rank} on {host}" if rank is not None and host else f"rank {rank}" if rank is not None else host or ""


def _counted(found: Found) -> str:
    return f"{found.signature.name} ({found.count} {found.of}{'s' if found.count != 1 else ''})"
