"""The run directory: where it is, files that are whole or not there, and the story that its records tell."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from recipes.core import errors, files
from recipes.core.errors import Kind, Next
from recipes.core.run import failures, rundir

HOSTS = ["a", "a", "b", "b"]
LAUNCH = "12.0"


def opened(run_dir: Path, hosts: list[str] = HOSTS, launch: str = LAUNCH) -> int:
    """Begins an attempt, as rank 0 does, and gives its number."""
    (run_dir / "failures").mkdir(exist_ok=True)
    return rundir.open_attempt(run_dir, hosts, launch)


def fail(run_dir: Path, rank: int, kind: Kind, *, error: str = "ValueError: x", at: float | None = None) -> None:
    """Leaves a record of attempt 0, at a time of the caller's choice."""
    failures.record(run_dir, attempt=0, rank=rank, host=HOSTS[rank], kind=kind, error=error, moment=at)


def begun(run_dir: Path, state: str = "running", step: int = 7) -> int:
    attempt = opened(run_dir)
    rundir.write_status(run_dir, state, attempt=attempt, step=step)
    return attempt


# --- where


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "12"}, "12"),
        ({"SLURM_JOB_ID": ""}, None),
        ({"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0"}, "12_0"),
        ({"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12"}, "14"),
    ],
)
def test_the_job_id_is_that_of_the_job_or_array_task(variables: dict[str, str], expected: str | None) -> None:
    assert rundir.job_id(variables) == expected


def test_the_run_directory_is_the_given_one_else_named_by_job_or_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    assert rundir.choose("a/../b", "mnist", "7", Path("/base")) == tmp_path / "b"
    assert rundir.choose("/x/y", "mnist", "7", tmp_path) == Path("/x/y")
    assert rundir.choose("~/y", "mnist", "7", tmp_path) == Path("/home/me/y")
    assert rundir.choose("", "mnist", "12_0", tmp_path) == tmp_path / "runs" / "mnist" / "12_0"
    (tmp_path / "round").symlink_to("round")
    assert rundir.choose("round", "mnist", "7", tmp_path) == tmp_path / "round"  # what makes it says what is wrong
    stamped = rundir.choose("", "mnist", None, tmp_path)
    assert stamped.parent == tmp_path / "runs" / "mnist"
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{os.getpid()}", stamped.name)


def test_each_launch_of_a_job_has_its_own_id() -> None:
    job = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0"}
    assert rundir.launch_id({}) == ""
    assert rundir.launch_id(job) == "12_0.0"
    assert rundir.launch_id({**job, "SLURM_RESTART_COUNT": ""}) == "12_0.0"
    assert rundir.launch_id({**job, "SLURM_RESTART_COUNT": "2"}) == "12_0.2"
    assert rundir.launch_id({**job, "RECIPES_LAUNCH": "host.7"}) == "host.7"


# --- files


@pytest.mark.parametrize("content", [b"", b'{"state": "runn', b"\x00" * 40, b"[1]", b"null", b"\xff\xfe{}"])
def test_a_damaged_status_file_reads_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "status.json").write_bytes(content)
    assert rundir.read_status(tmp_path) is None
    assert rundir.close(tmp_path, LAUNCH) is None


def test_a_missing_status_file_reads_as_none(tmp_path: Path) -> None:
    assert rundir.read_status(tmp_path) is None
    assert rundir.read_status(tmp_path / "no" / "folder") is None
    (tmp_path / "status.json").mkdir()
    assert rundir.read_status(tmp_path) is None


# --- attempts


def test_attempts_are_numbered_from_zero_and_record_their_hosts(tmp_path: Path) -> None:
    assert [opened(tmp_path, [f"h{i}"]) for i in range(3)] == [0, 1, 2]
    attempt = files.read_json(tmp_path / "attempt.json")
    assert attempt
    assert (attempt["attempt"], attempt["hosts"]) == (2, ["h2"])


def test_next_is_added_to_the_status_of_the_same_attempt(tmp_path: Path) -> None:
    rundir.note_next(tmp_path, Next.requeued, 0)
    assert not (tmp_path / "status.json").exists()
    begun(tmp_path, "preempted")
    before = rundir.read_status(tmp_path)
    rundir.note_next(tmp_path, Next.cancelled, 1)
    assert rundir.read_status(tmp_path) == before
    rundir.note_next(tmp_path, Next.requeued, 0)
    assert rundir.read_status(tmp_path) == {**(before or {}), "next": "requeued"}


# --- the end


