"""What the benchmarks read: real data where it is at hand and all is wanted, else as much made
here; each says which.
"""

from __future__ import annotations

import collections
import io
import itertools
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy
import torch
import torchvision
from PIL import Image
from torch import Tensor

from recipes.core.data import datasets, in_memory
from recipes.core.data.datasets import Dataset
from recipes.core.data.in_memory import AugmentedImages, ImageSet
from recipes.core.data.sampling import GlobalBatches
from recipes.core.errors import InputError
from tests.benchmarks.measure import FULL, Figure, Size, interleaved, samples_per_s
from tests.helpers import DATA

PHOTOS = DATA / "imagenet-sample.tar"  # ImageNet's JPEGs, <wnid>_<word>.JPEG
CIFAR_JPEGS = DATA / "cifar10-jpeg.tar.xz"  # <train|test>/<class>/NNNN.jpg
DIFFERENT = 50  # small JPEGs; more of them are copies of these
Batch = tuple[Tensor, Tensor]  # images, labels
RANDOM = "random images"  # what is used if there are no real ones


def photos(folder: Path, size: Size) -> str:
    """Writes JPEGs as ImageNet's, one class each, to ``folder/train/<class>/``, and one to val/;
    gives what they are.
    """
    if size.photos != FULL.photos or not PHOTOS.is_file():
        for number in range(size.photos):
            write(
                folder / f"train/class{number:04d}/0.JPEG", made_photo(number, 500, 375), quality=92
            )
        write(folder / "val/class0000/0.JPEG", made_photo(0, 500, 375))
        return f"{size.photos} made JPEGs of 500x375"
    with tarfile.open(PHOTOS) as packed:
        members = [member for member in packed if member.name.endswith(".JPEG")][: size.photos]
        for member in members:
            file = folder / "train" / member.name.partition("_")[0] / member.name
            file.parent.mkdir(parents=True)
            content = cast(IO[bytes], packed.extractfile(member))  # a regular file
            file.write_bytes(content.read())
        (folder / "val").mkdir()
        (folder / "val" / file.parent.name).symlink_to(file.parent)
    return f"{len(members)} JPEGs of ImageNet"


def mnist(folder: Path, size: Size) -> str:
    """Writes a data_dir with MNIST's files, plain; gives what they are."""
    real = _prepared(datasets.MNIST) if size.images == FULL.images else None
    sets = real or in_memory.fake(size.images, 10, (1, 28, 28))
    place = folder / datasets.MNIST.folder
    place.mkdir(parents=True)
    for file, tensor in zip(
        datasets.MNIST_FILES, (t for s in sets for t in (s.images, s.labels)), strict=True
    ):
        content = tensor.to(torch.uint8).squeeze()  # IDX has no channels
        (place / file.name).write_bytes(
            datasets.idx_header(*content.shape) + content.numpy().tobytes()
        )
    return "MNIST" if real else f"{size.images:,} {RANDOM}"


def recipe_batches(
    train_set: ImageSet,
    images: AugmentedImages,
    normalise: Callable[[Tensor], Tensor],
    batch_size: int,
    seed: int,
    epoch: int,
) -> Iterator[Batch]:
    """What a step of a recipe whose set lies in memory, on one rank, is given in ``epoch``."""
    for part in GlobalBatches(len(train_set), batch_size, seed, rank=0, world_size=1).epoch(epoch):
        images.draw(seed, epoch)
        yield normalise(images.take(part.indices)), train_set.labels[part.indices]


def input_figure(
    name: str,
    ours_is: str,
    epoch: Callable[[int], Iterable[Batch]],
    theirs_is: str,
    peer: Iterable[Batch],
    size: Size,
    note: str,
    least_s: float = 0.0,
) -> Figure:
    """Whole epochs of batches from a set in memory, against torchvision's dataset in a DataLoader.
    epoch: the batches of one.
    """
    epochs = itertools.count()
    sides = {
        "ours": lambda: samples_per_s(lambda: epoch(next(epochs)), least_s),
        "theirs": lambda: samples_per_s(lambda: peer, least_s),
    }
    values = interleaved(size.rounds, sides)
    them = f"torchvision {torchvision.__version__}'s {theirs_is} in a DataLoader, num_workers=0"
    return Figure(name, "samples/s", ours_is, them, ">= 12", values["ours"], values["theirs"], note)


