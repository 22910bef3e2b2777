"""The run directory: where it is, files that are whole or not there, and the story that its records tell."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.core import errors, files
from recipes.core.errors import Kind, Next
from recipes.core.run import rundir

HOSTS = ["a", "a", "b", "b"]
LAUNCH = "12.0"


def opened(run_dir: Path, hosts: list[str] = HOSTS, launch: str = LAUNCH) -> int:
    """Begins an attempt, as rank 0 does, and gives its number."""
    (run_dir / "failures").mkdir(exist_ok=True)
    return rundir.open_attempt(run_dir, hosts, launch)


def fail(run_dir: Path, rank: int, kind: Kind, *, error: str = "ValueError: x", at: float | None = None) -> None:
    """Leaves a record of attempt 0, at a time of the caller's choice."""
    rundir.record_failure(run_dir, attempt=0, rank=rank, host=HOSTS[rank], kind=kind, error=error, moment=at)


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
def test_job_id(variables: dict[str, str], expected: str | None) -> None:
    assert rundir.job_id(variables) == expected


def test_choose_takes_what_is_given_then_the_id_then_a_time_stamp(
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


def test_a_launch_is_told_from_an_earlier_one_of_the_same_job() -> None:
    job = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0"}
    assert rundir.launch_id({}) == ""
    assert rundir.launch_id(job) == "12_0.0"
    assert rundir.launch_id({**job, "SLURM_RESTART_COUNT": ""}) == "12_0.0"
    assert rundir.launch_id({**job, "SLURM_RESTART_COUNT": "2"}) == "12_0.2"
    assert rundir.launch_id({**job, "RECIPES_LAUNCH": "host.7"}) == "host.7"


# --- files


def test_write_json_replaces_the_whole_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    files.write_json(path, {"a": 1})
    files.write_json(path, {"b": "ü"})
    assert files.read_json(path) == {"b": "ü"}
    assert os.listdir(tmp_path) == ["x.json"]


def test_write_json_that_fails_at_any_point_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    files.write_json(path, {"a": 1})

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(OSError, match="No space"):
                files.write_json(path, {"b": 2})
        assert files.read_json(path) == {"a": 1}, name
        assert os.listdir(tmp_path) == ["x.json"], name
    with pytest.raises(TypeError):
        files.write_json(path, {"b": object()})
    assert files.read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_write_json_flushes_before_it_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        real = getattr(os, name)

        def call(*arguments: Any) -> None:
            done.append(name)
            real(*arguments)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name))
    files.write_json(tmp_path / "x.json", {})
    assert done == ["fsync", "replace", "fsync"]  # the file, then its name


@pytest.mark.parametrize("content", [b"", b'{"state": "runn', b"\x00" * 40, b"[1]", b"null", b"\xff\xfe{}"])
def test_a_torn_or_foreign_file_reads_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "status.json").write_bytes(content)
    assert rundir.read_status(tmp_path) is None
    assert rundir.close(tmp_path, LAUNCH) is None


def test_what_is_not_there_reads_as_none(tmp_path: Path) -> None:
    assert rundir.read_status(tmp_path) is None
    assert rundir.read_status(tmp_path / "no" / "folder") is None
    (tmp_path / "status.json").mkdir()
    assert rundir.read_status(tmp_path) is None


# --- attempts


def test_attempts_are_numbered_from_zero_and_know_their_hosts(tmp_path: Path) -> None:
    assert [opened(tmp_path, [f"h{i}"]) for i in range(3)] == [0, 1, 2]
    attempt = files.read_json(tmp_path / "attempt.json")
    assert attempt
    assert (attempt["attempt"], attempt["hosts"]) == (2, ["h2"])


def test_failed_ranks_are_those_of_the_attempt_asked_for(tmp_path: Path) -> None:
    begun(tmp_path)
    fail(tmp_path, 3, Kind.peer_lost)
    rundir.record_failure(tmp_path, attempt=1, rank=2, host="b", kind=Kind.error, error="x")
    rundir.record_failure(tmp_path, attempt=10, rank=1, host="a", kind=Kind.error, error="x")
    assert rundir.failed_ranks(tmp_path, 0) == [3]
    assert rundir.failed_ranks(tmp_path, 1) == [2]


