"""Sets of images too large for memory: class folders, packed copies, and random pixels for tests of speed."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from recipes.core.data import classfolder, datasets
from recipes.core.data.decode import Pixels
from recipes.core.data.packed import format, stage
from recipes.core.data.packed.read import Packed
from recipes.core.errors import InputError, Stopped

if TYPE_CHECKING:
    from recipes.core.train.session import Run


class Images(Protocol):
    """A set of images with labels. Files or packed JPEGs are read whole; of packed pixels, the rows that are wanted."""

    kind: str  # for a line: files; packed jpeg, 256 px; packed raw, 256 px
    place: str  # for an error: where it is
    raw: bool

    @property
    def classes(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...
    def label(self, i: int) -> int: ...
    def name(self, i: int) -> str: ...
    def digest(self) -> str:
        """The same where the samples and their order are the same."""
        ...

    def read(self, i: int) -> bytes:
        """A compressed image. Raises OSError, Unreadable."""
        ...

    def shape(self, i: int) -> tuple[int, int]:
        """Height and width, where ``raw``."""
        ...

    def rows(self, i: int, first: int, count: int) -> Pixels:
        """Rows of pixels (count, W, 3), where ``raw``; good until this thread asks for others. Raises OSError, Unreadable."""
        ...


class Files:
    """``FOLDER/<class>/*.JPEG``; labels are positions in ``classes``, the training set's."""

    kind, raw = "files", False

    def __init__(self, folder: Path, classes: Sequence[str] | None, tell: Callable[[object], None]) -> None:
        self._listing = classfolder.scan(folder, classes, tell)
        self.place = self._folder = str(folder)

    @property
    def classes(self) -> tuple[str, ...]:
        return self._listing.classes

    def __len__(self) -> int:
        return len(self._listing)

    def label(self, i: int) -> int:
        return self._listing.label(i)

    def name(self, i: int) -> str:
        return self._listing.name(i)

    def digest(self) -> str:
        return self._listing.digest()

    def read(self, i: int) -> bytes:
        with open(f"{self._folder}/{self._listing.name(i)}", "rb", buffering=0) as file:
            return file.readall()

    def shape(self, i: int) -> tuple[int, int]:
        raise NotImplementedError

    def rows(self, i: int, first: int, count: int) -> Pixels:
        raise NotImplementedError


class Fake:
    """dataset=fake: random pixels, a few of them over and over, that are read and cropped as packed ones are."""

    kind, place, raw = "random pixels, 256 px", "dataset=fake", True

    def __init__(self, samples: int, classes: int = 1000, size: int = 256) -> None:
        self.classes = tuple(f"class {i}" for i in range(classes))
        self._samples = samples
        self._pixels = np.random.default_rng(0).integers(0, 256, (16, size, size, 3), np.uint8)

    def __len__(self) -> int:
        return self._samples

    def label(self, i: int) -> int:
        return i % len(self.classes)

    def name(self, i: int) -> str:
        return f"fake sample {i}"

    def digest(self) -> str:
        return f"{self._samples} fake samples"

    def read(self, i: int) -> bytes:
        raise NotImplementedError

    def shape(self, i: int) -> tuple[int, int]:
        return self._pixels.shape[1], self._pixels.shape[2]

    def rows(self, i: int, first: int, count: int) -> Pixels:
        return self._pixels[i % len(self._pixels), first : first + count]


def open_images(data_dir: str | Path, split: str, tell: Callable[[object], None] = lambda done: None) -> Images:
    """``train`` or ``val`` of a folder: a packed copy, or class folders ``train/<class>/*.JPEG`` and ``val/…``.

    Opens and checks sizes, reads no image. A validation set's labels are positions in its training set's classes. tell: told
    something new now and then, where there is much to list. Raises InputError (one line: file, fault, mend).
    """
    folder = Path(data_dir).expanduser()
    if format.is_packed(folder):
        return Packed(folder, format.read_index(folder), split)
    if datasets.kind(folder / split) != "folder":
        wants = f"{split}/<class>/*.JPEG or a packed copy's index.json"
        mend = "give the folder that holds them, or pack a copy: " + format.prepare_command(Path("…"))
        raise InputError(f"data_dir={str(data_dir)!r} has no {wants}: {mend}")
    classes = None
    if split != "train" and datasets.kind(folder / "train") == "folder":
        classes = classfolder.class_names(folder / "train")
    return Files(folder / split, classes, tell)


def open_sets(cfg: "SetKeys", run: "Run") -> tuple[Images, Images]:
    """The training and the validation set of dataset=, data_dir= and stage_dir=, on every rank the same. Says what they are.

    Raises InputError and MachineError, on all ranks where one of them fails.
    """
    if cfg.dataset == "fake":
        return Fake(1_281_167), Fake(2000)
    world = run.world

    def staged(tell: Callable[[object], None]) -> Path:
        folder = find_folder(cfg.data_dir)
        stage_dir = os.path.expanduser(os.path.expandvars(cfg.stage_dir))
        if "$" in stage_dir:
            raise InputError(f"stage_dir={cfg.stage_dir}: such a variable is not set: give a folder")

        def beat(done: int, total: int) -> None:
            if run.stop:
                raise Stopped(run.stop.reason)
            tell(done)
            run.progress(f"to {stage_dir}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

        return stage.to_local_disk(folder, Path(stage_dir), beat) if stage_dir else folder

    if cfg.stage_dir:
        run.say(f"the packed copy is brought to stage_dir={cfg.stage_dir} where it is not there yet")
    # Apart, because what takes long is told while it does, and what a rank finds is looked at when all are there.
    folder = world.together("staging", staged)
    sets = world.together("images", lambda tell: tuple(open_images(folder, split, tell) for split in ("train", "val")))
    train, val = sets
    first = world.broadcast_text("images", f"{train.digest()} {val.digest()}").split(" ")

    def alike(tell: Callable[[object], None]) -> None:
        for images, wanted in zip(sets, first, strict=True):
            if images.digest() != wanted:
                raise InputError(
                    f"{images.place!r} holds other samples here than on {world.hosts[0]}: give all ranks the same"
                )

    world.together("alike", alike)
    run.say(f"{len(train):,} images in {len(train.classes)} classes, {len(val):,} to evaluate: {train.kind}, {folder}")
    return train, val


class SetKeys(Protocol):
    """The keys of a recipe that `open_sets` goes by."""

    @property
    def dataset(self) -> str: ...
    @property
    def data_dir(self) -> str: ...
    @property
    def stage_dir(self) -> str: ...


def find_folder(data_dir: str) -> Path:
    """``data_dir``, or ``imagenet`` in it where that is what holds images; empty for the default, `datafiles.default_dir`."""
    base = Path(data_dir or datasets.default_dir()).expanduser()
    below = base / "imagenet"

    def has_images(folder: Path) -> bool:
        return format.is_packed(folder) or datasets.kind(folder / "train") == "folder"

    return below if not has_images(base) and has_images(below) else base
