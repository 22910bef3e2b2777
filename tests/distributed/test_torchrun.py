"""The same run under torchrun, and as one plain process: what launches the ranks changes no bit of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests import helpers
from tests.distributed.conftest import SAME

WORDS = (*SAME, "dataset=digits", "device=cpu")


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
    ended = helpers.run([*torchrun, *WORDS, f"run_dir={tmp_path}"])
    assert ended.status == 0, ended.out
    assert "mnist: 3 ranks on 1 node, cpu, gloo" in ended.lines
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["rank0.log", "rank1.log", "rank2.log"]
    assert_same_to_the_bit(tmp_path, same_run[3])


@pytest.mark.long
def test_one_plain_process_gives_the_same_bits(tmp_path: Path, same_run: dict[int, Path]) -> None:
    ended = helpers.run([sys.executable, "-m", "recipes.mnist", *WORDS, f"run_dir={tmp_path}"])
    assert ended.status == 0, ended.out
    assert "mnist: 1 rank on 1 node, cpu, gloo" in ended.lines
    assert_same_to_the_bit(tmp_path, same_run[1])
