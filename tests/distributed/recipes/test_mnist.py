"""The recipe mnist in this process: its inputs, loss, schedule and optimiser against formulas, and
its accuracy on real digits.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recipes import mnist
from recipes.conf.mnist import Config
from recipes.core.data import datasets, in_memory
from recipes.core.data.in_memory import ImageSet
from recipes.core.errors import InputError
from tests import helpers
from tests.distributed import one_rank
from tests.distributed.one_rank import Trained

# of MNIST, 0 to 1, as in torch's own example
MEAN = (0.1307,)
STD = (0.3081,)
Train = Callable[..., Trained]
PIXELS = torch.randint(
    0, 256, (114, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
LABELS = torch.randint(0, 10, (114,), generator=torch.Generator().manual_seed(1))
TRAIN = ImageSet(PIXELS[:64], LABELS[:64])
TEST = ImageSet(PIXELS[64:], LABELS[64:])


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    monkeypatch.setattr(in_memory, "load", lambda dataset, folder: (TRAIN, TEST))
    folders = (tmp_path / str(i) for i in range(9))
    return lambda *words, **place: one_rank.train(
        mnist, next(folders), monkeypatch, "global_batch_size=16", *words, **place
    )


def test_training_images_are_shifted_and_normalised_and_the_loss_is_that_of_their_labels(
    train: Train,
) -> None:
    trained = train("epochs=6", "label_smoothing=0.3")
    shifts = one_rank.shifts(TRAIN.images, 1, "constant")
    samples = []
    losses = []
    for forward in trained.training:
        pixels = one_rank.unnormalised(forward.inputs, MEAN, STD)
        batch = [shifts[image.numpy().tobytes()] for image in pixels]
        samples += batch
        labels = TRAIN.labels[[i for i, _, _ in batch]]
        losses.append(one_rank.cross_entropy(forward.outputs, labels, 0.3))
    for epoch in range(6):
        of_epoch = samples[64 * epoch : 64 * epoch + 64]
        assert sorted(i for i, _, _ in of_epoch) == list(range(64))
    places = Counter((y, x) for _, y, x in samples)
    assert len(places) == 9
    assert min(places.values()) > 25  # of 384, 43 on average
    assert len(set(samples)) > 200  # each epoch has its own: 64 in one
    assert [row["loss"] for row in trained.rows] == pytest.approx(losses, rel=1e-5)


def test_test_images_are_unchanged_and_counted_by_their_labels(train: Train) -> None:
    trained = train("epochs=1", "augment=false")
    seen = set()
    for batch in trained.training:
        pixels = one_rank.unnormalised(batch.inputs, MEAN, STD)
        seen |= {image.numpy().tobytes() for image in pixels}
    assert seen == {image.numpy().tobytes() for image in TRAIN.images}  # augment=false
    assert trained.run.checkpoints.order["data"] == TRAIN.digest()  # not resumed with other images
    [forward] = trained.evaluation
    assert torch.equal(one_rank.unnormalised(forward.inputs, MEAN, STD), TEST.images)
    expected = {f"val_top{k}": one_rank.top(forward.outputs, TEST.labels, k) for k in (1, 5)}
    expected["val_samples"] = 50
    assert trained.results == expected
    assert {name: trained.rows[-1][name] for name in expected} == expected


def test_a_rank_takes_its_own_samples_and_random_numbers(train: Train) -> None:
    # 16 in 6, 5 and 5; 50 in 17, 17 and 16
    one_rank.check_second_of_three(train, slice(6, 11), slice(17, 34))


@pytest.mark.parametrize(
    ("schedule", "falls"),
    [("cosine", [1, 0.933013, 0.75, 0.5, 0.25, 0.066987]), ("constant", [1] * 6)],
)
def test_the_learning_rate_schedule(train: Train, schedule: str, falls: list[float]) -> None:
    trained = train("epochs=2", "lr=0.01", "warmup=0.25", f"schedule={schedule}")
    assert trained.lrs == pytest.approx([0.01 * f for f in (1 / 3, 2 / 3, *falls)], rel=1e-4)


def test_bfloat16_is_used_in_training_and_evaluation(train: Train) -> None:
    one_rank.check_bfloat16(train)


def test_the_optimizer_settings() -> None:
    net = torch.nn.Linear(2, 2)
    sgd, adamw = (mnist.make_optimizer(Config(optimizer=chosen), net) for chosen in mnist.Optimizer)
    assert type(adamw) is torch.optim.AdamW
    assert type(sgd) is torch.optim.SGD
    for optimizer in (sgd, adamw):
        assert one_rank.decayed(net, optimizer) == {"weight": 0.05, "bias": 0.0}
        for group in optimizer.param_groups:
            assert group["lr"] == 0.004
    for group in sgd.param_groups:
        assert group["momentum"] == 0.9
        assert group["nesterov"] is True
    for group in adamw.param_groups:
        assert group["betas"] == (0.9, 0.999)
        assert group["eps"] == 1e-6


def test_a_dataset_with_inconsistent_files_is_refused(tmp_path: Path) -> None:
    helpers.write_mnist(tmp_path / "MNIST/raw")
    for labels, expected in (
        (bytes(601), "601 labels for 600 images"),
        (bytes([10] * 600), "it has label 10, but there are ten classes"),
    ):
        header = struct.pack(">II", 0x801, len(labels))
        (tmp_path / "MNIST/raw" / "train-labels-idx1-ubyte").write_bytes(header + labels)
        with pytest.raises(InputError, match=expected):
            in_memory.load(datasets.MNIST, str(tmp_path))


def test_the_test_set_is_not_the_training_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for part, count, value in (("train", 3, 1), ("test", 4, 2)):
        for name, shape in (("images", (count, 1, 2, 2)), ("labels", (count,))):
            path = tmp_path / f"{part}-{name}"
            paths.append(path)
            header = struct.pack(f">I{len(shape)}I", 0x800 + len(shape), *shape)
            path.write_bytes(header + bytes([value]) * math.prod(shape))
    monkeypatch.setattr(datasets, "find_files", lambda dataset, folder: paths)
    train_set, test_set = in_memory.load(datasets.MNIST, "")
    for images, count, value in ((train_set, 3, 1), (test_set, 4, 2)):
        assert set(images.images.flatten().tolist()) == {value}
        assert images.labels.tolist() == [value] * count


def test_real_digits_are_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = one_rank.train(mnist, tmp_path, monkeypatch, "dataset=digits").results
    assert results["val_samples"] == 359
    assert results["val_top1"] >= 0.96
