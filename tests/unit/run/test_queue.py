"""What Slurm says about jobs, and who uses a run directory: by its job, a process on this machine, or a heartbeat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.core import files
from recipes.core.errors import MachineError
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, queue
from tests import helpers


@pytest.fixture
def other() -> Iterator[dict[str, Any]]:
    """What a live process records of itself."""
    code = "import json, os, sys; from recipes.core.run import attempt; print(json.dumps(attempt.describe_process({})), flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=files.ROOT,
    )  # fmt: skip
    assert process.stdout
    about: dict[str, Any] = json.loads(process.stdout.readline())
    yield about
    process.kill()
    process.communicate()


def an_attempt(folder: Path, state: str = "running", job: str | None = None, launch: str = "", **about: Any) -> Path:
    number = helpers.attempt(folder, launch=launch, **{"job": job, **about}).number
    directory.write_status(folder, state, attempt=number, step=3)
    return folder


def look(folder: Path, takeover: bool = False, patience_s: float = 9, **environ: str) -> queue.Usage:
    """Who else uses ``folder``, for an attempt that is opened next."""
    return queue.check(attempts.Attempt(folder, 99), environ, takeover, patience_s)


def test_a_running_process_on_this_machine_uses_the_run_directory(
    tmp_path: Path, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "WATCH_S", 1.0)  # for a heartbeat of the launch that was refused
    an_attempt(tmp_path, **other)
    pid = other["process"]["pid"]
    assert f"process {pid} on " in look(tmp_path).problem
    assert f"end it (kill {pid})" in look(tmp_path).problem
    assert f"process {pid} on " in queue.queued(tmp_path, "", {})
    assert look(tmp_path, takeover=True) == queue.Usage()
    helpers.attempt(tmp_path, step=None)  # a later launch that was refused does not hide it
    assert f"process {pid} on " in look(tmp_path).problem
    directory.write_status(tmp_path, "done", attempt=0, step=3)
    assert not look(tmp_path).problem


@pytest.mark.parametrize(("name", "value"), [("pid", 2**22), ("started", "1")])
def test_an_ended_process_or_another_one_with_its_id_does_not_count(
    tmp_path: Path, other: dict[str, Any], name: str, value: object
) -> None:
    an_attempt(tmp_path, **{**other, "process": {**other["process"], name: value}})
    assert look(tmp_path) == queue.Usage()


def test_another_step_of_the_job_counts_but_an_earlier_start_does_not(tmp_path: Path, other: dict[str, Any]) -> None:
    an_attempt(tmp_path, **{**other, "job": "7", "launch": "7.0", "cluster": ""})
    assert "another step of this job" in look(tmp_path, SLURM_JOB_ID="7").problem
    assert look(tmp_path, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1") == queue.Usage()


@pytest.mark.parametrize("takeover", [False, True])
@pytest.mark.parametrize("state", ["running", "done"])
def test_elements_of_an_array_may_not_share_a_run_directory(tmp_path: Path, takeover: bool, state: str) -> None:
    an_attempt(tmp_path, state, job="7_0", launch="7_0.0", cluster="")
    second = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    assert look(tmp_path, takeover, **second).problem == (
        f"run_dir={tmp_path}: element 7_0 of this job array uses it, and each element needs its own: "
        "launch.py makes such an array (sweep.KEY=A,B)"
    )
    first = {**second, "SLURM_ARRAY_TASK_ID": "0", "SLURM_RESTART_COUNT": "1"}
    assert look(tmp_path, takeover, **first) == queue.Usage()


def test_the_heartbeat_decides_if_slurm_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "WATCH_S", 3.0)
    monkeypatch.setenv("PATH", "")
    an_attempt(
        tmp_path, job="7", launch="7.0", cluster="here", process={"host": "x", "pid": 1, "started": "1", "place": "x"}
    )
    here = {"SLURM_JOB_ID": "8", "SLURM_CLUSTER_NAME": "here", "PATH": ""}
    found = look(tmp_path, **here)
    assert not found.problem
    assert (
        "job 7 on a has used it, and counts as ended, since it has no heartbeat (scontrol is not on the PATH"
        in found.note
    )
    over = threading.Event()

    def beats() -> None:
        while not over.wait(0.2):
            attempts.heartbeat(attempts.Attempt(tmp_path, 0))

    thread = threading.Thread(target=beats)
    thread.start()
    try:
        found = look(tmp_path, **here)
        elsewhere = look(tmp_path, **{**here, "SLURM_CLUSTER_NAME": "other"})
        at_submission = look(tmp_path, patience_s=0, **here)
    finally:
        over.set()
        thread.join()
    assert "job 7 on a (its heartbeat advances; scontrol is not on the PATH" in found.problem
    assert "it is a job of cluster here" in elsewhere.problem
    assert not at_submission.problem
    os.utime(tmp_path / "attempts/0000/opened.json", (1, 1))
    monkeypatch.setattr(queue, "WATCH_S", 1e6)
    assert "no heartbeat" in look(tmp_path, patience_s=1e6, **here).note  # an old one is not waited for


def answering(folder: Path, *fields: str) -> dict[str, str]:
    """The environment of a job, with a scontrol that says this of job 7 and notes each question."""
    folder.mkdir()
    lines = "\\n".join(["JobId=7 JobName=x", *fields])
    (folder / "scontrol").write_text(f"#!/bin/sh\necho asked >>{folder}/asked\nprintf '{lines}\\n'\n")
    (folder / "scontrol").chmod(0o755)
    return {"SLURM_JOB_ID": "8", "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("state", "batch", "fields", "used"),
    [
        ("running", "1", ("JobState=RUNNING",), "job 7 (running) uses it"),
        ("running", "0", ("JobState=RUNNING",), "job 7 (running) uses it"),
        ("preempted", "1", ("JobState=RUNNING",), "job 7 (running) uses it"),  # its batch script may requeue it yet
        ("preempted", "0", ("JobState=RUNNING",), ""),  # salloc
        ("preempted", "1", ("JobState=REQUEUE_HOLD Reason=x", "Restarts=1"), "job 7, which was requeued and is pending, will use it"),
        ("running", "1", ("JobState=FAILED",), ""),
    ],
)  # fmt: skip
def test_slurm_is_asked_once_for_the_state_of_the_job(
    tmp_path: Path, state: str, batch: str, fields: tuple[str, ...], used: str
) -> None:
    environ = answering(tmp_path / "bin", *fields, f"BatchFlag={batch}")
    an_attempt(tmp_path, state, job="7", launch="7.0", cluster="")
    problem = look(tmp_path, **environ).problem
    assert used in problem if used else not problem
    assert (tmp_path / "bin/asked").read_text() == "asked\n"
    assert bool(queue.queued(tmp_path, "", environ)) == bool(used)
    assert (tmp_path / "bin/asked").read_text() == "asked\n" * 2
    assert queue.queued(tmp_path, "afterany:7", environ) == ""


def test_a_requeued_job_counts_as_a_future_user(tmp_path: Path) -> None:
    environ = answering(tmp_path / "bin", "JobState=PENDING", "Restarts=1")
    an_attempt(tmp_path, "failed", job="7", launch="7.0", cluster="")
    assert queue.queued(tmp_path, "", environ) == ""
    files.write_json(tmp_path / "job.yaml", {"job_id": "7"})
    assert "job 7, which was requeued and is pending, will use it" in queue.queued(tmp_path, "", environ)
    assert (tmp_path / "bin/asked").read_text() == "asked\n"


# Printed by Slurm 22.05, shortened; the name and the paths hold what a user may type.
PRINTED = """\
JobId=12 ArrayJobId=11 ArrayTaskId=0 ArrayTaskThrottle=2 JobName=a b JobState=DONE
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=CANCELLED Reason=BeginTime Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:9
   NodeList=node[1-2]
   Command=/home/me/my jobs/x=1.sh
   StdErr=
   StdOut=/home/me/my jobs/log
   Comment=Restarts=7 x
   SystemComment=see JobState=RUNNING

