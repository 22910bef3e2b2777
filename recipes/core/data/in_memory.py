"""Small image sets in memory, and their augmentation on the device."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recipes.core import errors
from recipes.core.data import datasets, sampling


@dataclass(frozen=True)
class ImageSet:
    """A small set in memory. images: uint8 (N, C, H, W). labels: int64 (N,). Both on the rank's
    device.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def digest(self) -> str:
        """Equal for equal images and labels in the same order."""
        digest = hashlib.blake2b(digest_size=8)
        for tensor in (self.images, self.labels):
            digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()

    def batches(self, size: int, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of this rank's part of the set, in order, ``size`` at a time."""
        part = sampling.share(len(self), rank, world_size)
        return zip(self.images[part].split(size), self.labels[part].split(size), strict=True)

    def to(self, device: torch.device) -> "ImageSet":
        return ImageSet(self.images.to(device), self.labels.to(device))


def load(dataset: datasets.Dataset, data_dir: str) -> tuple[ImageSet, ImageSet]:
    """The training and the test set of MNIST or CIFAR-10. data_dir: as in `datasets.folder_of`.
    Raises InputError with the prepare command.
    """

    def tensor(path: Path) -> Tensor:
        shape, payload = datasets.read_idx(path)
        return torch.frombuffer(bytearray(payload), dtype=torch.uint8).reshape(shape)

    def part(images_path: Path, labels_path: Path) -> ImageSet:
        images = tensor(images_path)
        labels = tensor(labels_path).long()
        if len(images) != len(labels):
            raise errors.InputError(f"{labels_path}: {len(labels)} labels for {len(images)} images")
        if (labels > 9).any():
            why = f"it has label {labels.max()}, but there are ten classes"
            raise errors.InputError(f"{labels_path}: is damaged ({why})")
        return ImageSet(images if images.ndim == 4 else images.unsqueeze(1), labels)

    paths = datasets.find_files(dataset, data_dir)
    return part(*paths[:2]), part(*paths[2:4])


def digits() -> tuple[ImageSet, ImageSet]:
    """scikit-learn's 1,797 real digits, 8x8 resized to 28x28; every fifth is in the test set.
    Raises InputError without scikit-learn.
    """
    raw = errors.require("sklearn.datasets", "digits", "dataset=digits: ").load_digits()
    small = torch.from_numpy(raw.images).float().unsqueeze(1) / 16
    large = functional.interpolate(small, size=28, mode="bilinear", antialias=True)
    images = (large * 255).round().to(torch.uint8)
    labels = torch.from_numpy(raw.target).long()
    test = torch.arange(len(labels)) % 5 == 4
    return ImageSet(images[~test], labels[~test]), ImageSet(images[test], labels[test])


def fake(train: int, test: int, shape: tuple[int, int, int]) -> tuple[ImageSet, ImageSet]:
    """Random images of ten classes, the same in every run. shape: (C, H, W)."""
    random = torch.Generator().manual_seed(0)

    def part(count: int) -> ImageSet:
        images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=random)
        return ImageSet(images, torch.randint(0, 10, (count,), generator=random))

    return part(train), part(test)


