"""The run directory: its path and ``status.json``. Standard library only.

``status.json`` decides the outcome of a run, since srun can mask the exit status of a rank.
"""

import contextlib
import hmac
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.core import files, trust
from recipes.core.errors import EXIT_CRASH, EXIT_DONE, EXIT_REQUEUE, Kind, Next
from recipes.core.run import source
from recipes.core.slurm import environment

# folders in a run directory
EVALUATION = "evaluation"
DOCTOR = "doctor"
# The fields of job.yaml and opened.json that decide what is executed, cancelled or printed. Without
# them in the mark, another user could use a mark of an earlier run that had the same inode.
NAMED = (
    "job_id",
    "recipe",
    "arguments",
    "root",
    "options",
    "script",
    "log",
    "job",
    "process",
)
# the name of a run without an ID, as `choose` makes it
BY_TIME = re.compile(r"\d{8}-\d{6}-\d+", re.ASCII)


def launch_id(environ: environment.Environ) -> str:
    """An ID that differs for each start of a job, ``<job>.<restart>``; "" outside Slurm."""
    job = environment.job_id(environ)
    return f"{job}.{environment.restarts(environ)}" if job else ""


def choose(run_dir: str, recipe: str, run_id: str | None, base: Path) -> Path:
    """``run_dir`` if it is given, else ``runs/<recipe>/<run_id>`` in the repository of ``base``;
    without an ID, a time stamp.

    If ``run_dir`` is that of a training, the doctor uses a folder in it. Raises MachineError if
    ``run_dir`` is a link of another user.
    """
    if run_dir:
        path = trust.resolved(Path(run_dir).expanduser())
        return inside(path, DOCTOR) if recipe == DOCTOR else path
    now = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
    return source.home(base) / "runs" / recipe / (run_id or now)


def note_job(run_dir: Path, job_id: str, repository: Path) -> None:
    """Makes a link with which the run of a job is found by its ID, if it is outside the folder of
    all runs.
    """
    runs = os.path.realpath(repository / "runs")
    real = os.path.realpath(run_dir)
    if Path(real).is_relative_to(runs):
        return
    link = Path(runs) / "jobs" / job_id
    # A clone may be read-only. The submission and the job may make the link at the same time.
    with contextlib.suppress(OSError):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(real)


def read_status(run_dir: Path) -> files.Json:
    """The content of ``status.json``; {} before the run has begun, and for a file that
    `write_status` has not written.
    """
    status = files.read_json(run_dir / "status.json")
    is_valid = all(isinstance(status.get(name), int | float) for name in ("step", "updated"))
    return status if is_valid else {}


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
    """Replaces ``status.json``.

    kind: why the attempt ended; None while it runs or if it is done. first: the first failing rank,
    with ``rank``, ``host`` and ``exit_status``. `note_next` adds ``next`` later. Raises OSError.
    """
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
        "updated": time.time(),
    }
    files.write_json(run_dir / "status.json", content)


def note_next(run_dir: Path, word: Next, attempt: int) -> None:
    """Sets ``next`` in ``status.json``, if the status is of this attempt: what happens to the job
    after the run was saved.
    """
    with contextlib.suppress(OSError):
        status = read_status(run_dir)
        if status.get("attempt") == attempt:
            files.write_json(run_dir / "status.json", {**status, "next": word})


def inside(run_dir: Path, name: str) -> Path:
    """The folder for an evaluation or the doctor: ``run_dir``, or if a training uses this run
    directory, its folder ``name``.
    """
    # only a training writes this file
    return run_dir / name if os.path.exists(run_dir / "config.yaml") else run_dir


def marked(run_dir: Path, content: files.Json) -> files.Json:
    """``content``, of job.yaml or opened.json, with a mark that binds it to its run directory. A
    copy has another inode, and only this user has the key.
    """
    return {**content, "mark": _mark(run_dir, content)}


def is_marked(run_dir: Path, content: Mapping[str, Any]) -> bool:
    """Whether this user has written this content for ``run_dir``, and it was not copied into it."""
    mark = _mark(run_dir, content)
    return mark != "" and mark == content.get("mark")


def is_copied(run_dir: Path, content: Mapping[str, Any]) -> bool:
    """Whether this content of a run of this user has no valid mark. What a run of another user
    names is only shown, so its owner is believed.
    """
    return run_dir.stat().st_uid == os.geteuid() and not is_marked(run_dir, content)


def _mark(run_dir: Path, content: Mapping[str, Any]) -> str:
    key = trust.user_key()
    named = {name: content.get(name) for name in NAMED}
    for name in ("variables", "purpose"):  # job.yaml of an earlier version has none
        if content.get(name):
            named[name] = content[name]
    if named["job"]:
        named["process"] = None  # only a run outside Slurm is ended by it
    text = json.dumps([run_dir.stat().st_ino, named], sort_keys=True)
    return hmac.new(key, text.encode(), "sha256").hexdigest() if key else ""


def results(run_dir: Path) -> str:
    """The result in ``summary.json`` as part of a line: val_top1, or the metric that selects the
    best checkpoint. "" if there is none.
    """
    summary = files.read_json(run_dir / "summary.json")
    best = summary.get("best") or {}
    name = next((name for name in best if name != "step"), "val_top1")
    last = summary.get(name)
    if not isinstance(last, float):
        return ""
    line = f"; {name} {last:.4f}"
    if isinstance(best.get(name), float) and best[name] != last:
        line += f" (best {best[name]:.4f} at step {best.get('step')})"
    return line


def exit_code(status: files.Json, fallback: int) -> int:
    """The exit status that the content of ``status.json`` determines; otherwise ``fallback``, or 1
    if that is 0.
    """
    known = {"done": EXIT_DONE, "preempted": EXIT_REQUEUE}
    return known.get(status.get("state", ""), status.get("exit_status") or fallback or EXIT_CRASH)
