"""MNIST's input path: against torchvision's dataset in a DataLoader, and as the share that it takes
of a training step.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torchvision
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.transforms import ToTensor

from recipes import mnist
from recipes.conf.mnist import Config
from recipes.core.data import datasets, in_memory
from recipes.core.data.in_memory import AugmentedImages, ImageSet
from tests.benchmarks import inputs
from tests.benchmarks.inputs import Batch
from tests.benchmarks.measure import Figure, Size, one_thread

BATCH_SIZE = 128  # of the input alone; the step has the recipe's


def figures(size: Size) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder, one_thread():
        source = inputs.mnist(Path(folder), size)
        train_set, _ = in_memory.load(datasets.MNIST, folder)
        return [
            input_alone(size, folder, train_set, source),
            input_and_step(size, train_set, source),
        ]


def input_alone(size: Size, folder: str, train_set: ImageSet, source: str) -> Figure:
    """Whole epochs of batches, shuffled; ours are shifted and normalised as well, theirs are
    not.
    """
    shifted = AugmentedImages(train_set.images, mnist.MAX_SHIFT)
    peer_set = torchvision.datasets.MNIST(folder, transform=ToTensor())
    peer = DataLoader(peer_set, batch_size=BATCH_SIZE, shuffle=True, num_workers=0)

    def epoch(number: int) -> Iterator[Batch]:
        return inputs.recipe_batches(
            train_set, shifted, mnist.normalise, BATCH_SIZE, Config().seed, number
        )

    return inputs.input_figure(
        "mnist, input", "recipe, batch 128", epoch, "MNIST", peer, size, source
    )


def input_and_step(size: Size, train_set: ImageSet, source: str) -> Figure:
    """Steps of the recipe on the same batches, made as they are needed or all made before; a value
    is one step's.

    The two take turns step by step, and their CPU time counts: otherwise, a busy machine hides a
    difference of one per cent. What an epoch begins with, the shuffle and the shifts, is spread
    over its steps. Raises RuntimeError where the two did not come to the same losses, and so did
    not do the same work.
    """
    cfg = Config()
    per_epoch = -(-len(train_set) // cfg.global_batch_size)
    values: dict[str, list[float]] = {"ours": [], "theirs": []}
    shifted = {name: AugmentedImages(train_set.images, mnist.MAX_SHIFT) for name in values}
    for epoch in range(size.rounds + 1):
        words = (mnist.normalise, cfg.global_batch_size, cfg.seed, epoch)
        batches = {name: inputs.recipe_batches(train_set, shifted[name], *words) for name in values}
        batches["theirs"] = iter(list(itertools.islice(batches["theirs"], size.steps + 1)))
        extra_s = dict.fromkeys(values, 0.0)
        start = time.process_time()
        next(batches["ours"])
        extra_s["ours"] = (time.process_time() - start) / per_epoch
        next(batches["theirs"])

        losses: dict[str, list[float]] = {name: [] for name in values}
        steps = {name: fresh_step(cfg, losses[name]) for name in values}
        for turn in range(size.steps):
            for name in list(values) if turn % 2 else reversed(values):
                start = time.process_time()
                samples = steps[name](next(batches[name]))
                seconds = time.process_time() - start + extra_s[name]
                if epoch:  # the first round fills caches and does not count
                    values[name].append(samples / seconds)
        if losses["ours"] != losses["theirs"]:
            raise RuntimeError(f"mnist, input and step: other losses, so other work: {losses}")
    return Figure(
        "mnist, input and step",
        "samples/s",
        f"recipe, batch {cfg.global_batch_size}",
        "step alone",
        ">= 0.95",
        values["ours"],
        values["theirs"],
        source,
    )


def fresh_step(cfg: Config, losses: list[float]) -> Callable[[Batch], int]:
    """An optimiser step of the recipe, from its first weights on: gives the batch's size, and adds
    its loss to ``losses``.
    """
    torch.manual_seed(cfg.seed)
    net = mnist.Net()
    optimizer = mnist.make_optimizer(cfg, net)

    def step(batch: Batch) -> int:
        images, labels = batch
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(images), labels, label_smoothing=cfg.label_smoothing)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return len(labels)

    return step
