"""The recipe finetune: its schedule and groups against formulas; its images; the same metrics on 1,
2 and 3 ranks; an exact resume.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from recipes import finetune
from recipes.conf.finetune import Config
from recipes.core.data import labelled
from recipes.core.data.image_sets import Fake
from recipes.core.errors import ConfigError, InputError
from recipes.core.train import models, optimisation
from tests import helpers, states
from tests.distributed import one_rank

WORDS = ("arch=shufflenet_v2_x0_5", "pretrained=false", "px=32", "val_resize=32")
SMALL = (*WORDS, "num_workers=0", "global_batch_size=6")
COLORS = {"blue": (30, 60, 220), "green": (40, 200, 60), "red": (220, 40, 50)}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten images of each of three classes, and labels.csv with several labels for some of them."""
    folder = tmp_path_factory.mktemp("photographs")
    random = torch.Generator().manual_seed(0)
    rows = []
    for name, color in COLORS.items():
        (folder / name).mkdir()
        for i in range(10):
            noise = torch.randint(-40, 40, (48, 40, 3), generator=random)
            pixels = (torch.tensor(color) + noise).clamp(0, 255).to(torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / name / f"{i}.jpg")
            labels = name if i % 2 else f"{name};round"
            rows.append((f"{name}/{i}.jpg", labels, "val" if i < 3 else "train"))
    with open(folder / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file", "label", "split"), *rows])
    return folder


@pytest.fixture
def train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photographs: Path
) -> Callable[..., one_rank.Trained]:
    folders = (tmp_path / str(i) for i in range(9))
    words = (*SMALL, f"data_dir={photographs}")
    return lambda *more, **place: one_rank.train(
        finetune, next(folders), monkeypatch, *words, *more, **place
    )


def test_the_images_are_those_of_the_folder_normalised(train: Any, photographs: Path) -> None:
    trained = train("epochs=1", "augment=none", "min_crop=1")
    assert len(trained.training) == 4  # 24 of 30 images, in batches of 6
    mean, std = (torch.tensor(values)[:, None, None] for values in models.mean_and_std("resnet18"))
    seen = torch.cat([forward.inputs for forward in trained.training]) * std + mean
    brightest = seen.mean((2, 3)).amax(1) * 255
    colors = sorted(round(value / 10) for value in brightest.tolist())
    assert colors == [20] * 8 + [22] * 16  # green, blue and red
    order = trained.run.checkpoints.order
    assert order["validation_data"] not in ("", order["data"])
    assert trained.run.state.about == {"classes": ["blue", "green", "red"]}
    results = trained.results
    assert sum(map(sum, results["val_confusion"])) == results["val_samples"] == 6
    assert {"val_top1", "val_f1", "val_recall"} <= results.keys()
    assert "val_top5" not in results


def test_a_best_metric_of_an_unknown_class_is_refused_before_the_training(train: Any) -> None:
    assert "val_f1_green" in train("epochs=1", "best_metric=val_f1_green").results
    line = "must end with the name of a class, such as 'blue'; did you mean 'green'"
    with pytest.raises(InputError, match=f"^best_metric=val_f1_gren: {line}"):
        train("best_metric=val_f1_gren")


def test_several_labels_are_scored_by_average_precision(train: Any, photographs: Path) -> None:
    trained = train("epochs=1", f"labels={photographs / 'labels.csv'}", "multi_label=true")
    assert trained.training[0].outputs.shape == (6, 4)
    assert 0 < trained.results["val_map"] <= 1
    assert trained.results["val_samples"] == 9


def test_rates_fall_from_block_to_block_and_the_head_begins_alone() -> None:
    with torch.device("meta"):
        net = models.classifier("resnet18", "", 3)
    groups = optimisation.layer_groups(net, 0.01, 0.5, 0.1)
    rates = {group["depth"]: group["lr"] for group in groups}
    # fc, eight blocks, bn1, conv1
    assert rates == {depth: 0.01 * 0.5**depth for depth in range(11)}
    cfg = Config(head_epochs=1, warmup=0.25)
    of_head, of_others = finetune.lr_factors(cfg, 4, 12, [0, 3])
    assert [of_others(step) for step in range(4)] == [0.0] * 4
    assert of_others(4) == pytest.approx(1 / 3)
    assert of_head(0) == pytest.approx(1 / 4)
    assert of_head(3) == 1.0
    assert of_head(12) == of_others(12) == pytest.approx(0.0)


