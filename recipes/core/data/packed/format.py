"""The files of a packed copy: index.json, SPLIT.index and SPLIT-NNNNN.bin. Standard library only."""

import hashlib
import json
import re
import shlex
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.core import files
from recipes.core.data import datasets
from recipes.core.errors import InputError

FORMAT, VERSION = "packed images", 1
RECORD = struct.Struct("<QIIIHH")  # a sample: offset in its shard, length, shard, label, height, width
SPLITS = ("train", "val")
SAME = ("encoding", "size", "quality", "samples_per_shard")  # options of which a packed copy has one value


@dataclass(frozen=True)
class PackOptions:
    """How to pack. size: pixels of the shorter side; workers: 0 for all CPUs; max_skipped: of a split, None for `allowed`."""

    encoding: str = "jpeg"
    size: int = 256
    quality: int = 90
    workers: int = 0
    max_skipped: int | None = None
    samples_per_shard: int = 2048


def is_finished(folder: Path) -> bool:
    return datasets.kind(folder / "index.json") == "file"


def _stem(split: str, number: int) -> str:
    return f"{split}-{number:05d}"


RECORD_BYTES = 24  # of a sample in SPLIT.index


@dataclass(frozen=True)
class PackedFile:
    """A file as index.json has it: name, size in bytes, SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """One of a packed copy's splits: its number of samples, its index, and its shards in the order of their numbers."""

    samples: int
    index: PackedFile
    shards: tuple[PackedFile, ...]

    @property
    def files(self) -> tuple[PackedFile, ...]:
        return (self.index, *self.shards)


@dataclass(frozen=True)
class PackedCopy:
    """What index.json says. encoding: jpeg or raw. size: pixels of the shorter side. content: the file itself."""

    encoding: str
    size: int
    classes: tuple[str, ...]
    splits: Mapping[str, Split]
    content: bytes = field(repr=False)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def files(self) -> list[PackedFile]:
        return [file for split in self.splits.values() for file in split.files]


def prepare_command(folder: Path) -> str:
    """The command that packs into ``folder``, with the options that were given when it was begun, where it was."""
    begun, usual = files.read_json(folder / "packing.json") or {}, PackOptions()
    given = [f"{name}={begun[name]}" for name in SAME if begun.get(name) not in (None, getattr(usual, name))]
    words = ["python -m recipes.prepare imagenet source=…", f"data_dir={shlex.quote(str(folder))}", *given]
    return " ".join(words)


def is_packed(folder: Path) -> bool:
    """Whether ``folder`` is a packed copy, or one whose packing was not finished. Raises InputError where one may not look."""
    return bool(datasets.kind(folder / "index.json") or datasets.kind(folder / "packing.json"))


def read_index(folder: Path) -> PackedCopy:
    """``folder``'s index.json. Raises InputError (one line: file, fault, mend) where there is none or it is damaged."""
    path, again = folder / "index.json", prepare_command(folder)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        if datasets.kind(folder / "packing.json"):
            raise InputError(
                f"{str(folder)!r}: packing was not finished: run the same prepare command again ({again})"
            ) from None
        raise InputError(f"{str(folder)!r} is no packed copy of images (no index.json): {again}") from None
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read ({error.strerror}): make it readable") from None
    try:
        found: Any = json.loads(content)
        if (found["format"], found["version"]) != (FORMAT, VERSION):
            raise InputError(f"{str(path)!r} is not of the format {FORMAT!r}, version {VERSION}: {again}")
        splits = {name: _split(name, value) for name, value in found["splits"].items()}
        copy = PackedCopy(found["encoding"], int(found["size"]), tuple(found["classes"]), splits, content)
        if copy.encoding not in ("jpeg", "raw") or not all(isinstance(name, str) for name in copy.classes):
            raise ValueError
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise InputError(f"{str(path)!r} is damaged: {again}") from None
    return copy


def _split(name: str, found: Mapping[str, Any]) -> Split:
    samples = int(found["samples"])
    index = PackedFile(_plain(f"{name}.index"), samples * RECORD_BYTES, str(found["index_sha256"]))
    shards = (PackedFile(_plain(shard["file"]), int(shard["bytes"]), str(shard["sha256"])) for shard in found["shards"])
    return Split(samples, index, tuple(shards))


def _plain(name: str) -> str:
    """``name``, if it can only be a file of the folder itself; else ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name):
        raise ValueError(name)
    return name
