"""The table of runs: what it says of done, failed, running, damaged and unbegun ones, and where
they differ.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes import report
from recipes.core import files
from recipes.core.errors import ConfigError, InputError, Next
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, record, table
from tests import helpers


def make(folder: Path, state: str = "done", step: int = 10, reason: str = "", **keys: Any) -> Path:
    folder.mkdir(parents=True)
    helpers.attempt(folder)
    directory.write_status(folder, state, attempt=0, step=step, reason=reason)
    (folder / "config.yaml").write_text(
        "".join(f"{name}: {json.dumps(value)}\n" for name, value in keys.items())
    )
    if state == "done":
        files.write_json(
            folder / "summary.json",
            {"recipe": "cifar", "val_top1": 0.9412, "samples_per_second": 1234.5},
        )
    return folder


def refuse(folder: Path, line: str) -> None:
    new = helpers.attempt(folder, step=None)
    attempts.refuse({attempts.VARIABLE: str(new.folder)}, ConfigError(line))


def run_report(*words: object, status: int = 0) -> helpers.Ended:
    command = [sys.executable, "-m", "recipes.report", *map(str, words)]
    return helpers.run(command).expect(status)


def lines(*words: object) -> list[list[str]]:
    """The table's cells, as far as no cell has a space in it."""
    return [line.split() for line in run_report(*words).lines]


def test_the_table_shows_the_keys_in_which_runs_differ(tmp_path: Path) -> None:
    make(tmp_path / "cifar/7_0", lr=0.1, seed=1, epochs=3, data_dir="${oc.env:X}")
    make(tmp_path / "cifar/7_1", lr=0.2, seed=1, epochs=3, data_dir="${oc.env:X}")
    make(
        tmp_path / "cifar/7_2",
        "failed",
        4,
        "rank 1 on node3 failed first: out of memory",
        lr=0.4,
        seed=1,
        epochs=3,
    )
    rows = '{"step": 3, "loss": 2.5}\n{"step": 4, "loss": 2.25}\n{"step": 5, "lo'
    (tmp_path / "cifar/7_2/metrics.jsonl").write_text(rows)
    # of an earlier attempt
    files.write_json(tmp_path / "cifar/7_2/summary.json", {"val_top1": 0.5})
    for number in range(3):
        os.utime(tmp_path / f"cifar/7_{number}", (5 - number, 5 - number))
    head, *rows = lines(tmp_path)
    rows.reverse()  # the folder that has changed last comes last
    assert head == ["run", "state", "step", "lr", "val_top1", "loss", "samples_per_second", "note"]
    assert rows[0] == [str(tmp_path / "cifar/7_0"), "done", "10", "0.1", "0.9412", "-", "1234.5"]
    assert rows[1][:5] == [str(tmp_path / "cifar/7_1"), "done", "10", "0.2", "0.9412"]
    assert rows[2][:7] == [str(tmp_path / "cifar/7_2"), "failed", "4", "0.4", "-", "2.25", "-"]
    assert " ".join(rows[2][7:]) == "rank 1 on node3 failed first: out of memory"


def test_the_table_shows_pending_refused_and_resumed_runs_of_an_array(tmp_path: Path) -> None:
    """In folders whose names say nothing of the recipe; keys of the run are told by what was
    submitted.
    """
    for number in range(4):
        words = [
            "device=cpu",
            f"lr={9 if number in (0, 3) else (number + 1) / 10}",
            f"cpu_threads={number}",
            f"run_dir={tmp_path}/{number}",
        ]
        if number in (0, 3):
            make(tmp_path / f"{number}", lr=(number + 1) / 10, seed=0)
        (tmp_path / f"{number}").mkdir(exist_ok=True)
        about = {"job_id": f"7_{number}", "recipe": "cifar", "arguments": words}
        files.write_json(tmp_path / f"{number}/job.yaml", about)
    refuse(tmp_path / "2", "node7: no GPU")
    directory.write_status(tmp_path / "3", "failed", attempt=1, step=50, reason="lost")
    (tmp_path / "3/metrics.jsonl").write_text('{"step": 50, "loss": 0.5, "val_top1": 0.95}\n')
    head, *rows = lines(*(tmp_path / f"{number}" for number in range(4)))
    assert head == [
        "run",
        "state",
        "step",
        "lr",
        "cpu_threads",
        "val_top1",
        "loss",
        "samples_per_second",
        "note",
    ]
    assert [" ".join(row[1:]) for row in rows] == [
        "done 10 0.1 0 0.9412 - 1234.5",
        "not begun 0 0.2 1 - - -",
        "refused 0 0.3 2 - - - the newest start was refused: node7: no GPU",
        "failed 50 0.4 3 0.95 0.5 - lost",
    ]


