"""The run directory: where it is, its status, and who failed first. Standard library only.

``status.json`` is what counts about a run's outcome: under srun a rank's exit status can be masked. Ranks that fail leave a
record each; a rank that is gone without one was killed. `verdict` puts that together, from whichever process is left.
"""

import contextlib
import os
import socket
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from recipes.core import files
from recipes.core.errors import EXIT_CRASH, EXIT_DONE, EXIT_REQUEUE, Kind, MachineError, Next, kind_of
from recipes.core.run import source

STATES = ("running", "done", "preempted", "failed", "incomplete")
EVALUATION, DOCTOR = "evaluation", "doctor"  # folders in a run directory
FIX_JOB_FILES = "the files of submitted jobs go there: free space on its disk, or make it writable"


def job_id(environ: Mapping[str, str]) -> str | None:
    """``<job>``, or ``<array>_<task>`` in an array; None outside Slurm."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID") or None


def own_folder(environ: Mapping[str, str]) -> Path | None:
    """A run's own folder for what it needs while it goes on, one on each node of its job; None outside Slurm."""
    job, step = job_id(environ), environ.get("SLURM_STEP_ID", "0")
    if not job:
        return None
    # Several runs may go on side by side in one step.
    told = (environ.get(name, "") for name in ("RECIPES_LAUNCH", "TORCHELASTIC_RUN_ID", "MASTER_PORT"))
    run = zlib.crc32(" ".join(told).encode("utf-8", "surrogateescape"))
    parent = Path(environ.get("TMPDIR") or "/tmp")
    return (
        parent if parent.is_dir() else Path("/tmp")
    ) / f"recipes-{os.getuid()}-{job}.{step}-{socket.gethostname()}-{run:08x}"


def launch_id(environ: Mapping[str, str]) -> str:
    """What tells this launch of a run from an earlier one: the launcher's own word, else Slurm's job and restart; or ""."""
    job = job_id(environ)
    return environ.get("RECIPES_LAUNCH") or (f"{job}.{environ.get('SLURM_RESTART_COUNT') or 0}" if job else "")


def choose(run_dir: str, recipe: str, run_id: str | None, base: Path) -> Path:
    """The run directory: as given, else ``runs/<recipe>/<run_id>`` of the repository, with a time stamp where there is no id.

    base: the repository, or a copy of its code.
    """
    if run_dir:
        return Path(os.path.realpath(os.path.expanduser(run_dir)))  # Path.resolve() raises where links lead in a circle
    now = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
    return source.home(base) / "runs" / recipe / (run_id or now)


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """``status.json``, or None before the run has begun."""
    return files.read_json(run_dir / "status.json")


def write_status(
    run_dir: Path,
    state: str,
    *,
    attempt: int,
    step: int,
    reason: str = "",
    kind: Kind | None = None,
    first: Mapping[str, Any] | None = None,
) -> None:
    """Replaces ``status.json``. kind: why the attempt ended; None while it runs and where it is done. first: the first failing
    rank's record, as `verdict` gives it. What comes next is added later, by `note_next`."""
    assert state in STATES
    first = first or {}
    content = {
        "state": state,
        "attempt": attempt,
        "step": step,
        "reason": reason,
        "kind": kind,
        "next": None,
        "first_failing_rank": first.get("rank"),
        "first_failing_host": first.get("host"),
        "exit_status": first.get("exit_status"),
        "updated": round(time.time(), 3),
    }
    files.write_json(run_dir / "status.json", content)


def note_next(run_dir: Path, word: Next, attempt: int) -> None:
    """Adds to ``status.json``, if it is still this attempt's, what happens to the job after the run was saved."""
    with contextlib.suppress(OSError):
        status = read_status(run_dir)
        if status and status["attempt"] == attempt:
            files.write_json(run_dir / "status.json", {**status, "next": word})


