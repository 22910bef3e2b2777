"""The scores of an evaluation, beside scikit-learn's."""

import io
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.core.train import scores

# of two ranks with the same samples
WORLD = SimpleNamespace(device=torch.device("cpu"), sum=lambda counts: counts.mul_(2))
RUN: Any = SimpleNamespace(world=WORLD)


@pytest.fixture
def sklearn() -> ModuleType:
    """Imported by the tests that use it, since every worker imports this file."""
    from sklearn import metrics

    return metrics


@pytest.mark.parametrize("is_training", [True, False])
def test_an_evaluation_leaves_the_mode_of_the_network_as_it_was(is_training: bool) -> None:
    """A recipe may train a network in eval mode, without dropout; and the averaged weights too."""
    net, average = (nn.Sequential(nn.Dropout()).train(is_training) for _ in range(2))
    pulse = SimpleNamespace(beat=lambda phase: None)
    world = SimpleNamespace(pulse=pulse, broadcast_buffers=lambda net: None)
    for ema, evaluated in ((None, net), (SimpleNamespace(module=average), average)):
        run: Any = SimpleNamespace(world=world, state=SimpleNamespace(model=net, ema=ema))
        with scores.evaluation(run) as network:
            assert network is evaluated
            assert not network[0].training  # type: ignore[index]
        assert [part.training for part in evaluated.modules()] == [is_training] * 2


def of_classes(
    labels: Tensor, predicted: Tensor, classes: int, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    answers = [(F.one_hot(predicted, classes), labels)]
    monkeypatch.setattr(scores, "answered", lambda *_: answers)
    return scores.of_classes(RUN, lambda net: [], classes)


def test_scores_of_classes_are_those_of_scikit_learn(
    sklearn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(0)
    labels, predicted = (torch.randint(0, 5, (200,), generator=random) for _ in range(2))
    labels[:7] = -1  # that could not be read
    results = of_classes(labels, predicted, scores.LARGEST_MATRIX, monkeypatch)
    labels = labels[7:]
    predicted = predicted[7:]
    assert results["val_top1"] == pytest.approx(sklearn.accuracy_score(labels, predicted))
    assert results["val_f1"] == pytest.approx(sklearn.f1_score(labels, predicted, average="macro"))
    recall = sklearn.recall_score(labels, predicted, average=None)
    assert results["val_recall"][:5] == pytest.approx(recall, abs=1e-4)
    assert results["val_samples"] == 2 * 193
    confused = (labels == 3) & (predicted == 1)
    assert results["val_confusion"][3][1] == 2 * int(confused.sum())


def test_accuracy_counts_the_samples_that_could_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[9.0, 8, 7, 6, 5, 4]] * 4)
    for labels, expected in (([0, 3, 5, -1], [1 / 3, 2 / 3, 6]), ([-1, -1, -1, -1], [0, 0, 0])):
        answers = [(logits, torch.tensor(labels))]
        monkeypatch.setattr(scores, "answered", lambda *_, answers=answers: answers)
        shares = scores.accuracy(RUN, lambda net: [])
        assert list(shares.values()) == expected


def test_classes_that_do_not_occur_have_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    none = torch.tensor([-1])
    results = of_classes(none, torch.tensor([3]), 51, monkeypatch)
    assert results["val_f1"] == 0.0
    labels = torch.tensor([0, 0, 0, 0, 2])
    predicted = torch.tensor([0, 0, 1, 1, 2])
    results = of_classes(labels, predicted, 51, monkeypatch)
    assert results["val_f1"] == pytest.approx((4 / 6 + 0 + 1) / 3)
    assert results["val_recall"] == [0.5, None, 1.0] + [None] * 48
    assert "val_confusion" not in results


