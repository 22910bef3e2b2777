"""Neither the number of ranks nor the launcher changes the result: losses, samples, evaluation, weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from recipes.core.data import datasets
from recipes.core.data.datasets import DataFileError
from recipes.core.run import attempt as attempts
from tests import helpers

# 1,437 digits in batches of 205: 3 ranks do not divide one, and the last of an epoch has 2 samples, so that a rank has none.
SAME = (
    "global_batch_size=205", "max_steps=20", "log_every_steps=1", "seed=7", "cpu_threads=1", "dataset=digits", "device=cpu",
)  # fmt: skip

TOLERANCE = 2e-5  # relative; another order of the same sums in float32 comes to 2e-6 in 20 steps (measured)


@pytest.fixture(scope="module")
def same_run(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The run directories of one and the same run, by the number of its ranks: two launchers, started at once."""
    folder = tmp_path_factory.mktemp("same")
    run_dirs = {size: folder / f"ranks{size}" for size in (1, 3)}
    started = [
        helpers.fork([*helpers.LOCAL, *SAME, f"ranks_per_node={size}", f"run_dir={run_dir}"])
        for size, run_dir in run_dirs.items()
    ]
    for ended in [helpers.finish(process) for process in started]:
        assert ended.status == 0, ended.out
    return run_dirs


def losses(run_dir: Path) -> list[float]:
    found = helpers.rows(run_dir)
    assert [row["step"] for row in found] == list(range(1, 21))
    return [row["loss"] for row in found]


def test_losses_agree_even_if_a_rank_has_no_sample(same_run: dict[int, Path]) -> None:
    alone = losses(same_run[1])
    assert alone[0] == pytest.approx(2.3, rel=0.05)  # the logarithm of ten classes
    assert alone[-1] < 0.8 * alone[0]
    assert losses(same_run[3]) == pytest.approx(alone, rel=TOLERANCE)


def test_learning_rates_and_epochs_agree(same_run: dict[int, Path]) -> None:
    alone, *others = [[(r["epoch"], r["lr"]) for r in helpers.rows(run_dir)] for run_dir in same_run.values()]
    assert [epoch for epoch, _ in alone] == [0] * 8 + [1] * 8 + [2] * 4
    assert len({lr for _, lr in alone}) == 20
    assert others == [alone]


def test_every_test_sample_is_counted_once(same_run: dict[int, Path]) -> None:
    alone, *others = [[row for row in helpers.rows(run_dir) if "val_top1" in row] for run_dir in same_run.values()]
    assert [row["step"] for row in alone] == [8, 16, 20]  # the ends of two epochs and of the run
    for row in alone:
        assert row["val_samples"] == 359  # a prime number: no number of ranks divides it
        assert (row["val_top1"] * 359) % 1 == pytest.approx(0, abs=1e-6)
        assert row["val_top1"] < row["val_top5"] <= 1
    for other in others:
        for name in ("val_samples", "val_top1", "val_top5"):
            assert [row[name] for row in other] == [row[name] for row in alone]
    summaries = {size: helpers.read(run_dir, "summary") for size, run_dir in same_run.items()}
    for size, summary in summaries.items():
        assert (summary["world_size"], summary["val_samples"], summary["steps"]) == (size, 359, 20)
        assert summary["val_top1"] == helpers.rows(same_run[size])[-1]["val_top1"]


def test_concurrent_runs_do_not_interfere(same_run: dict[int, Path]) -> None:
    for size, run_dir in same_run.items():  # started at the same moment
        summary = helpers.read(run_dir, "summary")
        assert (summary["world_size"], summary["restarts"]) == (size, 0)
        assert helpers.read(run_dir, "status")["state"] == "done"
        assert len(attempts.facts(run_dir)["hosts"]) == size
        assert len(list((run_dir / "logs").iterdir())) == size


def assert_same_to_the_bit(run_dir: Path, expected: Path) -> None:
    speed = {"samples_per_second"}
    found, wanted = (
        [{k: v for k, v in row.items() if k not in speed} for row in helpers.rows(d)] for d in (run_dir, expected)
    )
    assert len(wanted) == 20
    assert found == wanted
    models = [
        torch.load(d / "checkpoints" / "step-00000020.pt", weights_only=True)["model"] for d in (run_dir, expected)
    ]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


def test_torchrun_gives_the_same_bits(tmp_path: Path, same_run: dict[int, Path]) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=3",
        "-m",
        "recipes.mnist",
    ]
    ended = helpers.run_fork([*torchrun, *SAME, f"run_dir={tmp_path}"])
    assert ended.status == 0, ended.out
    assert "mnist: 3 ranks on 1 node, cpu, gloo" in ended.lines
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["rank0.log", "rank1.log", "rank2.log"]
    assert_same_to_the_bit(tmp_path, same_run[3])


@pytest.mark.long
def test_one_plain_process_gives_the_same_bits(tmp_path: Path, same_run: dict[int, Path]) -> None:
    ended = helpers.run([sys.executable, "-m", "recipes.mnist", *SAME, f"run_dir={tmp_path}"])
    assert ended.status == 0, ended.out
    assert "mnist: 1 rank on 1 node, cpu, gloo" in ended.lines
    assert_same_to_the_bit(tmp_path, same_run[1])


@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    [
        (("optimizer=sgd", "lr=0.05"), TOLERANCE),
        # AdamW's first steps go by the sign of each gradient, rounding's where there is next to none: 2e-6 on one kind of CPU, and
        # 2e-3 on another, whose kernels sum in another order for another size of batch.
        (("optimizer=adamw",), 1e-2),
    ],
)
@pytest.mark.long
def test_losses_agree_on_mnist(optimizer: tuple[str, ...], tolerance: float, tmp_path: Path) -> None:
    try:
        datasets.find_mnist(helpers.DATA)
    except DataFileError as error:
        pytest.skip(f"{error}, and set RECIPES_DATA to it")
    run_dirs = {size: tmp_path / f"ranks{size}" for size in (1, 3)}
    words = ["dataset=mnist", f"data_dir={helpers.DATA}", "global_batch_size=128", "max_steps=20", "log_every_steps=1"]
    words += optimizer
    started = [
        helpers.start([*helpers.LOCAL, *words, "cpu_threads=1", f"ranks_per_node={size}", f"run_dir={run_dir}"])
        for size, run_dir in run_dirs.items()
    ]
    for ended in [helpers.finish(process) for process in started]:
        assert ended.status == 0, ended.out
    for run_dir in run_dirs.values():
        assert helpers.read(run_dir, "summary")["val_samples"] == 10_000
    assert losses(run_dirs[3]) == pytest.approx(losses(run_dirs[1]), rel=tolerance)
