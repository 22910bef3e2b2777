"""The files of a packed copy. Standard library only.

index.json          options, classes, and each split's files with their SHA-256; written last, so it
                    means "complete"
SPLIT.index         one `RECORD` for each sample
SPLIT-NNNNN.bin     shards: the samples' JPEGs, one after another
"""

import hashlib
import json
import shlex
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.core import files
from recipes.core.data import datasets
from recipes.core.data.datasets import DataFile
from recipes.core.errors import InputError

VERSION = {"format": "packed images", "version": 1, "encoding": "jpeg"}
INDEX = "index.json"
MOST_BYTES = 64 << 20  # of index.json
SPLITS = ("train", "val")
# Length bytes from offset in a shard, the label, and the image's height and width in pixels.
RECORD = struct.Struct("<QIIIHH")


@dataclass(frozen=True)
class Split:
    """A split of a packed copy. skipped: number of images left out, which index.json names."""

    samples: int
    index: DataFile
    shards: tuple[DataFile, ...]
    skipped: int


@dataclass(frozen=True)
class PackedCopy:
    """What index.json says. size, quality: as in `write.pack`. index: index.json itself."""

    size: int
    quality: int
    classes: tuple[str, ...]
    splits: Mapping[str, Split]
    index: DataFile

    @property
    def files(self) -> list[DataFile]:
        """All files, index.json last."""
        files = [file for split in self.splits.values() for file in (split.index, *split.shards)]
        return [*files, self.index]


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def read_index(folder: Path) -> PackedCopy:
    """Reads index.json. Raises InputError (one line) if it is missing or damaged."""
    path = folder / INDEX
    again = datasets.prepare_command("imagenet", folder)
    try:
        content = files.read_bounded(path, MOST_BYTES)
        facts: Any = json.loads(content)
        classes = tuple(facts["classes"])
        is_known = VERSION.items() <= facts.items()
        if not is_known or not all(isinstance(name, str) for name in classes):
            raise ValueError
        splits = {name: _split(name, facts["splits"][name]) for name in SPLITS}
        index = DataFile(INDEX, len(content), hashlib.sha256(content).hexdigest())
        return PackedCopy(int(facts["size"]), int(facts["quality"]), classes, splits, index)
    except FileNotFoundError:
        command = datasets.prepare_command("imagenet", "…")
        fix = f"pack one: {command} source={shlex.quote(str(folder))}"
        raise InputError(f"{str(folder)!r} is not a packed copy (no index.json): {fix}") from None
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        raise InputError(f"{str(path)!r} {why}: make it readable") from None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        fix = f"remove it and pack again: {again}"
        raise InputError(f"{str(path)!r} is damaged or of another version: {fix}") from None


def _split(name: str, facts: Mapping[str, Any]) -> Split:
    """Files are named by their split and number: no name in index.json is used."""
    samples = int(facts["samples"])
    index = DataFile(f"{name}.index", samples * RECORD.size, str(facts["index_sha256"]))
    shards = tuple(
        DataFile(shard_name(name, i), int(shard["bytes"]), str(shard["sha256"]))
        for i, shard in enumerate(facts["shards"])
    )
    return Split(samples, index, shards, len(facts["skipped"]))
