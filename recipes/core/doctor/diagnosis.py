"""What a folder of logs says about a failure: the first rank and host to fail, and the known causes with their fixes."""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from recipes.core.errors import InputError, Kind
from recipes.core.doctor import signatures
from recipes.core.doctor.signatures import Signature
from recipes.core.doctor import log_events
from recipes.core.doctor.log_events import NOTHING, Own


@dataclass(frozen=True)
class Found:
    """A signature that the logs hold. count: of ranks, or of files where no rank is named. where: file and line."""

    signature: Signature
    count: int
    of: str
    line: str
    where: str


@dataclass(frozen=True)
class Explanation:
    """What the logs say. verdict: a line. rank, host: the first to fail, None where nothing tells. error: the line that shows it,
    or "", and where it stands. causes: what began it first, harmless ones last. notes: what could not be read."""

    verdict: str
    rank: int | None = None
    host: str | None = None
    error: str = ""
    where: str = ""
    causes: tuple[Found, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """What is printed: the verdict, then at most four causes with their mends, then the rest by name; twenty lines at most."""
        said = [self.verdict]
        if self.error:
            said.append(f"  {self.where}: {self.error}")
        by_weight = (
            signatures.KINDS[:2],
            signatures.KINDS[2:3],
            signatures.KINDS[3:4],
        )  # where there is a cause, what only hints at one is named below
        graded = [[found for found in self.causes if found.signature.kind in kinds] for kinds in by_weight]
        chosen = next((some[:4] for some in graded if some), [])
        for found in chosen:
            signature = found.signature
            said += [f"{signature.kind}: {_counted(found)}: {signature.means}", f"  do: {signature.mend}"]
            if (found.where, found.line) != (self.where, self.error):
                said.append(f"  {found.where}: {found.line}")
        for title, kinds in (
            ("besides", signatures.KINDS[:3]),
            ("followed", signatures.KINDS[3:4]),
            ("harmless", signatures.KINDS[4:]),
        ):
            rest = [found for found in self.causes if found.signature.kind in kinds and found not in chosen]
            if rest:
                more = f", and {len(rest) - 6} more" if len(rest) > 6 else ""
                said.append(f"{title}: {', '.join(map(_counted, rest[:6]))}{more}")
        return [log_events.shown(line) for line in said + list(self.notes[:3])]


def of_logs(
    folder: Path, own: Own = NOTHING, batch_logs: Sequence[Path] = (), notes: tuple[str, ...] = ()
) -> Explanation:
    """Reads the logs of a failed run: a run directory of ours, any folder of logs, or one file. Runs nothing, changes nothing.

    own: what a run's own records say. batch_logs: files of its job, outside of the folder. notes: to be shown first of all notes.
    Raises InputError, with one line, for a path that is not there or holds no log.
    """
    folder = Path(folder)
    try:
        single = not stat.S_ISDIR(folder.stat().st_mode)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            log_events.shown(f"{folder}: cannot be read ({why}): give a run directory, or a folder or file of logs")
        ) from None
    files, left_out = ([folder], "") if single else log_events.log_files(folder)
    told = log_events.LogReader(hosts=log_events.hosts_of(folder) if not single else {})
    roots = {path.parent.parent for path in files if re.fullmatch(r"(stdout|stderr)\.log", path.name)}
    for number, path in enumerate(files):
        name = path.name if single else str(path.relative_to(folder))
        told.read(number, path, log_events.shown(name, 120), log_events.rank_in_name(name, len(roots) == 1))
    for number, path in enumerate(batch_logs, len(files)):
        name = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
        rank = log_events.rank_in_name(path.name, False)
        told.read(number, path, log_events.shown(name), rank or None)  # rank 0's is the batch script's too
    if not told.files and not own.verdict:
        why = (
            told.unread[0]
            if told.unread
            else f"holds no log ({', '.join('*' + suffix for suffix in log_events.SUFFIXES)})"
        )
        raise InputError(log_events.shown(f"{folder}: {why}: give a run directory, or a folder or file of logs"))
    said = [*notes, left_out] if left_out else [*notes]
    if (
        not single
        and isinstance(attempt := log_events.small_json(folder / "attempt.json").get("attempt"), int)
        and attempt > 0
    ):
        said.append(
            f"the ranks' logs hold {attempt} earlier attempt{'s' if attempt > 1 else ''} too: a cause may be an old one"
        )
    if told.unread:
        said.append(f"not read: {told.unread[0]}" + (f", and {len(told.unread) - 1} more" if told.unread[1:] else ""))
    return _judge(told, own if own.verdict else told.recap, tuple(said))