def open_attempt(run_dir: Path, hosts: list[str], launch: str = "", job: str | None = None, **about: Any) -> int:
    """Called by rank 0 alone: numbers this attempt (0 is the first) and records each rank's host, its launch and job, and ``about``.

    The run directory is the one's that has begun, noted as ``before``, until this one begins too: it may yet be refused.
    """
    newest = files.read_json(run_dir / "attempt.json")
    attempt = int(newest["attempt"]) + 1 if newest else 0
    content = {"attempt": attempt, "launch": launch, "job": job, "hosts": hosts, "started": round(time.time(), 3)}
    files.write_json(run_dir / "attempt.json", {**content, **about, "before": begun(newest)})
    return attempt


def begin_attempt_at(run_dir: Path, step: int, own: bool = False, **of: Any) -> None:
    """Called by rank 0 alone: this attempt takes the run directory over, and begins at ``step``. Raises MachineError, OSError.

    own: from a checkpoint of this run directory. of: this ``attempt`` and ``launch``; a later one may have been opened since.
    """
    record = files.read_json(run_dir / "attempt.json")
    if record is None:
        raise MachineError(
            f"{run_dir}/attempt.json, which this run has just written, cannot be read: the file system is at fault"
        )
    if any(record.get(name) != value for name, value in of.items()):
        raise _taken_over(run_dir, record)
    before = record.pop("before", None) or {}
    files.write_json(
        run_dir / "attempt.json", {**record, "from_step": step, "own": own, "follows": before.get("launch")}
    )


def begun(record: dict[str, Any] | None) -> dict[str, Any] | None:
    """The newest attempt that has begun, of what ``attempt.json`` holds."""
    return record if record is None or "from_step" in record else record.get("before")


def owner(run_dir: Path, **of: Any) -> dict[str, Any] | None:
    """The attempt that the run directory is: the one that has begun last, or else that was opened last; None for none.

    of: ``attempt`` or ``launch``, or both, of the one that is asked for, which may be opened and not begun; None where it is neither.
    """
    newest = files.read_json(run_dir / "attempt.json")
    return _owner(newest, of) if of else begun(newest) or newest


def _owner(newest: dict[str, Any] | None, of: Mapping[str, Any]) -> dict[str, Any] | None:
    for record in (newest, begun(newest)):
        if record and all(record.get(name) == value for name, value in of.items()):
            return record
    return None


def check_owner(run_dir: Path, attempt: int, launch: str) -> None:
    """Raises MachineError where a later attempt has taken the run directory over from this one, as far as the file system tells."""
    newest = files.read_json(
        run_dir / "attempt.json"
    )  # once: where it does not answer just now, no other attempt is seen
    if newest is not None and not _owner(newest, {"attempt": attempt, "launch": launch}):
        raise _taken_over(run_dir, newest)


def _taken_over(run_dir: Path, newest: Mapping[str, Any]) -> MachineError:
    return MachineError(f"{run_dir}: a later attempt writes here ({newest.get('launch') or 'unknown'}); this one ends")


def taken_over_by(run_dir: Path, launch: str) -> str:
    """The launch that has taken the run directory over from this one, "" for none. For the end of this launch's own job."""
    newest = begun(files.read_json(run_dir / "attempt.json"))
    taken = newest and launch and newest.get("follows") == launch and newest.get("launch") != launch
    return str(newest.get("launch") or "unknown") if newest and taken else ""


def gained_nothing(run_dir: Path, launch: str) -> bool:
    """Whether this launch's attempt, and it is not the run's first, has ended before it began or at the step that it began at."""
    attempt, status = owner(run_dir, launch=launch), read_status(run_dir)
    if not attempt or not status or status["attempt"] != attempt["attempt"] or attempt["attempt"] == 0:
        return False
    return "from_step" not in attempt or bool(status["step"] <= attempt["from_step"])


def for_evaluation(run_dir: Path) -> Path:
    """Where an evaluation of a run's checkpoint is kept: beside the run, which may be training; a new folder is its own."""
    trained = (run_dir / "config.yaml").exists()  # an evaluation leaves none
    return run_dir / EVALUATION if trained else run_dir


