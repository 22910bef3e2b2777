"""Where the time of a run went, by the files of its attempts."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from recipes.core import files
from recipes.core.errors import Kind
from recipes.core.run import attempt as attempts
from recipes.core.run import ledger
from recipes.core.run.attempt import Attempt
from tests import helpers


def opened(
    run_dir: Path, at: float, *, launch: str = "7.0", step: int | None = 0, **facts: float
) -> Attempt:
    """A new attempt that is opened at this time, and begins 5 s later."""
    attempt = helpers.attempt(run_dir, launch=launch, step=step, time=at, **facts)
    if step is not None:
        begun = {"step": step, "begun_at": at + 5.0, "load_s": 2.0}
        files.write_json(attempt.folder / "begun.json", begun)
    return attempt


def failed(attempt: Attempt, at: float) -> None:
    """A rank makes its last progress at this time and fails 3 s later; srun ends 4 s after that."""
    attempts.record(
        attempt, rank=0, host="a", kind=Kind.killed, error="x", moment=at + 3, progress=at
    )
    files.write_json(attempt.folder / "ended.json", {"state": "failed", "time": at + 7})


def write(run_dir: Path, *rows: tuple[Any, ...]) -> None:
    """Rows of attempt, step, time and, if given, ``spent_s``."""
    names = ("attempt", "step", "time", "spent_s")
    with open(run_dir / "metrics.jsonl", "w") as file:
        for row in rows:
            print(json.dumps(dict(zip(names, row, strict=False))), file=file)


def spent(run_dir: Path, end: float, is_running: bool = False) -> list[dict[str, float]]:
    """The seconds of each attempt, whose sum is the time from the submission to the end."""
    entries = ledger.of_attempts(run_dir, end, is_running)
    whole = ledger.total(entries)
    facts = Attempt(run_dir, 0).facts()
    assert whole["wall_s"] == pytest.approx(end - (facts["submitted"] or facts["time"]))
    return [entry["seconds"] for entry in entries]


def test_the_time_of_a_run_with_a_restart_and_a_requeue(tmp_path: Path) -> None:
    first = opened(tmp_path, 100.0, submitted=60.0, gpus=4, nodes=2)
    failed(first, 130.0)
    second = opened(tmp_path, 145.0, step=20, gpus=4, nodes=2)
    files.write_json(second.folder / attempts.RESTART, {"excluded": []})
    files.write_json(second.folder / "ended.json", {"state": "preempted", "time": 200.0})
    third = opened(tmp_path, 300.0, launch="7.1", step=40, submitted=202.0)
    files.write_json(third.folder / "ended.json", {"state": "done", "time": 400.0})
    of_second = {"data": 8.0, "evaluation": 5.0, "checkpoint": 2.0, "hang": 3.0, "compile": 4.0}
    write(
        tmp_path,
        (0, 1, 106.0),
        (0, 20, 120.0),
        (0, 30, 129.0),
        (1, 21, 151.0),
        (1, 40, 190.0, of_second),
        (2, 80, 395.0, {"data": "x", "other": 3.0, "evaluation": 1e9}),
    )
    assert spent(tmp_path, 400.0) == [
        {"queue": 40, "start": 5, "training": 15, "repeated": 9 + 1, "hang": 3, "restart": 4},
        {
            "restart": 8 + 5,
            "training": 40 - 22,
            "checkpoint": 10 + 2,
            **{cause: of_second[cause] for cause in ("data", "evaluation", "hang", "compile")},
        },
        {"queue": 100, "start": 5, "evaluation": 90, "checkpoint": 5},
    ]
    whole = ledger.total(ledger.of_attempts(tmp_path, 400.0, False))
    assert whole["effective"] == round(33 / 340, 4)
    assert whole["gpu_hours_lost"]["restart"] == pytest.approx(8 * 17 / 3600, rel=0.01)
    assert whole["gpu_hours_lost"].keys().isdisjoint({"queue", "training"})
    doubled = ledger.total([whole, whole])
    assert doubled["wall_s"] == 680.0
    assert doubled["effective"] == whole["effective"]


def test_steps_that_an_attempt_from_an_older_checkpoint_repeats_do_not_count(
    tmp_path: Path,
) -> None:
    """The checkpoint of the second attempt is damaged when the third one begins."""
    for number, (at, step, end) in enumerate(((100.0, 0, 200.0), (200.0, 80, 300.0))):
        attempt = opened(tmp_path, at, launch=f"7.{number}", step=step)
        files.write_json(attempt.folder / "ended.json", {"state": "preempted", "time": end})
    third = opened(tmp_path, 300.0, launch="7.2", step=40)
    files.write_json(third.folder / "ended.json", {"state": "done", "time": 400.0})
    write(tmp_path, (0, 40, 145.0), (0, 80, 185.0), (1, 90, 290.0), (2, 100, 400.0))
    first, second, last = spent(tmp_path, 400.0)
    assert first["training"] == 145 - 105
    assert first["repeated"] == 185 - 145
    assert "training" not in second
    assert last["training"] == 400 - 305


@pytest.mark.parametrize("is_judged", [False, True])
def test_a_second_job_that_is_refused_takes_no_time_from_the_run(
    tmp_path: Path, is_judged: bool
) -> None:
    first = opened(tmp_path, 100.0)
    os.utime(first.folder / "opened.json", (200.0, 200.0))
    opened(tmp_path, 102.0, launch="8.0", step=None)
    if is_judged:
        files.write_json(first.folder / "ended.json", {"state": "done", "time": 200.0})
        os.utime(first.folder / "opened.json", (0.0, 0.0))
    write(tmp_path, (0, 1, 106.0), (0, 20, 200.0))
    assert spent(tmp_path, 200.0) == [{"start": 5.0, "training": 95.0}]


def test_a_node_that_died_with_the_batch_script_is_a_hang_until_the_requeue(
    tmp_path: Path,
) -> None:
    earlier = opened(tmp_path, 50.0, launch="6.0")
    facts = earlier.facts()
    files.write_json(earlier.folder / "opened.json", {**facts, "job": "6"})
    files.write_json(earlier.folder / "ended.json", {"state": "preempted", "time": 60.0})
    first = opened(tmp_path, 100.0)
    os.utime(first.folder / "opened.json", (130.0, 130.0))
    opened(tmp_path, 500.0, launch="7.1", step=20, submitted=430.0)
    write(tmp_path, (1, 20, 120.0), (1, 22, 126.0), (2, 21, 506.0))
    died = {"start": 5.0, "training": 15.0, "repeated": 10.0}
    again = {"hang": 300.0, "queue": 70.0, "start": 5.0, "training": 95.0}
    assert spent(tmp_path, 600.0, is_running=True)[1:] == [{"queue": 40.0, **died}, again]


def test_attempts_that_have_not_begun_or_have_no_rows(tmp_path: Path) -> None:
    failed(opened(tmp_path / "refused", 100.0, step=None), 101.0)
    assert spent(tmp_path / "refused", 108.0) == [{"start": 1.0, "hang": 3.0, "restart": 4.0}]
    evaluated = opened(tmp_path / "evaluated", 100.0)
    files.write_json(evaluated.folder / "ended.json", {"state": "done", "time": 120.0})
    assert spent(tmp_path / "evaluated", 120.0) == [{"start": 5.0, "evaluation": 15.0}]


def test_a_job_that_was_submitted_after_a_loss_waited_in_the_queue(tmp_path: Path) -> None:
    first = opened(tmp_path, 100.0)
    os.utime(first.folder / "opened.json", (130.0, 130.0))
    second = opened(tmp_path, 500.0, launch="8.0", step=0, submitted=430.0)
    facts = files.read_json(second.folder / "opened.json")
    files.write_json(second.folder / "opened.json", {**(facts or {}), "job": "8"})
    (tmp_path / "attempts/0002").mkdir()  # it could not be described
    _, again = spent(tmp_path, 510.0, is_running=True)
    assert again == {"queue": 370.0, "start": 5.0, "training": 5.0}


def test_the_time_of_a_run_that_is_lost_ends(tmp_path: Path) -> None:
    """Its status is still running, and nothing has written a heartbeat for hours."""
    attempt = opened(tmp_path, 100.0)
    os.utime(attempt.folder / "opened.json", (130.0, 130.0))
    [entry] = ledger.of_attempts(tmp_path, 9000.0, is_running=True)
    assert entry["seconds"] == {"start": 5.0, "training": 45.0}


@pytest.mark.parametrize(("progress", "hang"), [(None, {}), (130.0, {"hang": 20.0})])
def test_a_program_trains_until_it_fails_or_hangs(
    tmp_path: Path, progress: float | None, hang: dict[str, float]
) -> None:
    """It writes no rows."""
    program = opened(tmp_path, 100.0)
    begun = files.read_json(program.folder / "begun.json")
    assert begun
    files.write_json(program.folder / "begun.json", {**begun, "of_program": True})
    known = {} if progress is None else {"progress": progress}
    kind = Kind.error if progress is None else Kind.hang
    attempts.record(program, rank=0, host="a", kind=kind, error="x", moment=150.0, **known)
    files.write_json(program.folder / "ended.json", {"state": "failed", "time": 152.0})
    training = (progress or 150.0) - 105.0
    expected = {"start": 5.0, "training": training, "restart": 2.0, **hang}
    assert spent(tmp_path, 152.0) == [expected]


def test_a_run_of_an_earlier_version(tmp_path: Path) -> None:
    """Its records have neither the time of the begin nor the parts of the time of the steps."""
    for at, launch, step in ((100.0, "7.0", 0), (300.0, "7.1", 20)):
        attempt = opened(tmp_path, at, launch=launch, step=step)
        files.write_json(attempt.folder / "begun.json", {"step": step})
        os.utime(attempt.folder / "opened.json", (at + 60, at + 60))
    write(tmp_path, (0, 1, 110.0), (0, 20, 130.0), (0, 30, 150.0), (1, 21, 305.0), (1, 40, 325.0))
    first, second = spent(tmp_path, 327.0)
    assert first == {"start": 10.0, "training": 20.0, "repeated": 20.0 + 10.0}
    assert second == {"queue": 140.0, "start": 5.0, "training": 20.0, "checkpoint": 2.0}


def test_no_times_without_attempts_or_if_a_clock_was_set_back(tmp_path: Path) -> None:
    assert ledger.of_attempts(tmp_path, 1.0, False) == []
    opened(tmp_path, 100.0)
    nothing = {"wall_s": 0.0, "effective": 0.0, "seconds": {}, "gpu_hours_lost": {}}
    assert ledger.of_attempts(tmp_path, 90.0, False) == [nothing]
    assert ledger.of_attempts(tmp_path, math.nan, False) == []
    assert ledger.total([]) == nothing


def test_the_parts_of_a_restart(tmp_path: Path) -> None:
    first = opened(tmp_path, 100.0)
    failed(first, 130.0)
    second = opened(tmp_path, 145.0, step=20)
    write(tmp_path, (0, 30, 129.0), (1, 21, 151.0), (1, 22, 157.0))
    assert ledger.recovery(second) == {}  # of another start of the job
    files.write_json(second.folder / attempts.RESTART, {"excluded": []})
    parts = ledger.recovery(second)
    assert [*parts.values()] == [3.0, 4.0, 8.0, 3.0, 2.0, 1.0]
    assert tuple(parts) == ledger.PARTS
    text = "detection 3.0 s, teardown 4.0 s, examination 8.0 s, start 3.0 s, load 2.0 s, first step"
    assert ledger.text(parts) == f"{text} 1.0 s"


def test_the_parts_of_a_restart_that_has_not_begun(tmp_path: Path) -> None:
    failed(opened(tmp_path, 100.0), 130.0)
    second = opened(tmp_path, 145.0, step=None)
    files.write_json(second.folder / attempts.RESTART, {"excluded": []})
    assert [*ledger.recovery(second)] == ["detection", "teardown", "examination"]
