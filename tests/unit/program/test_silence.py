"""When a program of the user counts as one that hangs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.core.program import silence
from recipes.core.run import look, positions
from recipes.core.run.attempt import Attempt
from tests import helpers
from tests.unit.program.test_supervise import View

NEVER_S = 25.0  # a program that does not hang is looked at for so long

SILENT = "no output and no new file for 5 s (silent_s=)"


class Busy(Exception):
    """The program was not found to hang within NEVER_S."""


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "saved").mkdir()
    return helpers.attempt(tmp_path / "run", hosts=("a", "b"))


def hangs_after(
    attempt: Attempt,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[int], object],
    folder: str = "",
    is_stopping: bool = False,
) -> float | None:
    """Seconds until the program is found to hang, with silent_s=5; None if it is not. happens: is
    called after each half a second with its number.
    """
    view = View(is_stopping=is_stopping)
    numbers = itertools.count()

    def sleep(seconds: float) -> None:
        view.now += seconds
        if view.now > NEVER_S:
            raise Busy
        happens(next(numbers))

    monkeypatch.setattr(silence.time, "sleep", sleep)
    monkeypatch.setattr(silence, "report", lambda attempt, why: None)
    try:
        silence.wait(attempt, view, 5.0, folder)
    except Busy:
        return None
    assert view.hangs
    return view.now


def write(path: Path, until: int = 1000) -> Callable[[int], object]:
    """Writes a file again and again, the last time in this half a second."""
    return lambda number: path.write_text(f"{number}") if number < until else None


def test_a_program_hangs_if_no_rank_writes_and_no_file_is_saved(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = attempt.run_dir
    assert hangs_after(attempt, monkeypatch, lambda number: None) == 5.5
    assert hangs_after(attempt, monkeypatch, write(run_dir / "logs/rank3.log", 9)) == 9.5
    for name in ("logs/rank3.log", "saved.pt", "deep/saved.pt", "metrics.jsonl"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        assert hangs_after(attempt, monkeypatch, write(run_dir / name)) is None, name
    # also after the program has saved
    assert hangs_after(attempt, monkeypatch, write(run_dir / "logs/rank3.log")) is None
    beats = lambda number: os.utime(attempt.folder / "opened.json", (number, number))  # noqa: E731
    assert hangs_after(attempt, monkeypatch, beats) == 5.5
    other = str(tmp_path / "saved")
    assert hangs_after(attempt, monkeypatch, write(tmp_path / "saved/x"), other) is None
    assert hangs_after(attempt, monkeypatch, write(run_dir / "saved.pt"), other) == 5.5


def test_a_program_that_saves_at_a_stop_does_not_hang(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hangs_after(attempt, monkeypatch, lambda number: None, is_stopping=True) is None


def test_a_hang_is_recorded_even_if_no_rank_answers(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(positions, "WAIT_S", 0.3)
    silence.report(attempt, 5.0)
    record = helpers.read(attempt.folder / "failed", "hang0000")
    late = "ranks 0-1: no answer within 0.3 s: "
    assert (record["rank"], record["host"], record["kind"]) == (0, "a", "hang")
    assert record["error"].startswith(f"{SILENT}; {late}")
    assert record["time"] - record["progress"] == pytest.approx(5.3, abs=1.0)
    assert late in positions.file_of(attempt).read_text()
    assert late in capfd.readouterr().err


def test_no_rank_is_blamed_if_all_are_at_the_same_place(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = {"state": look.STOPPED[0], "command": "", "kernel": "", "stack": ""}
    answers = [{"rank": rank, "host": "a", "processes": [process]} for rank in range(2)]
    monkeypatch.setattr(positions, "ask", lambda folder, ranks: answers)
    silence.report(attempt, 5.0)
    record = helpers.read(attempt.folder / "failed", "hang0000")
    assert (record["rank"], record["host"]) == (None, "")
    assert record["error"] == f"{SILENT}; ranks 0-1 on a: stopped by a signal"