def for_examination(run_dir: Path) -> Path:
    """Where the doctor leaves its own status and verdict: beside the run, where there is one."""
    return run_dir / DOCTOR if (run_dir / "config.yaml").exists() else run_dir


def of_launch(run_dir: Path, launch: str) -> Path:
    """``run_dir``, or the folder in it of the evaluation that this launch was."""
    attempt = files.read_json(run_dir / EVALUATION / "attempt.json")
    return run_dir / EVALUATION if attempt and launch and attempt["launch"] == launch else run_dir


def refuse(run_dir: Path, launch: str, exit_status: int, line: str) -> None:
    """Notes that a launch was refused before the run began, for who reads how it ended; the status stays as it was."""
    with contextlib.suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        files.write_json(run_dir / "refused.json", {"launch": launch, "exit_status": exit_status, "line": line})


def refusal(run_dir: Path, launch: str) -> dict[str, Any] | None:
    """The note of `refuse` for this launch, if there is one: ``exit_status`` and ``line``."""
    for folder in (of_launch(run_dir, launch), run_dir):
        if (note := files.read_json(folder / "refused.json")) and note["launch"] == launch:
            return note
    return None


def accuracy(run_dir: Path) -> str:
    """The accuracy in ``summary.json``, as a part of a line; "" for none."""
    found = (files.read_json(run_dir / "summary.json") or {}).get("val_top1")
    return f"; val_top1 {found:.4f}" if isinstance(found, float) else ""


def record_failure(
    run_dir: Path,
    *,
    attempt: int,
    rank: int,
    host: str,
    kind: Kind,
    error: str,
    exit_status: int = EXIT_CRASH,
    behind: Mapping[str, Any] | None = None,
    moment: float | None = None,
) -> None:
    """Leaves this rank's record. behind: the rank that did not arrive, with its host and how far it was (``at``), as this one
    sees it. moment: when it failed, as time.time(); None: now."""
    content = {
        "rank": rank,
        "host": host,
        "kind": kind,
        "error": error,
        "exit_status": exit_status,
        "behind": behind,
        "time": moment or time.time(),
    }
    files.write_json(run_dir / "failures" / f"attempt-{attempt}-rank-{rank}.json", content)


def read_failure(run_dir: Path, attempt: int, rank: int) -> dict[str, Any] | None:
    """That rank's record, if it has left one."""
    return files.read_json(run_dir / "failures" / f"attempt-{attempt}-rank-{rank}.json")


def failed_ranks(run_dir: Path, attempt: int) -> list[int]:
    """The ranks that have left a record of their failure in this attempt."""
    return [int(p.stem.rpartition("-")[2]) for p in (run_dir / "failures").glob(f"attempt-{attempt}-rank-*.json")]


class Verdict(NamedTuple):
    """Why an attempt failed: reason, in one line; the first failing rank's record, with at least its rank and host; and the kind."""

    reason: str
    first: dict[str, Any] | None
    kind: Kind


