"""What a user is told: exit statuses and errors, why a run ended (`Kind`), what follows (`Next`), and text that fits one line.

Standard library only; imports nothing of the project.
"""

import re
import signal
from collections.abc import Mapping
from enum import Enum
from typing import Any

MAX_SHOWN = 60  # characters of a bad value that are shown

EXIT_DONE = 0
EXIT_CRASH = 1
EXIT_CONFIG = 2  # bad configuration or bad input
EXIT_MACHINE = 3  # this machine or allocation cannot run it
EXIT_REQUEUE = 75  # saved, to be requeued


class ConfigError(ValueError):
    """A user's key or value is invalid. The message is one line: key, value, what is invalid, the fix. Exit status 2."""


class MachineError(RuntimeError):
    """This machine or allocation cannot run the recipe. The message is one line; exit status 3."""


class NodeError(MachineError):
    """A MachineError that all ranks of a node meet alike: only its first rank prints it."""


class RunError(RuntimeError):
    """The run cannot continue because of what it computes (its loss, its memory). The message is one line; exit status 1."""


class Stopped(Exception):
    """Stopped before there was a step to save. The message is the reason. Exit status 75."""


class InputError(ValueError):
    """Input other than keys (data, a checkpoint, a variable) is invalid. The message is one line; exit status 2."""


class Kind(str, Enum):
    """Why a rank or a run ended: ``kind`` in status.json and in a rank's failure record."""

    error = "error"  # its own exception, or an exit status other than 0
    peer_lost = "peer-lost"  # it lost the connection to another rank
    timeout = "timeout"  # another rank did not arrive within timeout_s
    hang = "hang"  # it made no progress itself for timeout_s
    killed = "killed"  # it ended without a failure record
    exited = "exited"  # it ended with status 0 before the run's end
    out_of_memory = "out-of-memory"
    disk_full = "disk-full"
    machine = "machine"  # this machine or allocation cannot run it
    input = "input"  # bad keys, data or checkpoint
    stopped = "stopped"  # by a signal or ahead of the time limit, and saved
    suspended = "suspended"  # its processes were stopped for too long

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's end or absence caused it."""
        return self in (Kind.peer_lost, Kind.timeout)


class Next(str, Enum):
    """What happened to the job after a run was stopped and saved: ``next`` in status.json."""

    requeued = "requeued"  # by its batch script or by Slurm
    held = "held"  # requeued, but Slurm starts it only after scontrol release
    cancelled = "cancelled"
    max_requeues = "max-requeues"  # not requeued: max_requeues= is reached
    no_progress = "no-progress"  # not requeued: the last start completed no step
    requeue_failed = "requeue-failed"  # scontrol requeue failed
    not_requeued = "not-requeued"  # Slurm ended the job and does not requeue it: time limit, preemption by cancelling


def kind_of(record: Mapping[str, Any]) -> Kind | None:
    """The kind in a status or failure record; None where it has none, as in run directories of earlier versions."""
    word = "peer-lost" if record.get("kind") == "peer" else record.get("kind")  # "peer": earlier versions
    return _member(Kind, word)


def next_of(status: Mapping[str, Any]) -> Next | None:
    """What comes next for a run by its status; None where that is not known."""
    return _member(Next, status.get("next"))


def _member(of: Any, word: object) -> Any:
    return of(word) if word in [member.value for member in of] else None


def show(text: str) -> None:
    """Prints ``text``. Where the reader has closed the pipe (``| head``), SIGPIPE ends the process, as it ends other commands.

    Called from the main thread.
    """
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        print(text, flush=True)
    finally:
        signal.signal(signal.SIGPIPE, before)


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """``value`` as it can stand in a one-line message: escaped, and cut when longer than ``limit``."""
    text = str(value.name if isinstance(value, Enum) else value)[: limit + 1]
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def one_line(error: BaseException, limit: int = 300) -> str:
    """The kind and text of an error, in one line."""
    text = " ".join(re.sub(r"[^\x20-\x7e\u00a0-\uffff]", " ", str(error)).split())
    return f"{type(error).__name__}: {text}"[:limit] if text else type(error).__name__
