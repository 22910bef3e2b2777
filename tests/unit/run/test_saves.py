"""Whether a program of the user has saved something during an attempt."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.core import files
from recipes.core.run import attempt as attempts
from recipes.core.run import saves
from recipes.core.run.attempt import Attempt
from tests import helpers


def write(path: Path, text: str = "saved") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """An attempt that begins with the files a and b/c, both in its run directory and in the folder
    `other`.
    """
    attempt = helpers.attempt(tmp_path / "run")
    for folder in (attempt.run_dir, tmp_path / "other"):
        for name in ("a", "b/c"):
            write(folder / name)
    return attempt


@pytest.mark.parametrize("name", ["run", "other"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda folder: None, False),
        (lambda folder: touch(folder / "b/c"), True),
        (lambda folder: (folder / "b/c").unlink(), True),
        (lambda folder: write(folder / "b/d"), True),
        (lambda folder: (folder / "b/c").rename(folder / "b/d"), True),
        (lambda folder: (folder / "b/d").mkdir(), False),
    ],
)
def test_a_change_of_a_file_is_seen(
    attempt: Attempt, tmp_path: Path, name: str, change: Callable[[Path], object], expected: bool
) -> None:
    saves.note(attempt, "" if name == "run" else str(tmp_path / "other"))
    change(tmp_path / ("other" if name == "run" else "run"))  # it does not count
    assert saves.has_changed(attempt) is False
    change(tmp_path / name)
    assert saves.has_changed(attempt) is expected


def test_a_file_of_another_size_with_the_same_time_has_changed(attempt: Attempt) -> None:
    saves.note(attempt, "")
    moment = (attempt.run_dir / "a").stat().st_mtime_ns
    write(attempt.run_dir / "a", "saved more")
    os.utime(attempt.run_dir / "a", ns=(moment, moment))
    assert saves.has_changed(attempt) is True


@pytest.mark.parametrize("folder", ["", "run", "run/..", "link"])
def test_what_the_job_writes_itself_does_not_count(
    attempt: Attempt, tmp_path: Path, folder: str
) -> None:
    """Nor if saves= names the run directory, or a folder that it is in."""
    (tmp_path / "link").symlink_to(attempt.run_dir)
    saves.note(attempt, str(tmp_path / folder) if folder else "")
    for name in (
        "logs/rank0.log",
        "logs/hang-0.txt",
        "summary.json",
        "attempts/0000/x.json",
        "doctor/x",
        "status.json",
        "job.yaml",
        "job.sh",
        "metrics.jsonl",
    ):
        write(attempt.run_dir / name)
    assert saves.has_changed(attempt) is False
    write(attempt.run_dir / "b/logs/events")
    assert saves.has_changed(attempt) is True


def test_a_folder_without_files_is_unknown_and_the_first_file_is_a_change(
    attempt: Attempt, tmp_path: Path
) -> None:
    assert saves.has_changed(attempt) is None  # nothing was noted
    saves.note(attempt, str(tmp_path / "later"))
    assert saves.has_changed(attempt) is None
    write(tmp_path / "later/checkpoint")
    assert saves.has_changed(attempt) is True


def test_a_run_makes_progress_by_steps_and_a_program_by_files(
    attempt: Attempt, tmp_path: Path
) -> None:
    begun = helpers.attempt(tmp_path / "recipe", step=5)
    assert [saves.has_progress(begun, step) for step in (0, 5, 6)] == [False, False, True]
    program = attempts.open_next(attempt.run_dir, "script", {})
    attempts.begin(program, 0, own=False, of_program=True)
    assert saves.has_progress(program, 0)  # unknown: nothing was noted
    saves.note(program, "")
    assert not saves.has_progress(program, 7)
    touch(attempt.run_dir / "a")
    assert saves.has_progress(program, 0)


def test_a_link_without_its_target_is_no_error(attempt: Attempt) -> None:
    (attempt.run_dir / "latest").symlink_to("gone")
    saves.note(attempt, "")
    assert saves.has_changed(attempt) is False


def test_a_folder_with_very_many_files_is_looked_at_in_part(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "MOST_FILES", 1)
    saves.note(attempt, "")
    touch(attempt.run_dir / "b/c")
    assert saves.has_changed(attempt) is False
    touch(attempt.run_dir / "a")
    assert saves.has_changed(attempt) is True
    assert files.read_json(attempt.folder / "saves.json")["folder"] == ""


def test_files_behind_a_link_and_in_logs_count_but_not_those_of_the_job(
    attempt: Attempt, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    write(scratch / "w")
    (attempt.run_dir / "link").symlink_to(scratch)
    (scratch / "round").symlink_to(scratch)
    for name in ("logs/rank0.log", "logs/node1.log", "attempts/0000/x", "status.json"):
        write(attempt.run_dir / name)
    for name in ("link/w", "logs/saved"):
        saves.note(attempt, "")
        write(attempt.run_dir / "logs/rank0.log")
        assert saves.has_changed(attempt) is False
        (attempt.run_dir / name).parent.mkdir(exist_ok=True)
        (attempt.run_dir / name).write_text("longer than before")
        assert saves.has_changed(attempt) is True
