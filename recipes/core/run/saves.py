"""Whether a program of the user has saved something during an attempt. Standard library only.

A digest of the names, sizes and times of its files is taken when the attempt begins and when it has
ended. A program that has changed nothing would only repeat its work after a requeue.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from recipes.core import files
from recipes.core.run.attempt import Attempt

# What the recipes write in a run directory. Each attempt begins with a copy of metrics.jsonl, in
# which a program may write rows, but cannot save its work.
OWN = {"attempts", "job.sh", "job.yaml", "status.json", "doctor", "summary.json", "metrics.jsonl"}
OWN_LOG = re.compile(r"(rank|node)\d+\.log|hang-\d+\.txt")  # in logs
MOST_FILES = 100_000  # of more files, only these are looked at


def note(attempt: Attempt, folder: str) -> None:
    """Notes at the begin of an attempt what is saved in ``folder``; "" is the run directory. Raises
    OSError.
    """
    content = {"folder": folder, "digest": digest(attempt, folder)}
    files.write_json(attempt.folder / "saves.json", content)


def has_changed(attempt: Attempt) -> bool | None:
    """Whether files have changed since the attempt began. None if that is unknown, or if there is
    still no file.
    """
    before = attempt.read("saves.json")
    if not before:
        return None
    now = digest(attempt, before["folder"])
    return now != before["digest"] if now else None


def has_progress(attempt: Attempt, step: int) -> bool:
    """Whether a run has completed a step, or a program has changed a file, since an attempt
    began. step: at which the run was saved. For a program, it looks at each of its files.
    """
    facts = attempt.facts()
    if facts.get("of_program"):  # it counts no steps
        return has_changed(attempt) is not False
    return bool(step > facts.get("step", step))


def digest(attempt: Attempt, folder: str) -> str:
    """The digest of a folder; "" if it has no file. "" is the run directory, which counts without
    what the recipes write in it.
    """
    content = hashlib.sha256()
    count = 0
    run_dir = attempt.run_dir
    for path in _files(Path(folder) if folder else run_dir, run_dir):
        with contextlib.suppress(OSError):
            facts = path.stat()
            line = f"{path}\0{facts.st_size}\0{facts.st_mtime_ns}\n"
            content.update(os.fsencode(line))
            count += 1
        if count == MOST_FILES:
            break
    return content.hexdigest() if count else ""


def _files(folder: Path, run_dir: Path) -> Iterator[Path]:
    """The files in ``folder`` and behind links in it, each folder once, without what the recipes
    write in ``run_dir``. The logs count if they are all that is looked at.
    """
    own = os.path.realpath(run_dir)
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        hidden = OWN if real == own else set[str]()
        folders[:] = sorted(name for name in folders if name not in hidden)
        is_below = Path(place) != folder
        for name in sorted(names):
            is_log = is_below and OWN_LOG.fullmatch(name)
            if not (is_log or name in hidden):
                yield Path(place, name)