@pytest.mark.parametrize(
    ("word", "state"),
    [
        (Next.cancelled, "cancelled"),
        (Next.requeued, "stopped"),
        (None, "stopped"),
    ],
)
def test_a_run_that_was_cancelled_is_called_so(
    tmp_path: Path, word: Next | None, state: str
) -> None:
    directory.write_status(tmp_path, "preempted", attempt=0, step=3)
    if word:
        directory.note_next(tmp_path, word, 0)
    assert record.read(tmp_path).state == state


def test_folders_in_a_run_directory_are_not_runs(tmp_path: Path) -> None:
    run = tmp_path / "runs/mnist/run"
    make(run / "evaluation", step=3)
    (run / "attempts").mkdir()
    make(tmp_path / "doctor/run")
    assert list(table.run_directories(tmp_path)) == [run]


def test_keys_are_compared_within_a_recipe_and_a_result_may_be_0() -> None:
    entry = {"folder": "a", "state": "done", "step": 1, "note": ""}
    results = table.results({"loss": 0.0, "lr": 0.5, "gpu_energy_kj": 1.5})
    assert results == {"loss": 0.0}
    runs = [
        {**entry, "recipe": recipe, "values": {"lr": lr, "seed": seed}, "results": results}
        for recipe, lr, seed in (("toy", 1, 1), ("toy", 1, 2), ("mnist", 2, 1))
    ]
    assert table.cells(runs)[0] == ["run", "state", "step", "seed", "loss", "note"]


def test_damaged_files_affect_only_their_own_cells(tmp_path: Path) -> None:
    folder = make(tmp_path / "a/run", lr=0.1)
    for name in ("status.json", "summary.json", "config.yaml", "metrics.jsonl"):
        (folder / name).write_text("[{: nothing")
    row = record.read(folder)
    assert row.state == "not begun"
    assert row.step == 0
    assert row.values == {}
    assert table.entry(row)["results"] == {}
    (folder / "job.yaml").write_text('{"recipe": 3, "arguments": 7}')
    (folder / "config.yaml").write_text('lr: 0.1\nname: "a\\nb"\n')
    make(tmp_path / "a/other", lr=0.2, name="x\x1b[2Jy")
    ended = run_report(tmp_path)
    assert len(ended.lines) == 3
    assert "\x1b" not in ended.out


def test_json_output_and_a_closed_pipe(tmp_path: Path) -> None:
    make(tmp_path / "run", lr=0.1)
    told = json.loads(run_report("--json", tmp_path).out)
    assert told["state"] == "done"
    assert told["values"] == {"lr": 0.1}
    assert told["results"]["val_top1"] == 0.9412
    ended = helpers.run(
        ["sh", "-c", f"{sys.executable} -m recipes.report {tmp_path} | true"]
    ).expect(0)
    assert ended.out == ""


def test_a_folder_without_runs_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"/none: cannot be read \(No such file or directory\)"):
        report.main([f"{tmp_path}/none"])
    line = f"{tmp_path}: no run was found: give a run directory, or a folder of run directories"
    with pytest.raises(InputError, match=line):
        report.main([str(tmp_path), "--json"])
    assert run_report(tmp_path, status=2).lines == [f"report: {line}"]


def test_a_refused_launch_is_noted_until_a_later_one_begins(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", lr=0.1)
    refuse(folder, "lr=0.1 becomes 0.2")
    row = record.read(folder)
    assert row.state == "done"
    assert row.note == "the newest start was refused: lr=0.1 becomes 0.2"
    directory.write_status(folder, "preempted", attempt=0, step=10, reason="SIGUSR2")
    directory.note_next(folder, Next.max_requeues, 0)
    # the refusal is older
    assert record.read(folder).note == "SIGUSR2; max-requeues"
    directory.write_status(folder, "running", attempt=0, step=10)
    row = record.read(folder)
    row = replace(row, read_at=row.status["updated"] + 600)
    assert row.state == "running"
    assert row.end == row.read_at
    assert row.step == 10
    refused = "the newest start was refused: lr=0.1 becomes 0.2"
    assert row.note == f"status written 0:10:00 ago; {refused}"
    helpers.attempt(folder)
    directory.write_status(folder, "done", attempt=2, step=10)
    assert record.read(folder).note == ""