def _judge(told: log_events.LogReader, own: Own, notes: tuple[str, ...]) -> Explanation:
    """Puts together what the files say. own: our own verdict, where a run of ours has left one."""
    events = told.settled()
    first = events[0] if events and events[0].signature.kind != signatures.HARMLESS else None
    rank, host, verdict = None, None, ""
    if first and not first.signature.whole:
        named = [e for e in events if e.signature is first.signature and (e.rank is not None or e.host)]
        first = first if first.rank is not None or first.host or not named else named[0]
        rank, host = first.rank, first.host
    grave = first is not None and first.signature.kind in signatures.KINDS[:2] and rank is not None
    if own.verdict and not (grave and own.kind in (Kind.peer_lost, Kind.killed)):
        verdict, rank, host = own.verdict, own.rank, own.host
        if rank is not None:
            first = next((e for e in events if e.rank == rank and e.signature.kind != signatures.HARMLESS), None)
    elif first is None:
        last = f"; the last words, in {told.last[0]}: {told.last[1]}" if told.last[1] else ": they are empty"
        verdict = f"no known cause in {told.files} file{'s' if told.files != 1 else ''}{last}"
    elif first.signature.whole:
        verdict = f"the whole job was ended, and no rank is to blame: {first.signature.name}"
    elif first.signature.kind == signatures.CONSEQUENCE and (missed := _missed(events, told.ranks())) is not None:
        rank, why = missed
        host, verdict = told.hosts.get(rank), why
    elif first.signature.kind == signatures.CONSEQUENCE:
        verdict = f"{_who(rank, host) or 'a rank'} spoke first, of a consequence ({first.signature.name}); what began it left no line here"
    else:
        who, name = _who(rank, host), first.signature.name
        verdict = f"{who} failed first: {name}" if who else f"first came, on a rank that the logs do not name: {name}"
    error, where = (first.line, first.where) if first else ("", "")
    if own.verdict and not own.kind and not first:  # a run that never began
        where, error = told.last
    if first and first.order in told.later:
        notes = (told.later[first.order], *notes)
    if rank is not None and host and f"rank {rank} on" not in verdict and f"rank {rank}" in verdict:
        verdict = verdict.replace(f"rank {rank}", f"rank {rank} on {host}", 1)
    return Explanation(log_events.shown(verdict), rank, host, error, where, tuple(_grouped(events)), notes)


def _missed(events: list[log_events.Event], known: set[int]) -> tuple[int, str] | None:
    """Where all that is said are consequences: the rank that was behind the others, or the only one that said nothing."""
    behind: dict[int, int] = {}
    for event in events:
        number = re.search(r"SeqNum=(\d{1,18}),", event.line)
        if number and event.rank is not None:
            behind[event.rank] = min(int(number[1]), behind.get(event.rank, 1 << 62))
    least = min(behind.values(), default=0)
    last = sorted(rank for rank, number in behind.items() if number == least)
    if last and 2 * len(last) < len(behind):
        most = max(behind.values())
        return last[0], f"rank {last[0]} was behind: it waited in collective {least}, the others in {most}"
    silent = known - {
        event.rank for event in events if event.rank is not None and event.signature.kind != signatures.HARMLESS
    }
    if len(silent) == 1 and len(known) > 2:
        rank = silent.pop()
        return rank, f"rank {rank} said nothing, while all others lost a rank or waited: look at it first"
    return None


def _grouped(events: list[log_events.Event]) -> Iterator[Found]:
    """Each signature once, in the order of its first event."""
    by_name: dict[str, list[log_events.Event]] = {}
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
