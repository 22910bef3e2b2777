"""The recipe cifar on real ranks: from a folder of images to a summary, and what its keys are refused for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from recipes import cifar
from recipes.conf.cifar import Config
from tests import helpers

LOCAL = (
    sys.executable,
    str(helpers.ROOT / "launch.py"),
    "recipe=cifar",
    "launcher=local",
    "device=cpu",
    "cpu_threads=1",
)
SMALL = ("arch=resnet9", "small_px=8", "global_batch_size=24", "log_every_steps=1")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of 3 classes, 48 images to train on and 37 to test, packed by the real command."""
    folder, target = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("packed")
    helpers.write_images(folder / "train", 3, 16, 32)
    helpers.write_images(folder / "test", 3, 13, 32, seed=1)
    for extra in ("class0/0.JPEG", "class1/5.JPEG"):
        (folder / "test" / extra).unlink()
    ended = helpers.run([sys.executable, "-m", "recipes.prepare", "cifar10", f"source={folder}", f"data_dir={target}"])
    assert ended.status == 0, ended.out
    return target


@pytest.mark.long
def test_a_folder_of_images_is_learnt_and_each_is_counted_once(data_dir: Path, tmp_path: Path) -> None:
    words = [
        "ranks_per_node=2",
        "epochs=4",
        "ema=0.3",
        "lr=0.08",
        "lr_batch_size=48",
        f"data_dir={data_dir}",
        f"run_dir={tmp_path}",
    ]
    ended = helpers.run([*LOCAL, *SMALL, *words])
    assert ended.status == 0, ended.out
    summary = helpers.read(tmp_path, "summary")
    assert (summary["world_size"], summary["val_samples"], summary["steps"]) == (2, 37, 8)
    assert summary["val_top1"] > 0.6  # a third by chance
    assert "lr: 0.04 for batches of 24 (0.08 for 48, in proportion)" in ended.lines
    assert "ema: 0.5477 a step of 24 (0.3 for 48)" in ended.lines
    assert [row["step"] for row in helpers.rows(tmp_path)] == list(range(1, 9))

    counts = set()
    for ranks in (1, 2, 3, 4):  # the same weights, evaluated by any number of ranks
        place = [
            f"ranks_per_node={ranks}",
            f"resume={tmp_path}/checkpoints/step-00000008.pt",
            f"run_dir={tmp_path}/{ranks}",
        ]
        ended = helpers.run(
            [*LOCAL, *SMALL, *[w for w in words if "run_dir" not in w and "ranks" not in w], *place, "evaluate=true"]
        )
        assert ended.status == 0, ended.out
        result = helpers.read(tmp_path / str(ranks), "summary")
        counts.add((result["val_samples"], result["val_top1"], result["val_top5"]))
    assert counts == {(37, summary["val_top1"], summary["val_top5"])}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(
            ["sync_bn=true", "dataset=fake"], "sync_bn=true: torch has it for GPUs only", marks=pytest.mark.long
        ),
        pytest.param(
            ["global_batch_size=1", "dataset=fake", "ranks_per_node=2"],
            "global_batch_size=1: a batch of 1 of 50000 samples",
            marks=pytest.mark.long,
        ),
        (
            ["global_batch_size=3", "dataset=fake", "ranks_per_node=2", "accumulate=2"],
            "2 ranks of 2 pieces without any",
        ),
        (["data_dir=/nonexistent"], "python -m recipes.prepare cifar10"),
    ],
)
def test_what_cannot_be_trained_is_one_line(words: list[str], expected: str, tmp_path: Path) -> None:
    ended = helpers.run([*LOCAL, f"run_dir={tmp_path}", *words])
    assert ended.status == 2
    assert expected in ended.lines[-1]
    assert "Traceback" not in ended.out


def test_images_grow_and_the_last_third_is_whole() -> None:
    sides = [cifar.side(Config(small_px=16), 12, epoch) for epoch in range(12)]
    assert sides == sorted(sides)
    assert (sides[0], sides[8:]) == (16, [32] * 4)
    assert {side % 4 for side in sides} == {0}
    assert {cifar.side(Config(), 3, epoch) for epoch in range(3)} == {32}


def test_the_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    factors = [cifar.lr_factor(Config(warmup=0.25), 100, step) for step in range(100)]
    peak = factors.index(max(factors))
    assert peak == 25
    assert factors[25] == 1
    assert factors[:26] == sorted(factors[:26])
    assert factors[25:] == sorted(factors[25:], reverse=True)
    assert 0 < factors[99] < 0.02


def test_norms_and_biases_have_no_weight_decay() -> None:
    net = cifar.ResNet9(10)
    weights, others = cifar.make_optimizer(Config(), net, 0.1).param_groups
    assert (weights["weight_decay"], others["weight_decay"]) == (5e-4, 0)
    assert {p.ndim for p in weights["params"]} == {2, 4}
    assert {p.ndim for p in others["params"]} == {1}
    assert sum(len(g["params"]) for g in (weights, others)) == len(list(net.parameters()))
    assert net(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
