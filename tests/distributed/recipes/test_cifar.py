"""The recipe cifar in this process: its inputs, loss, schedule, averages and networks against
formulas, and its refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import functional as TF

from recipes import cifar
from recipes.conf.cifar import Arch, Config
from recipes.core.data import in_memory
from recipes.core.data.in_memory import ImageSet
from recipes.core.data.sampling import GlobalBatches
from recipes.core.errors import InputError
from tests.distributed import one_rank
from tests.distributed.one_rank import Trained

# Of CIFAR-10, 0 to 1, to four digits as usually given: red, green, blue.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
PIXELS = torch.randint(
    0, 256, (80, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
LABELS = torch.randint(0, 10, (80,), generator=torch.Generator().manual_seed(1))
TRAIN = ImageSet(PIXELS[:32], LABELS[:32])
TEST = ImageSet(PIXELS[32:], LABELS[32:])
IMAGES = torch.randn(20, 3, 32, 32, generator=torch.Generator().manual_seed(2))
PLAIN = ("crop=0", "flip=false")
Train = Callable[..., Trained]


def small_net(cfg: Config, run: object, images: Tensor) -> nn.Module:
    """Of any size of images, with batch normalisation, and other answers for an image than for its
    mirror image.
    """
    conv = nn.Conv2d(3, 4, 5, stride=4)
    head = nn.Linear(16, 10)
    # so that the largest logit is one that the image gives, not the bias
    nn.init.normal_(head.weight, std=9.0)
    return nn.Sequential(
        conv, nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), head
    )


def airbench(deep: bool) -> cifar.AirBench:
    return cifar.AirBench(IMAGES, 10, (128, 384, 512) if deep else (64, 256, 256), deep)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    monkeypatch.setattr(in_memory, "load", lambda dataset, folder: (TRAIN, TEST))
    monkeypatch.setattr(cifar, "make_net", small_net)
    return lambda *words, **place: one_rank.train(
        cifar, tmp_path / str(place), monkeypatch, "global_batch_size=8", *words, **place
    )


def pixels(inputs: Tensor) -> Tensor:
    return one_rank.unnormalised(inputs, MEAN, STD)


def test_training_images_are_shifted_with_mirrored_borders_and_half_are_flipped(
    train: Train,
) -> None:
    trained = train("epochs=6", "label_smoothing=0.3")
    shifts = one_rank.shifts(TRAIN.images, 4, "reflect")
    drawn = []
    losses = []
    for forward in trained.training:
        batch = []
        for image in pixels(forward.inputs):
            plain = shifts.get(image.contiguous().numpy().tobytes())
            mirrored = shifts.get(TF.hflip(image).numpy().tobytes())
            assert plain or mirrored
            batch.append((plain or mirrored, plain is None))
        drawn.append(batch)
        labels = TRAIN.labels[[i for (i, _, _), _ in batch]]
        losses.append(one_rank.cross_entropy(forward.outputs, labels, 0.3))
    samples = [sample for batch in drawn for sample in batch]
    flipped = []
    for epoch in range(6):
        of_epoch = samples[32 * epoch : 32 * epoch + 32]
        assert sorted(i for (i, _, _), _ in of_epoch) == list(range(32))
        flipped.append({i for (i, _, _), is_flipped in of_epoch if is_flipped})
        assert 6 <= len(flipped[-1]) <= 26  # of 32
    assert flipped == [flipped[0], set(range(32)) - flipped[0]] * 3  # every second time
    for axis in (1, 2):
        places = [shift[axis] for shift, _ in samples]
        assert min(places.count(place) for place in range(9)) >= 8  # of 192, 21 on average
    assert len(set(samples)) > 150  # each epoch has its own: 32 in one
    assert [row["loss"] for row in trained.rows] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("tta", [True, False])
def test_an_evaluation_sums_the_logits_of_each_image_and_its_mirror_image(
    train: Train, tta: bool
) -> None:
    trained = train("epochs=1", f"tta={str(tta).lower()}")
    seen = [pixels(forward.inputs) for forward in trained.evaluation]
    expected = [TEST.images, TF.hflip(TEST.images)][: 1 + tta]
    for images, wanted in zip(seen, expected, strict=True):
        assert torch.equal(images, wanted)
    answers = [forward.outputs for forward in trained.evaluation]

    def results(logits: Tensor) -> dict[str, float]:
        scores = {f"val_top{k}": one_rank.top(logits, TEST.labels, k) for k in (1, 5)}
        return scores | {"val_samples": len(TEST)}

    assert trained.results == results(sum(answers))
    if tta:  # the test tells a half of the sum from the sum
        for other in answers:
            assert results(other) != trained.results


def test_an_evaluation_with_shifts_gives_them_half_of_the_weight(train: Train) -> None:
    trained = train("epochs=1", "tta_shift=6")
    wide = F.pad(TEST.images.float(), (6,) * 4, "reflect")
    views = [TEST.images, wide[..., :32, :32], wide[..., 12:, 12:]]
    seen = [pixels(forward.inputs) for forward in trained.evaluation]
    expected = [*views, *map(TF.hflip, views)]
    for images, wanted in zip(seen, expected, strict=True):
        assert torch.equal(images, wanted.byte())
    answers = [forward.outputs for forward in trained.evaluation]
    unweighted = sum(answers)
    weighted = unweighted + answers[0] + answers[3]
    for logits, is_right in ((weighted, True), (unweighted, False)):
        scores = [one_rank.top(logits, TEST.labels, k) for k in (1, 5)]
        assert ([trained.results["val_top1"], trained.results["val_top5"]] == scores) == is_right


def test_a_rank_takes_its_own_samples(train: Train) -> None:
    # 8 in 3, 3 and 2; 48 in 16, 16 and 16
    one_rank.check_second_of_three(train, slice(3, 6), slice(16, 32))


def test_cutout_removes_a_grey_square(train: Train) -> None:
    trained = train("max_steps=4", "cutout=8", *PLAIN)
    images = torch.cat([pixels(forward.inputs) for forward in trained.training])
    grey = (images == 121).all(1).sum((1, 2))
    # a quarter of it at least
    assert grey.min() >= 16
    assert grey.max() == 64


def test_bfloat16_is_used_in_training_and_evaluation(train: Train) -> None:
    one_rank.check_bfloat16(train)


def test_the_learning_rate_schedule(train: Train) -> None:
    """One quarter of 8 steps up, the others down; for a batch half as large as lr_batch_size the
    half of it.
    """
    trained = train("epochs=2", "lr=0.08", "warmup=0.25", "lr_batch_size=16")
    sixths = (2, 4, 6, 5, 4, 3, 2, 1)
    assert trained.lrs == pytest.approx([0.04 * factor / 6 for factor in sixths])


def test_averaged_weights_are_evaluated(train: Train) -> None:
    trained = train("max_steps=2", "ema=0.25", "lr_batch_size=16")
    ema = trained.run.state.ema
    assert ema
    assert ema._decay == 0.5  # a batch of 8 is half of lr_batch_size
    assert {forward.net for forward in trained.evaluation} == {ema.module}
    assert {forward.net for forward in trained.training} == {trained.run.state.model}
    later = train("max_steps=2", "ema=0.25", "lr_batch_size=16", "evaluate=true")
    assert torch.equal(later.evaluation[-1].weights, list(ema.parameters())[-1])


def test_the_optimizer_settings() -> None:
    net = nn.Linear(2, 2)
    sgd = cifar.make_optimizer(Config(weight_decay=0.25), net, 0.1, 8)
    plain = cifar.make_optimizer(Config(momentum=0.0), net, 0.1, 8)
    assert one_rank.decayed(net, sgd) == {"weight": 0.25, "bias": 0}
    for group in sgd.param_groups:
        assert group["lr"] == 0.1
        assert group["momentum"] == 0.9
        assert group["nesterov"] is True
    assert {group["nesterov"] for group in plain.param_groups} == {False}


def test_muon_trains_the_filters_of_airbench_and_sgd_the_rest() -> None:
    """The first layer's filters and the norms' weights are not trained, and its bias only in the
    first three epochs.
    """
    cfg = Config(arch=Arch.airbench94, momentum=0.6, weight_decay=2e-6, warmup=0.0)
    net = airbench(deep=False)
    optimizer = cifar.make_optimizer(cfg, net, 0.24, 2000)
    names = {p: name for name, p in net.named_parameters()}
    groups = [sorted(names[p] for p in group["params"]) for group in optimizer.param_groups]
    filters = [f"body.{i}.{part}.0.weight" for i in range(3) for part in ("first", "second")]
    biases = [f"body.{i}.{norm}.bias" for i in range(3) for norm in ("first.2", "second.1")]
    assert groups == [filters, ["whiten.bias"], biases, ["head.weight"]]
    muon, *sgd = optimizer.param_groups
    assert muon["orthogonal"] is True
    assert muon["lr"] == 0.24
    assert muon["momentum"] == 0.6
    assert muon["weight_decay"] == 0
    for group, rate in zip(sgd, (106, 106, 1340), strict=True):
        assert group["orthogonal"] is False
        assert group["lr"] == pytest.approx(rate)
        assert group["momentum"] == 0.85
        assert group["lr"] * group["weight_decay"] == pytest.approx(4e-3)
    # eight epochs of ten steps
    factors = cifar.lr_factors(cfg, GlobalBatches(100, 10, 0, 0, 1), 80, 4)
    assert [factors[group](15) for group in range(4)] == [65 / 80, 0.5, 65 / 80, 65 / 80]
    assert factors[1](31) == 0
    # two epochs
    assert cifar.lr_factors(cfg, GlobalBatches(100, 10, 0, 0, 1), 20, 4)[1](20) == 0


def test_the_networks_are_the_variants_for_32_px() -> None:
    """The sizes are by hand: a first layer of 3x3 that keeps all pixels, stages of half the side
    each.
    """
    sides: list[int] = []
    resnet18 = cifar.resnet18(10)
    shallow = airbench(deep=False)
    deep = airbench(deep=True)
    for net, last in ((resnet18, "layer4"), (shallow, "body"), (deep, "body")):
        net.get_submodule(last).register_forward_hook(
            lambda module, inputs, output: sides.append(output.shape[-1])
        )
        assert net.train()(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert sides == [4, 3, 3]
    sizes = [sum(p.numel() for p in net.parameters()) for net in (resnet18, shallow, deep)]
    assert sizes == [11_173_962, 1_972_792, 9_918_776]
    for layer in (resnet18.layer1, resnet18.layer4):
        for block in cast(nn.Sequential, layer):
            assert not block.bn2.weight.any()


def test_a_group_of_airbench_by_its_definition() -> None:
    """A deep one has a shortcut past its last two convolutions."""
    x = torch.randn(2, 4, 6, 6)
    for deep in (False, True):
        group = cifar.Group(4, 6, deep).eval()
        filters = group.first[0].weight
        assert torch.equal(F.conv2d(x, filters, padding=1)[:, :4], x)
        assert filters[4:].any()
        first = group.first(x)
        expected = group.second(first)
        if group.third:
            expected = first + group.third(expected)
        assert torch.equal(group(x), F.gelu(expected))


def test_the_first_layer_of_airbench_whitens_patches() -> None:
    images = torch.rand(64, 3, 8, 11) * torch.rand(8, 11)  # neighbours are alike
    answers = F.conv2d(images, cifar.whitening(images)).transpose(0, 1).flatten(1)
    assert torch.allclose(answers[:12], -answers[12:])
    covariance = answers[:12] @ answers[:12].T / answers.shape[1]
    assert torch.allclose(covariance, torch.eye(12), atol=0.05)


def test_the_keys_select_the_network() -> None:
    run: Any = SimpleNamespace(world=SimpleNamespace(device=one_rank.CPU))
    configs = [Config(arch=arch, weight_decay=0, sync_bn=arch is Arch.airbench94) for arch in Arch]
    resnet18, airbench94, airbench96 = (cifar.make_net(config, run, IMAGES) for config in configs)
    assert not isinstance(resnet18, cifar.AirBench)
    for net, is_large in ((resnet18, True), (airbench94, False), (airbench96, True)):
        assert (sum(p.numel() for p in net.parameters()) > 9_000_000) == is_large
        synchronised = [module for module in net.modules() if isinstance(module, nn.SyncBatchNorm)]
        assert bool(synchronised) == (net is airbench94)
    for net in (airbench94, airbench96):
        assert isinstance(net, cifar.AirBench)
        assert net.head.out_features == 10


def test_a_run_is_not_resumed_with_different_images(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("max_steps=1")
    others = ImageSet(TRAIN.images.flip(0), TRAIN.labels)
    monkeypatch.setattr(in_memory, "load", lambda dataset, folder: (others, TEST))
    with pytest.raises(InputError, match=r"other keys or data \(.*another training set\)"):
        train("max_steps=2")


def test_a_batch_with_empty_pieces_is_refused(train: Train) -> None:
    with pytest.raises(InputError, match="needs 3, one for each of the parts"):
        train("global_batch_size=3", "accumulate=3", "max_steps=1")
    batches = GlobalBatches(32, 6, 0, 0, 1)  # the last two have 4
    batches.require_full(2, 2)
    with pytest.raises(InputError, match=r"needs 5, one for each rank; give at least 10"):
        batches.require_full(5, 1)
    few = GlobalBatches(4, 100, 0, 0, 5)
    with pytest.raises(InputError, match=r"needs 5, one for each rank; use fewer ranks$"):
        few.require_full(5, 1)
