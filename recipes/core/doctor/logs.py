"""Reads log files: which files there are, and the lines in them that contain a known text, with their ranks."""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from recipes.core.doctor.patterns import EXCEPTION, PATTERNS, TRACEBACK, Pattern
from recipes.core.errors import InputError, shown
from recipes.core.run import directory

MOST_BYTES = 8 << 20  # of each file; the part before its last bytes is not read
LONGEST_LINE = 2000  # characters of a line that is shown
TAIL = 6  # last lines of a log that are shown
SUFFIXES = (".log", ".out", ".err", ".txt")
PRUNED = {"checkpoints", "node_modules", "__pycache__", directory.EVALUATION}
ATTEMPT = "\f"  # the writer of a log begins each attempt with it
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_RANK = re.compile(r"\[rank(\d{1,6})\]|\b[Rr]ank (\d{1,6})\]|srun: error: [\w.-]{1,255}: tasks? (\d{1,6})")
_RANK_OF_FILE = re.compile(r"(?:^|[^a-z])(?:rank|task)[_.-]?(\d{1,6})(?=\D|$)[^/]*$")


@dataclass(frozen=True)
class Event:
    """A line that contains a text of ``pattern``. log: the name of its file. number: orders the lines of a file. rank: None where unknown."""

    pattern: Pattern
    log: str
    number: int
    line: str
    rank: int | None


@dataclass(frozen=True)
class Log:
    """The newest attempt in a log file. rank: whose file it is, by its name; None where unknown. tail: the last lines."""

    name: str
    rank: int | None
    events: list[Event]
    tail: list[str]


def files_in(folder: Path) -> list[Path]:
    """The logs in a folder and the folders in it, in numerical order. Links to folders are not followed."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in PRUNED and not f.startswith("."))
        found += [Path(place, n) for n in sorted(names) if n.endswith(SUFFIXES) or re.search(r"\.[oe]\d{1,12}$", n)]
    return sorted(found, key=lambda path: [p.zfill(12) if p.isdecimal() else p for p in re.split(r"(\d+)", str(path))])


def read(path: Path, name: str) -> Log:
    """The newest attempt in a regular file. Raises OSError and ValueError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("not a regular file")
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
        data = file.read(MOST_BYTES)
    # Without colours, which may separate words of a text. A progress bar ends its lines with a carriage return.
    text = _COLOUR.sub("", data.decode("utf-8", "replace")).replace("\r", "\n").rpartition(ATTEMPT)[2]
    lines = [line for line in text.split("\n") if line.strip()]
    rank = _RANK_OF_FILE.search(name)
    return _log(name, int(rank[1]) if rank else None, text, lines)


def unreadable(path: Path, error: object) -> InputError:
    why = getattr(error, "strerror", None) or error
    return InputError(shown(f"{path}: {why}: give a run directory, or a folder or file of logs", LONGEST_LINE))


def _log(name: str, of_file: int | None, text: str, lines: list[str]) -> Log:
    """Finds the lines with a known text: of each pattern and rank the first, of exceptions the last."""
    texts = [(one, pattern) for pattern in PATTERNS for one in pattern.texts.split(" | ") if one in text]
    found: dict[tuple[Pattern, int | None], Event] = {}
    tracebacks: set[str] = set()  # what the lines of each traceback that has begun start with, for example "[rank3]: "
    for number, line in enumerate(lines):
        pattern = next((pattern for one, pattern in texts if one in line), None)
        if TRACEBACK in line:
            tracebacks.add(line[: line.index(TRACEBACK)])
        elif ended := {prefix for prefix in tracebacks if line.startswith(prefix) and _is_last(line, prefix)}:
            tracebacks -= ended
            is_exception = any(re.match(r"[A-Za-z_][\w.]{0,200}(?::|$)", line[len(prefix) :]) for prefix in ended)
            pattern = pattern or (EXCEPTION if is_exception else None)
        if not pattern:
            continue
        match = _RANK.search(line[:500])
        rank = int(match[match.lastindex or 0]) if match else of_file
        if (pattern, rank) not in found or pattern is EXCEPTION:
            found[pattern, rank] = Event(pattern, name, number, line[:LONGEST_LINE].strip(), rank)
    events = sorted(found.values(), key=lambda event: event.number)
    return Log(name, of_file, events, [line[:LONGEST_LINE].rstrip() for line in lines[-TAIL:]])


def _is_last(line: str, prefix: str) -> bool:
    """Whether a line ends a traceback: it is not indented."""
    return len(line) > len(prefix) and not line[len(prefix)].isspace()
