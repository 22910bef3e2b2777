"""The run directory: its path, its attempts and its status. Standard library only.

``status.json`` decides the outcome of a run, since srun can mask the exit status of a rank. Any process that still runs can
complete it with `close`.
"""

import contextlib
import os
import socket
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.core import files
from recipes.core.errors import EXIT_CRASH, EXIT_DONE, EXIT_REQUEUE, Kind, MachineError, Next, kind_of
from recipes.core.run import failures, source
from recipes.core.run.failures import Verdict

STATES = ("running", "done", "preempted", "failed", "incomplete")
EVALUATION, DOCTOR = "evaluation", "doctor"  # folders in a run directory
FIX_JOB_FILES = "the files of submitted jobs go there: free space on its disk, or make it writable"


def job_id(environ: Mapping[str, str]) -> str | None:
    """``<job>``, or ``<array>_<task>`` in an array; None outside Slurm."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID") or None


def own_folder(environ: Mapping[str, str]) -> Path | None:
    """The path of a run's own temporary folder on this node; None outside Slurm. The folder is not created."""
    job, step = job_id(environ), environ.get("SLURM_STEP_ID", "0")
    if not job:
        return None
    # Several runs may run at the same time in one step.
    run_names = (environ.get(name, "") for name in ("RECIPES_LAUNCH", "TORCHELASTIC_RUN_ID", "MASTER_PORT"))
    run = zlib.crc32(" ".join(run_names).encode("utf-8", "surrogateescape"))
    parent = Path(environ.get("TMPDIR") or "/tmp")
    parent = parent if parent.is_dir() else Path("/tmp")
    return parent / f"recipes-{os.getuid()}-{job}.{step}-{socket.gethostname()}-{run:08x}"


def launch_id(environ: Mapping[str, str]) -> str:
    """An ID that differs for each launch of a run: the launcher's own ID, else Slurm's ``<job>.<restart>``, else ""."""
    job = job_id(environ)
    return environ.get("RECIPES_LAUNCH") or (f"{job}.{environ.get('SLURM_RESTART_COUNT') or 0}" if job else "")


def choose(run_dir: str, recipe: str, run_id: str | None, base: Path) -> Path:
    """The run directory: ``run_dir`` if it is given, else ``runs/<recipe>/<run_id>`` in the repository.

    A time stamp replaces ``run_id`` if there is none. base: the repository, or a snapshot of its code.
    """
    if run_dir:
        return Path(os.path.realpath(os.path.expanduser(run_dir)))  # Path.resolve() raises for links in a circle
    now = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
    return source.home(base) / "runs" / recipe / (run_id or now)


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """The content of ``status.json``; None before the run has begun."""
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
    may_fail: bool = False,
) -> dict[str, Any]:
    """Replaces ``status.json`` and returns its content.

    kind: why the attempt ended; None while it runs or if it is done. first: the record of the first failing rank, from
    `verdict`. may_fail: ignore an error of the file system. `note_next` adds ``next`` later.
    """
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
    with contextlib.suppress(OSError) if may_fail else contextlib.nullcontext():
        files.write_json(run_dir / "status.json", content)
    return content


def note_next(run_dir: Path, word: Next, attempt: int) -> None:
    """Sets ``next`` in ``status.json``, if the status is of this attempt: what happens to the job after the run was saved."""
    with contextlib.suppress(OSError):
        status = read_status(run_dir)
        if status and status["attempt"] == attempt:
            files.write_json(run_dir / "status.json", {**status, "next": word})


def open_attempt(run_dir: Path, hosts: list[str], launch: str = "", job: str | None = None, **about: Any) -> int:
    """Numbers this attempt (the first is 0), and records the hosts of all ranks, the launch, the job and ``about``.

    Only rank 0 calls it. Returns the number. The run directory still belongs to the last attempt that has begun, which
    is recorded as ``before``, until this attempt begins: it may still be refused.
    """
    newest = files.read_json(run_dir / "attempt.json")
    attempt = int(newest["attempt"]) + 1 if newest else 0
    content = {"attempt": attempt, "launch": launch, "job": job, "hosts": hosts, "started": round(time.time(), 3)}
    files.write_json(run_dir / "attempt.json", {**content, **about, "before": begun(newest)})
    return attempt


