"""A run, read once from the files of its directory. The tables of runs, the page, ``explain``, the
trackers and ``launch.py`` read it here. Never torch, and never asks Slurm.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from recipes.core import files, trust
from recipes.core.errors import InputError, Kind, Next, kind_of, next_of
from recipes.core.files import Json
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, judge, rows
from recipes.core.run.attempt import Attempt
from recipes.core.run.rows import Row

MAX_YAML = 1 << 16  # bytes of a config.yaml; as in config.key_value, whose import is slow
# the folders in which files of a run are read; links in place of these files are not followed
READ = ("attempts", "attempts/*", "attempts/*/*")
LONGEST_NAME = 500  # bytes of a file that names a checkpoint
LONGEST_S = 1e10  # of a duration as text: a file may hold any number
NEWEST = 1000  # rows that are read of a run that may have many more


class State(str, Enum):
    """The state of a run, in every command. The files of a run tell the first ones; the queue of
    Slurm and the processes of this machine tell the others.
    """

    not_begun = "not begun"
    refused = "refused"
    running = "running"
    stopped = "stopped"
    cancelled = "cancelled"
    failed = "failed"
    done = "done"

    pending = "pending"
    held = "held"
    requeued = "requeued"
    starting = "starting"
    lost = "lost"
    unknown = "unknown"

    __str__ = str.__str__


# by the state in status.json
OF_STATUS = {
    "running": State.running,
    "preempted": State.stopped,
    "incomplete": State.failed,
    "failed": State.failed,
    "done": State.done,
}


@dataclass(frozen=True)
class Record:
    """What the files of a run say. The properties read what few readers need, once.

    status: status.json; {} before the run has begun. job: job.yaml. summary: summary.json; {} until
    the run is done. attempts: newest first. read_at: time.time().
    """

    folder: Path
    status: Json
    job: Json
    summary: Json
    attempts: list[Attempt]
    read_at: float

    @cached_property
    def state(self) -> State:
        """The state according to the files alone."""
        state = OF_STATUS.get(str(self.status.get("state")), State.not_begun)
        if state not in (State.done, State.running) and self.refused:
            return State.refused
        is_cancelled = state is State.stopped and next_of(self.status) is Next.cancelled
        return State.cancelled if is_cancelled else state

    @cached_property
    def refused(self) -> str:
        """Why the newest launch ended before it began. "" if it has begun, was stopped, or if the
        run has ended since then.
        """
        newest = self.attempts[0] if self.attempts else None
        if not newest or newest.has_begun or self.status.get("attempt") == newest.number:
            return ""
        records = attempts.records(newest)
        ended = newest.read("ended.json")
        moment = ended.get("time") or (records[0]["time"] if records else 0.0)
        is_running = self.status.get("state") == "running"
        is_past = moment <= float(self.status.get("updated") or 0.0) and not is_running
        if not moment or is_past or kind_of(ended) is Kind.stopped:
            return ""
        return str(ended.get("line") or judge.judge(newest).line)

    @cached_property
    def facts(self) -> Json:
        """`attempts.facts`: of the attempt that owns the run, else of the newest one."""
        return attempts.facts(self.folder)

    @property
    def recipe(self) -> str:
        return str(self.job.get("recipe") or self.facts.get("recipe") or "")

    @cached_property
    def keys(self) -> dict[str, Any]:
        """The keys in config.yaml; {} if they cannot be read."""
        import yaml  # the import is slow

        path = self.folder / "config.yaml"
        try:
            text = files.read_bounded(path, MAX_YAML, files.without_links).decode()
            usual = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            # without merge keys, with which a small file can take all memory
            loader = type("Loader", (usual,), {"flatten_mapping": lambda self, node: None})
            content = yaml.load(text, loader)
        # a refused run has no config.yaml; a damaged file only makes its keys unknown
        except Exception:
            return {}
        if not isinstance(content, dict):
            return {}
        # no key of a recipe has several values
        return {str(k): v for k, v in content.items() if not isinstance(v, (dict, list))}

    @cached_property
    def values(self) -> dict[str, Any]:
        """The keys of the submission and of the recipe."""
        arguments = self.job.get("arguments") or ()
        typed = dict(str(word).partition("=")[::2] for word in arguments)
        typed.pop("run_dir", None)
        return typed | self.keys

    @cached_property
    def row(self) -> Row:
        """The newest row; {} if there is none, or if there is a summary."""
        return {} if self.summary else next(rows.newest(self.folder), {})

    @cached_property
    def newest_rows(self) -> list[Row]:
        """The last rows, at most NEWEST, the newest one last."""
        return rows.rows(self.folder, NEWEST)

    @property
    def best(self) -> Json:
        """The best evaluation so far: its value by the name of the metric, and its ``step``; {} if
        there is none.
        """
        best = {**self.row, **self.summary}.get("best")
        return best if isinstance(best, dict) else {}

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint; 0 if there is none. A resumed run repeats the steps
        after it.
        """
        with contextlib.suppress(OSError, ValueError):
            path = self.folder / "checkpoints/latest"
            name = files.read_bounded(path, LONGEST_NAME, files.without_links).decode().strip()
            return int(name.removeprefix("step-").removesuffix(".pt"))
        return 0

    @property
    def step(self) -> int:
        return rows.whole(self.row.get("step") or self.status.get("step")) or 0

    @property
    def end(self) -> float:
        """When the run ended, or when it was read if it runs; NaN if unknown."""
        is_running = self.state is State.running
        return self.read_at if is_running else rows.number(self.status.get("updated"))

    @property
    def quiet_s(self) -> float:
        """Seconds since the last change of status.json."""
        return max(0.0, self.read_at - self.status.get("updated", 0.0))

    @property
    def note(self) -> str:
        """What the status says beside the state."""
        notes = [str(self.status[name]) for name in ("reason", "next") if self.status.get(name)]
        if self.state is State.running:
            notes.append(f"status written {ago(self.quiet_s)} ago")
        if self.refused:
            notes.append(f"the newest start was refused: {self.refused}")
        return "; ".join(notes)