def test_close_sets_a_running_status_to_failed_with_the_verdict(tmp_path: Path) -> None:
    begun(tmp_path)
    fail(tmp_path, 2, Kind.error, error="ValueError: boom")
    status = rundir.close(tmp_path, LAUNCH, reason="rank 1 was killed", first={"rank": 1, "host": "a"})
    assert status == rundir.read_status(tmp_path)
    assert status
    assert (status["state"], status["attempt"], status["step"]) == ("failed", 0, 7)
    assert status["reason"] == "rank 2 on b failed first: ValueError: boom"
    assert (status["first_failing_rank"], status["first_failing_host"]) == (2, "b")


def test_close_uses_the_callers_reason_without_failure_records(tmp_path: Path) -> None:
    begun(tmp_path)
    status = rundir.close(tmp_path, LAUNCH, reason="rank 1 was killed by SIGKILL", first={"rank": 1, "host": "a"})
    assert status
    assert (status["state"], status["reason"]) == ("failed", "rank 1 was killed by SIGKILL")
    assert (status["first_failing_rank"], status["first_failing_host"]) == (1, "a")


def test_a_run_whose_ranks_all_exited_with_0_before_its_end_is_incomplete(tmp_path: Path) -> None:
    begun(tmp_path)
    status = rundir.close(tmp_path, LAUNCH, all_ended_well=True)
    assert status
    assert status["state"] == "incomplete"
    assert rundir.exit_code(status, 0) == errors.EXIT_CRASH


@pytest.mark.parametrize("state", ["done", "preempted", "failed", "incomplete"])
def test_close_does_not_change_a_final_status(tmp_path: Path, state: str) -> None:
    begun(tmp_path, state)
    fail(tmp_path, 2, Kind.error)
    before = (tmp_path / "status.json").read_bytes()
    status = rundir.close(tmp_path, LAUNCH, reason="x", first={"rank": 1, "host": "a"})
    assert status
    assert status["state"] == state
    assert (tmp_path / "status.json").read_bytes() == before


def test_close_does_not_change_the_status_of_another_launch(tmp_path: Path) -> None:
    begun(tmp_path)
    assert rundir.close(tmp_path, "12.1") is None
    status = rundir.read_status(tmp_path)
    assert status
    assert status["state"] == "running"


def test_a_refusal_is_read_only_by_its_launch(tmp_path: Path) -> None:
    run_dir = tmp_path / "new" / "run"
    rundir.refuse(run_dir, LAUNCH, 2, "host: no data")
    note = rundir.refusal(run_dir, LAUNCH)
    assert note
    assert (note["exit_status"], note["line"]) == (2, "host: no data")
    assert rundir.refusal(run_dir, "12.1") is None
    assert rundir.refusal(tmp_path, LAUNCH) is None
    assert not (run_dir / "status.json").exists()
    (tmp_path / "file").touch()
    rundir.refuse(tmp_path / "file" / "run", LAUNCH, 2, "x")  # nowhere to note it: the line was said


def test_close_does_not_change_the_status_after_a_refused_attempt(tmp_path: Path) -> None:
    begun(tmp_path, "preempted")
    before = (tmp_path / "status.json").read_bytes()
    opened(tmp_path)
    rundir.refuse(tmp_path, LAUNCH, 2, "other keys")
    assert rundir.close(tmp_path, LAUNCH) is None
    assert (tmp_path / "status.json").read_bytes() == before


def test_close_reports_an_attempt_that_was_killed_before_it_began(tmp_path: Path) -> None:
    begun(tmp_path, "done")
    opened(tmp_path)
    status = rundir.close(tmp_path, LAUNCH, reason="rank 1 was killed", first={"rank": 1, "host": "a"})
    assert status
    assert (status["state"], status["attempt"], status["reason"]) == ("failed", 1, "rank 1 was killed")


@pytest.mark.parametrize(
    ("status", "fallback", "expected"),
    [
        ({"state": "done"}, 143, 0),
        ({"state": "preempted"}, 143, 75),
        ({"state": "preempted"}, 0, 75),
        ({"state": "failed", "exit_status": 2}, 143, 2),
        ({"state": "failed", "exit_status": None}, 143, 143),
        ({"state": "failed", "exit_status": None}, 0, 1),
        ({"state": "incomplete"}, 0, 1),
        ({"state": "running"}, 0, 1),
        (None, 0, 1),
        (None, 3, 3),
    ],
)
def test_the_exit_status_follows_from_the_status_file(
    status: dict[str, Any] | None, fallback: int, expected: int
) -> None:
    assert rundir.exit_code(status, fallback) == expected


def test_an_unknown_state_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        rundir.write_status(tmp_path, "finished", attempt=0, step=0)
    assert not os.listdir(tmp_path)