def verdict(run_dir: Path, number: int | None = None) -> Verdict:
    """Why an attempt (``number``; None: the newest) failed, as far as the ranks' records show.

    A rank's own error counts before anything else, the earliest first. Without one, a rank that left no record while others
    lost a peer was killed from outside (SIGKILL, out of memory, its node).
    """
    attempt = files.read_json(run_dir / "attempt.json") if number is None else owner(run_dir, attempt=number)
    if not attempt:
        return Verdict("it failed before its first step; the log above says why", None, Kind.error)
    found = (files.read_json(p) for p in (run_dir / "failures").glob(f"attempt-{attempt['attempt']}-rank-*.json"))
    records = [
        (kind_of(record) or Kind.error, record) for record in sorted(filter(None, found), key=lambda r: r["time"])
    ]
    for kind, record in records:
        if not kind.is_consequence:
            alike = [r for k, r in records if not k.is_consequence and r["error"] == record["error"]]
            record = min(alike, key=lambda r: r["rank"])  # rank 0 speaks for all ranks with the same error
            return Verdict(f"rank {record['rank']} on {record['host']} failed first: {record['error']}", record, kind)
    own_word: set[int] = set()
    for _, record in records:
        # A stopped rank that is woken to be ended says afterwards that it has lost its peers.
        if (late := record.get("behind")) and late["rank"] not in own_word:
            who = f"rank {late['rank']} on {late['host']}"
            return Verdict(
                f"{who} got no further than {late['at']}, and the other ranks timed out waiting for it",
                late,
                Kind.timeout,
            )
        own_word.add(record["rank"])
    silent = [{"rank": rank, "host": host} for rank, host in enumerate(attempt["hosts"]) if rank not in own_word]
    if records and silent:
        named = ", ".join(f"rank {s['rank']} on {s['host']}" for s in silent[:4])
        more = f" and {len(silent) - 4} more" if len(silent) > 4 else ""
        reason = f"{named}{more} exited without an error record (killed, out of memory, or its node is gone)"
        return Verdict(reason, silent[0], Kind.killed)
    if records:  # a rank that timed out before one that lost its connection to that rank
        kind, record = next((one for one in records if one[0] is Kind.timeout), records[0])
        return Verdict(f"rank {record['rank']} on {record['host']} lost its peers: {record['error']}", record, kind)
    return Verdict(
        "all ranks exited without an error record (killed from outside, or by NCCL: see their logs)", None, Kind.killed
    )


def close(
    run_dir: Path,
    launch: str = "",
    *,
    all_ended_well: bool = False,
    reason: str = "",
    kind: Kind = Kind.killed,
    first: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Called when no rank is left: a status that still says running becomes failed, or incomplete where no rank failed.

    reason, kind, first: what the caller has seen itself, for where the ranks left no record. Gives the status of this launch;
    None where it never began, and left things as they were.
    """
    run_dir = of_launch(run_dir, launch)
    status, attempt = read_status(run_dir), owner(run_dir, launch=launch)
    if not attempt:
        return None
    begun = status is not None and status["attempt"] == attempt["attempt"]
    if not begun and (refusal(run_dir, launch) or _runs_elsewhere(status, attempt)):
        return None
    # A rank whose record was missing when the others wrote theirs may have left it since.
    unsure = begun and status is not None and status["state"] == "failed" and kind_of(status) is Kind.killed
    if not status or not begun or status["state"] == "running" or unsure:
        found = verdict(run_dir, attempt["attempt"])
        if all_ended_well and not unsure:
            found = Verdict("every rank ended with status 0 before the run's end", None, Kind.exited)
        elif first and (found.first is None or found.kind is Kind.killed):
            found = Verdict(reason, dict(first), kind)
        state = "incomplete" if all_ended_well and not unsure else "failed"
        step = status["step"] if status else 0
        told = {"state": state, "attempt": attempt["attempt"], "step": step, "reason": found.reason, "kind": found.kind}
        status = {**told, "exit_status": (found.first or {}).get("exit_status")}
        with contextlib.suppress(OSError):  # a full disk: the caller is given the outcome all the same
            write_status(
                run_dir,
                state,
                attempt=attempt["attempt"],
                step=step,
                reason=found.reason,
                kind=found.kind,
                first=found.first,
            )
            status = read_status(run_dir)
    return status


def _runs_elsewhere(status: Mapping[str, Any] | None, attempt: Mapping[str, Any]) -> bool:
    """Whether an attempt that never began stands beside another job's, which is running as far as can be seen."""
    before = attempt.get("before")
    if not before or not status or status["state"] != "running":
        return False
    jobs = [str(one["launch"]).rpartition(".")[0] or str(one["launch"]) for one in (before, attempt)]
    return jobs[0] != jobs[1]


def exit_code(status: Mapping[str, Any] | None, fallback: int) -> int:
    """The exit status that ``status.json`` stands for; ``fallback`` (never 0) where it says nothing better."""
    state = status["state"] if status else ""
    known = {"done": EXIT_DONE, "preempted": EXIT_REQUEUE}.get(state)
    return known if known is not None else (status and status.get("exit_status")) or fallback or EXIT_CRASH
