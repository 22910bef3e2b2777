"""When a wrapper reads the run directory, and what it writes there."""

import os
import time
from pathlib import Path

import pytest

from recipes.core import files
from recipes.core.program.watch import Watch
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, in_use, positions
from recipes.core.run.stop_note import StopNote
from tests import helpers


def test_a_request_to_stop_is_recorded_at_once_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper that read the run directory without a pause would need a CPU while its program
    saves.
    """
    looks: list[float] = []
    monkeypatch.setattr(Watch, "_look", lambda self: looks.append(time.monotonic()))
    view = Watch(helpers.attempt(tmp_path), 1)
    helpers.wait_until(lambda: looks, 5.0, "the first look")
    view.tell_stop("SIGUSR2", time.time())
    helpers.wait_until(lambda: len(looks) > 1, 4.0, "a look at the request")
    time.sleep(0.3)
    assert len(looks) == 2
    view.fenced = "the test has ended"
    view.tell_stop("SIGUSR2", time.time())  # ends the thread


def test_a_run_directory_that_does_not_answer_was_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, run = Watch._look, Watch._run
    monkeypatch.setattr(Watch, "_run", lambda self: None)
    monkeypatch.setattr(in_use, "HEARTBEAT_S", 0.0)
    view = Watch(attempts.Attempt(tmp_path / "gone", 0), 1)
    seen_at = view.seen_at
    looks: list[None] = []

    def look_twice(self: Watch) -> None:
        looks.append(None)
        self.fenced = "the test has ended" if len(looks) > 1 else ""
        look(self)

    monkeypatch.setattr(Watch, "_look", look_twice)
    run(view)
    assert len(looks) == 2
    assert view.seen_at == seen_at


def test_each_wrapper_records_its_stop_once_and_the_first_one_writes_status_and_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watch, "_run", lambda self: None)
    attempt = helpers.attempt(tmp_path)
    os.utime(attempt.folder / "opened.json", (1, 1))
    for task in (1, 0):
        assert directory.read_status(tmp_path) == {}
        assert attempts.newest_heartbeat(attempt) == 1.0
        view = Watch(attempt, task)
        view.tell_stop("SIGUSR2", 100.0 + task)
        view._look()
        path = attempt.folder / f"failed/stop000{task}.json"
        record = helpers.read(path.parent, path.stem)
        assert (record["rank"], record["time"]) == (task, 100.0 + task)
        path.unlink()
        view._look()
        assert not path.exists()
    assert directory.read_status(tmp_path)["state"] == "preempted"
    assert attempts.newest_heartbeat(attempt) > 1.0
    report = positions.file_of(attempt)
    for text in ("", "rank 1 hangs"):  # the first task opens the file before it writes
        report.parent.mkdir(exist_ok=True)
        report.write_text(text)
        view._look()
        assert view.hangs == bool(text)
    report.unlink()  # a network file system may hide it
    view._look()
    assert view.hangs
    of_note = Watch(attempt, 1)
    of_note.note = StopNote(reason="SIGUSR2")
    assert of_note.is_stopping


def test_a_program_ends_after_its_job_script_or_when_a_later_attempt_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watch, "_run", lambda self: None)
    attempt = helpers.attempt(tmp_path, launch="7.0")
    view = Watch(attempt, 1)
    view._look()
    assert view.fenced == ""
    files.write_json(attempt.folder / "ended.json", {})
    view._look()
    assert view.fenced == "the job script has ended this attempt"
    helpers.attempt(tmp_path, launch="8.0")
    view._look()
    assert "a later attempt (8.0) writes to this run directory" in view.fenced
