"""Closed lists of words, why a run ended (`Kind`) and what follows (`Next`), and `show`, which prints help and tables. Standard library only."""

import signal
from collections.abc import Mapping
from enum import Enum
from typing import Any


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
