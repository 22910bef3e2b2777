"""The attempts of a run. Each start has its own folder ``attempts/NNNN`` in the run directory.
Standard library only.

``opened.json`` numbers an attempt. ``begun.json`` makes it the owner of the run. ``failed/`` has a
record of each rank that failed, and ``ended.json`` is the judgement. Only the attempt and its
parent write in its folder.
"""

import contextlib
import functools
import itertools
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from recipes.core import files, trust
from recipes.core.errors import EXIT_CRASH, ConfigError, InputError, Kind, MachineError
from recipes.core.place import processes
from recipes.core.run import directory
from recipes.core.slurm import environment

# in the folder of an attempt: the stop signals that a user's program catches
CATCHES = "catches.json"
# in the folder of an attempt that was started again in its job: the nodes that it leaves out
RESTART = "restart.json"
# set by the parent of the ranks: the folder of the attempt that it has opened
VARIABLE = "RECIPES_ATTEMPT"
REPEATED_S = 1.5  # the other ranks wait this long before they print why they are refused


@dataclass(frozen=True)
class Attempt:
    """One attempt of the run in ``run_dir``. number: from 0."""

    run_dir: Path
    number: int

    @property
    def folder(self) -> Path:
        return self.run_dir / "attempts" / f"{self.number:04d}"

    @property
    def staging(self) -> Path:
        """The folder in which this attempt writes its checkpoints before it renames them. A later
        attempt removes it.
        """
        return self.run_dir / "checkpoints" / f".{self.number}"

    @property
    def has_begun(self) -> bool:
        return (self.folder / "begun.json").exists()

    @property
    def is_restart(self) -> bool:
        """Whether ``restarts=`` has started it, in the allocation of the attempt before it."""
        return (self.folder / RESTART).exists()

    def facts(self) -> files.Json:
        """What was recorded when this attempt was opened and when it began, and its number as
        ``attempt``.
        """
        return {**self.read("opened.json"), **self.read("begun.json"), "attempt": self.number}

    def read(self, name: str) -> files.Json:
        """The JSON object in a file in the folder of this attempt; {} if it cannot be read."""
        return files.read_json(self.folder / name)

    def only_own(self, content: files.Json) -> files.Json:
        """A status or a row if this attempt has written it, else {}."""
        return content if content.get("attempt") == self.number else {}


def every(run_dir: Path) -> list[Attempt]:
    """The attempts of a run, newest first."""
    names = list[str]()
    with contextlib.suppress(OSError):
        names = os.listdir(run_dir / "attempts")
    numbers = sorted(map(int, filter(str.isdecimal, names)), reverse=True)
    return [Attempt(run_dir, number) for number in numbers]


def newest(run_dir: Path, launch: str = "") -> Attempt | None:
    """The attempt that was opened last. launch: only attempts of this launch count."""
    for attempt in every(run_dir):
        if not launch or attempt.facts().get("launch") == launch:
            return attempt
    return None


def owner(run_dir: Path) -> Attempt | None:
    """The attempt that owns the run: the highest one that has begun. None if none has begun."""
    return next((attempt for attempt in every(run_dir) if attempt.has_begun), None)


def facts(run_dir: Path) -> files.Json:
    """The facts of the attempt that owns the run, else of the newest one; {} if there is none."""
    attempt = owner(run_dir) or newest(run_dir)
    if attempt:
        return attempt.facts()
    # written before each attempt had a folder
    return files.read_json(run_dir / "attempt.json")


def start_time(pid: int) -> str:
    """The start time of a process in kernel clock ticks. "" if there is no such process or it has
    ended.
    """
    with contextlib.suppress(OSError):
        fields = processes.stat(int(pid))  # it may be the text of another user
        if fields[0] not in ("Z", "X"):
            return fields[19]
    return ""


@functools.cache
def namespace() -> str:
    """The boot ID of this machine and the process namespace. Process IDs can be compared only if
    both are the same.
    """
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
    return ""


def given(environ: environment.Environ) -> Attempt | None:
    """The attempt that the parent of this rank has opened; None if there is no parent."""
    folder = Path(environ.get(VARIABLE) or ".")
    return Attempt(folder.parent.parent, int(folder.name)) if folder.name.isdecimal() else None


