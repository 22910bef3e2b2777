"""Sets of images too large for memory: class folders, packed copies, and random images for benchmarks."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np

from recipes.core.data import classfolder, datasets
from recipes.core.data.classfolder import Listing
from recipes.core.data.packed import format
from recipes.core.data.packed.read import Packed


class Fake:
    """dataset=fake: a few JPEGs of smooth noise, repeated, that are decoded like real ones."""

    kind, place = "random images, 256 px", "dataset=fake"

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
Images = Listing | Packed | Fake


def open_images(folder: Path, split: str, report: Callable[[object], None] = lambda done: None) -> Images:
    """``train`` or ``val`` of ``folder``: a packed copy, or class folders ``train/<class>/*.JPEG`` and ``val/…``.

    Opens the files and checks their sizes, reads no image. A validation set's labels are positions in its training set's
    classes. report: called during long listings to show progress. Raises InputError (one line: file, fault, fix).
    """
    if datasets.kind(folder / format.INDEX):
        return Packed(folder, format.read_index(folder), split)
    classes = None if split == "train" else classfolder.class_names(folder / "train")
    return classfolder.scan(folder / split, classes, report)
