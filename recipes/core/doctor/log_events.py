"""Reads log files: which files there are, and the lines in them that fit a known signature, with rank and host."""

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.core.doctor.signatures import EXCEPTION, SIGNATURES, Level, Signature
from recipes.core.errors import shown
from recipes.core.files import read_json
from recipes.core.run import attempt as attempts
from recipes.core.run import directory

HEAD_BYTES, TAIL_BYTES = 2 << 20, 8 << 20  # of each file; the part between them is not read
MOST_FILES = 4096
MOST_NAMES = 200_000  # files and folders that are listed in search of logs
MOST_LINES = 10_000  # matches of one wording in one file
LONGEST_LINE = 2000  # characters of a line that is shown; the longest messages of these recipes are shorter
WIDTH = 4096  # characters on either side of a match that count as its line
FAR = 100  # lines between two exceptions; with more, the first one may have been caught
SUFFIXES = (".log", ".out", ".err", ".txt")
PRUNED = {"checkpoints", "node_modules", "__pycache__", directory.EVALUATION}


@dataclass
class Event:
    """A line that fits a signature. order: the number of its file, and the offset in it.

    process: host and process id, on NCCL's lines. is_warning: a logger's level on the line is WARNING or lower.
    """

    signature: Signature
    path: str
    where: str
    line: str
    order: tuple[int, int]
    rank: int | None
    host: str | None
    process: tuple[str, str] | None
    is_warning: bool


class LogReader:
    """Collects the events of one file after another.

    recap: rank, host and text of the last line ``failed: rank N on HOST …`` of a run of these recipes. last: a file's name and last
    line. later: by the order of an exception, a note on another one far below it in the same file: the first one was probably caught.
    """

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self.events: list[Event] = []
        self.hosts = dict(hosts)  # by rank
        self.ranks_with_file: set[int] = set()
        self.files = 0
        self.unread: list[str] = []
        self.last = ("", "")
        self.recap: tuple[int, str, str] | None = None
        self.later: dict[tuple[int, int], str] = {}
        self._rank_of: dict[tuple[str, str], int] = {}  # by host and process id, from NCCL's lines

    def read(self, number: int, path: Path, name: str, rank: int | None) -> None:
        """Adds a file's events. rank: whose file it is, by its name."""
        try:
            pieces = _pieces(path)
        except (OSError, ValueError) as error:
            self.unread.append(f"{name} ({getattr(error, 'strerror', None) or error})")
            return
        self.files += 1
        self.ranks_with_file |= {rank} if rank is not None else set()
        for part, (text, from_start) in enumerate(pieces):
            begin = _last_attempt(text)
            self._note_ranks(text, begin)
            self._add_events(text, begin, name, from_start, rank, (number, part * HEAD_BYTES))
        if pieces and (line := _last_line(pieces[-1][0])):
            self.last = (name, line)

    def _add_events(
        self, text: str, begin: int, name: str, from_start: bool, file_rank: int | None, order: tuple[int, int]
    ) -> None:
        """Adds the events of a part of a file: of each signature and rank, the first line. order: of the begin of ``text``."""
        labelled, total = _labelled(text), text.count("\n") + (not text.endswith("\n"))
        lines, counted = 1, 0
        first_of: dict[tuple[object, ...], tuple[Event, int]] = {}
        last_of: dict[tuple[object, ...], tuple[int, int]] = {}
        for start, (end, signature, offset) in sorted(_scan(text, begin).items()):
            rank, host, process = _speaker(text[start : min(end, start + 500)], labelled)
            rank = rank if rank is not None else self._rank_of.get(process or ("", ""), file_rank)
            is_warning = _WARNING.search(text, start, start + offset) is not None
            last_of[key := (signature.name, rank, host, is_warning)] = (start, end)
            if key in first_of:
                continue
            lines, counted = lines + text.count("\n", counted, start), start
            where = f"{name}:{lines}" if from_start else f"{name}, line {total - lines + 1} from its end"
            line = text[start:end].strip()
            if offset >= 150:
                line = f"{text[start : start + 60]} … {text[start + offset - 20 : end]}"
            place = (order[0], order[1] + start)
            event = Event(signature, name, where, shown(line, LONGEST_LINE), place, rank, host, process, is_warning)
            first_of[key] = event, start
        for of_event, (event, first_start) in first_of.items():
            self.events.append(event)
            start, end = last_of[of_event]
            between = text.count("\n", first_start, start)
            if event.signature is EXCEPTION and between >= FAR:
                line = shown(text[start:end].strip(), LONGEST_LINE)
                self.later[event.order] = f"{name} has another exception {between} lines below: {line}"

    def _note_ranks(self, text: str, begin: int) -> None:
        """Notes the ranks of NCCL's processes, and the rank that a run's own last line names."""
        for start, end in _lines_with(text, " nranks ", 0):
            line = text[start : min(end, start + 500)]
            if (prefix := _NCCL.match(line)) and (rank := re.search(r"\brank (\d{1,6}) nranks ", line)):
                self._rank_of[(prefix[1], prefix[2])] = int(rank[1])
                self.hosts.setdefault(int(rank[1]), prefix[1])
        for start, end in _lines_with(text, "failed: rank ", begin):
            if found := _RECAP.fullmatch(text[start : min(end, start + WIDTH)]):
                self.recap = int(found[2]), found[3], found[1]

    def ranks(self) -> set[int]:
        """All ranks that the logs show to have been there."""
        seen = {event.rank for event in self.events if event.rank is not None} | self.ranks_with_file | set(self.hosts)
        return set(range(max(seen) + 1)) if seen and max(seen) < MOST_FILES else seen

    def sorted_events(self) -> list[Event]:
        """The events, causes first; events of the same level in the order of the files."""
        for event in self.events:
            if event.rank is None and event.process:
                event.rank = self._rank_of.get(event.process)
            if event.rank is not None and event.host:
                self.hosts.setdefault(event.rank, event.host)
        for event in self.events:
            event.host = event.host or (self.hosts.get(event.rank) if event.rank is not None else None)

        def key(event: Event) -> tuple[float, tuple[int, int]]:
            level = float(event.signature.level)
            if event.signature.whole_job:
                level += 0.5  # a job that hangs after a rank's failure ends at its time limit, too
            return max(level, Level.hint + 0.5) if event.is_warning else level, event.order

        return sorted(self.events, key=key)


