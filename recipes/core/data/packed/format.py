"""The files of a packed copy, their only reader and their only writer. Standard library only.

index.json          options, classes, and each split's files with their SHA-256; written last, so it means "complete"
SPLIT.index         one `Record` for each sample
SPLIT-NNNNN.bin     shards: the samples' JPEGs, one after another
packing.json        the options and file names that packing was started with
SPLIT-NNNNN.json    a finished shard's note, until index.json is written
"""

import hashlib
import json
import re
import shlex
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from recipes.core import errors, files
from recipes.core.data import datasets
from recipes.core.data.datasets import DataFile
from recipes.core.errors import InputError

VERSION = {"format": "packed images", "version": 1, "encoding": "jpeg"}
INDEX, PLAN = "index.json", "packing.json"
SPLITS = ("train", "val")
RECORD = struct.Struct("<QIIIHH")
OPTIONS = ("size", "quality", "samples_per_shard")  # the options that all parts of a packed copy share


class Record(NamedTuple):
    """Where a sample is and what it is: length bytes from offset in a shard; height and width in pixels."""

    offset: int
    length: int
    shard: int
    label: int
    height: int
    width: int

    def pack(self) -> bytes:
        return RECORD.pack(*self)


def record(index: Any, i: int) -> Record:
    """Sample ``i``'s record. index: a buffer with the content of a SPLIT.index."""
    return Record._make(RECORD.unpack_from(index, i * RECORD.size))


@dataclass(frozen=True)
class PackOptions:
    """How to pack. size: pixels of the shorter side. workers: 0 for all CPUs. max_skipped: of a split, None for the default."""

    size: int = 256
    quality: int = 90
    workers: int = 0
    max_skipped: int | None = None
    samples_per_shard: int = 2048


@dataclass(frozen=True)
class Split:
    """A split of a packed copy. skipped: ``file`` and ``why`` of each image left out."""

    samples: int
    index: DataFile
    shards: tuple[DataFile, ...]
    skipped: tuple[Mapping[str, str], ...]

    @property
    def files(self) -> tuple[DataFile, ...]:
        return (self.index, *self.shards)


@dataclass(frozen=True)
class PackedCopy:
    """What index.json says. size: pixels of the shorter side. content: the bytes of index.json."""

    size: int
    classes: tuple[str, ...]
    splits: Mapping[str, Split]
    content: bytes = field(repr=False)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def files(self) -> list[DataFile]:
        return [file for split in self.splits.values() for file in split.files]


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def note_path(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05d}.json"


def header(options: PackOptions) -> dict[str, Any]:
    """The fields that index.json and packing.json have in common."""
    return {**VERSION, "size": options.size, "quality": options.quality}


def check_version(content: Mapping[str, Any], path: Path) -> None:
    """Raises InputError if ``content``, of index.json or packing.json, is of another version or of pixels (``raw``)."""
    differs = [f"{name}={errors.shown(content.get(name))}" for name in VERSION if content.get(name) != VERSION[name]]
    if differs:
        raise InputError(
            f"{str(path)!r}: {', '.join(differs)} is not supported, only {', '.join(map(str, VERSION.values()))}: pack again "
            f"into another data_dir=, or remove {shlex.quote(str(path.parent))} first: {prepare_command(path.parent)}"
        )


def prepare_command(folder: Path) -> str:
    """The command that packs into ``folder``. With other options than the first ones it refuses, and names those."""
    return f"{datasets.prepare_command('imagenet', folder)} source=…"


def is_finished(folder: Path) -> bool:
    return datasets.kind(folder / INDEX) == "file"


def write_index(folder: Path, options: PackOptions, classes: Sequence[str], splits: Mapping[str, Split]) -> None:
    """Writes index.json."""
    written = {
        name: {
            "samples": split.samples,
            "index_sha256": split.index.sha256,
            "shards": [{"file": file.name, "bytes": file.size, "sha256": file.sha256} for file in split.shards],
            "skipped": split.skipped,
        }
        for name, split in splits.items()
    }
    files.write_json(folder / INDEX, {**header(options), "classes": list(classes), "splits": written})


def read_index(folder: Path) -> PackedCopy:
    """Reads index.json. Raises InputError (one line: file, fault, fix) where it is missing or damaged."""
    path, again = folder / INDEX, prepare_command(folder)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        if datasets.kind(folder / PLAN):
            raise InputError(
                f"{str(folder)!r}: packing is not finished: run the same command again ({again})"
            ) from None
        raise InputError(f"{str(folder)!r} is not a packed copy (no index.json): pack one with {again}") from None
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read ({error.strerror}): make it readable") from None
    try:
        found: Any = json.loads(content)
        check_version(found, path)
        splits = {name: _split(name, value) for name, value in found["splits"].items()}
        copy = PackedCopy(int(found["size"]), tuple(found["classes"]), splits, content)
        if not all(isinstance(name, str) for name in copy.classes):
            raise ValueError
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise InputError(f"{str(path)!r} is damaged: remove it and pack again: {again}") from None
    return copy


def _split(name: str, found: Mapping[str, Any]) -> Split:
    samples = int(found["samples"])
    return Split(
        samples,
        DataFile(_plain(f"{name}.index"), samples * RECORD.size, str(found["index_sha256"])),
        tuple(DataFile(_plain(shard["file"]), int(shard["bytes"]), str(shard["sha256"])) for shard in found["shards"]),
        tuple({"file": str(skip["file"]), "why": str(skip["why"])} for skip in found["skipped"]),
    )


def _plain(name: str) -> str:
    """``name`` if it can only be a file of the folder itself, otherwise ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name):
        raise ValueError(name)
    return name
