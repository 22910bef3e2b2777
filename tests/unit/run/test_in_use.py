"""Who uses a run directory: by its job, a process on this machine, or a heartbeat."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.core import files
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, in_use
from tests import helpers
from tests.unit.launch.stand_ins import Stubs


@pytest.fixture
def other() -> Iterator[dict[str, Any]]:
    """What a live process records of itself."""
    with subprocess.Popen(["sleep", "600"]) as process:
        started = attempts.start_time(process.pid)
        place = attempts.namespace()
        yield {
            "cluster": None,
            "process": {"host": "here", "pid": process.pid, "started": started, "place": place},
        }
        process.kill()


def an_attempt(
    folder: Path, state: str = "running", job: str | None = None, launch: str = "", **about: Any
) -> Path:
    number = helpers.attempt(folder, launch=launch, **{"job": job, **about}).number
    directory.write_status(folder, state, attempt=number, step=3)
    return folder


def look(folder: Path, patience_s: float = 9, **environ: str) -> str:
    """Who else uses ``folder``, for an attempt that is opened next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", environ.get("PATH", os.environ["PATH"]))
        return in_use.check(attempts.Attempt(folder, 99), environ, patience_s)


def test_a_running_process_uses_the_run(
    tmp_path: Path, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_use, "WATCH_S", 1.0)  # for a heartbeat of the launch that was refused
    an_attempt(tmp_path, **other)
    pid = other["process"]["pid"]
    assert f"process {pid} on " in look(tmp_path)
    assert f"end it (kill {pid})" in look(tmp_path)
    helpers.attempt(tmp_path, step=None)  # a later launch that was refused does not hide it
    assert f"process {pid} on " in look(tmp_path)
    directory.write_status(tmp_path, "done", attempt=0, step=3)
    assert not look(tmp_path)
    directory.write_status(tmp_path, "done", attempt=8, step=3)  # of another attempt
    assert look(tmp_path)
    assert not in_use.check(attempts.Attempt(tmp_path, 0), {}, 0)  # of itself
    ended = tmp_path / "attempts/0000/ended.json"
    files.write_json(ended, {"state": "failed"})
    assert not look(tmp_path)
    ended.unlink()
    assert not look(
        an_attempt(tmp_path, "done")
    )  # it took the run over, so the first one had ended


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pid", 2**22),
        ("started", "1"),
    ],
)
def test_ended_or_other_processes_do_not_count(
    tmp_path: Path, other: dict[str, Any], name: str, value: object
) -> None:
    an_attempt(tmp_path, **{**other, "process": {**other["process"], name: value}})
    assert look(tmp_path) == ""


def test_another_step_of_the_job_counts_but_an_earlier_start_does_not(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    an_attempt(tmp_path, **{**other, "job": "7", "launch": "7.0", "cluster": ""})
    assert "another Slurm step of this job" in look(tmp_path, SLURM_JOB_ID="7")
    assert look(tmp_path, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1") == ""
    pid = other["process"]["pid"]
    os.kill(pid, signal.SIGKILL)
    helpers.wait_until(lambda: not helpers.alive(pid), 10, "the end of the step")
    assert look(tmp_path, SLURM_JOB_ID="7") == ""  # a zombie


def test_the_heartbeat_decides_if_slurm_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_use, "WATCH_S", 3.0)
    process = {"host": "x", "pid": 1, "started": "1", "place": "x"}
    about = {"cluster": "here", "process": process, "hosts": ("a", "b")}
    an_attempt(tmp_path, job="7", launch="7.0", **about)
    here = {"SLURM_JOB_ID": "8", "SLURM_CLUSTER_NAME": "here", "PATH": ""}
    assert look(tmp_path, **here) == ""
    over = threading.Event()

    def beats() -> None:
        while not over.wait(0.2):
            attempts.heartbeat(attempts.Attempt(tmp_path, 0))

    thread = threading.Thread(target=beats)
    thread.start()
    try:
        for cluster in ("here", "other"):
            line = look(tmp_path, **{**here, "SLURM_CLUSTER_NAME": cluster})
            assert "job 7 on a (it still writes heartbeats) uses it: end it" in line
        assert look(tmp_path, patience_s=0, **here) == ""  # at the submission
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("cluster", "own", "decides"),
    [
        (None, {}, "heartbeat"),
        (None, {"SLURM_JOB_ID": "8", "SLURM_CLUSTER_NAME": "here"}, "heartbeat"),
        ("here", {"SLURM_JOB_ID": "8", "SLURM_CLUSTER_NAME": "here"}, "Slurm"),
        ("", {"SLURM_JOB_ID": "8", "SLURM_CLUSTER_NAME": "here"}, "Slurm"),
        ("here", {}, "Slurm"),
        ("there", {"SLURM_JOB_ID": "8", "SLURM_CLUSTER_NAME": "here"}, "heartbeat"),
    ],
)
def test_only_a_job_of_this_cluster_is_looked_up_in_slurm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cluster: str | None,
    own: dict[str, str],
    decides: str,
) -> None:
    """Its process is on another machine. Another cluster may have a job of the same number."""
    monkeypatch.setattr(in_use, "_check_by_slurm", lambda *of: "Slurm")
    monkeypatch.setattr(in_use, "_check_by_heartbeat", lambda *of: "heartbeat")
    process = {"host": "x", "pid": 1, "started": "1", "place": "x"}
    an_attempt(tmp_path, job="7", launch="7.0", cluster=cluster, process=process)
    assert look(tmp_path, **own) == decides


@pytest.mark.parametrize(
    ("state", "fields", "used"),
    [
        ("running", ("JobState=RUNNING",), "job 7 (running) uses it"),
        (
            "preempted",
            ("JobState=RUNNING",),
            "job 7 (running) uses it",
        ),  # its batch script may requeue it yet
        (
            "preempted",
            ("JobState=REQUEUE_HOLD Reason=x", "Restarts=1"),
            "job 7 (requeue_hold) uses it",
        ),
        ("preempted", ("JobState=RUNNING BatchFlag=0",), ""),  # of salloc
        ("running", ("JobState=FAILED",), ""),
    ],
)
def test_slurm_is_asked_once_for_the_state_of_the_job(
    tmp_path: Path, stubs: Stubs, state: str, fields: tuple[str, ...], used: str
) -> None:
    stubs.add("scontrol", r"printf '%s\n' 'JobId=7 JobName=x' " + shlex.join(fields))
    an_attempt(tmp_path, state, job="7", launch="7.0", cluster="")
    problem = look(tmp_path, SLURM_JOB_ID="8")
    assert used in problem if used else not problem
    assert len(stubs.calls("scontrol")) == 1


def test_a_job_that_is_ending_counts_unless_nobody_waits_for_it(
    tmp_path: Path, stubs: Stubs
) -> None:
    stubs.add("scontrol", "echo JobId=7; echo JobState=COMPLETING")
    an_attempt(tmp_path, job="7", launch="7.0", cluster="here")
    assert look(tmp_path, patience_s=0, SLURM_JOB_ID="8") == ""
    line = "job 7 (completing) uses it: cancel it (scancel 7), or "
    assert line in look(tmp_path, patience_s=1e-9, SLURM_JOB_ID="8")