# --- files


def log_files(folder: Path) -> tuple[list[Path], str]:
    """The logs in a folder, and a note on those that are left out. If the folder holds logs of several jobs, only the newest counts.

    Links to folders are not followed.
    """
    found: list[Path] = []
    listed = 0
    for place, folders, names in os.walk(folder):
        listed += len(folders) + len(names)
        folders[:] = sorted(f for f in folders if f not in PRUNED and not f.startswith("."))
        found += [Path(place, n) for n in sorted(names) if n.endswith(SUFFIXES) or re.search(r"\.[oe]\d{1,12}$", n)]
        if len(found) > MOST_FILES or listed > MOST_NAMES:
            note = f"there are more than {MOST_FILES:,} logs or {MOST_NAMES:,} files; not all were read"
            return found[:MOST_FILES], note
    found.sort(key=lambda path: [p.zfill(12) if p.isdecimal() else p for p in re.split(r"(\d+)", str(path))])
    jobs = {path: job[1] or job[2] for path in found if (job := _JOB.search(path.name))}
    if len(set(jobs.values())) < 2:
        return found, ""
    newest = jobs[max(jobs, key=lambda path: os.lstat(path).st_mtime)]
    found = [path for path in found if jobs.get(path, newest) == newest]
    return found, f"read: the logs of job {newest}, the newest here"


def _pieces(path: Path) -> list[tuple[str, bool]]:
    """The text of a regular file, or its first and last part; and whether each part begins at the file's begin. Raises OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(0, "not a regular file")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without blocking, if it has become a pipe
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file")
        size = os.fstat(descriptor).st_size
        parts = [(file.read(HEAD_BYTES + TAIL_BYTES if size <= HEAD_BYTES + TAIL_BYTES else HEAD_BYTES), True)]
        if size > HEAD_BYTES + TAIL_BYTES:
            file.seek(size - TAIL_BYTES)
            parts.append((file.read(TAIL_BYTES), False))
    # Without colours, which may separate words of a pattern.
    return [(_COLOUR.sub("", data.decode("utf-8", "replace")).replace("\r\n", "\n"), whole) for data, whole in parts]


def rank_in_name(name: str, one_node: bool) -> int | None:
    """The rank of a file by its name: rank3.log, 17_3_log.out of submitit, attempt_0/3/stderr.log of torchrun on one node."""
    found = re.search(r"(?:^|[^a-z])(?:rank|task)[_.-]?(\d{1,6})(?=\D|$)[^/]*$|_(\d{1,6})_log\.(?:out|err)$", name)
    local = re.search(r"(?:^|/)(\d{1,4})/std(?:out|err)\.log$", name) if one_node else None
    return int(found[1] or found[2]) if found else int(local[1]) if local else None


def small_json(path: Path) -> dict[str, Any]:
    """The JSON object in a small regular file; {} if there is none."""
    with contextlib.suppress(OSError, RecursionError):
        if stat.S_ISREG((status := path.stat()).st_mode) and status.st_size < HEAD_BYTES:
            return read_json(path) or {}
    return {}


def hosts_of(folder: Path) -> dict[int, str]:
    hosts = attempts.facts(folder).get("hosts")
    return {rank: host for rank, host in enumerate(hosts) if isinstance(host, str)} if isinstance(hosts, list) else {}


# --- lines

_JOB = re.compile(r"^(\d+(?:_\d+)?)_\d+_log\.(?:out|err)$|^.*-(\d+(?:_\d+)?)\.(?:out|err)$")
_INTRODUCED = re.compile(r"(?:^|\n)\w{1,64}: \d{1,6} ranks? on \d{1,6} nodes?, [^\n]*$")
_WARNING = re.compile(r"(?<!NCCL)(?:^|[\s\[(|])(?:WARNING|INFO|DEBUG)(?=[\s\]):|,-])", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_RANK = re.compile(
    r"\[rank(\d{1,6})\]|\b[Rr]ank (\d{1,6})\]|\brank (\d{1,6}) on ([\w.-]{1,255})|srun: error: ([\w.-]{1,255}): tasks? (\d{1,6})"
)
_NCCL = re.compile(r"(?:\[[^\]\n]{1,40}\]:? ?|\s{0,8}\d{1,6}: ?)?([\w.-]{1,255}):(\d{1,10}):\d{1,10} \[\d{1,3}\] ")
_NODE = re.compile(r"Node failure on ([\w.-]{1,255})|failed on node ([\w.-]{1,255})")
_RECAP = re.compile(r"(?:\w{1,64}: )?failed: (rank (\d{1,6}) on ([\w.-]{1,255}) .{1,1500}?)(?:; logs in .*)?")


def _lines_with(text: str, wording: str, begin: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each line that contains ``wording``; of a very long line, the part near it. A carriage return ends a line, too."""
    at = text.find(wording, begin)
    for _ in range(MOST_LINES):
        if at < 0:
            return
        low, high = max(begin, at - WIDTH), at + WIDTH
        start = max(text.rfind("\n", low, at), text.rfind("\r", low, at), low - 1) + 1
        end = min([e for c in "\n\r" if (e := text.find(c, at, high)) >= 0], default=min(high, len(text)))
        yield start, end
        at = text.find(wording, end)


