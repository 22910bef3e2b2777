"""One's own labelled images: class folders, or a CSV of files and labels. Opened for training and
validation, as torch data sets.
"""

import csv
import hashlib
import io
import os
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset

from recipes.core.data import classfolder, datasets, pillow, sampling
from recipes.core.data.image_sets import Fake
from recipes.core.errors import InputError
from recipes.core.files import read_bounded

SPLIT = 2  # the stream of `sampling.generator` that divides a set without a validation part
SEPARATOR = ";"  # between the labels of one image
MAX_TABLE = 1 << 30  # bytes of a CSV
FAKE = 60, 3  # samples and classes of dataset=fake
COLUMNS = ("file", "label", "split")
Say = Callable[[str], object]


@dataclass(frozen=True)
class Table:
    """The rows of a CSV with the columns ``file``, ``label`` and perhaps ``split`` (train or val).
    Files are relative to ``folder``.

    several: whether an image may have several labels; its label is then a float tensor (classes,)
    of 0 and 1.
    """

    folder: Path
    place: str  # of the CSV
    several: bool
    classes: tuple[str, ...]
    files: list[str]
    labels: list[tuple[int, ...]]
    splits: list[str]

    def __len__(self) -> int:
        return len(self.files)

    def label(self, i: int) -> Any:
        if not self.several:
            return self.labels[i][0]
        label = torch.zeros(len(self.classes))
        label[list(self.labels[i])] = 1
        return label

    def name(self, i: int) -> str:
        return self.files[i]

    def read(self, i: int) -> bytes:
        """The sample's file. Raises Unreadable."""
        return pillow.read_file(self.folder / self.files[i])

    def digest(self) -> str:
        text = repr((self.classes, self.files, self.labels, self.splits))
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


Images = classfolder.Listing | Table | Fake


@dataclass(frozen=True)
class Pictures(Dataset[Any]):
    """The images ``positions`` of ``source``: ``transform`` of the upright RGB image, and its
    label.
    """

    source: Images
    positions: Sequence[int]
    transform: Callable[[Image.Image], Any]

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        """Raises InputError with the file's name if it cannot be decoded."""
        at = self.positions[i]
        try:
            image = pillow.decode(self.source.read(at))
        except pillow.Unreadable as error:
            name = f"{self.source.place}: {self.source.name(at)!r}"
            raise InputError(f"{name} {error}: remove it, or replace it") from None
        return self.transform(image), self.source.label(at)

    def counts(self) -> torch.Tensor:
        """The number of images of each class, int64 (classes,). Each image has one label."""
        labels = torch.tensor([self.source.label(i) for i in self.positions])
        return labels.bincount(minlength=len(self.source.classes))

    def digest(self) -> str:
        return hashlib.sha256(f"{self.source.digest()} {list(self.positions)}".encode()).hexdigest()


Part = tuple[Images, Sequence[int]]


def open_parts(
    dataset: str,
    data_dir: str,
    table: str,
    several: bool,
    fraction: float,
    seed: int,
    say: Say,
) -> tuple[Part, Part]:
    """Training and validation set, each with the positions of its images.

    table: a CSV, or "" for class folders. If these or the CSV have no validation part, the share
    ``fraction`` of the images is for validation, drawn from ``seed``. say: gets lines about how the
    folders are read. Raises InputError (one line: file, fault, fix).
    """
    if dataset == "fake":
        return _divided(Fake(*FAKE), fraction, seed)
    folder = datasets.folder_of(data_dir)
    if not datasets.kind(folder):
        raise InputError(f"data_dir={str(folder)!r} does not exist: give the folder of your images")
    if table:
        rows = read_table(Path(table).expanduser(), folder, several, say)
        _check_classes(rows, say)
        return _of_table(rows, fraction, seed)

    split_folders = _split_folders(folder, say)
    train = classfolder.scan(split_folders.get("train", folder), say=say)
    _check_classes(train, say)
    if "val" not in split_folders:
        return _divided(train, fraction, seed)
    val = classfolder.scan(split_folders["val"], train.classes, say=say)
    return (train, range(len(train))), (val, range(len(val)))


def _split_folders(folder: Path, say: Say) -> dict[str, Path]:
    """The folders for training and validation, in any usual spelling. Without them, the folders are
    classes.
    """
    place = repr(str(folder))
    names, _ = classfolder.class_names(folder)
    folders = datasets.split_folders(folder)
    splits = {split: path.name for split, path in folders.items()}
    if not splits:
        say(f"{place}: its folders are the classes: {len(names)}, {names[0]!r} to {names[-1]!r}")
        return {}
    if "train" not in splits:
        fix = "add train/<class>/; if it is a class, give a CSV with labels="
        other = min(splits.values())
        raise InputError(f"{place} has the folder {other!r} without a folder train: {fix}")

    warning = "" if all(split == name for split, name in splits.items()) else "warning: "
    train = splits["train"]
    val = repr(splits["val"]) if "val" in splits else "a part of it"
    unread = [repr(name) for name in names if name not in (train, splits.get("val"))]
    rest = ", ".join(unread) or "nothing"
    say(f"{warning}{place}: for training {train!r}, for validation {val}, left out {rest}")
    return folders


def _check_classes(source: classfolder.Listing | Table, say: Say) -> None:
    """Raises InputError for a single class, and warns of classes whose names differ only in
    spelling.
    """
    if len(source.classes) == 1 and not _several(source):
        fix = "give images of at least two classes"
        inner = Path(source.place, source.classes[0])
        if isinstance(source, classfolder.Listing) and any(
            entry.is_dir() for entry in inner.iterdir()
        ):
            fix = f"if the classes are the folders in it, give data_dir={str(inner)!r}"
        raise InputError(f"{source.place!r} has only the class {source.classes[0]!r}: {fix}")

    first_of = dict[str | float, str]()
    for name in source.classes:
        other = first_of.setdefault(_spelling(name), name)
        if other == name:
            continue
        both = f"{other!r} and {name!r}"
        if _composed(other) == _composed(name):  # they look equal
            both = f"{other!a} and {name!a}"
        say(f"warning: {source.place!r}: {both} are read as two classes")