JobId=13 JobName=b
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=3:0
"""


def test_each_job_that_scontrol_prints_is_parsed() -> None:
    task, plain = queue.parse(PRINTED)
    assert (task.id, task.state, task.reason) == ("11_0", "CANCELLED", "BeginTime")
    assert (task.exit_status, task.restarts, task.ended) == (137, 2, True)
    assert task.fields["JobName"] == "a b JobState=DONE"
    assert task.fields["Command"] == "/home/me/my jobs/x=1.sh"
    assert task.fields["StdErr"] == ""
    assert (plain.id, plain.state, plain.reason, plain.exit_status, plain.ended) == ("13", "RUNNING", "", 3, False)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", None),
        ("echo Job 7 not found; exit 1", None),  # printed for 7_1 while other elements of array 7 are known
        ("echo Unable to contact slurm controller >&2; exit 1", "does not answer: Unable to contact"),
        ("exec /bin/sleep 60", r"^Slurm's controller has not answered within 0\.5 s$"),
        ("", "not on the PATH"),
    ],
)
def test_an_unknown_job_is_none_and_an_unavailable_controller_is_an_error(
    tmp_path: Path, script: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if expected is None:
        assert queue.find("7", os.environ) is None
    else:
        with pytest.raises(MachineError, match=expected):
            queue.show("7", os.environ, timeout_s=0.5 if "sleep" in script else queue.ANSWER_S)


def test_a_job_name_that_is_not_utf8_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_bytes(b"#!/bin/sh\necho 'JobId=7 JobName=\xe9t\xe9\n JobState=RUNNING'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [job.state for job in queue.show("7", os.environ)] == ["RUNNING"]
