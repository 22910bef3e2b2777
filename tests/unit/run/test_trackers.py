"""Series in experiment trackers: the same steps and values as in metrics.jsonl, whatever the run
has gone through.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes import export
from recipes.core import files
from recipes.core.errors import InputError
from recipes.core.run import directory, rows, trackers
from tests import helpers

# by metric: step and value, in the order in which they were written
Series = dict[str, list[tuple[int, float]]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory for a test that exports to tensorboard."""
    pytest.importorskip("tensorboard", reason="tensorboard is optional: pip install '.[trackers]'")
    return tmp_path / "run"


def of_rows(run_dir: Path) -> Series:
    series: Series = {}
    for row in rows.rows(run_dir):
        for name, value in row.items():
            if name != "step":
                series.setdefault(name, []).append((row["step"], float(value)))
    return series


def in_tensorboard(run_dir: Path, place: Path) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    read = {
        tag: events.Tensors(tag)
        for tag in events.Tags()["tensors"]
        if not tag.startswith(("_hparams", "summary"))
    }

    def value(event: Any) -> float:
        return float(tensor_util.make_ndarray(event.tensor_proto).item())

    return {tag: [(event.step, value(event)) for event in read[tag]] for tag in read}


def wandb_records(file: Path) -> list[bytes]:
    """The records of a .wandb file: LevelDB's log format, with blocks of 32 KiB, after a header of
    7 bytes.
    """
    data = file.read_bytes()
    at = 7
    records = list[bytes]()
    part = b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + size]
        if kind in (1, 4):  # whole, or the last part
            records.append(part)
            part = b""
        at += 7 + size
    return records


def in_wandb(run_dir: Path, place: Path) -> Series:
    from wandb.proto import wandb_internal_pb2

    series: Series = {}
    for file in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in wandb_records(file):
            record = wandb_internal_pb2.Record.FromString(data)
            items = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in items.items():
                if not name.startswith("_"):
                    series.setdefault(name, []).append((items["_step"], float(value)))
    return series


def in_mlflow(run_dir: Path, place: Path) -> Series:
    import mlflow

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = mlflow.MlflowClient(tracking_uri=str(place / "mlruns"))
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    series: Series = {}
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        series[name] = [(metric.step, metric.value) for metric in history]
    return series


def in_trackio(run_dir: Path, place: Path) -> Series:
    series: Series = {}
    database = sqlite3.connect(next((place / "trackio").glob("*.db")))
    for step, text in database.execute("SELECT step, metrics FROM metrics ORDER BY id"):
        for name, value in json.loads(text).items():
            series.setdefault(name, []).append((step, float(value)))
    return series


READERS = {
    "tensorboard": in_tensorboard,
    "wandb": in_wandb,
    "mlflow": in_mlflow,
    "trackio": in_trackio,
}


def close(series: Series, expected: Series) -> None:
    """The same steps; the same values, as far as 32 bits can tell. NaN is NaN."""
    assert series.keys() == expected.keys()
    for name in series:
        assert [step for step, _ in series[name]] == [step for step, _ in expected[name]], name
        for (_, first), (_, second) in zip(series[name], expected[name], strict=True):
            assert first == pytest.approx(second, rel=1e-6, nan_ok=True), name


def train(
    folder: Path,
    attempt: int,
    begin: int,
    end: int,
    state: str = "preempted",
    saved: int | None = None,
) -> None:
    """Adds the rows of an attempt that begins after step ``begin``; its loss is its own, other than
    that of a repeated step. saved: the step of its newest checkpoint; ``end`` by default.
    """
    saved = end if saved is None else saved
    helpers.attempt(folder, step=begin)
    with open(folder / "metrics.jsonl", "a") as file:
        for step in range(begin + 1, end + 1):
            loss = math.nan if step == 3 else 1 / (step + attempt)
            row = {"attempt": attempt, "step": step, "loss": loss, "lr": 0.1}
            file.write(json.dumps(row | ({"val_top1": step / 64} if step % 4 == 0 else {})) + "\n")
        file.write('{"step": 9\n')
    (folder / "config.yaml").write_text("lr: 0.1\nname: x\n")
    (folder / "checkpoints/latest").write_text(f"step-{saved:08d}.pt\n")
    step = end if state == "failed" else saved
    directory.write_status(folder, state, attempt=attempt, step=step)
    if state == "done":
        files.write_json(
            folder / "summary.json", {"recipe": "mnist", "steps": end, "val_top1": 0.5}
        )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to start the command in, away from the trackers of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(folder: Path, to: str) -> str:
    """The line that the command prints. It runs in a separate process, since trackers keep state in
    their process.
    """
    command = [sys.executable, "-m", "recipes.export", str(folder), f"to={to}"]
    modules = ":".join(filter(None, [str(helpers.ROOT), *sys.path]))
    environ = helpers.clean_environment(PYTHONPATH=modules)
    ended = helpers.run(command, cwd=folder.parent, environ=environ).expect(0)
    return next(line for line in reversed(ended.lines) if line.startswith(str(folder)))