def _scan(text: str, begin: int) -> dict[int, tuple[int, Signature, int]]:
    """The lines from ``begin`` on that fit a signature: their end, the signature, and the offset of the match, by their begin."""
    found: dict[int, tuple[int, Signature, int]] = {}
    for signature in SIGNATURES:
        for wording in signature.pattern.split(" | "):
            parts = wording.split("…")
            for start, end in _lines_with(text, parts[0], begin):
                at = offset = text.find(parts[0], start, end)
                for part in parts[1:]:
                    at = text.find(part, at, end) if at >= 0 else at
                if at >= 0 and start not in found:
                    found[start] = (end, signature, offset - start)
    for start, end in _lines_with(text, EXCEPTION.pattern, begin):
        where = _exception(text, start, end)
        if where and where[0] not in found:
            found[where[0]] = (where[1], EXCEPTION, 0)
    return found


def _exception(text: str, start: int, end: int) -> tuple[int, int] | None:
    """The last line of a traceback: the first one that is not indented, after the same prefix (``[rank3]:`` or ``3:``)."""
    prefix = re.match(r"(?:\[\w{1,20}\]:|\s{0,8}\d{1,6}:) ?", text[start:end])
    label, at = prefix[0] if prefix else "", end + 1
    for _ in range(400):
        stop = text.find("\n", at, at + WIDTH)
        line = text[at : stop if stop >= 0 else at + WIDTH]
        if line.startswith(label):
            bare = line[len(label) :]
            if bare and not bare[0].isspace():
                return (at, at + len(line)) if re.match(r"[A-Za-z_][\w.]{0,200}(?::|\s*$)", bare) else None
        at += len(line) + 1
    return None


def _speaker(head: str, labelled: bool) -> tuple[int | None, str | None, tuple[str, str] | None]:
    """Rank, host, and NCCL's host and process of a line, as far as its begin shows them."""
    rank, host, process = None, None, None
    if found := _RANK.search(head):
        rank, host = int(found[1] or found[2] or found[3] or found[6]), found[4] or found[5]
    elif labelled and (label := re.match(r"\s{0,8}(\d{1,6}): ", head)):
        rank = int(label[1])
    if nccl := _NCCL.match(head):
        host, process = nccl[1], (nccl[1], nccl[2])
    if node := _NODE.search(head):
        host = node[1] or node[2]
    return rank, host, process


def _last_attempt(text: str) -> int:
    """Where the last attempt of a run of these recipes begins, if several attempts are in one file."""
    at = max(text.rfind("\nrun directory: "), 0)
    return at if _INTRODUCED.search(text[max(0, at - WIDTH) : at]) else 0


def _labelled(text: str) -> bool:
    """Whether the lines begin with their ranks, as with ``srun --label``."""
    lines = [line for line in text[: 4 * WIDTH].split("\n")[:50] if line]
    return len(lines) > 4 and all(re.match(r"\s{0,8}\d{1,6}: ?", line) for line in lines[:-1])


def _last_line(text: str) -> str:
    words = text[-WIDTH:].split()
    return shown(re.split(r"[\n\r]", text[-WIDTH:].rstrip())[-1].strip()) if words else ""
