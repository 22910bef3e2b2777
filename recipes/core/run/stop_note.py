"""The stop note of an attempt: a request to stop that processes on all nodes read.

Slurm's signal before the time limit reaches only the batch shell of a program's job, which writes
the note. The wrappers of the program read it every few seconds and act at the same moment.
Standard library only.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.core.run.attempt import Attempt

LENGTH = 256  # characters of the file: a reader finds the earlier note or the new one


@dataclass(frozen=True)
class StopNote:
    """before_s: seconds between the request and the time limit; None if there is no such request.

    reason: why the program is to stop; "" as long as it is not. at: when the wrappers act, in
    seconds since 1970. ends: whether the program is only to end, since it has asked for a requeue.
    limit_at: the time limit of the job, at which the wrappers kill the program: Slurm would kill
    the job script too, which could not requeue the job. None if it is unknown.
    """

    before_s: float | None = None
    reason: str = ""
    at: float = 0.0
    ends: bool = False
    limit_at: float | None = None


def path(attempt: Attempt) -> Path:
    return attempt.folder / "stop.json"


def write(attempt: Attempt, note: StopNote) -> None:
    """Writes the note into the existing file, if there is one, over the whole earlier note. Raises
    OSError.

    A network file system may hide a new file for a minute, but not the new content of a known file.
    """
    descriptor = os.open(path(attempt), os.O_WRONLY | os.O_CREAT, 0o666)
    with open(descriptor, "w") as file:
        file.write(json.dumps(asdict(note)).ljust(LENGTH))


def read(attempt: Attempt) -> StopNote:
    """The note; an empty one while the file is being written or does not exist. Raises OSError."""
    try:
        return StopNote(**json.loads(path(attempt).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return StopNote()
