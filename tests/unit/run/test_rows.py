"""The rows of a run: one for each step, with rising steps, whatever the file has gone through."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from recipes.core.run import rows


def write(run_dir: Path, *lines: object) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    (run_dir / "metrics.jsonl").write_bytes(b"\n".join(texts) + b"\n")
    return run_dir


def test_a_row_replaces_those_that_a_resume_has_made_void(tmp_path: Path) -> None:
    steps = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 3), (1, 4), (1, 5), (2, 5)]
    write(tmp_path, *({"attempt": attempt, "step": step} for attempt, step in steps))
    assert [(row["attempt"], row["step"]) for row in rows.rows(tmp_path)] == [
        (0, 1),
        (0, 2),
        (1, 3),
        (1, 4),
        (2, 5),
    ]
    # Attempt 0 went to step 4. Attempt 1 began after step 2, and has done one step so far.
    write(tmp_path, *({"attempt": attempt, "step": step} for attempt, step in steps[:5]))
    assert [row["step"] for row in rows.rows(tmp_path)] == [1, 2, 3]


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    wrong = (b'{"step": %s}' % step for step in (b"true", b'"2"', b"-1", b"1e3", b"1" + b"0" * 400))
    cut = b'{"step": 2, "lo'
    damaged = (cut, b"\xff\xfe", b"[" * 100_000, b"[3]", b"", *wrong)
    write(tmp_path, {"step": 1}, *damaged, {"step": 3, "loss": math.nan}, cut)
    first, last = rows.rows(tmp_path)
    assert first == {"step": 1}
    assert last["step"] == 3
    assert math.isnan(last["loss"])


def test_an_evaluation_of_very_many_classes_is_read(tmp_path: Path) -> None:
    evaluated = {"step": 2, "val_top1": 0.25, "val_recall": [0.3333] * 60_000}
    write(tmp_path, {"step": 1}, evaluated)
    assert next(rows.newest(tmp_path)) == evaluated


def test_a_row_in_two_parts_of_the_file_is_read(tmp_path: Path) -> None:
    every = [{"step": step, "text": "x" * (step * 37 % 9000)} for step in range(1, 1000)]
    write(tmp_path, *every)
    assert rows.rows(tmp_path) == every


def test_the_newest_row_is_read_without_the_rows_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *({"step": step} for step in range(10_000)))
    parsed = list[bytes]()

    def parse(lines: list[bytes]) -> list[dict[str, int]]:
        parsed.extend(lines)
        return [json.loads(line) for line in lines]

    monkeypatch.setattr(rows, "_parsed", parse)
    assert next(rows.newest(tmp_path)) == {"step": 9999}
    assert len(parsed) < 1000


def test_a_run_without_a_readable_file_has_no_rows(tmp_path: Path) -> None:
    assert rows.rows(tmp_path) == []
    (tmp_path / "metrics.jsonl").mkdir()
    assert rows.rows(tmp_path) == []


def test_numbers() -> None:
    assert [rows.number(value) for value in (0, 1.5, -2)] == [0.0, 1.5, -2.0]
    for value in (math.nan, math.inf, 10**400, True, None, "1", [1]):
        assert math.isnan(rows.number(value)), value
        assert rows.whole(value) is None, value
    assert rows.whole(2.75) == 2
    assert rows.numbers([1, 2.5]) == [1.0, 2.5]
    assert rows.numbers((1, 2)) == rows.numbers(None) == []


def test_the_rows_around_a_step_are_found_in_a_long_file(tmp_path: Path) -> None:
    every = [
        {"attempt": attempt, "step": step, "text": "x" * (step % 90)}
        for attempt, steps in ((0, range(1, 700, 2)), (2, range(501, 900)))
        for step in steps
    ]
    write(tmp_path, *every, b'{"attempt": 2, "st')
    for before, row in itertools.pairwise([{}, *every]):
        assert rows.around(tmp_path, row["attempt"], row["step"]) == (before, row)
    assert rows.around(tmp_path, 1, 600) == (every[349], every[350])
    assert rows.around(tmp_path, 2, math.inf) == (every[-1], {})
    assert rows.around(write(tmp_path), 0, 1) == ({}, {})


def test_few_rows_of_a_long_run_have_its_peaks_and_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "LONGEST_PART", 1 << 16)
    lines = []
    for attempt, steps in ((0, range(1, 15_001)), (1, range(12_001, 25_001))):
        for step in steps:
            row: dict[str, Any] = {"attempt": attempt, "step": step, "loss": math.sin(step)}
            if step == 7777:
                row["loss"] = 50.0
            if step % 5000 == 0:
                row |= {"loss": math.nan, "val_top1": 1 / step, "rank_step_s": [0.1, step]}
            if attempt == 0 and step > 12_000:
                row["loss"] = 99.0  # it does not count
            lines.append(row)
    write(tmp_path, *lines)
    every = rows.rows(tmp_path)
    few = rows.thinned(tmp_path, 100)
    assert len(few) < 2000
    assert [row["step"] for row in few] == sorted({row["step"] for row in few})
    assert few[0] == every[0]
    assert repr(few[-200:]) == repr(every[-200:])
    of_steps = {row["step"]: row for row in few}
    assert of_steps[7777]["loss"] == 50.0
    assert max(row["loss"] for row in few) == 50.0
    assert {5000, 10_000, 15_000, 20_000, 25_000} < of_steps.keys()
