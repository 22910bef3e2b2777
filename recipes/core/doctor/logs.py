"""Reads log files: which files there are, and the lines in them that contain a known text."""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from recipes.core.doctor.patterns import PATTERNS, Pattern
from recipes.core.errors import InputError, shown
from recipes.core.run import directory

MOST_BYTES = 8 << 20  # of each file; the part before its last bytes is not read
LONGEST_LINE = 2000  # characters of a line that is shown
TAIL = 6  # last lines of a log that are shown
SUFFIXES = (".log", ".out", ".err", ".txt")
PRUNED = {"checkpoints", "node_modules", "__pycache__", directory.EVALUATION}
ATTEMPT = "\f"  # the writer of a log begins each attempt with it
# The source code in a traceback, which may contain a text that nothing has printed. srun -l and torchrun put the rank before each line.
_SOURCE = re.compile(r'^(.{0,100})(  File ".+", line \d+.*\n)(?:\1    .*\n)+', re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")


@dataclass(frozen=True)
class Log:
    """The newest attempt in a log file. known: for each pattern the first line that contains a text of it. tail: the last lines."""

    name: str
    known: dict[Pattern, str]
    tail: list[str]


def files_in(folder: Path) -> list[Path]:
    """The logs in a folder and the folders in it. Links to folders are not followed."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in PRUNED and not f.startswith("."))
        found += [Path(place, name) for name in sorted(names) if name.endswith(SUFFIXES)]
    return found


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
    texts = [(one, pattern) for pattern in PATTERNS for one in pattern.texts.split(" | ") if one in text]
    known: dict[Pattern, str] = {}
    for line in _SOURCE.sub(r"\1\2", text).split("\n") if texts else []:
        if pattern := next((pattern for one, pattern in texts if one in line), None):
            known.setdefault(pattern, line[:LONGEST_LINE].strip())
    return Log(name, known, [line[:LONGEST_LINE].rstrip() for line in lines[-TAIL:]])


def unreadable(path: Path, error: object) -> InputError:
    why = getattr(error, "strerror", None) or error
    return InputError(shown(f"{path}: {why}: give a run directory, or a folder or file of logs", LONGEST_LINE))
