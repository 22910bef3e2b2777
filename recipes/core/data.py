"""Which samples each rank takes at each step, and small sets held in memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from recipes.core import datafiles
from recipes.core.rundir import InputError


@dataclass(frozen=True)
class Shard:
    """One rank's part of one global batch.

    epoch, batch: which, from 0. indices: this rank's samples, int64. global_size: samples of the batch over all ranks.
    """

    epoch: int
    batch: int
    indices: Tensor
    global_size: int


def share(count: int, rank: int, world_size: int) -> slice:
    """Rank's contiguous part of ``count`` items; the first ``count % world_size`` ranks take one more."""
    each, more = divmod(count, world_size)
    begin = rank * each + min(rank, more)
    return slice(begin, begin + each + (rank < more))


@dataclass(frozen=True)
class GlobalBatches:
    """The same batches of the same samples in the same order on any number of ranks: a permutation drawn from (seed, epoch).

    Every sample is there exactly once an epoch; the last batch of an epoch may be smaller.
    """

    num_samples: int
    global_batch_size: int
    seed: int
    rank: int
    world_size: int

    @property
    def per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch_size)

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Shard]:
        """This rank's shards of ``epoch``, from batch ``first_batch`` on."""
        order = torch.randperm(self.num_samples, generator=generator(self.seed, epoch))
        for batch in range(first_batch, self.per_epoch):
            whole = order[batch * self.global_batch_size : (batch + 1) * self.global_batch_size]
            yield Shard(epoch, batch, whole[share(len(whole), self.rank, self.world_size)], len(whole))


def generator(seed: int, epoch: int, stream: int = 0) -> torch.Generator:
    """A generator of its own for each (seed, epoch, stream), the same on every rank. stream: 0 the order, 1 augmentation."""
    mixed = (seed * 1_000_003 + epoch) * 1_000_003 + stream
    return torch.Generator().manual_seed(mixed % 2**63)


@dataclass(frozen=True)
class ImageSet:
    """A small set in memory. images: uint8 (N, 1, H, W). labels: int64 (N,). Both on the rank's device."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "ImageSet":
        return ImageSet(self.images.to(device), self.labels.to(device))


def mnist(data_dir: str) -> tuple[ImageSet, ImageSet]:
    """MNIST's training and test set from a folder, 28x28. Raises DataFileError naming the prepare command.

    data_dir: empty for the default, `datafiles.default_dir`.
    """
    paths = datafiles.find_mnist(data_dir or datafiles.default_dir())

    def tensor(name: str) -> Tensor:
        shape, payload = datafiles.read_idx(paths[name])
        buffer = bytearray(payload) if isinstance(payload, bytes) else payload  # a mapped file is used where it lies
        return torch.frombuffer(buffer, dtype=torch.uint8).reshape(shape)

    def part(name: str) -> ImageSet:
        return ImageSet(tensor(f"{name}_images").unsqueeze(1), tensor(f"{name}_labels").long())

    return part("train"), part("test")


def digits() -> tuple[ImageSet, ImageSet]:
    """scikit-learn's 1,797 real handwritten digits, 8x8 brought to 28x28; every fifth is of the test set.

    Raises InputError where scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise InputError("dataset=digits: wants scikit-learn: pip install scikit-learn, or make install") from None
    found = load_digits()
    small = torch.from_numpy(found.images).float().unsqueeze(1) / 16
    images = (functional.interpolate(small, size=28, mode="bilinear", antialias=True) * 255).round().to(torch.uint8)
    labels = torch.from_numpy(found.target).long()
    test = torch.arange(len(labels)) % 5 == 4
    return ImageSet(images[~test], labels[~test]), ImageSet(images[test], labels[test])


def fake(train: int, test: int, shape: tuple[int, int, int], classes: int) -> tuple[ImageSet, ImageSet]:
    """Random images and labels, the same in every run. shape: (C, H, W)."""
    random = torch.Generator().manual_seed(0)

    def part(count: int) -> ImageSet:
        images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=random)
        return ImageSet(images, torch.randint(0, classes, (count,), generator=random))

    return part(train), part(test)


class ShiftedImages:
    """Greyscale images, each shifted by up to ``reach`` pixels when it is taken; what comes in from outside is 0.

    An image is taken as one run of bytes from the padded set, whose start makes the shift: a copy of 28 rows costs no more
    than reading them. Shifts are drawn from (seed, epoch) for the whole set, so they do not depend on the number of ranks.
    """

    def __init__(self, images: Tensor, reach: int) -> None:
        count, channels, self.height, self.width = images.shape
        assert channels == 1 and images.dtype == torch.uint8
        self._reach, self._row = reach, self.width + 2 * reach
        self._stride = (self.height + 2 * reach) * self._row
        length = self.height * self._row
        flat = functional.pad(images, (reach,) * 4).flatten()
        flat = functional.pad(flat, (0, 2 * reach))  # the last image's lowest, rightmost run ends there
        self._runs = flat.unfold(0, length, 1)  # a view: run i is the bytes from i on
        self._starts = torch.arange(count, device=images.device) * self._stride
        self._drawn: tuple[int, int] | None = None

    def draw(self, seed: int, epoch: int) -> None:
        """The shifts of an epoch, for every image; drawn once, whoever asks how often."""
        if self._drawn == (seed, epoch):
            return
        self._drawn = (seed, epoch)
        y, x = torch.randint(0, 2 * self._reach + 1, (2, len(self._starts)), generator=generator(seed, epoch, stream=1))
        base = torch.arange(len(self._starts)) * self._stride
        self._starts = (base + y * self._row + x).to(self._starts.device)

    def take(self, indices: Tensor) -> Tensor:
        """Images ``indices``, uint8 (B, 1, H, W)."""
        runs = self._runs.index_select(0, self._starts[indices])
        return runs.view(-1, 1, self.height, self._row)[..., : self.width]
