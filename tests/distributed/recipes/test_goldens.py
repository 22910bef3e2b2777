"""The recipes give the losses, and continue the run directories, that are recorded in
tests/goldens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import goldens, helpers

# Recorded with torch 2.15. On the same CPU, torch 2.10 gives the same bits. Other kernels (AVX2, or
# plain C, in place of AVX-512) change the losses by less than 1e-5. A learning rate that is 1 %
# higher changes the last by at least 4e-4.
RELATIVE = 1e-4
SAMPLES = 2  # of the evaluated samples: two logits that are almost equal may change places
TOY = (sys.executable, "-m", "recipes.toy")


@pytest.mark.parametrize("recipe", goldens.TRAININGS)
def test_two_ranks_give_the_recorded_losses_and_accuracies(recipe: str, tmp_path: Path) -> None:
    recorded = json.loads((goldens.FOLDER / f"{recipe}.json").read_text())
    rows = goldens.train(recipe, tmp_path)
    assert [row["step"] for row in rows] == [row["step"] for row in recorded]
    for row, before in zip(rows, recorded, strict=True):
        assert row.keys() == before.keys(), row
        for name, value in before.items():
            near = pytest.approx(value, abs=0, rel=RELATIVE)
            if name in ("val_top1", "val_top5"):
                near = pytest.approx(value, abs=SAMPLES / before["val_samples"], rel=0)
            assert row[name] == near, f"{name} at step {row['step']}"


def losses(run_dir: Path) -> dict[int, float]:
    # the last row of a step counts
    return {row["step"]: row["loss"] for row in helpers.rows(run_dir)}


def reported(run_dir: Path) -> dict[str, Any]:
    ended = helpers.run([sys.executable, "-m", "recipes.report", "--json", str(run_dir)]).expect(0)
    return json.loads(ended.out)


@pytest.mark.parametrize(
    ("name", "state", "ranks", "step", "note", "saved"),
    [
        ("done", "done", 1, goldens.STEPS, "", goldens.STEPS),
        ("preempted", "stopped", 1, 11, "SIGTERM", 11),
        ("failed", "failed", 2, 12, "rank 1 on ", 8),
    ],
)
def test_runs_of_before_are_continued(
    name: str, state: str, ranks: int, step: int, note: str, saved: int, tmp_path: Path
) -> None:
    """step: of the last row before. saved: of the newest checkpoint."""
    run_dir = goldens.copy_of_run(name, tmp_path)
    before = reported(run_dir)
    assert before["state"] == state
    assert before["recipe"] == "toy"
    assert before["step"] == step
    assert note in before["note"]

    processes = helpers.fork_ranks([*TOY, f"run_dir={run_dir}"], ranks)
    first, *others = (helpers.finish(process).expect(0) for process in processes)
    assert len(others) == ranks - 1
    assert first.lines[-1] == f"finished at step {goldens.STEPS}"
    [resumed] = [line for line in first.lines if line.startswith("resumed from ")]
    assert resumed.endswith(f", step {saved}")
    assert ("\nalready finished: " in first.out) == (name == "done")
    status = helpers.read(run_dir, "status")
    assert status["state"] == "done"
    assert status["attempt"] == 1
    assert status["step"] == goldens.STEPS
    after = reported(run_dir)
    assert after["state"] == "done"
    assert after["step"] == goldens.STEPS
    assert after["note"] == ""
    rows = [(row["attempt"], row["step"]) for row in helpers.rows(run_dir)]
    of_first = [(0, number) for number in range(1, step + 1)]
    of_second = [(1, number) for number in range(saved + 1, goldens.STEPS + 1)]
    assert rows == of_first + of_second
    # All runs have the same keys: a run that is continued ends as one that was never stopped.
    assert losses(run_dir) == pytest.approx(losses(goldens.RUNS / "done"), rel=RELATIVE)
