"""CIFAR-10's input path in one thread, against torchvision's dataset and transforms in a
DataLoader.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torchvision
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms

from recipes import cifar
from recipes.conf.cifar import Config
from recipes.core.data import in_memory
from recipes.core.data.in_memory import AugmentedImages, ImageSet
from tests.benchmarks import inputs
from tests.benchmarks.measure import FULL, Figure, Size, one_core

IMAGES = 50_000  # of the training set
PEER_IMAGES = 10_000  # of them, drawn anew each time, are enough to tell the peer's speed


def figures(size: Size) -> list[Figure]:
    cfg = Config()
    real = size.images == FULL.images
    train_set, _, source = inputs.cifar10(min(IMAGES, size.images), 10, real)
    mean, std = (torch.tensor(values) for values in (cifar.MEAN, cifar.STD))
    normalise = partial(in_memory.normalise, mean=mean, std=std)
    with one_core():
        images = AugmentedImages(train_set.images, cfg.crop, reflect=True, flip=cfg.flip)

        def epoch(number: int) -> Iterator[inputs.Batch]:
            return inputs.recipe_batches(
                train_set, images, normalise, cfg.global_batch_size, cfg.seed, number
            )

        peer_set = PeerSet(train_set)
        sampler = RandomSampler(peer_set, num_samples=min(PEER_IMAGES, len(peer_set)))
        peer: DataLoader[inputs.Batch] = DataLoader(
            peer_set, cfg.global_batch_size, sampler=sampler, num_workers=0
        )
        ours_is = f"recipe: crop, flip, normalise, batch {cfg.global_batch_size}"
        theirs_is = "CIFAR10, crop, flip, ToTensor, Normalize,"
        note = f"{len(train_set):,} images, {source}"
        return [
            inputs.input_figure(
                "cifar, input", ours_is, epoch, theirs_is, peer, size, note, size.least_s
            )
        ]


class PeerSet(torchvision.datasets.CIFAR10):
    """torchvision's own dataset, with its own way from an array to a sample, over images that are
    in memory already.
    """

    def __init__(self, images: ImageSet) -> None:
        self.data = images.images.permute(0, 2, 3, 1).contiguous().numpy()
        self.targets: list[int] = images.labels.tolist()
        mean, std = ([value / 255 for value in values] for values in (cifar.MEAN, cifar.STD))
        steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        self.transform = transforms.Compose(
            [*steps, transforms.ToTensor(), transforms.Normalize(mean, std)]
        )
        self.target_transform = None