@pytest.mark.long
@pytest.mark.parametrize("to", READERS)
def test_a_run_is_one_series_whatever_was_requeued(place: Path, to: str) -> None:
    pytest.importorskip(to, reason=f"{to} is optional: pip install '.[trackers]'")
    folder = place / "run"
    where = to if to == "tensorboard" else f"{to} mnist"
    train(folder, 0, 0, 9, "running", saved=6)
    assert f"{folder}: 5 rows to " in call(folder, to)
    nothing = f"{folder}: nothing new for {where}"
    held_back = "; 4 rows are not exported yet: a resume may replace them"
    assert call(folder, to) == nothing + held_back
    released = {
        name: [point for point in points if point[0] < 6]
        for name, points in of_rows(folder).items()
    }
    close(READERS[to](folder, place), released)
    train(folder, 1, 6, 14)  # from the checkpoint of step 6
    assert f"{folder}: 8 rows to " in call(folder, to)
    train(folder, 2, 14, 20, "done")
    line = call(folder, to)
    assert f"{folder}: 7 rows to " in line
    assert "replace" not in line
    assert call(folder, to) == nothing
    series = READERS[to](folder, place)
    close(series, of_rows(folder))
    assert [step for step, _ in series["loss"]] == list(range(1, 21))
    assert series["loss"][6][1] == pytest.approx(1 / 8)  # of attempt 1
    # The run is made longer: the tracker has all of it so far.
    train(folder, 3, 20, 22, "running", saved=20)
    assert "nothing new" in call(folder, to)
    train(folder, 4, 20, 24, "done")
    assert f"{folder}: 4 rows to " in call(folder, to)
    close(READERS[to](folder, place), of_rows(folder))


def test_keys_come_first_and_the_summary_last(run_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place = run_dir / "tensorboard"
    known = []
    train(run_dir, 0, 0, 4)
    files.write_json(run_dir / "summary.json", {"val_top1": 0.1})  # of an earlier end
    for attempt, begin, state in ((1, 4, "preempted"), (2, 5, "done"), (3, 5, "done")):
        train(run_dir, attempt, begin, 5, state)
        assert export.main([str(run_dir.parent), "to=tensorboard"]) == 0
        events = EventAccumulator(str(place)).Reload()
        keys = events.Tensors("_hparams_/session_start_info")
        summaries = events.Tensors("summary") if "summary" in events.Tags()["tensors"] else []
        known.append((len(keys), len(summaries), len(list(place.iterdir()))))
    assert known == [(1, 0, 1), (1, 1, 2), (1, 1, 2)]
    assert b"lr" in events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert json.loads(summaries[0].tensor_proto.string_val[0])["val_top1"] == 0.5
    assert export.main([str(run_dir), "to=tensorboard", "project=other"]) == 0
    assert list(helpers.read(run_dir, "exported")) == ["tensorboard"]  # whatever project=


def test_each_tracker_gets_the_rows_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, 0, 0, 4)
    sent = []
    for to in ("wandb", "mlflow", "wandb"):
        monkeypatch.setitem(trackers.TRACKERS, to, lambda new: (new.id, str(len(new.values))))
        sent.append(trackers.export(run_dir, to, "").partition("; ")[0])
    first = sent[0].partition(": ")[2]
    assert first.startswith("3 rows")
    assert [line.partition(": ")[2] for line in sent] == [
        first,
        first,
        "nothing new for wandb mnist",
    ]


def test_rows_that_were_replaced_are_refused(run_dir: Path) -> None:
    """The newest checkpoint was damaged, or resume= names an earlier one."""
    train(run_dir, 0, 0, 8)
    export.main([str(run_dir), "to=tensorboard"])
    train(run_dir, 1, 4, 12)
    with pytest.raises(
        InputError, match=r"tensorboard has rows that a resume replaced: remove exported\.json to"
    ):
        export.main([str(run_dir), "to=tensorboard"])


def test_steps_that_a_failed_run_has_lost_are_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status has the step at which it failed."""
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda new: (new.id, str(len(new.values))))
    run_dir = tmp_path / "run"
    train(run_dir, 0, 0, 9, "failed", saved=6)
    assert f"{run_dir}: 5 rows to " in trackers.export(run_dir, "wandb", "")
    train(run_dir, 1, 6, 14)
    assert f"{run_dir}: 8 rows to " in trackers.export(run_dir, "wandb", "")


def test_a_row_whose_evaluation_was_postponed_is_held_back(run_dir: Path) -> None:
    """A stop at the end of an epoch postpones the evaluation. The resumed run writes the row again,
    with its results.
    """
    train(run_dir, 0, 0, 6)
    line = trackers.export(run_dir, "tensorboard", "")
    assert "run: 5 rows to " in line
    assert line.endswith("; 1 rows are not exported yet: a resume may replace them")


def test_the_error_of_a_library_is_one_line(run_dir: Path) -> None:
    train(run_dir, 0, 0, 4)
    (run_dir / "tensorboard").touch()
    with pytest.raises(InputError, match=r"/run: tensorboard: \w+Error: "):
        export.main([str(run_dir), "to=tensorboard"])
    assert not (run_dir / "exported.json").exists()


def test_errors_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "run", 0, 0, 4)
    with pytest.raises(InputError, match="/none: cannot be read"):
        export.main([f"{tmp_path}/none", "to=wandb"])
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(InputError, match=r"trackio.*: pip install '\.\[trackers\]'$"):
        export.main([str(tmp_path), "to=trackio"])
    assert not (tmp_path / "run/exported.json").exists()
    ended = helpers.run(
        [sys.executable, "-m", "recipes.export", str(tmp_path / "run"), "to=x"]
    ).expect(2)
    assert ended.lines == ["export: to=x: must be one of tensorboard, wandb, mlflow, trackio"]