def _several(source: Images) -> bool:
    """Whether an image may have several labels."""
    return isinstance(source, Table) and source.several


def _spelling(name: str) -> str | float:
    """Equal for names that differ only in case, in their Unicode form, or as 1 and 1.0."""
    try:
        return float(name)
    except ValueError:
        return _composed(name).casefold()


def _composed(name: str) -> str:
    """``name`` with one code point for a letter and its accents, where there is one. macOS writes
    names of files with two.
    """
    return unicodedata.normalize("NFC", name)


def read_table(path: Path, folder: Path, several: bool, say: Say) -> Table:
    """The rows of a CSV, without those of the split test. Raises InputError with the line and the
    fix.

    The files must exist, in ``folder``. Rows of the same file must have the same labels and the
    same split, so that no image is in both parts.
    """
    key = f"labels={str(path)!r}"
    try:
        text = read_bounded(path, MAX_TABLE).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
        rows = [(reader.line_num, row) for row in reader]
        columns = reader.fieldnames or []
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{key}: cannot be read ({error}): give a CSV in UTF-8") from None
    if not rows or not {"file", "label"} <= {*columns}:
        needed = "a first line with the columns file,label and rows below it"
        raise InputError(f"{key}: must have {needed}")
    for name in COLUMNS:
        if columns.count(name) > 1:
            raise InputError(f"{key}: has the column {name} twice: remove or rename one")
    unread = [repr(name) for name in columns if name not in COLUMNS]
    if unread:
        say(f"{key}: columns that are not read: {', '.join(unread)}")

    files = list[str]()
    labels_of = list[list[str]]()
    splits = list[str]()
    first_rows = dict[tuple[int, int], tuple[int, list[str], str]]()
    left_out = 0
    for number, row in rows:
        line = f"{key}: line {number}"
        if any(row.get(None) or ()):  # not for commas at the end
            fix = "put a value with commas in quotes"
            raise InputError(f"{line}: has more values than the first line: {fix}")
        name, label, split_name = ((row.get(column) or "").strip() for column in COLUMNS)
        image = folder / name
        if not os.path.isfile(image):
            fix = "correct the name, or data_dir="
            raise InputError(f"{line}: {str(image)!r} does not exist: {fix}")
        labels = [label]
        if several:
            labels = sorted({part.strip() for part in label.split(SEPARATOR)} - {""})
        elif not label or SEPARATOR in label:
            fix = "give one, or multi_label=true"
            raise InputError(f"{line}: label {label!r} must be one class: {fix}")
        split = datasets.SPLITS.get(split_name.lower(), "")
        if split_name and not split:
            raise InputError(f"{line}: split {split_name!r} must be train, val or test")
        status = image.stat()
        first = first_rows.setdefault((status.st_dev, status.st_ino), (number, labels, split))
        if first[0] != number and not (split and first[1:] == (labels, split)):
            fix = "keep one of the rows, or give both the same label and split"
            raise InputError(f"{line}: {name!r} is also the file of line {first[0]}: {fix}")
        if split == "test":
            left_out += 1
            continue
        files.append(name)
        labels_of.append(labels)
        splits.append(split)
    if left_out:
        say(f"{key}: {left_out} rows of the split test are not read")

    classes = sorted({name for labels in labels_of for name in labels})
    position = {name: i for i, name in enumerate(classes)}
    positions = [tuple(position[name] for name in labels) for labels in labels_of]
    return Table(folder, str(path), several, tuple(classes), files, positions, splits)


def _of_table(table: Table, fraction: float, seed: int) -> tuple[Part, Part]:
    if not any(table.splits):
        return _divided(table, fraction, seed)
    train = [i for i, split in enumerate(table.splits) if split != "val"]
    val = [i for i, split in enumerate(table.splits) if split == "val"]
    key = f"labels={table.place!r}"
    if not (train and val):
        missing = "val" if train else "train"
        raise InputError(f"{key}: no row has split {missing}: add such rows, or remove the column")

    known = {label for i in train for label in table.labels[i]}
    for i in val:
        for label in table.labels[i]:
            if label not in known:
                images = f"all images of class {table.classes[label]!r}, such as {table.name(i)!r},"
                fix = "give some of them the split train"
                raise InputError(f"{key}: {images} have split val: {fix}")
    return (table, train), (table, val)


def _divided(source: Images, fraction: float, seed: int) -> tuple[Part, Part]:
    """The share ``fraction`` of each class (of all images, if they have several labels) for
    validation, at least one image; the rest for training.
    """
    of_class = defaultdict(list)
    several = _several(source)
    for i in range(len(source)):
        of_class[0 if several else source.label(i)].append(i)

    random = sampling.generator(seed, 0, SPLIT)
    val = set[int]()
    for _, positions in sorted(of_class.items()):
        count = min(len(positions) - 1, max(1, round(fraction * len(positions))))
        chosen = torch.randperm(len(positions), generator=random)[:count]
        val |= {positions[i] for i in chosen.tolist()}
    if not val:
        fix = "give a folder val/, or a column split in labels="
        raise InputError(f"{source.place}: too few images for a validation set: {fix}")
    return (source, [i for i in range(len(source)) if i not in val]), (source, sorted(val))