def test_an_attempt_owns_the_run_directory_until_the_next_one_begins(tmp_path: Path) -> None:
    assert rundir.owner(tmp_path) is None
    rundir.open_attempt(tmp_path, ["a"], "1.0")
    rundir.begin_attempt_at(tmp_path, 0)
    rundir.write_status(tmp_path, "running", attempt=0, step=5)
    rundir.open_attempt(tmp_path, ["b"], "2.0")  # and is refused
    assert rundir.open_attempt(tmp_path, ["c"], "3.0") == 2  # and is refused too: their records are not to be mixed
    mine = rundir.owner(tmp_path)
    assert mine
    assert (mine["attempt"], mine["launch"]) == (0, "1.0")
    assert rundir.owner(tmp_path, attempt=0, launch="1.0")
    assert rundir.owner(tmp_path, attempt=2, launch="3.0")
    assert rundir.owner(tmp_path, launch="2.0") is None
    assert rundir.close(tmp_path, "3.0") is None  # it was killed in its start, say, and the first one runs
    assert (rundir.read_status(tmp_path) or {})["state"] == "running"
    closed = rundir.close(tmp_path, "1.0")
    assert closed
    assert (closed["state"], closed["attempt"]) == ("failed", 0)
    rundir.begin_attempt_at(tmp_path, 5)
    assert rundir.owner(tmp_path, launch="1.0") is None
    assert rundir.owner(tmp_path) == rundir.owner(tmp_path, launch="3.0")
    assert "before" not in (files.read_json(tmp_path / "attempt.json") or {})


def test_an_attempt_does_not_begin_after_a_later_one_was_opened(tmp_path: Path) -> None:
    rundir.open_attempt(tmp_path, ["a"], "1.0")
    rundir.open_attempt(tmp_path, ["b"], "2.0")  # while the first one looks about
    before = (tmp_path / "attempt.json").read_bytes()
    with pytest.raises(errors.MachineError, match=r"a later attempt writes here \(2\.0\); this one ends"):
        rundir.begin_attempt_at(tmp_path, 7, attempt=0, launch="1.0")
    assert (tmp_path / "attempt.json").read_bytes() == before
    rundir.begin_attempt_at(tmp_path, 7, attempt=1, launch="2.0")
    with pytest.raises(errors.MachineError, match="a later attempt writes here"):
        rundir.check_owner(tmp_path, 0, "1.0")
    rundir.check_owner(tmp_path, 1, "2.0")


@pytest.mark.parametrize("silent", [0, 1])
def test_one_failed_read_does_not_count_as_a_later_attempt(
    tmp_path: Path, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir.open_attempt(tmp_path, ["a"], "1.0")
    looks, look = iter(range(9)), files.read_json
    monkeypatch.setattr(files, "read_json", lambda path: None if next(looks) == silent else look(path))
    rundir.check_owner(tmp_path, 0, "1.0")


def test_a_requeued_attempt_that_never_began_has_failed(tmp_path: Path) -> None:
    rundir.open_attempt(tmp_path, ["a"], "7.0")
    rundir.begin_attempt_at(tmp_path, 0)
    rundir.write_status(tmp_path, "running", attempt=0, step=5)  # its node died
    rundir.open_attempt(tmp_path, ["a"], "7.1")
    closed = rundir.close(tmp_path, "7.1")
    assert closed
    assert (closed["state"], closed["attempt"]) == ("failed", 1)


def test_close_returns_the_status_if_it_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rundir.open_attempt(tmp_path, ["a"], "7.0")
    rundir.begin_attempt_at(tmp_path, 0)
    rundir.write_status(tmp_path, "running", attempt=0, step=5)

    def full(*arguments: object, **words: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_json", full)
    closed = rundir.close(tmp_path, "7.0")
    assert closed
    assert (closed["state"], closed["step"]) == ("failed", 5)
    assert rundir.exit_code(closed, 1) == 1


def test_evaluations_and_examinations_have_their_own_folder(tmp_path: Path) -> None:
    evaluation = tmp_path / rundir.EVALUATION
    evaluation.mkdir()
    rundir.open_attempt(evaluation, ["a"], "9.0")
    rundir.refuse(evaluation, "9.0", 2, "another model")
    assert rundir.refusal(tmp_path, "9.0") == {"launch": "9.0", "exit_status": 2, "line": "another model"}
    assert rundir.refusal(tmp_path, "9.1") is None
    assert rundir.for_examination(tmp_path) == tmp_path
    (tmp_path / "config.yaml").touch()
    assert rundir.for_examination(tmp_path) == tmp_path / "doctor"