def begin_attempt_at(run_dir: Path, step: int, own: bool = False, **of: Any) -> None:
    """Makes this attempt the owner of the run directory and records that it begins at ``step``. Only rank 0 calls it.

    own: whether the attempt resumes from a checkpoint of this run directory. of: the ``attempt`` and ``launch`` of this
    attempt. Raises MachineError if a later attempt has been opened since, or if the record cannot be read. Raises
    OSError.
    """
    record = files.read_json(run_dir / "attempt.json")
    if record is None:
        raise MachineError(
            f"{run_dir}/attempt.json, which this run wrote, cannot be read back: check the file system of the run directory"
        )
    if not _is(record, of):
        raise _taken_over(run_dir, record)
    before = record.pop("before", None) or {}
    files.write_json(
        run_dir / "attempt.json", {**record, "from_step": step, "own": own, "follows": before.get("launch")}
    )


def begun(record: dict[str, Any] | None) -> dict[str, Any] | None:
    """The newest attempt that has begun, from the content of ``attempt.json``."""
    return record if record is None or "from_step" in record else record.get("before")


def attempts(run_dir: Path) -> list[dict[str, Any]]:
    """The last attempt that was opened, which may still be refused; then the last one that has begun, if it is another one."""
    newest = files.read_json(run_dir / "attempt.json")
    last = begun(newest)
    return [record for record in (newest, last if last is not newest else None) if record]


def owner(run_dir: Path, **of: Any) -> dict[str, Any] | None:
    """The attempt that owns the run directory: the last one that has begun, else the last one that was opened.

    Returns None if there is none. of: ``attempt``, ``launch`` or both. With them, the function returns the attempt with
    these values if it is the last one that was opened or the last one that has begun; else None.
    """
    found = attempts(run_dir)
    if of:
        return next((record for record in found if _is(record, of)), None)
    return found[-1] if found else None


def _is(record: Mapping[str, Any], of: Mapping[str, Any]) -> bool:
    return all(record.get(name) == value for name, value in of.items())


def check_owner(run_dir: Path, attempt: int, launch: str) -> None:
    """Raises MachineError if a later attempt, as far as the file system shows, has taken over the run directory."""
    found = attempts(run_dir)
    if found and not any(_is(record, {"attempt": attempt, "launch": launch}) for record in found):
        raise _taken_over(run_dir, found[0])


def _taken_over(run_dir: Path, newest: Mapping[str, Any]) -> MachineError:
    return MachineError(f"{run_dir}: a later attempt writes here ({newest.get('launch') or 'unknown'}); this one ends")


def taken_over_by(run_dir: Path, launch: str) -> str:
    """The launch that has taken over the run directory from this launch; "" if there is none.

    Called at the end of this launch's job.
    """
    newest = begun(files.read_json(run_dir / "attempt.json"))
    taken = newest and launch and newest.get("follows") == launch and newest.get("launch") != launch
    return str(newest.get("launch") or "unknown") if newest and taken else ""


def gained_nothing(run_dir: Path, launch: str) -> bool:
    """Whether the attempt of this launch, if it is not attempt 0, completed no step."""
    attempt, status = owner(run_dir, launch=launch), read_status(run_dir)
    if not attempt or not status or status["attempt"] != attempt["attempt"] or attempt["attempt"] == 0:
        return False
    return "from_step" not in attempt or bool(status["step"] <= attempt["from_step"])


def for_evaluation(run_dir: Path) -> Path:
    """The folder for an evaluation: ``evaluation/`` in the run directory of a training, which may run; else ``run_dir``."""
    trained = (run_dir / "config.yaml").exists()  # an evaluation does not write this file
    return run_dir / EVALUATION if trained else run_dir


