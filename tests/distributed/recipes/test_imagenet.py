"""The recipe imagenet in this process: its inputs, loss, schedule and optimisers against formulas,
and real images that it memorises.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import models as theirs

from recipes import imagenet
from recipes.conf.imagenet import Config
from recipes.core.data import classfolder, decode, image_sets, torch_loader
from recipes.core.data.image_sets import IGNORE
from recipes.core.errors import ConfigError, InputError, MachineError
from recipes.core.train.optimizers import LARS
from tests import helpers
from tests.distributed import one_rank
from tests.distributed.one_rank import Trained

# As all of torchvision's weights have them: red, green, blue, of 0 to 1.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
Train = Callable[..., Trained]


def small_net(cfg: Config, run: object, classes: int, pretrained: str = "") -> nn.Module:
    conv = nn.Conv2d(3, 4, 5, stride=4)
    layers = [
        conv,
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers, nn.Linear(16, classes))


@pytest.fixture(scope="module")
def slopes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 training images whose red grows to the right, whose green grows downwards, and whose blue
    is the class, times 30.

    And 13 validation images of several sizes.
    """
    folder = tmp_path_factory.mktemp("slopes")
    down, right = np.mgrid[0:100, 0:120]
    for i in range(24):
        place = folder / "train" / f"class{i % 6}"
        place.mkdir(parents=True, exist_ok=True)
        blue = np.full_like(down, 30 * (i % 6) + 50)
        pixels = np.stack([2 * right, 2 * down, blue], 2).astype(np.uint8)
        Image.fromarray(pixels).save(place / f"{i}.JPEG", quality=98, subsampling=0)
    for i in range(13):
        place = folder / "val" / f"class{i % 6}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = np.random.default_rng(i).integers(0, 256, (6, 7, 3), np.uint8)
        size = (50 + 5 * i, 100 - 4 * i)
        image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        image.save(place / f"{i}.JPEG")
    return folder