# --- who failed first


def test_verdict_without_an_attempt(tmp_path: Path) -> None:
    why, who, _ = rundir.verdict(tmp_path)
    assert "before its first step" in why
    assert who is None


def test_verdict_a_ranks_own_error_counts_before_an_earlier_lost_peer(tmp_path: Path) -> None:
    begun(tmp_path)
    fail(tmp_path, 0, Kind.peer_lost, error="RuntimeError: connection closed", at=1.0)
    fail(tmp_path, 3, Kind.error, error="ValueError: late", at=3.0)
    fail(tmp_path, 2, Kind.error, error="ValueError: boom", at=2.0)
    why, who, _ = rundir.verdict(tmp_path)
    assert why == "rank 2 on b failed first: ValueError: boom"
    assert who
    assert (who["rank"], who["host"]) == (2, "b")


def test_verdict_an_early_exit_is_a_ranks_own_failure(tmp_path: Path) -> None:
    begun(tmp_path)
    fail(tmp_path, 0, Kind.peer_lost, at=1.0)
    fail(tmp_path, 1, Kind.exited, error="left", at=2.0)
    assert rundir.verdict(tmp_path)[0] == "rank 1 on a failed first: left"


def test_verdict_a_rank_without_a_word_among_peers_was_killed(tmp_path: Path) -> None:
    begun(tmp_path)
    for rank in (0, 1, 3):
        fail(tmp_path, rank, Kind.peer_lost)
    why, who, _ = rundir.verdict(tmp_path)
    assert why.startswith("rank 2 on b exited without an error record")
    assert who == {"rank": 2, "host": "b"}


def test_verdict_names_four_silent_ranks_and_counts_the_others(tmp_path: Path) -> None:
    opened(tmp_path, [f"h{i}" for i in range(8)])
    rundir.record_failure(tmp_path, attempt=0, rank=1, host="h1", kind=Kind.peer_lost, error="x")
    why, who, _ = rundir.verdict(tmp_path)
    assert why.startswith(
        "rank 0 on h0, rank 2 on h2, rank 3 on h3, rank 4 on h4 and 3 more exited without an error record"
    )
    assert who == {"rank": 0, "host": "h0"}


def test_verdict_where_all_only_lost_peers_names_the_earliest(tmp_path: Path) -> None:
    begun(tmp_path)
    for rank in range(4):
        fail(tmp_path, rank, Kind.timeout, error="DistError: timed out", at=10.0 - rank)
    assert rundir.verdict(tmp_path)[0] == "rank 3 on b lost its peers: DistError: timed out"


def test_verdict_without_any_record(tmp_path: Path) -> None:
    begun(tmp_path)
    why, who, _ = rundir.verdict(tmp_path)
    assert why.startswith("all ranks exited without an error record")
    assert who is None


def test_verdict_looks_at_the_newest_attempt_alone_and_past_torn_records(tmp_path: Path) -> None:
    begun(tmp_path)
    fail(tmp_path, 2, Kind.error, error="old")
    opened(tmp_path)
    (tmp_path / "failures" / "attempt-1-rank-0.json").write_text('{"rank": 0, "ho')
    assert rundir.verdict(tmp_path)[0].startswith("all ranks exited without an error record")
    rundir.record_failure(tmp_path, attempt=1, rank=1, host="a", kind=Kind.error, error="new")
    assert rundir.verdict(tmp_path)[0] == "rank 1 on a failed first: new"


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([(0, Kind.peer_lost), (3, Kind.disk_full), (2, Kind.error)], Kind.disk_full),
        ([(1, Kind.hang), (0, Kind.timeout)], Kind.hang),
        ([(0, Kind.peer_lost), (1, Kind.peer_lost), (3, Kind.timeout)], Kind.killed),
        ([(0, Kind.peer_lost), (1, Kind.timeout), (2, Kind.peer_lost), (3, Kind.peer_lost)], Kind.timeout),
        ([], Kind.killed),
    ],
)
def test_the_status_has_the_kind_of_the_first_failure(
    tmp_path: Path, records: list[tuple[int, Kind]], expected: Kind
) -> None:
    begun(tmp_path)
    for at, (rank, kind) in enumerate(records):
        fail(tmp_path, rank, kind, at=float(at))
    assert rundir.verdict(tmp_path).kind is expected
    rundir.close(tmp_path, LAUNCH)
    assert (rundir.read_status(tmp_path) or {})["kind"] == expected.value