class AugmentedImages:
    """Images of a set with random shifts, flips and cutouts, drawn for each image and epoch.

    reach: largest shift in pixels; the border is padded with 0, or with the mirrored image
    (``reflect``). flip: half of the images are mirrored left to right. cutout: side, in pixels, of
    a square that is replaced by ``fill``.

    A shifted image is one contiguous run of bytes of the padded set; the start of the run sets the
    shift. Copying complete rows is fastest. Everything is drawn from (seed, epoch) for the whole
    set, so it does not depend on the number of ranks.
    """

    def __init__(
        self,
        images: Tensor,
        reach: int = 0,
        *,
        reflect: bool = False,
        flip: bool = False,
        cutout: int = 0,
        fill: int = 0,
    ) -> None:
        count, self._channels, self._height, self._width = images.shape
        assert images.dtype == torch.uint8
        self._reach = reach
        self._flip = flip
        self._cutout = cutout
        self._fill = fill
        self._row = (self._width + 2 * reach) * self._channels
        # where each padded image begins
        self._base = torch.arange(count) * (self._height + 2 * reach) * self._row
        if reflect:  # torch's own reflection does not support uint8
            rows = np.pad(np.arange(self._height), reach, "reflect")
            columns = np.pad(np.arange(self._width), reach, "reflect")
            padded = images[:, :, rows][..., columns]
        else:
            padded = functional.pad(images, (reach,) * 4)
        # Rows of pixels with all channels: a run of bytes is an image in channels_last.
        padded = padded.permute(0, 2, 3, 1).flatten()
        # Makes room for the last image's lowest, rightmost run.
        padded = functional.pad(padded, (0, 2 * reach * self._channels))
        # a view: run i is the bytes from i on
        self._runs = padded.unfold(0, self._height * self._row, 1)
        self._drawn: tuple[int, int] | None = None

    def draw(self, seed: int, epoch: int) -> None:
        """Draws the augmentation of an epoch, before `take`; further calls for the same epoch do
        nothing.
        """
        if self._drawn == (seed, epoch):
            return
        self._drawn = (seed, epoch)
        count = len(self._base)
        device = self._runs.device
        random = sampling.generator(seed, epoch, stream=1)
        y, x = torch.randint(0, 2 * self._reach + 1, (2, count), generator=random)
        starts = self._base + y * self._row + x * self._channels
        self._starts = starts.to(device, non_blocking=True)
        if self._flip:
            first = torch.rand(count, generator=sampling.generator(seed, 0, stream=3)) < 0.5
            self._flips = (first ^ bool(epoch % 2)).to(device, non_blocking=True)
        if self._cutout:  # its centre is anywhere in the image, so it can extend over the border
            sides = torch.tensor([[self._height], [self._width]])
            middle = torch.rand(2, count, generator=random) * sides
            self._holes = (middle.floor().long() - self._cutout // 2).to(device, non_blocking=True)

    def take(self, indices: Tensor) -> Tensor:
        """Images ``indices``, uint8 (B, C, H, W); several channels are in channels_last."""
        runs = self._runs.index_select(0, self._starts[indices])
        rows = runs.view(-1, self._height, self._row)[..., : self._width * self._channels]
        images = rows.unflatten(-1, (self._width, self._channels))  # (B, H, W, C)
        if self._flip:
            images = torch.where(self._flips[indices][:, None, None, None], images.flip(2), images)
        if self._cutout:
            images = images.masked_fill(self._covered(indices)[..., None], self._fill)
        # With one channel, the strides alone tell the memory format, and convolutions select their
        # kernels by them.
        return images.permute(0, 3, 1, 2) if self._channels > 1 else images.squeeze(3).unsqueeze(1)

    def _covered(self, indices: Tensor) -> Tensor:
        """Which pixels the squares cover, bool (B, H, W)."""
        sides = []
        for begin, length in zip(self._holes[:, indices], (self._height, self._width), strict=True):
            from_begin = torch.arange(length, device=begin.device) - begin[:, None]
            sides.append((from_begin >= 0) & (from_begin < self._cutout))
        return sides[0][:, :, None] & sides[1][:, None, :]


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 (B, C, H, W) to float in channels_last, minus ``mean``, divided by ``std``, each (C,)
    in units of a pixel.

    Each row of pixels is one vector: on CPUs this is eight times as fast as broadcasting C values
    over H and W.
    """
    _, channels, _, width = images.shape
    rows = images.permute(0, 2, 3, 1).flatten(2).float()
    rows.sub_(mean.repeat(width)).div_(std.repeat(width))
    return rows.unflatten(2, (width, channels)).permute(0, 3, 1, 2)
