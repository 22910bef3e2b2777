"""Reading large JPEGs on one core: random crops of 224 px through `TorchLoader`, against
ImageFolder in a DataLoader.

Both sides do the same work: crops as uint8; or crops mirrored at random and normalised to floats.
The recipe normalises on its device.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import __version__ as pillow_version
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from recipes import imagenet
from recipes.conf.imagenet import Config
from recipes.core.data import image_sets, in_memory
from recipes.core.data.image_sets import Crops, Images
from recipes.core.data.packed import write
from recipes.core.data.sampling import GlobalBatches
from recipes.core.data.torch_loader import TorchLoader
from tests.benchmarks import inputs
from tests.benchmarks.inputs import Batch
from tests.benchmarks.measure import Figure, Size, interleaved, one_core, samples_per_s

PX = 224
BATCH_SIZE = 64
WAYS = (  # figure, folder, decoder, targets of uint8 and floats
    ("files, other pixels", "files", "opencv", ">= 1.6", ">= 1.3"),
    ("files, the same pixels", "files", "torchvision", ">= 1.4", ">= 1"),
    ("packed jpeg", "jpeg", "opencv", ">= 5", ">= 1.9"),
)
PEERS = {
    "uint8": "RandomResizedCrop, PILToTensor",
    "floats": "RandomResizedCrop, flip, ToTensor, Normalize",
}


def figures(size: Size) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "files")
        source = inputs.photos(files, size)
        write.pack(files, Path(folder, "jpeg"), 256, 90, 0, lambda line: None)
        with one_core():
            values = interleaved(size.rounds, sides(Path(folder), size.least_s))
    return [
        Figure(
            f"images, {name}, {kind}",
            "images/s",
            f"decoder={decoder}",
            f"Pillow {pillow_version}, {steps} of ImageFolder in a DataLoader, num_workers=0",
            targets[number],
            values[f"{name}, {kind}"],
            values[kind],
            source,
        )
        for number, (kind, steps) in enumerate(PEERS.items())
        for name, _, decoder, *targets in WAYS
    ]


def sides(folder: Path, least_s: float) -> dict[str, Callable[[], float]]:
    """What to measure, by name: the peer, and each way of ours, as uint8 and as floats."""
    calls: dict[str, Callable[[], float]] = {}
    for kind, batches in (("uint8", crops), ("floats", floats)):
        peer = peer_loader(folder / "files", floats=kind == "floats")
        calls[kind] = partial(samples_per_s, peer.__iter__, least_s)
        for name, place, decoder, *_ in WAYS:
            epochs = OurEpochs(
                image_sets.open_images(folder / place, "train"), decoder, flip=kind == "floats"
            )
            calls[f"{name}, {kind}"] = partial(
                samples_per_s, partial(epochs.next, batches), least_s
            )
    return calls


def peer_loader(folder: Path, px: int = PX, floats: bool = True) -> DataLoader[Batch]:
    """On one core: what PyTorch's own example of ImageNet does, or its crops as uint8."""
    mean, std = ([value / 255 for value in values] for values in (imagenet.MEAN, imagenet.STD))
    steps: list[Any] = [transforms.RandomResizedCrop(px)]
    if floats:
        steps += [
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(mean, std),
        ]
    else:
        steps += [transforms.PILToTensor()]
    train_set = ImageFolder(str(folder / "train"), transforms.Compose(steps))
    return DataLoader(train_set, BATCH_SIZE, shuffle=True, num_workers=0)


class OurEpochs:
    """Epoch after epoch of one loader; where ``workers`` is 0, it decodes in the calling thread."""

    def __init__(
        self, images: Images, decoder: str, workers: int = 0, px: int = PX, flip: bool = False
    ) -> None:
        batches = GlobalBatches(len(images), BATCH_SIZE, 0, rank=0, world_size=1)
        crops = Crops(images, decoder, partial(imagenet.training_crop, Config(px=px, flip=flip), 1))
        device = torch.device("cpu")
        self._loader = TorchLoader(
            crops, batches, collate=image_sets.collate, num_workers=workers, device=device
        )
        self._epochs = itertools.count()

    def next(self, batches: Callable[[TorchLoader, int], Iterator[Batch]]) -> Iterator[Batch]:
        """Raises RuntimeError where an image could not be read, and so was not decoded."""
        yield from batches(self._loader, next(self._epochs))
        if self._loader.skipped:
            raise RuntimeError(f"images: {len(self._loader.skipped)} could not be read")


def crops(loader: TorchLoader, epoch: int) -> Iterator[Batch]:
    for part in loader.epoch(epoch):
        yield part.data


def floats(loader: TorchLoader, epoch: int) -> Iterator[Batch]:
    """Normalised as the recipe's step does it on its device."""
    mean, std = (torch.tensor(values) for values in (imagenet.MEAN, imagenet.STD))
    for images, labels in crops(loader, epoch):
        yield in_memory.normalise(images, mean, std), labels
