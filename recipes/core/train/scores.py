"""Evaluations over all ranks: accuracy, F1, recall and the confusion matrix; for several labels per
image, average precision.
"""

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from recipes.core.config import declare
from recipes.core.errors import InputError, Stopped, shown
from recipes.core.run import watchdog
from recipes.core.train import sharding
from recipes.core.train.run import Run

Pairs = Iterable[tuple[Tensor, Tensor]]  # of logits and labels, or of others, for each batch
Answers = Callable[[nn.Module], Pairs]
# classes; a larger confusion matrix is not counted, since its size is their square
LARGEST_MATRIX = 50
OF_CLASS = ("val_f1_", "val_precision_", "val_recall_")
CLASSES_AT_ONCE = 64  # of which a rank holds the logits of all samples


@torch.inference_mode()
def accuracy(run: Run, answers: Answers) -> dict[str, Any]:
    """``val_top1``, ``val_top5`` (fractions) and ``val_samples``, over all ranks. Each rank counts
    its own samples, and the counts are summed.

    answers: gets the network to evaluate, and returns pairs of logits and labels. A collective:
    every rank must call it. Raises Stopped as `answered`.
    """
    counts = torch.zeros(3, dtype=torch.int64, device=run.world.device)
    for logits, labels in answered(run, answers):
        counts += right(logits, labels)
    top1, top5, samples = run.world.sum(counts).tolist()
    return {
        "val_top1": top1 / max(1, samples),
        "val_top5": top5 / max(1, samples),
        "val_samples": samples,
    }


def right(logits: Tensor, labels: Tensor) -> Tensor:
    """Counts of top-1 hits, top-5 hits and samples: int64, shape (3,). Counts of several batches
    can be added.

    logits: (B, classes). labels: (B,). A negative label marks a sample that could not be read; it
    does not count.
    """
    hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    return torch.stack([hits[:, 0].sum(), hits.sum(), (labels >= 0).sum()])


@torch.no_grad()  # not inference mode, in which fully_shard would allocate what training reuses
def answered(run: Run, answers: Answers, in_step: bool = False) -> Pairs:
    """The pairs of ``answers``, as `accuracy` takes them, for a metric of your own. If a rank was
    notified to stop, it raises Stopped on all ranks after their last pair: `loop.steps` evaluates
    again later.

    Every rank must call it, and exhaust it. Sum the counts over the ranks afterwards, with
    `World.sum`. in_step: as for `evaluation`; each forward pass must yield one pair.
    """
    with evaluation(run, in_step) as net:
        # no rank may wait in a forward pass that another rank does not make
        is_agreed = in_step and isinstance(net, FSDPModule)
        must_stop = run.agree_to_stop if is_agreed else run.stop_is_near
        try:
            for pair in answers(net):
                if must_stop():
                    break
                run.world.pulse.beat(watchdog.EVALUATION)
                yield pair
        except Exception:
            # the stop may have ended a process that reads the samples
            if is_agreed or not run.stop_is_near(at_once=True):
                raise
    run.world.pulse.beat(watchdog.WAITING)
    reason = run.agree_to_stop()
    if reason:
        raise Stopped(reason)