def test_a_rank_that_another_one_timed_out_waiting_for_is_of_that_kind(tmp_path: Path) -> None:
    begun(tmp_path)
    behind = {"rank": 2, "host": "b", "at": "step 7 (backward)"}
    rundir.record_failure(tmp_path, attempt=0, rank=0, host="a", kind=Kind.timeout, error="x", behind=behind)
    expected = "rank 2 on b got no further than step 7 (backward), and the other ranks timed out waiting for it"
    assert rundir.verdict(tmp_path) == (expected, behind, Kind.timeout)


def test_the_records_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    begun(tmp_path)
    for rank in (0, 1, 3):
        fail(tmp_path, rank, "peer")  # type: ignore[arg-type]
    assert rundir.verdict(tmp_path).kind is Kind.killed
    fail(tmp_path, 2, "exit", error="left")  # type: ignore[arg-type]
    assert rundir.verdict(tmp_path).reason == "rank 2 on b failed first: left"


def test_what_happened_to_the_job_is_added_to_the_status(tmp_path: Path) -> None:
    rundir.note_next(tmp_path, Next.requeued, 0)
    assert not (tmp_path / "status.json").exists()
    begun(tmp_path, "preempted")
    before = rundir.read_status(tmp_path)
    rundir.note_next(tmp_path, Next.cancelled, 1)
    assert rundir.read_status(tmp_path) == before
    rundir.note_next(tmp_path, Next.requeued, 0)
    assert rundir.read_status(tmp_path) == {**(before or {}), "next": "requeued"}


# --- the end


def test_close_turns_running_into_failed_with_the_verdict(tmp_path: Path) -> None:
    begun(tmp_path)
    fail(tmp_path, 2, Kind.error, error="ValueError: boom")
    status = rundir.close(tmp_path, LAUNCH, reason="rank 1 was killed", first={"rank": 1, "host": "a"})
    assert status == rundir.read_status(tmp_path)
    assert status
    assert (status["state"], status["attempt"], status["step"]) == ("failed", 0, 7)
    assert status["reason"] == "rank 2 on b failed first: ValueError: boom"
    assert (status["first_failing_rank"], status["first_failing_host"]) == (2, "b")


def test_close_takes_what_the_caller_saw_where_the_ranks_left_no_word(tmp_path: Path) -> None:
    begun(tmp_path)
    status = rundir.close(tmp_path, LAUNCH, reason="rank 1 was killed by SIGKILL", first={"rank": 1, "host": "a"})
    assert status
    assert (status["state"], status["reason"]) == ("failed", "rank 1 was killed by SIGKILL")
    assert (status["first_failing_rank"], status["first_failing_host"]) == (1, "a")


def test_close_ranks_that_all_ended_well_before_the_end_are_incomplete(tmp_path: Path) -> None:
    begun(tmp_path)
    status = rundir.close(tmp_path, LAUNCH, all_ended_well=True)
    assert status
    assert status["state"] == "incomplete"
    assert rundir.exit_code(status, 0) == errors.EXIT_CRASH


