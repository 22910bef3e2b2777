"""The recipe toy: what it learns and writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import helpers

TOY = (sys.executable, "-m", "recipes.toy", "device=cpu", "cpu_threads=1")


def test_it_learns_and_writes_the_usual_files(tmp_path: Path) -> None:
    helpers.run_fork(
        [*TOY, "checkpoint_every_steps=0", "keep_checkpoints=0", f"run_dir={tmp_path}"]
    ).expect(0)
    rows = helpers.rows(tmp_path)
    assert rows[0]["step"] == 1
    assert rows[-1]["step"] == 320
    assert rows[-1]["loss"] < 0.02 < 0.2 < rows[0]["loss"]
    saved = [int(path.stem[5:]) for path in sorted((tmp_path / "checkpoints").glob("*.pt"))]
    assert saved == [80, 160, 240, 320]  # after each five epochs of 16 steps
    summary = helpers.read(tmp_path, "summary")
    assert summary["recipe"] == "toy"
    assert summary["steps"] == 320
    assert summary["world_size"] == 1
    assert summary["val_loss"] < 0.01
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert {"metrics.jsonl", "summary.json", "status.json"} <= {path.name for path in before}
    helpers.run_fork([*TOY, "evaluate=true", f"run_dir={tmp_path}"]).expect(0)
    assert helpers.read(tmp_path / "evaluation", "summary")["val_loss"] == summary["val_loss"]
    assert helpers.read(tmp_path / "evaluation", "status")["state"] == "done"
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_second_attempt_compiles_nothing_again(tmp_path: Path) -> None:
    """Compiling is most of the time of these runs; loading what is compiled took 8 % of it."""
    command = [*TOY, "compile=true", f"run_dir={tmp_path}/run"]
    environ = helpers.clean_environment(TMPDIR=str(tmp_path))
    compiled: list[dict[Path, int]] = []
    for steps in (2, 4):
        process = helpers.start([*command, f"max_steps={steps}", "force=true"], environ=environ)
        helpers.finish(process, 280).expect(0)
        libraries = tmp_path.glob("recipes-*/*/*/*.so")
        compiled.append({path: path.stat().st_mtime_ns for path in libraries})
    assert compiled[0]
    assert compiled[1] == compiled[0]
    assert helpers.read(tmp_path / "run", "summary")["resumed_from_step"] == 2
