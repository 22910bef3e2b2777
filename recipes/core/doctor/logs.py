"""Reads log files: which files there are, and the lines in them that fit a known pattern, with rank and host."""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes.core.doctor.patterns import EXCEPTION, PATTERNS, TRACEBACK, Pattern
from recipes.core.errors import InputError, shown
from recipes.core.run import directory

MOST_BYTES = 8 << 20  # of each file; the part before its last bytes is not read
MOST_FILES = 4096
MOST_LINES = 1000  # lines with one text in one file
LONGEST_LINE = 2000  # characters of a line that is shown
SUFFIXES = (".log", ".out", ".err", ".txt")
PRUNED = {"checkpoints", "node_modules", "__pycache__", directory.EVALUATION}
ATTEMPT = "\f"  # the writer of a log begins each attempt with it
_JOB = re.compile(r"^(\d+(?:_\d+)?)_\d+_log\.(?:out|err)$|^.*-(\d+(?:_\d+)?)\.(?:out|err)$")
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_RANK = re.compile(r"\[rank(\d{1,6})\]|\b[Rr]ank (\d{1,6})\]|srun: error: [\w.-]{1,255}: tasks? (\d{1,6})")
_HOST = re.compile(
    r"srun: error: ([\w.-]{1,255}): task|Node failure on ([\w.-]{1,255})|^([\w.-]{1,255}):\d{1,10}:\d{1,10} \[\d{1,3}\] "
)
_LABEL = re.compile(r"\s{0,8}(\d{1,6}): ?")


@dataclass(frozen=True)
class Event:
    """A line that fits a pattern. where: file and line. of_file: the number of its file. rank, host: None where unknown."""

    pattern: Pattern
    where: str
    line: str
    of_file: int
    offset: int
    rank: int | None
    host: str | None


@dataclass(frozen=True)
class Log:
    """The newest attempt in a log file. first_line: the number of its first line; None if the file is too large to count.

    rank: whose file it is, by its name; None where unknown.
    """

    name: str
    text: str
    first_line: int | None
    rank: int | None

    def tail(self, count: int) -> list[str]:
        lines = re.split(r"[\n\r]+", self.text[-count * LONGEST_LINE :].rstrip())
        return [shown(line.rstrip(), LONGEST_LINE) for line in lines[-count:] if line.strip()]


def files_in(folder: Path) -> list[Path]:
    """The logs in a folder. If it holds logs of several jobs, those of the newest. Links to folders are not followed."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in PRUNED and not f.startswith("."))
        found += [Path(place, n) for n in sorted(names) if n.endswith(SUFFIXES) or re.search(r"\.[oe]\d{1,12}$", n)]
        if len(found) > MOST_FILES:
            break
    found = found[:MOST_FILES]
    found.sort(key=lambda path: [p.zfill(12) if p.isdecimal() else p for p in re.split(r"(\d+)", str(path))])
    jobs = {path: job[1] or job[2] for path in found if (job := _JOB.search(path.name))}
    newest = jobs[max(jobs, key=lambda path: os.lstat(path).st_mtime)] if jobs else None
    return [path for path in found if jobs.get(path, newest) == newest]


def read(path: Path, name: str, rank: int | None) -> Log:
    """The newest attempt in a regular file. Raises OSError and ValueError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("not a regular file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - MOST_BYTES))
        data = file.read(MOST_BYTES)
    # Without colours, which may separate words of a text.
    before, _, text = _COLOUR.sub("", data.decode("utf-8", "replace")).replace("\r\n", "\n").rpartition(ATTEMPT)
    return Log(shown(name, LONGEST_LINE), text, 1 + before.count("\n") if size <= MOST_BYTES else None, rank)


def unreadable(path: Path, error: object) -> InputError:
    why = getattr(error, "strerror", None) or error
    return InputError(shown(f"{path}: {why}: give a run directory, or a folder or file of logs", LONGEST_LINE))


def rank_in_name(name: str, one_node: bool) -> int | None:
    """The rank of a file by its name: rank3.log, 17_3_log.out of submitit, attempt_0/3/stderr.log of torchrun on one node."""
    found = re.search(r"(?:^|[^a-z])(?:rank|task)[_.-]?(\d{1,6})(?=\D|$)[^/]*$|_(\d{1,6})_log\.(?:out|err)$", name)
    local = re.search(r"(?:^|/)(\d{1,4})/std(?:out|err)\.log$", name) if one_node else None
    return int(found[1] or found[2]) if found else int(local[1]) if local else None


def events(log: Log, number: int) -> Iterator[Event]:
    """The lines of a log that fit a pattern: of each pattern and speaker the first, of exceptions the last. number: of its file."""
    text = log.text
    found: dict[int, tuple[int, Pattern]] = {}  # by the begin of the line
    for pattern in PATTERNS:
        for wording in pattern.texts.split(" | "):
            for start, end in _lines_with(text, wording):
                found.setdefault(start, (end, pattern))
    for start, end in _lines_with(text, TRACEBACK):
        if last := _last_line_of_traceback(text, start, end):
            found.setdefault(last[0], (last[1], EXCEPTION))
    labelled = _is_labelled(text)
    kept: dict[tuple[object, ...], Event] = {}
    for start, (end, pattern) in sorted(found.items()):
        line = text[start:end]
        rank, host = _RANK.search(line[:500]), _HOST.search(line[:500])
        label = _LABEL.match(line) if labelled and not rank else None
        spoken = int(rank[rank.lastindex or 0]) if rank else int(label[1]) if label else log.rank
        key = (pattern.name, spoken, host and host[host.lastindex or 0])
        if key not in kept or pattern is EXCEPTION:
            where = log.name
            if log.first_line is not None:
                where += f":{log.first_line + text.count(chr(10), 0, start)}"
            kept[key] = Event(pattern, where, shown(line.strip(), LONGEST_LINE), number, start, spoken, key[2] or None)
    yield from kept.values()


def _lines_with(text: str, wording: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each line that contains ``wording``; of a very long line, the part near it. A carriage return ends a line, too."""
    at = text.find(wording)
    for _ in range(MOST_LINES):
        if at < 0:
            return
        low, high = max(0, at - LONGEST_LINE), at + LONGEST_LINE
        start = max(text.rfind("\n", low, at), text.rfind("\r", low, at), low - 1) + 1
        end = min([e for c in "\n\r" if (e := text.find(c, at, high)) >= 0], default=min(high, len(text)))
        yield start, end
        at = text.find(wording, end)


def _last_line_of_traceback(text: str, start: int, end: int) -> tuple[int, int] | None:
    """The first line that is not indented, after the same prefix (``[rank3]:`` or ``3:``)."""
    prefix = re.match(r"(?:\[\w{1,20}\]:|\s{0,8}\d{1,6}:) ?", text[start:end])
    label, at = prefix[0] if prefix else "", end + 1
    for _ in range(400):
        stop = text.find("\n", at, at + LONGEST_LINE)
        line = text[at : stop if stop >= 0 else at + LONGEST_LINE]
        bare = line.removeprefix(label)
        if line.startswith(label) and bare and not bare[0].isspace():
            return (at, at + len(line)) if re.match(r"[A-Za-z_][\w.]{0,200}(?::|\s*$)", bare) else None
        at += len(line) + 1
    return None


def _is_labelled(text: str) -> bool:
    """Whether the lines begin with their ranks, as with ``srun --label``."""
    lines = [line for line in text[:10_000].split("\n")[:50] if line]
    return len(lines) > 4 and all(_LABEL.match(line) for line in lines[:-1])