def open_next(
    run_dir: Path,
    recipe: str,
    environ: environment.Environ,
    hosts: Sequence[str] = (),
    launch: str = "",
    submitted: float | None = None,
) -> Attempt:
    """Opens an attempt; the last one that has begun still owns the run. hosts: by rank; empty for
    the parent. launch: a launcher's own ID, in place of Slurm's. submitted: when the job was put
    into the queue. Raises MachineError.
    """
    with files.writing_to(run_dir, "run_dir"):
        for folder in (run_dir, run_dir / "attempts"):
            trust.own_folder(folder)
        before = facts(run_dir).get("attempt", -1)  # of an earlier version
        highest = next((attempt.number for attempt in every(run_dir)), before)
        for number in itertools.count(highest + 1):
            new = Attempt(run_dir, number)
            # Another launch may make the folder first, and a network file system may repeat a call
            # that succeeded.
            with contextlib.suppress(FileExistsError):
                new.folder.mkdir()
                break
        for name in ("failed", "ranks"):
            (new.folder / name).mkdir(exist_ok=True)
        describe(new, recipe, environ, hosts, launch, submitted)
        return new


def describe(
    attempt: Attempt,
    recipe: str,
    environ: environment.Environ,
    hosts: Sequence[str],
    launch: str = "",
    submitted: float | None = None,
) -> None:
    """Writes ``opened.json``. Rank 0 replaces that of its parent when the hosts of all ranks are
    known. Raises OSError.
    """
    opened = attempt.read("opened.json")
    launch = opened.get("launch") or launch or directory.launch_id(environ)
    # launcher=local in an allocation of salloc is no job: it ends before the allocation does
    job = environment.job_id(environ) if launch == directory.launch_id(environ) else ""
    pid = os.getpid()
    requested = {
        "cpus": environment.cpus_on_node(environ),
        "memory_mb": environment.memory_mb(environ),
        "gpus": environment.gpus_per_node(environ),
        "nodes": environment.num_nodes(environ),
    }
    content = {
        "recipe": recipe,
        "run_dir": os.path.realpath(attempt.run_dir),
        "launch": launch,
        "job": job or None,
        "cluster": environment.cluster(environ) if job else None,  # None: outside Slurm
        **{name: value for name, value in requested.items() if job and value is not None},
        "process": {
            "host": socket.gethostname(),
            "pid": pid,
            "started": start_time(pid),
            "place": namespace(),
        },
        "hosts": list(hosts),
        "submitted": opened.get("submitted", submitted),
        "time": opened.get("time", round(time.time(), 3)),
    }
    # in a container, a rank may not see the home folder with the key
    if job and opened:
        content["mark"] = opened.get("mark")
    else:
        content = directory.marked(attempt.run_dir, content)
    files.write_json(attempt.folder / "opened.json", content)


def begin(
    attempt: Attempt, step: int, own: bool, of_program: bool = False, load_s: float = 0.0
) -> None:
    """Makes this attempt the owner of the run. Only rank 0 calls it.

    Earlier attempts that still run can then no longer rename a checkpoint, and write their rows
    into a removed file. step: the step at which it begins. own: whether it resumes from a
    checkpoint of this run directory. of_program: whether the ranks are a program of the user, which
    writes no steps. load_s: how long the checkpoint was read. Raises MachineError if a later
    attempt has begun. Raises OSError.
    """
    check_owner(attempt)
    if not of_program:
        trust.own_folder(attempt.staging)
    try:
        with open(attempt.folder / "begun.json", "x") as file:
            begun = {"step": step, "own": own, "of_program": of_program}
            json.dump({**begun, "begun_at": time.time(), "load_s": load_s}, file)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise MachineError(
            f"{attempt.folder}: another Slurm step of this job has begun this attempt: "
            "wait until it ends"
        ) from None
    for earlier in every(attempt.run_dir):
        if earlier.number < attempt.number and not of_program:
            _remove(earlier.staging)
    metrics = attempt.run_dir / "metrics.jsonl"
    if os.path.lexists(metrics):
        with open(metrics, "rb", opener=files.without_links) as old:
            files.write_whole(metrics, lambda new: _copy(attempt, old, new))


def _copy(attempt: Attempt, old: IO[bytes], new: IO[bytes]) -> None:
    """Copies the rows of earlier attempts. Raises MachineError if a later one has begun meanwhile:
    the copy would replace its rows.
    """
    shutil.copyfileobj(old, new)
    new.flush()
    os.fsync(new.fileno())  # which may take long
    check_owner(attempt)


def _remove(folder: Path) -> None:
    """Removes a folder. It is renamed first, so that a process that still writes in it cannot
    rename a file out of it.
    """
    removed = folder.with_name(f"{folder.name}.removed")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def check_owner(attempt: Attempt) -> None:
    """Raises MachineError if a later attempt has begun, as far as the file system shows."""
    launch = taken_over_by(attempt)
    if launch:
        raise MachineError(
            f"{attempt.run_dir}: a later attempt ({launch}) writes to this run directory, "
            "so this attempt ends"
        )