def test_the_memory_of_the_scores_grows_with_the_classes_and_not_with_their_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A matrix of 200,000 classes would have 320 GB."""
    results = of_classes(torch.tensor([7, 8]), torch.tensor([7, 9]), 200_000, monkeypatch)
    assert results["val_top1"] == 0.5
    assert results["val_recall"][7] == 1.0


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("val_f1_b", 0.5),
        ("val_precision_b", 1 / 3),
        ("val_recall_b", 1.0),
        ("val_f1_none", 0.0),  # undefined
        ("val_f1", None),
        ("val_f1_x", None),
    ],
)
def test_the_score_of_one_class_can_be_the_best_metric(
    metric: str, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SimpleNamespace(config=SimpleNamespace(best_metric=metric))
    run: Any = SimpleNamespace(world=SimpleNamespace(**vars(WORLD), gather=lambda part: [part]))
    run.settings = settings
    names = ["a", "b", "none"]
    labels = torch.tensor([0, 0, 1, 0])
    predicted = torch.tensor([1, 0, 1, 1])
    one_hot = [F.one_hot(part, 3) for part in (predicted, labels)]
    for score, answer in (
        (scores.of_classes, (one_hot[0], labels)),
        (scores.of_labels, (one_hot[0] - 0.5, one_hot[1])),
    ):
        monkeypatch.setattr(scores, "answered", lambda *_, answer=answer: [answer])
        results = score(run, lambda net: [], 3, names)
        single = {name: results[name] for name in results if name.count("_") > 1}
        assert single == ({} if expected is None else {metric: pytest.approx(expected)})


def test_the_score_of_one_class_counts_the_samples_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_others = torch.tensor([[0, 0], [0, 3], [3, 0]])  # three b that were taken for a
    config = SimpleNamespace(best_metric="val_recall_b")
    run: Any = SimpleNamespace(
        settings=SimpleNamespace(config=config),
        world=SimpleNamespace(device=WORLD.device, sum=lambda counts: counts + of_others),
    )
    labels = torch.tensor([0, 1])
    monkeypatch.setattr(scores, "LARGEST_MATRIX", 0)
    monkeypatch.setattr(scores, "answered", lambda *_: [(F.one_hot(labels, 2), labels)])
    results = scores.of_classes(run, lambda net: [], 2, ["a", "b"])
    assert results["val_recall_b"] == 1 / 4


# with few levels, many scores are equal; a rank may have no sample
@pytest.mark.parametrize(("levels", "own"), [(1000, 50), (3, 50), (3, 0)])
def test_scores_of_several_labels_are_those_of_scikit_learn(
    sklearn: Any, levels: int, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.integers(0, levels, (80, 4)) / levels - 0.5)
    labels = torch.from_numpy((random.random((80, 4)) < 0.3).astype(float))
    labels[:, 3] = 0
    pairs = [(logits[:20], labels[:20]), (logits[20:50], labels[20:50])][:own]
    of_other_rank = torch.stack([logits[own:], labels[own:]]).float().split(3, 2)
    monkeypatch.setattr(scores, "answered", lambda run, answers: pairs)
    monkeypatch.setattr(scores, "CLASSES_AT_ONCE", 3)
    sizes: list[int] = []

    def gather(part: bytes) -> list[bytes]:
        other = io.BytesIO()
        torch.save(of_other_rank[len(sizes)].clone(), other)
        sizes.append(len(part))
        return [part, other.getvalue()]

    run: Any = SimpleNamespace(world=SimpleNamespace(gather=gather))
    precisions = [sklearn.average_precision_score(labels[:, i], logits[:, i]) for i in range(3)]
    results = scores.of_labels(run, lambda net: [], 4)
    assert results.keys() == {"val_map", "val_f1", "val_samples"}
    assert results["val_map"] == pytest.approx(sum(precisions) / 3)
    f1 = sklearn.f1_score(labels, logits > 0, average="macro")
    assert results["val_f1"] == pytest.approx(f1)
    assert results["val_samples"] == 80
    assert len(sizes) == 2  # of three classes, and of one
    assert (sizes[1] < sizes[0]) == bool(own)
