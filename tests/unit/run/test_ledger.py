"""Where the time of a run went, by the files of its attempts."""

from __future__ import annotations

import json
from pathlib import Path

from recipes.core import files
from recipes.core.errors import Kind
from recipes.core.run import attempt as attempts
from recipes.core.run import ledger
from recipes.core.run.attempt import Attempt
from tests import helpers


def opened(run_dir: Path, at: float, *, launch: str = "7.0", step: int | None = 0) -> Attempt:
    """A new attempt that is opened at 100 * its number, with the times of its begin."""
    attempt = helpers.attempt(run_dir, launch=launch, step=step, time=at)
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


def write(run_dir: Path, *rows: tuple[int, int, float]) -> None:
    with open(run_dir / "metrics.jsonl", "w") as file:
        for number, step, moment in rows:
            print(json.dumps({"attempt": number, "step": step, "time": moment}), file=file)


def test_the_parts_of_a_restart(tmp_path: Path) -> None:
    first = opened(tmp_path, 100.0)
    failed(first, 130.0)
    second = opened(tmp_path, 145.0, step=20)
    write(tmp_path, (0, 30, 129.0), (1, 21, 151.0))
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