def write_status(attempt: Attempt, state: str, step: int, **why: Any) -> None:
    """Writes ``status.json``. why: as for `directory.write_status`. Raises OSError, and
    MachineError if a later attempt has begun.
    """
    check_owner(attempt)
    directory.write_status(attempt.run_dir, state, attempt=attempt.number, step=step, **why)


def taken_over_by(attempt: Attempt) -> str:
    """The launch of a later attempt that has begun; "" if there is none."""
    later = owner(attempt.run_dir)
    if not later or later.number <= attempt.number:
        return ""
    return str(later.facts().get("launch") or "unknown")


def heartbeat(attempt: Attempt) -> None:
    """Shows that the run is alive. Rank 0 calls it every few seconds. Raises OSError."""
    os.utime(attempt.folder / "opened.json")


def newest_heartbeat(attempt: Attempt) -> float:
    """The time of the newest heartbeat, or 0. Opening the file makes a network file system ask its
    server for the current time.
    """
    with contextlib.suppress(OSError), open(attempt.folder / "opened.json", "rb") as file:
        return os.fstat(file.fileno()).st_mtime
    return 0.0


def record(
    attempt: Attempt,
    *,
    rank: int | None,
    host: str,
    kind: Kind,
    error: str,
    exit_status: int = EXIT_CRASH,
    behind: files.Json | None = None,
    moment: float | None = None,
    progress: float | None = None,
    name: str = "rank",
    is_ending: bool = False,
    by_other: bool = False,
) -> None:
    """Writes the error record of a rank. Raises OSError.

    name: begins the name of the file; "stop" for a request to stop, so that a later failure of the
    rank has its own file. rank: None if no rank is known to be the cause. behind: the rank that did
    not arrive, as `World.behind` returns it. moment: of the failure, as time.time(); None means
    now. progress: when the rank made progress last; None if unknown. is_ending: whether the rank
    still saves or asks the other ranks where they are, and then replaces the record. by_other:
    whether another process writes it; it does not replace what the rank has written itself.
    """
    path = attempt.folder / "failed" / f"{name}{rank or 0:04d}.json"
    if by_other and path.exists():
        return
    content = {
        "rank": rank,
        "host": host,
        "kind": kind,
        "error": error,
        "exit_status": exit_status,
        "behind": behind,
        "time": moment or time.time(),
        "progress": progress,
        "is_ending": is_ending,
    }
    files.write_json(path, content)


def records(attempt: Attempt) -> list[files.Json]:
    """The error records of an attempt, earliest first."""
    every_record = map(files.read_json, (attempt.folder / "failed").glob("*.json"))
    return sorted(filter(None, every_record), key=lambda record: record["time"])


def note_rank(attempt: Attempt, rank: int, task: int, host: str, ended: float | None) -> None:
    """Notes that a rank of a user's program runs, or when it ended. Raises OSError.

    task: the number of the wrapper that gets the signals for this rank; the rank itself, unless it
    has a launcher.
    """
    if ended is None:  # torchrun may start a rank again that has failed
        (attempt.folder / "failed" / f"rank{rank:04d}.json").unlink(missing_ok=True)
    content = {"rank": rank, "task": task, "host": host, "ended": ended}
    files.write_json(attempt.folder / "ranks" / f"rank{rank:04d}.json", content)


def program_ranks(attempt: Attempt) -> list[files.Json]:
    """The ranks that `note_rank` has noted, in order."""
    paths = sorted((attempt.folder / "ranks").glob("*.json"))
    return list(filter(None, map(files.read_json, paths)))


def hosts(attempt: Attempt) -> dict[int, str]:
    """The hosts of the ranks, by rank, as far as they are known; not of a program's ranks that have
    ended.
    """
    known = dict(enumerate(attempt.facts().get("hosts") or ()))
    running = [rank for rank in program_ranks(attempt) if not rank["ended"]]
    return known | {rank["rank"]: rank["host"] for rank in running}


def print_refusal(line: str, is_first: bool, is_told: bool) -> None:
    """Prints why a rank is refused. is_told: whether a parent prints the judgement on its record;
    then only the first rank prints. Else all do, the first one first.
    """
    if not is_first:
        if is_told:
            return
        time.sleep(REPEATED_S)
    print(line, file=sys.stderr, flush=True)


def refuse(
    environ: environment.Environ, error: ConfigError | InputError | MachineError, rank: int = 0
) -> bool:
    """Records in the attempt that the parent has opened, if there is one, why the launch ends.
    Returns whether it is recorded there: the disk may be full, or this node does not see the
    folder.
    """
    attempt = given(environ)
    if not attempt:
        return False
    try:
        record(
            attempt,
            rank=rank,
            host=socket.gethostname(),
            kind=error.kind,
            error=str(error),
            exit_status=error.exit_status,
        )
    except OSError:
        return False
    return True