def small_jpegs(folder: Path, count: int) -> None:
    """Writes ``count`` JPEGs of 64x48 to ``folder/train/<class>/``, of ten classes."""
    write(folder / "val/class0/0.jpg", made_photo(0, 64, 48))
    for number in range(count):
        file = folder / f"train/class{number % 10}/{number}.jpg"
        if number < DIFFERENT:
            write(file, made_photo(number, 64, 48), quality=90)
        else:
            file.write_bytes(
                (folder / f"train/class{number % 10}/{number % DIFFERENT}.jpg").read_bytes()
            )


def made_photo(seed: int, width: int, height: int) -> Tensor:
    """Soft shapes and some grain, which take about as many bytes as a photograph: uint8 (3,
    H, W).
    """
    random = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, max(2, height // 16), max(2, width // 16), generator=random) * 255
    soft = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")[0]
    return (
        (soft + 8 * torch.randn(3, height, width, generator=random)).clamp(0, 255).to(torch.uint8)
    )


def write(file: Path, image: Tensor, **options: Any) -> None:
    """An image, uint8 (3, H, W), in the format of the file's ending."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, **options)


def cifar10(train: int, test: int, real: bool = True) -> tuple[ImageSet, ImageSet, str]:
    """The first images of each class of CIFAR-10, ``train`` and ``test`` of them altogether, sorted
    by class; what they are.

    Random ones where neither the prepared set nor the JPEGs are at hand, or ``real`` is false.
    """
    wanted = {"train": train // 10, "test": test // 10}
    sets = _prepared(datasets.CIFAR10) if real else None
    if sets:
        train_set = _first_of_each(sets[0], wanted["train"])
        test_set = _first_of_each(sets[1], wanted["test"])
        return train_set, test_set, "CIFAR-10"
    if real and CIFAR_JPEGS.is_file():
        return *_unpacked_cifar10(wanted), "CIFAR-10 (JPEG q75)"
    made = in_memory.fake(train, test, (3, 32, 32))
    train_set, test_set = (ImageSet(part.images, torch.arange(len(part)) % 10) for part in made)
    return train_set, test_set, RANDOM


def _prepared(dataset: Dataset) -> tuple[ImageSet, ImageSet] | None:
    try:
        return in_memory.load(dataset, str(DATA))
    except InputError:
        return None


def _first_of_each(images: ImageSet, count: int) -> ImageSet:
    chosen = torch.cat(
        [(images.labels == label).nonzero().flatten()[:count] for label in range(10)]
    )
    return ImageSet(images.images[chosen], images.labels[chosen])


def _unpacked_cifar10(wanted: dict[str, int]) -> tuple[ImageSet, ImageSet]:
    """From the JPEGs, as Pillow decodes them."""
    files: dict[tuple[str, str], list[bytes]] = collections.defaultdict(list)
    with tarfile.open(CIFAR_JPEGS) as packed:
        for member in packed:
            part, _, rest = member.name.partition("/")
            into = files[part, rest.partition("/")[0]]
            if member.isfile() and len(into) < wanted[part]:
                content = cast(IO[bytes], packed.extractfile(member))  # a regular file
                into.append(content.read())
    classes = sorted({name for _, name in files if name})

    def image_set(part: str) -> ImageSet:
        kept = [
            (content, label) for label, name in enumerate(classes) for content in files[part, name]
        ]
        pixels = numpy.stack(
            [numpy.asarray(Image.open(io.BytesIO(content)).convert("RGB")) for content, _ in kept]
        )
        return ImageSet(
            torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(),
            torch.tensor([label for _, label in kept]),
        )

    return image_set("train"), image_set("test")