def sums(run: Run, answers: Answers, in_step: bool = False) -> list[float]:
    """The sum of the first and that of the second values, both scalars, of all pairs of
    ``answers``, over all ranks. in_step: as for `evaluation`. A collective.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=run.world.device)
    for pair in answered(run, answers, in_step):
        totals += torch.stack(pair)
    return run.world.sum(totals).tolist()


@contextlib.contextmanager
def evaluation(run: Run, in_step: bool = False) -> Iterator[nn.Module]:
    """The network to evaluate, in eval mode: the averaged weights if there are any. Called by all
    ranks.

    in_step: whether all ranks make the same number of forward passes. With strategy=fsdp, a rank
    then holds the weights of one block at a time, otherwise those of the whole model.

    Rank 0's buffers are copied to all ranks, since the averages of batch normalisation differ: each
    rank computes them from its own samples. A checkpoint holds those of rank 0.
    """
    net = run.state.model
    if run.state.ema:
        net = run.state.ema.module
    run.world.pulse.beat(watchdog.WAITING)
    run.world.broadcast_buffers(net)
    run.world.pulse.beat(watchdog.EVALUATION)
    training = net.training
    net.eval()
    try:
        with contextlib.nullcontext() if in_step else sharding.unsharded(net):
            yield net
    finally:
        net.train(training)


def of_classes(
    run: Run, answers: Answers, classes: int, names: Sequence[str] = ()
) -> dict[str, Any]:
    """``val_top1``, ``val_f1`` (mean over the classes), ``val_recall`` by class, ``val_confusion``
    and ``val_samples``. A collective.

    answers: as for `accuracy`; a negative label does not count. names: of classes, for `of_one`.
    """
    counts = torch.zeros(3, classes, dtype=torch.int64, device=run.world.device)
    side = classes if classes <= LARGEST_MATRIX else 0
    matrix = torch.zeros(side * side, dtype=torch.int64, device=run.world.device)
    for logits, labels in answered(run, answers):
        predicted = logits.argmax(1)[labels >= 0]
        labels = labels[labels >= 0]
        hits = labels[labels == predicted]
        counts += torch.stack(
            [torch.bincount(part, minlength=classes) for part in (hits, labels, predicted)]
        )
        if side:
            matrix += torch.bincount(labels * side + predicted, minlength=side * side)
    counts = run.world.sum(counts)
    scores = of_counts(counts) | of_one(run, names, counts)
    if side:
        scores["val_confusion"] = run.world.sum(matrix).view(side, side).tolist()
    return scores


def of_counts(counts: Tensor) -> dict[str, Any]:
    """The scores of counts (3, classes): of each class its hits, its labels and its predictions.

    A class that neither occurs nor is predicted has no F1, and does not count in the mean. The
    recall of a class without samples is None.
    """
    hits, labels, predicted = counts.double().cpu()
    samples = int(labels.sum())
    return {
        "val_top1": float(hits.sum()) / max(1, samples),
        "val_samples": samples,
        "val_f1": mean_f1(hits, labels + predicted),
        "val_recall": [
            round(float(h / n), 4) if n else None for h, n in zip(hits, labels, strict=True)
        ],
    }


def require_class(metric: str, names: Sequence[str]) -> None:
    """Raises InputError if ``best_metric`` is the score of a class that is not in ``names``."""
    for kind in OF_CLASS:
        name = metric.removeprefix(kind)
        if name not in (metric, *names):
            raise InputError(
                f"best_metric={shown(metric)}: must end with the name of a class, such as "
                f"'{shown(names[0])}'{declare.nearest(name, names)}"
            )


def of_one(run: Run, names: Sequence[str], counts: Tensor) -> dict[str, float]:
    """The F1, precision or recall of a class if ``best_metric`` is its name, such as
    ``val_f1_cat``; 0 if it is undefined. names: of the classes. counts: as for `of_counts`.
    """
    if not names:
        return {}
    metric = run.settings.config.best_metric
    hits, labels, predicted = counts.double()
    scores = (2 * hits / (labels + predicted), hits / predicted, hits / labels)
    return {
        kind + name: float(value.nan_to_num())
        for kind, values in zip(OF_CLASS, scores, strict=True)
        for name, value in zip(names, values, strict=True)
        if kind + name == metric
    }


def of_labels(
    run: Run, answers: Answers, classes: int, names: Sequence[str] = ()
) -> dict[str, Any]:
    """For several labels per image: ``val_map`` (mean average precision), ``val_f1`` (mean, at
    probability 1/2), ``val_samples``. names: as for `of_classes`.

    answers: logits (B, classes), and labels of 0 and 1 of the same shape. A collective, in which
    each rank gets the scores of all samples, of CLASSES_AT_ONCE classes at a time.
    """
    pairs = [
        torch.stack([logits.float(), labels.float()]).cpu()
        for logits, labels in answered(run, answers)
    ]
    mine = torch.cat([torch.zeros(2, 0, classes), *pairs], 1)
    precisions: list[float] = []
    parts: list[Tensor] = []
    samples = 0
    for part in mine.split(CLASSES_AT_ONCE, 2):
        logits, labels = _of_all_ranks(run, part).double()
        predicted = (logits > 0).double()
        precisions += average_precisions(logits, labels)
        parts.append(torch.stack([predicted * labels, labels, predicted]).sum(1))
        samples = len(labels)
    counts = torch.cat(parts, 1)
    return {
        "val_map": sum(precisions) / max(1, len(precisions)),
        "val_f1": mean_f1(counts[0], counts[1] + counts[2]),
        "val_samples": samples,
        **of_one(run, names, counts),
    }


def _of_all_ranks(run: Run, part: Tensor) -> Tensor:
    """``part`` (2, N, classes) of each rank, joined by samples. A collective."""
    buffer = io.BytesIO()
    torch.save(part.clone(), buffer)  # a view would be saved with its whole storage
    parts = [
        torch.load(io.BytesIO(part), weights_only=True)
        for part in run.world.gather(buffer.getvalue())
    ]
    return torch.cat(parts, 1)


def average_precisions(logits: Tensor, labels: Tensor) -> list[float]:
    """The average precision of each class that occurs, as in scikit-learn: the mean precision at
    its hits. Equal scores count together.

    logits, labels: (N, classes).
    """
    precisions = []
    for scores, positive in zip(logits.T, labels.T, strict=True):
        if not positive.any():
            continue
        scores, order = scores.sort(descending=True)
        hits = positive[order].cumsum(0)
        # of each group of equal scores
        last = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])
        ranks = torch.arange(1, len(scores) + 1)[last]
        gained = torch.diff(hits[last], prepend=torch.zeros(1))
        precisions.append(float((gained * hits[last] / ranks).sum() / hits[-1]))
    return precisions


def mean_f1(hits: Tensor, counts: Tensor) -> float:
    """The mean F1 of the classes that occur or are predicted. hits, counts: of each class; counts:
    its labels and its predictions.
    """
    scores = (2 * hits / counts)[counts > 0]
    return float(scores.mean()) if len(scores) else 0.0