def for_examination(run_dir: Path) -> Path:
    """The folder for the doctor's status and verdict: ``doctor/`` in an existing run directory; else ``run_dir``."""
    return run_dir / DOCTOR if (run_dir / "config.yaml").exists() else run_dir


def of_launch(run_dir: Path, launch: str) -> Path:
    """The folder of this launch: the evaluation folder in ``run_dir`` if it was an evaluation, else ``run_dir``."""
    attempt = files.read_json(run_dir / EVALUATION / "attempt.json")
    return run_dir / EVALUATION if attempt and launch and attempt["launch"] == launch else run_dir


def refuse(run_dir: Path, launch: str, exit_status: int, line: str) -> None:
    """Records in ``refused.json`` that a launch was refused before the run began. The status does not change."""
    with contextlib.suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        files.write_json(run_dir / "refused.json", {"launch": launch, "exit_status": exit_status, "line": line})


def refusal(run_dir: Path, launch: str) -> dict[str, Any] | None:
    """The record that `refuse` wrote for this launch, with ``exit_status`` and ``line``; None if there is none."""
    for folder in (of_launch(run_dir, launch), run_dir):
        if (note := files.read_json(folder / "refused.json")) and note["launch"] == launch:
            return note
    return None


def accuracy(run_dir: Path) -> str:
    """The accuracy in ``summary.json`` as part of a line; "" if there is none."""
    found = (files.read_json(run_dir / "summary.json") or {}).get("val_top1")
    return f"; val_top1 {found:.4f}" if isinstance(found, float) else ""


def close(
    run_dir: Path,
    launch: str = "",
    *,
    all_ended_well: bool = False,
    reason: str = "",
    kind: Kind = Kind.killed,
    first: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Sets the final status of a launch after all of its ranks have ended.

    A status that is still ``running`` becomes ``failed``, or ``incomplete`` if no rank failed. reason, kind, first:
    what the caller has observed itself; they are used if the ranks wrote no record. Returns the status of this launch;
    None if the launch never began and changed nothing.
    """
    run_dir = of_launch(run_dir, launch)
    status, attempt = read_status(run_dir), owner(run_dir, launch=launch)
    if not attempt:
        return None
    begun = status is not None and status["attempt"] == attempt["attempt"]
    if not begun and (refusal(run_dir, launch) or _runs_elsewhere(status, attempt)):
        return None
    # A rank whose record was missing when the status was written may have written it since then.
    unsure = begun and status is not None and status["state"] == "failed" and kind_of(status) is Kind.killed
    if status and begun and status["state"] != "running" and not unsure:
        return status
    found = failures.verdict(run_dir, attempt)
    state = "failed"
    if all_ended_well and not unsure:
        state = "incomplete"
        found = Verdict("every rank exited with status 0 before the end of the run", None, Kind.exited)
    elif first and (found.first is None or found.kind is Kind.killed):
        found = Verdict(reason, dict(first), kind)
    return write_status(
        run_dir, state, attempt=attempt["attempt"], step=status["step"] if status else 0,
        reason=found.reason, kind=found.kind, first=found.first, may_fail=True,  # the disk may be full
    )  # fmt: skip


def _runs_elsewhere(status: Mapping[str, Any] | None, attempt: Mapping[str, Any]) -> bool:
    """Whether another job still runs this run, as far as the status shows, while this attempt has never begun."""
    before = attempt.get("before")
    if not before or not status or status["state"] != "running":
        return False
    jobs = [str(one["launch"]).rpartition(".")[0] or str(one["launch"]) for one in (before, attempt)]
    return jobs[0] != jobs[1]


def exit_code(status: Mapping[str, Any] | None, fallback: int) -> int:
    """The exit status for the content of ``status.json``.

    If the content does not determine it, the result is ``fallback``, or 1 if ``fallback`` is 0.
    """
    status = status or {}
    known = {"done": EXIT_DONE, "preempted": EXIT_REQUEUE}
    return known.get(status.get("state", ""), status.get("exit_status") or fallback or EXIT_CRASH)
