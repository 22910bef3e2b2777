"""Exit statuses, error classes, why a run ended (`Kind`), what happens next (`Next`), and one-line
messages.

Standard library only. This module imports nothing from the project.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

MAX_SHOWN = 60  # characters of a bad value that are shown

# the oldest versions of packages that execute no code of the files that they read; also in
# pyproject.toml
OLDEST = {"jinja2": "3.1.6", "timm": "1.0.26", "transformers": "5.1"}

EXIT_DONE = 0
EXIT_CRASH = 1
EXIT_CONFIG = 2  # invalid configuration or input
EXIT_MACHINE = 3  # this machine or allocation cannot run it
# the run was stopped and saved; `next` in status.json says whether the job was requeued
EXIT_REQUEUE = 75
EXIT_PIPE = 141  # the reader of stdout has closed the pipe: 128 + SIGPIPE


class Kind(str, Enum):
    """Why a rank or a run ended: ``kind`` in status.json and in a rank's error record."""

    error = "error"  # the rank raised an exception, or exited with a status other than 0
    peer_lost = "peer-lost"  # the rank lost the connection to another rank
    timeout = "timeout"  # another rank did not reach a collective within timeout_s
    # the rank itself made no progress for timeout_s (outside of training and evaluation: six times
    # timeout_s); a program: silent_s=
    hang = "hang"
    killed = "killed"  # the rank ended without an error record
    exited = "exited"  # the rank exited with status 0 before the end of the run
    out_of_memory = "out-of-memory"
    disk_full = "disk-full"
    machine = "machine"  # this machine or allocation cannot run the recipe
    input = "input"  # invalid keys, data or checkpoint
    # the run cannot continue because of what it computes, such as a loss that is not finite
    run_error = "run-error"
    # the run was stopped by a signal or shortly before the time limit; if it had completed a step,
    # it was saved
    stopped = "stopped"

    @property
    def is_consequence(self) -> bool:
        """Whether the end or the absence of another rank caused this failure."""
        return self in (Kind.peer_lost, Kind.timeout)

    @property
    def is_curable(self) -> bool:
        """Whether the same run may succeed if it is started again."""
        return self not in (
            Kind.out_of_memory,
            Kind.disk_full,
            Kind.input,
            Kind.run_error,
            Kind.stopped,
        )


class _Printable(Exception):
    """The message of an error may quote a file, an archive or a server: characters that a terminal
    would interpret are escaped. exit_status: with which a command ends because of it. kind: of a
    run that ends because of it.
    """

    exit_status = EXIT_CONFIG
    kind = Kind.input

    def __init__(self, text: str = "") -> None:
        super().__init__(printable(text))


class ConfigError(_Printable, ValueError):
    """A key, an env file or a launcher's variable is invalid. One line: its name, its value and the
    fix. Exit status 2.
    """


class MachineError(_Printable, RuntimeError):
    """This machine or allocation cannot run the recipe. One line. Exit status 3."""

    exit_status = EXIT_MACHINE
    kind = Kind.machine


class DiskFull(MachineError):
    """A disk or a quota is used up."""

    kind = Kind.disk_full


class RunError(_Printable, RuntimeError):
    """The run cannot continue because of what it computes or calls, such as a loss that is not
    finite. One line. Exit status 1.
    """

    exit_status = EXIT_CRASH
    kind = Kind.run_error


class Stopped(Exception):
    """Ends work outside the steps because the run is to stop. The message is the reason. Exit
    status 75.
    """


class InputError(_Printable, ValueError):
    """Other input (data, a checkpoint) is invalid. One line. Exit status 2."""


class Hang(Exception):
    """Ends a program of the user whose ranks make no progress. Its record says where they are. Exit
    status 1.
    """


class Next(str, Enum):
    """What happened to the job after a run was stopped and saved, or after it failed: ``next`` in
    status.json.
    """

    requeued = "requeued"  # the batch script or Slurm requeued the job
    held = "held"  # the job was requeued, but Slurm starts it only after scontrol release
    cancelled = "cancelled"  # the job was cancelled
    max_requeues = "max-requeues"  # not requeued: max_requeues= is reached
    # not requeued: the last start completed no step, or the program saved no file
    no_progress = "no-progress"
    requeue_failed = "requeue-failed"  # scontrol requeue failed
    restarted = "restarted"  # the ranks failed, and were started again in the same job
    # not requeued: Slurm ended it at its time limit, or cancelled it for another job
    not_requeued = "not-requeued"


def kind_of(record: Mapping[str, Any]) -> Kind | None:
    """The kind in a status record or an error record. None if the record has no known kind."""
    return next((kind for kind in Kind if kind == record.get("kind")), None)


def next_of(status: Mapping[str, Any]) -> Next | None:
    """What happens next to a run, according to its status. None if the status does not say."""
    return next((word for word in Next if word == status.get("next")), None)


def printable(text: str) -> str:
    """``text`` with unprintable characters escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """``value`` as text for a one-line message: cut at ``limit`` characters, unprintable ones
    escaped.
    """
    text = printable(str(value.name if isinstance(value, Enum) else value)[: limit + 1])
    return text if len(text) <= limit else text[: limit - 1] + "…"


def one_line(error: BaseException, limit: int = 300) -> str:
    """The type and the text of an error in one line of at most ``limit`` characters."""
    name = type(error).__name__
    text = " ".join(str(error).split())
    return shown(f"{name}: {text}" if text else name, limit)


def require(module: str, extra: str, place: str = "") -> Any:
    """The module. Raises InputError if it is not installed, or older than in `OLDEST`. extra: the
    optional dependencies that have it. place: the start of the message.
    """
    from importlib import metadata  # loads many modules

    try:
        imported = importlib.import_module(module)
        oldest = OLDEST.get(module)
        version = metadata.version(module) if oldest else ""
        if oldest and _numbers(version) < _numbers(oldest):
            raise ImportError(f"{module} {version} is older than {oldest}")
        return imported
    except ImportError as error:
        raise InputError(f"{place}{one_line(error, 80)}: pip install '.[{extra}]'") from None


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def status_of(command: str, main: Callable[[list[str]], int]) -> int:
    """Runs ``main`` with the arguments of the command line, and returns its exit status. Errors of
    the user or the machine print one line.
    """
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has closed the pipe, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_PIPE
    except (ConfigError, InputError, MachineError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return getattr(error, "exit_status", EXIT_CONFIG)
