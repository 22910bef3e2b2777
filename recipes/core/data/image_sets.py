"""Sets of images too large for memory: class folders, packed copies, and random images for
benchmarks; and their crops.
"""

import functools
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from recipes.core.data import classfolder, datasets, decode
from recipes.core.data.decode import Decoder, Pixels
from recipes.core.data.packed import format
from recipes.core.data.packed.read import Packed
from recipes.core.data.pillow import Unreadable
from recipes.core.data.torch_loader import SkippedSample

IGNORE = -100  # the label of an image that cannot be read: cross_entropy's ignore_index
_decoder = functools.cache(decode.make_decoder)  # for each process


class Fake:
    """dataset=fake: a few JPEGs of smooth noise, repeated, that are decoded like real ones."""

    kind = "random images, 256 px"
    place = "dataset=fake"

    def __init__(self, samples: int, classes: int = 1000) -> None:
        from PIL import Image

        self.classes = tuple(f"class {i}" for i in range(classes))
        self._samples = samples
        self._jpegs = []
        for noise in np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3), np.uint8):
            buffer = io.BytesIO()
            Image.fromarray(noise).resize((256, 256)).save(buffer, "JPEG", quality=90)
            self._jpegs.append(buffer.getvalue())

    def __len__(self) -> int:
        return self._samples

    def label(self, i: int) -> int:
        return i % len(self.classes)

    def name(self, i: int) -> str:
        return f"fake sample {i}"

    def digest(self) -> str:
        return f"{self._samples} fake samples"

    def read(self, i: int) -> bytes:
        return self._jpegs[i % len(self._jpegs)]


# A set of compressed images with labels. `read` raises OSError and Unreadable.
Images = classfolder.Listing | Packed | Fake


def open_images(
    folder: Path, split: str, report: Callable[[object], None] = lambda done: None
) -> Images:
    """``train`` or ``val`` of ``folder``: a packed copy, or class folders ``train/<class>/*.JPEG``
    and ``val/…``.

    Opens the files and checks their sizes, reads no image. A validation set's labels are positions
    in its training set's classes. report: called during long listings to show progress. Raises
    InputError (one line: file, fault, fix).
    """
    if datasets.kind(folder / format.INDEX):
        return Packed(folder, format.read_index(folder), split)
    splits = {"train": folder / "train", "val": folder / "val", **datasets.split_folders(folder)}
    classes = None if split == "train" else classfolder.class_names(splits["train"])[0]
    return classfolder.scan(splits[split], classes, report)


class Crops(Dataset[tuple[Tensor, int]]):
    """The images of a set, decoded and cropped, uint8 (S, S, 3), and their labels.

    decoder: as in `make_decoder`, which may raise InputError. crop: called with the decoder, the
    image's pixels and the epoch (-1 in an evaluation); returns the crop. An image that cannot be
    read is black, and its label is IGNORE.
    """

    def __init__(
        self, images: Images, decoder: str, crop: Callable[[Decoder, Pixels, int], Pixels]
    ) -> None:
        self.images = images
        self.decoder = _decoder(decoder).name
        self._crop = crop
        self._epoch = 0

    def __len__(self) -> int:
        return len(self.images)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        decoder = _decoder(self.decoder)
        try:
            pixels = decode.decode_any(decoder, self.images.read(i))
            return torch.from_numpy(self._crop(decoder, pixels, self._epoch)), self.images.label(i)
        except (OSError, Unreadable) as error:
            pixel = np.zeros((1, 1, 3), np.uint8)
            black = torch.from_numpy(self._crop(decoder, pixel, self._epoch))
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            name = f"{Path(self.images.place).name}/{self.images.name(i)}"  # the same on all nodes
            raise SkippedSample(name, why, (black, IGNORE)) from None


def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Makes a batch of samples of `Crops`: uint8 (B, 3, S, S) in channels_last, and labels, int64
    (B,).
    """
    images, labels = default_collate(samples)
    return images.permute(0, 3, 1, 2), labels