@pytest.fixture
def train(slopes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    monkeypatch.setattr(imagenet, "make_net", small_net)
    words = (
        f"data_dir={slopes}",
        "global_batch_size=12",
        "px=48",
        "val_px=40",
        "val_resize=52",
        "num_workers=0",
    )
    return lambda *more, **place: one_rank.train(
        imagenet, tmp_path / str(place), monkeypatch, *words, *more, **place
    )


def pixels(inputs: Tensor) -> Tensor:
    mean = torch.tensor(MEAN).view(3, 1, 1)
    std = torch.tensor(STD).view(3, 1, 1)
    return (inputs * std + mean) * 255


def test_half_of_the_crops_are_flipped_and_the_loss_is_that_of_their_labels(train: Train) -> None:
    trained = train("epochs=8", "min_crop=0.25", "label_smoothing=0.3")
    losses = []
    areas = []
    flips = []
    for forward in trained.training:
        assert forward.inputs.shape == (12, 3, 48, 48)
        shown = pixels(forward.inputs)
        blue = shown[:, 2]
        labels = ((blue.mean((1, 2)) - 50) / 30).round().long()
        assert (blue - (30 * labels + 50).view(-1, 1, 1)).abs().max() < 4
        losses.append(one_rank.cross_entropy(forward.outputs, labels, 0.3))
        red = shown[:, 0].mean(1)
        green = shown[:, 1].mean(2)
        assert (green[:, -1] > green[:, 0]).all()  # never upside down
        flips += (red[:, 0] > red[:, -1]).tolist()
        # From the middles of the second pixel and the last but one, of 48, to those of the edges.
        width = (red[:, -2] - red[:, 1]).abs() / 2 * 48 / 45
        height = (green[:, -2] - green[:, 1]).abs() / 2 * 48 / 45
        areas += (width * height / 12000).tolist()
    assert [row["loss"] for row in trained.rows] == pytest.approx(losses, rel=1e-5)
    assert 70 < sum(flips) < 122  # of 192
    assert 0.23 < min(areas) < 0.30
    assert max(areas) > 0.93


def test_an_evaluation_starts_from_the_weights_of_a_run(train: Train, tmp_path: Path) -> None:
    trained = train("max_steps=2")
    run_dir = trained.run.dir.rename(tmp_path / "before")
    assert train("evaluate=true", f"weights={run_dir}").results == trained.results
    started = train("max_steps=1", f"weights={run_dir}")
    run_dir.rename(tmp_path / "elsewhere")
    again = train("evaluate=true", f"weights={run_dir}")  # the checkpoint has all weights
    assert again.results == started.results
    with pytest.raises(ConfigError, match="cannot be used with pretrained=true"):
        train("pretrained=true", f"weights={run_dir}")


def test_validation_images_equal_torchvisions_presets(train: Train, slopes: Path) -> None:
    trained = train("max_steps=1", "val_batch_size=5")
    preset = theirs.ResNet50_Weights.IMAGENET1K_V1.transforms(crop_size=40, resize_size=52)
    paths = sorted((slopes / "val").rglob("*.JPEG"))
    wanted = torch.stack([preset(Image.open(path)) for path in paths])
    assert [len(forward.inputs) for forward in trained.evaluation] == [5, 5, 3]
    seen = torch.cat([forward.inputs for forward in trained.evaluation])
    outputs = torch.cat([forward.outputs for forward in trained.evaluation])
    assert (seen - wanted).abs().max() < 1.1 / 255 / 0.224  # one unit of a pixel
    labels = torch.tensor([int(path.parent.name[-1]) for path in paths])
    expected = {f"val_top{k}": one_rank.top(outputs, labels, k) for k in (1, 5)}
    assert trained.results == {**expected, "val_samples": 13, "skipped_samples": 0}
    # as in test_mnist
    assert trained.run.checkpoints.order["data"] == classfolder.scan(slopes / "train").digest()


def test_pretrained_weights_are_evaluated_without_a_checkpoint(train: Train) -> None:
    trained = train("evaluate=true", "pretrained=true")
    assert not trained.training
    assert trained.results["val_samples"] == 13


def test_the_image_size_follows_the_schedule_of_the_epochs(train: Train) -> None:
    # seven epochs, of which the last one ends early
    trained = train("epochs=99", "max_steps=13", "px=96", "small_px=32", "flip=false")
    sides = []
    for forward in trained.training:
        height, width = forward.inputs.shape[2:]
        assert height == width
        sides.append(width)
        red = forward.inputs[:, 0]
        assert (red[:, :, -1] > red[:, :, 0]).all()
    assert sides == [side for side in (32, 32, 32, 64, 64, 64, 96) for _ in range(2)][:13]
    assert imagenet.side(Config(), 90, 0) == 224
    assert imagenet.side(Config(px=80, small_px=40), 8, 7) == 80


def test_a_rank_takes_its_own_samples_and_random_numbers(train: Train) -> None:
    # 12 in 4, 4 and 4; 13 in 5, 4 and 4
    one_rank.check_second_of_three(train, slice(4, 8), slice(5, 9))


def test_bfloat16_is_used_in_training_and_evaluation(train: Train) -> None:
    one_rank.check_bfloat16(train)


def test_the_keys_select_the_decoder_and_its_workers(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = decode.make_decoder
    names = []
    loaded = torch_loader.DataLoader
    workers = []

    def load(*of: Any, **keys: Any) -> Any:
        """Reads in this process. A fork of it, which has the threads of many tests, may hang or
        crash.
        """
        workers.append(keys["num_workers"])
        return loaded(*of, **{**keys, "num_workers": 0, "persistent_workers": False})

    def make_noted(name: str) -> Any:
        names.append(name)
        return make("torchvision")

    monkeypatch.setattr(image_sets, "_decoder", make_noted)
    monkeypatch.setattr(torch_loader, "DataLoader", load)
    for size, name in enumerate(("opencv", "torchvision"), 1):
        names.clear()
        train("max_steps=1", f"decoder={name}", "num_workers=2", size=size)
        # of the two sets; then each read asks for the one that stands in
        assert names[:2] == [name] * 2
    assert set(workers) == {1, 2}  # one compares two reads


def test_mixup_blends_pairs_and_their_losses(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = imagenet.mixed
    calls = []

    def noted(cfg: Config, images: Tensor, labels: Tensor, *more: Any) -> Any:
        blended = mixed(cfg, images, labels, *more)
        calls.append((labels, *blended))
        return blended

    monkeypatch.setattr(imagenet, "mixed", noted)
    trained = train("epochs=4", "mixup=0.4", "label_smoothing=0")
    shares = set()
    for forward, call, row in zip(trained.training, calls, trained.rows, strict=True):
        labels, images, others, share = call
        assert torch.equal(forward.inputs, images)
        assert torch.equal(others, labels.flip(0))
        loss = one_rank.cross_entropy(forward.outputs, labels, 0)
        other_loss = one_rank.cross_entropy(forward.outputs, labels.flip(0), 0)
        assert row["loss"] == pytest.approx(share * loss + (1 - share) * other_loss, rel=1e-5)
        assert 0 < share < 1
        shares.add(share)
    assert len(shares) == 8


def test_mixup_takes_the_same_share_on_every_rank() -> None:
    x = torch.randn(6, 3, 4, 4)
    labels = torch.arange(6)
    blended, _, share = imagenet.mixed(Config(mixup=0.4), x, labels, 3, 5)
    assert torch.allclose(blended, share * x + (1 - share) * x.flip(0), atol=1e-6)
    assert imagenet.mixed(Config(mixup=0.4), x[:2], labels[:2], 3, 5)[2] == share
    plain, same, whole = imagenet.mixed(Config(), x, labels, 3, 5)
    assert plain is x
    assert same is labels
    assert whole == 1.0


def test_an_image_that_cannot_be_read_has_no_loss(
    train: Train, slopes: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(slopes, tmp_path / "copy")
    for path in (copy / "train" / "class0" / "0.JPEG", copy / "val" / "class0" / "0.JPEG"):
        path.write_bytes(b"")
    trained = train(f"data_dir={copy}", "max_steps=2", "label_smoothing=0", "flip=false")
    assert trained.results["skipped_samples"] == 2
    assert trained.results["val_samples"] == 12
    counted = []
    for forward, row in zip(trained.training, trained.rows, strict=True):
        blue = pixels(forward.inputs)[:, 2].mean((1, 2))
        labels = ((blue - 50) / 30).round().long()
        read = labels >= 0  # the others are black
        counted.append(int(read.sum()))
        loss = one_rank.cross_entropy(forward.outputs[read], labels[read], 0)
        assert row["loss"] == pytest.approx(loss * counted[-1] / 12, rel=1e-5)
    assert sum(counted) == 23
    assert IGNORE == -100  # what cross_entropy leaves out


@pytest.mark.parametrize(
    ("words", "factors"),
    [
        (["warmup_epochs=1"], [1 / 3, 2 / 3, 1, 0.853553, 0.5, 0.146447]),
        (["warmup_epochs=0"], [1, 0.933013, 0.75, 0.5, 0.25, 0.066987]),
        (["warmup_epochs=0", "schedule=step"], [1, 1, 0.1, 0.1, 0.01, 0.01]),
        (["warmup_epochs=9"], [1 / 4, 2 / 4, 3 / 4, 1, 0.75, 0.25]),  # half of the steps, at most
    ],
)
def test_the_learning_rate_schedule(train: Train, words: list[str], factors: list[float]) -> None:
    """Of three epochs of two steps, in batches of a quarter of lr_batch_size."""
    trained = train("epochs=3", "lr=0.08", "lr_batch_size=48", *words)
    assert trained.lrs == pytest.approx([0.02 * factor for factor in factors], rel=1e-4)


def test_the_optimizer_settings() -> None:
    net = nn.Linear(2, 2)
    keys = {"weight_decay": 0.25, "momentum": 0.8}
    for decay_norms, expected in ((False, 0.0), (True, 0.25)):
        sgd = imagenet.make_optimizer(Config(decay_norms=decay_norms, **keys), net, 0.1)
        assert one_rank.decayed(net, sgd) == {"weight": 0.25, "bias": expected}
        for group in sgd.param_groups:
            assert group["lr"] == 0.1
            assert group["momentum"] == 0.8
            assert group["nesterov"] is True
    plain = imagenet.make_optimizer(Config(nesterov=False), net, 0.1)
    assert {group["nesterov"] for group in plain.param_groups} == {False}
    lars = imagenet.make_optimizer(Config(optimizer=imagenet.Optimizer.lars, **keys), net, 9.0)
    assert type(lars) is LARS
    assert one_rank.decayed(net, lars) == {"weight": 0.25, "bias": 0.0}
    assert [group["adapt"] for group in lars.param_groups] == [True, False]
    for group in lars.param_groups:
        assert group["lr"] == 9.0
        assert group["momentum"] == 0.8


@pytest.mark.parametrize("on", [True, False])
def test_the_keys_select_the_network(on: bool) -> None:
    run: Any = SimpleNamespace(world=SimpleNamespace(device=one_rank.CPU))
    cfg = Config(arch="resnet18", sync_bn=on, zero_init_residual=on)
    net: Any = imagenet.make_net(cfg, run, 7)
    norm = net.layer1[0].bn2
    assert net.fc.out_features == 7
    assert isinstance(norm, nn.SyncBatchNorm) == on
    assert (not norm.weight.any()) == on


@pytest.mark.parametrize(
    ("words", "error", "expected"),
    [
        (["evaluate=true", "variant=dev"], InputError, "evaluate=true"),
        (
            ["variant=dev", "global_batch_size=2", "accumulate=3", "max_steps=1"],
            InputError,
            "needs 3, one for each of the parts",
        ),
        (
            ["data_dir=/nonexistent"],
            InputError,
            "data_dir='/nonexistent' has neither train/<class>",
        ),
        (
            ["pretrained=true", "variant=dev"],
            MachineError,
            "python -m recipes.prepare weights arch=resnet18",
        ),
    ],
)
def test_invalid_settings_are_refused(
    words: list[str],
    error: type[Exception],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(error, match=expected):
        one_rank.train(imagenet, tmp_path / "run", monkeypatch, *words)


# ---------------------------------------------------------------- whole runs

LOCAL = (*helpers.LOCAL[:2], "recipe=imagenet", "launcher=local", "device=cpu", "cpu_threads=1")
SMALL = (
    "arch=resnet18",
    "px=32",
    "val_px=32",
    "val_resize=36",
    "global_batch_size=16",
    "log_every_steps=1",
    "min_crop=0.5",
    "warmup_epochs=1",
    "num_workers=1",
)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """3 classes, 51 images to train on and 37 to evaluate, two of each damaged besides."""
    folder = tmp_path / "photos"
    helpers.write_images(folder / "train", 3, 17, 40)
    helpers.write_images(folder / "val", 3, 13, 40, seed=1)
    for extra in ("class0/0.JPEG", "class1/5.JPEG"):
        (folder / "val" / extra).unlink()
    for split in ("train", "val"):
        whole = (folder / split / "class2" / "2.JPEG").read_bytes()
        (folder / split / "class2" / "broken.JPEG").write_bytes(whole[:300])
        (folder / split / "class2" / "empty.JPEG").write_bytes(b"")
    return folder


def test_images_are_learnt_and_each_is_counted_once(photos: Path, tmp_path: Path) -> None:
    """From a packed copy, which each node copies to its disk."""
    packed = tmp_path / "packed"
    words = [f"source={photos}", f"data_dir={packed}", "size=36", "workers=1"]
    prepare = [sys.executable, "-m", "recipes.prepare", "imagenet", *words]
    ended = helpers.run_fork(prepare).expect(0)
    assert "train: 2 images skipped" in ended.out
    keys = [
        "ranks_per_node=2",
        "epochs=4",
        "ema=0.3",
        "lr_batch_size=32",
        "lr=0.06",
        "mixup=0.1",
        f"data_dir={packed}",
    ]
    keys += [f"run_dir={tmp_path}/run", f"stage_dir={tmp_path}/node"]
    helpers.run_fork([*LOCAL, *SMALL, *keys]).expect(0)
    summary = helpers.read(tmp_path / "run", "summary")
    assert summary["world_size"] == 2
    assert summary["val_samples"] == 37
    assert summary["skipped_samples"] == 0
    assert summary["steps"] == 4 * 4  # 51 files in batches of 16
    assert summary["val_top1"] > 0.6  # a third by chance
    assert summary["val_top5"] == 1
    assert len(list((tmp_path / "node").glob("*/index.json"))) == 1