def log_of_job(folder: Path, job: Json) -> str:
    """The log that job.yaml names; "" if it was copied here. job: job.yaml of ``folder``."""
    return "" if directory.is_copied(folder, job) else str(job.get("log") or "")


def is_log_of(folder: Path, log: Path) -> bool:
    """Whether the owner of a run may show this file: another user's job can name any file, also in
    a folder that is closed.
    """
    return os.path.isfile(log) and log.stat().st_uid == folder.stat().st_uid


def _may_have_links_of_others(folder: Path, job: Json) -> bool:
    """Whether another user may have made what is in a run directory. The links of a copy belong to
    this user.
    """
    is_shared = folder.stat().st_mode & 0o022
    return bool(is_shared) or not trust.is_own(folder) or directory.is_copied(folder, job)


def read(folder: Path) -> Record:
    """Reads a run directory. Raises InputError if a folder in it is a link that another user may
    have made: it could lead to files of this user, whose content would be printed.
    """
    status = directory.read_status(folder)
    job = files.read_json(folder / "job.yaml")
    if folder.exists() and _may_have_links_of_others(folder, job):
        for pattern in READ:
            for path in folder.glob(pattern):
                if path.is_symlink() and not path.is_file():  # links to files are not followed
                    raise InputError(f"{path}: is a link, which another user may have made")
    # a summary of an earlier attempt stays until the run is done again
    is_done = status.get("state") == "done"
    summary = files.read_json(folder / "summary.json") if is_done else {}
    return Record(folder, status, job, summary, attempts.every(folder), time.time())


def ago(seconds: float) -> str:
    """A duration as text, for example 0:10:00."""
    return str(timedelta(seconds=round(min(max(0.0, seconds), LONGEST_S))))