@pytest.mark.parametrize("state", ["done", "preempted", "failed", "incomplete"])
def test_close_leaves_an_outcome_that_is_there(tmp_path: Path, state: str) -> None:
    begun(tmp_path, state)
    fail(tmp_path, 2, Kind.error)
    before = (tmp_path / "status.json").read_bytes()
    status = rundir.close(tmp_path, LAUNCH, reason="x", first={"rank": 1, "host": "a"})
    assert status
    assert status["state"] == state
    assert (tmp_path / "status.json").read_bytes() == before


def test_close_leaves_the_status_of_another_launch(tmp_path: Path) -> None:
    begun(tmp_path)
    assert rundir.close(tmp_path, "12.1") is None
    status = rundir.read_status(tmp_path)
    assert status
    assert status["state"] == "running"


def test_a_refusal_is_read_by_the_launch_that_was_refused(tmp_path: Path) -> None:
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


def test_close_leaves_the_status_of_the_attempt_before_a_refused_one(tmp_path: Path) -> None:
    begun(tmp_path, "preempted")
    before = (tmp_path / "status.json").read_bytes()
    opened(tmp_path)
    rundir.refuse(tmp_path, LAUNCH, 2, "other keys")
    assert rundir.close(tmp_path, LAUNCH) is None
    assert (tmp_path / "status.json").read_bytes() == before


def test_close_of_an_attempt_that_died_before_it_began_says_so(tmp_path: Path) -> None:
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
def test_exit_code(status: dict[str, Any] | None, fallback: int, expected: int) -> None:
    assert rundir.exit_code(status, fallback) == expected


def test_a_state_that_nobody_knows_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        rundir.write_status(tmp_path, "finished", attempt=0, step=0)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("text", ["a\nb", "a\r\n\tb", "a\u2028b", "a\x85b", "a\x1b[31mb", "é ü", "", "x" * 5000])
def test_one_line_is_one_line(text: str) -> None:
    line = errors.one_line(ValueError(text))
    assert line.startswith("ValueError")
    assert len(line.splitlines()) == 1
    assert len(line) <= 300
    assert line.isprintable()


def test_umask_is_given_back(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with files.umask(0o077):
            (tmp_path / "private").touch(0o666)
        (tmp_path / "open").touch(0o666)
    finally:
        os.umask(before)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o644


def test_the_run_directory_is_an_attempts_until_the_next_one_begins(tmp_path: Path) -> None:
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


def test_an_attempt_does_not_begin_in_place_of_a_later_one(tmp_path: Path) -> None:
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
def test_a_file_system_that_does_not_answer_once_is_no_later_attempt(
    tmp_path: Path, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir.open_attempt(tmp_path, ["a"], "1.0")
    looks, look = iter(range(9)), files.read_json
    monkeypatch.setattr(files, "read_json", lambda path: None if next(looks) == silent else look(path))
    rundir.check_owner(tmp_path, 0, "1.0")


def test_a_requeued_attempt_that_never_began_is_a_failure_of_the_job(tmp_path: Path) -> None:
    rundir.open_attempt(tmp_path, ["a"], "7.0")
    rundir.begin_attempt_at(tmp_path, 0)
    rundir.write_status(tmp_path, "running", attempt=0, step=5)  # its node died
    rundir.open_attempt(tmp_path, ["a"], "7.1")
    closed = rundir.close(tmp_path, "7.1")
    assert closed
    assert (closed["state"], closed["attempt"]) == ("failed", 1)


def test_what_a_run_came_to_is_said_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_refused_an_evaluation_or_was_examined_is_found_where_it_is(tmp_path: Path) -> None:
    evaluation = tmp_path / rundir.EVALUATION
    evaluation.mkdir()
    rundir.open_attempt(evaluation, ["a"], "9.0")
    rundir.refuse(evaluation, "9.0", 2, "another model")
    assert rundir.refusal(tmp_path, "9.0") == {"launch": "9.0", "exit_status": 2, "line": "another model"}
    assert rundir.refusal(tmp_path, "9.1") is None
    assert rundir.for_examination(tmp_path) == tmp_path
    (tmp_path / "config.yaml").touch()
    assert rundir.for_examination(tmp_path) == tmp_path / "doctor"