def test_class_weights_and_mixing_change_the_loss(train: Any) -> None:
    losses = set()
    for words in ((), ("mixup=0.4",), ("cutmix=1",)):
        trained = train("epochs=1", *words)
        losses.add(trained.rows[0]["loss"])
    assert len(losses) == 3
    # the classes are of the same size
    assert train("epochs=1", "class_weights=true").rows[0]["loss"] in losses
    labels = torch.tensor([0, 1, 2, 0])
    x, soft = finetune.mixed(Config(mixup=0.4), torch.rand(4, 3, 8, 8), labels, 3, 0, 1)
    assert soft.sum(1).tolist() == pytest.approx([1.0] * 4)
    _, again = finetune.mixed(Config(mixup=0.4), x, labels, 3, 0, 1)
    assert again.equal(soft)  # the same at a resume
    for later in ((1, 1), (0, 2)):  # another epoch, another batch
        assert not finetune.mixed(Config(mixup=0.4), x, labels, 3, *later)[1].equal(soft)


def test_a_rare_class_has_a_higher_weight() -> None:
    """One of a class of average size is 1; a class without images has that of one image."""
    pictures = labelled.Pictures(Fake(8, classes=3), [0, 1, 4, 7], lambda image: None)
    assert pictures.counts().tolist() == [1, 3, 0]
    assert finetune.class_weights(pictures).tolist() == pytest.approx([4 / 3, 4 / 9, 4 / 3])


@pytest.mark.parametrize(
    "keys",
    [
        {"multi_label": True},
        {"mixup": 1.0, "cutmix": 1.0},
        {"multi_label": True, "labels": "a.csv", "class_weights": True},
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{list(keys)[-1]}="):
        Config(**keys)


@pytest.mark.parametrize("arch", ["resnet18", "vit_b_16", "convnext_tiny", "densenet121"])
def test_every_trained_parameter_is_in_one_group(arch: str) -> None:
    with torch.device("meta"):
        net = models.classifier(arch, "", 3)
    groups = optimisation.layer_groups(net, 1.0, 0.5, 0.1)
    parameters = [p for group in groups for p in group["params"]]
    assert len(parameters) == len(set(parameters)) == len(list(net.parameters()))
    assert max(group["depth"] for group in groups) >= 4


def launched(folder: Path, photographs: Path, ranks: int, *words: str) -> Path:
    """The run directory of a finished run of ``ranks`` ranks."""
    keys = (
        *SMALL,
        f"data_dir={photographs}",
        "log_every_steps=1",
        f"ranks_per_node={ranks}",
        f"run_dir={folder}",
    )
    helpers.run_fork([*helpers.LOCAL, "recipe=finetune", "dataset=images", *keys, *words]).expect(0)
    return folder


def test_metrics_are_the_same_on_one_two_and_three_ranks(tmp_path: Path, photographs: Path) -> None:
    words = ("epochs=2", "train=head", "erasing=0.5", "global_batch_size=7")
    alone = helpers.rows(launched(tmp_path / "1", photographs, 1, *words))
    for ranks in (2, 3):
        rows = helpers.rows(launched(tmp_path / str(ranks), photographs, ranks, *words))
        for name in ("loss", "val_f1", "val_top1"):
            expected = [row[name] for row in alone if name in row]
            values = [row[name] for row in rows if name in row]
            assert values == pytest.approx(expected, abs=1e-4), name


def test_a_resumed_run_ends_with_the_state_of_one_that_never_stopped(
    tmp_path: Path, photographs: Path
) -> None:
    keys = [
        "max_steps=6",
        "epochs=2",
        "checkpoint_every_steps=3",
        "num_workers=1",
        "train=lora",
        "cutmix=1",
        "ema=0.9",
    ]
    whole = launched(tmp_path / "whole", photographs, 1, *keys)
    folder = tmp_path / "again/checkpoints"
    folder.mkdir(parents=True)
    shutil.copy(whole / "checkpoints/step-00000003.pt", folder)
    # the weights to start from are not read again, and may no longer exist
    again = launched(tmp_path / "again", photographs, 1, *keys, "weights=/gone")
    assert helpers.rows(again)[0]["step"] == 4
    assert states.at_step(again, 6) == states.at_step(whole, 6)
