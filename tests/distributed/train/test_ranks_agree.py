"""Neither the number of ranks nor the launcher changes the result: losses, samples, evaluation,
weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import helpers

# 1,438 digits in batches of 205: 3 ranks do not divide one, and the last of an epoch has 2 samples,
# so that a rank has none.
SAME = (
    "global_batch_size=205",
    "max_steps=20",
    "log_every_steps=1",
    "seed=7",
    "cpu_threads=1",
    "dataset=digits",
    "device=cpu",
)

# relative; another order of the same sums in float32 comes to 2e-6 in 20 steps (measured)
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def same_run(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The run directories of one and the same run, by the number of its ranks: two launchers,
    started at once.
    """
    folder = tmp_path_factory.mktemp("same")
    run_dirs = {size: folder / f"ranks{size}" for size in (1, 3)}
    started = [
        helpers.fork([*helpers.LOCAL, *SAME, f"ranks_per_node={size}", f"run_dir={run_dir}"])
        for size, run_dir in run_dirs.items()
    ]
    for process in started:
        helpers.finish(process).expect(0)
    return run_dirs


def losses(run_dir: Path) -> list[float]:
    rows = helpers.rows(run_dir)
    assert [row["step"] for row in rows] == list(range(1, 21))
    return [row["loss"] for row in rows]


def test_losses_agree_even_if_a_rank_has_no_sample(same_run: dict[int, Path]) -> None:
    alone = losses(same_run[1])
    assert alone[0] == pytest.approx(2.3, rel=0.05)  # the logarithm of ten classes
    assert alone[-1] < 0.8 * alone[0]
    assert losses(same_run[3]) == pytest.approx(alone, rel=TOLERANCE)


def test_every_test_sample_is_counted_once(same_run: dict[int, Path]) -> None:
    alone, other = (
        [row for row in helpers.rows(run_dir) if "val_top1" in row] for run_dir in same_run.values()
    )
    assert [row["step"] for row in alone] == [8, 16, 20]  # the ends of two epochs and of the run
    for row in alone:
        assert row["val_samples"] == 359  # a prime number: no number of ranks divides it
        right = row["val_top1"] * 359
        assert right == pytest.approx(round(right), abs=1e-6)
        assert row["val_top1"] < row["val_top5"] <= 1
    for name in ("val_samples", "val_top1", "val_top5"):
        assert [row[name] for row in other] == [row[name] for row in alone]
    for size, run_dir in same_run.items():
        summary = helpers.read(run_dir, "summary")
        assert summary["world_size"] == size
        assert summary["val_samples"] == 359
        assert summary["steps"] == 20
        assert summary["val_top1"] == helpers.rows(run_dir)[-1]["val_top1"]


# The ranks return different losses, because this recipe does not add them up with world.sum().
# After the second epoch, only rank 0 has a new best loss.
OWN_RESULTS = """
from recipes import toy
from recipes.core.train import loop
start = toy.entry.begin("toy")
steps = loop.steps

def with_own_results(run, cfg, model, batches, evaluate):
    values = iter([1.0, 0.5 + run.world.rank, 0.75])
    return steps(run, cfg, model, batches, lambda: {"val_loss": next(values)})

loop.steps = with_own_results
toy.session.run(toy.main, start)
"""


def test_results_that_differ_between_the_ranks_do_not_divide_them(tmp_path: Path) -> None:
    words = ["device=cpu", "samples=8", "global_batch_size=4", "epochs=3", "timeout_s=20"]
    words += ["best_metric=val_loss", "best_mode=min", f"run_dir={tmp_path}"]
    helpers.run_ranks(OWN_RESULTS, words, 2).expect(0)
    assert helpers.read(tmp_path, "summary")["best"] == {"val_loss": 0.5, "step": 4}
