"""Samples of a packed copy, for a loader's workers."""

import errno
import hashlib
import os
import resource
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from recipes.core import files
from recipes.core.data import datasets
from recipes.core.data.packed import format
from recipes.core.data.pillow import Unreadable
from recipes.core.errors import InputError

NAMES = ("offset", "length", "shard", "label", "height", "width")
FIELDS = np.dtype(list(zip(NAMES, ("<u8", "<u4", "<u4", "<u4", "<u2", "<u2"), strict=True)))
assert FIELDS.itemsize == format.RECORD.size


class Packed:
    """A split of a packed copy. No Python object is kept for a sample: its record is read from the
    index, which is mapped.

    Shards are read, not mapped: a disk error then belongs to one sample and is no SIGBUS, each read
    fetches exactly one sample, and the pages do not count as the job's memory.
    """

    def __init__(self, folder: Path, copy: format.PackedCopy, split: str) -> None:
        again = f"pack again: {datasets.prepare_command('imagenet', folder)}"
        parts = copy.splits[split]
        self.kind = f"packed jpeg, {copy.size} px"
        self.classes = copy.classes
        self.place = str(folder)
        self._opened = folder, copy, split
        self._split = split
        self._files = parts.shards
        with _open(folder, parts.index, again) as opened:
            self._records = np.memmap(opened, FIELDS, "r")
        _allow_open_files(len(parts.shards))
        self._shards = [_open(folder, file, again) for file in parts.shards]
        self._digest = hashlib.sha256(self._records.data).hexdigest()
        if self._digest != parts.index.sha256 or not self._is_valid():
            raise InputError(f"{str(folder / parts.index.name)!r} is damaged: {again}")

    def _is_valid(self) -> bool:
        """Whether every record has a known label and points into a shard."""
        shard = self._records["shard"]
        if (shard >= len(self._files)).any() or (self._records["label"] >= len(self.classes)).any():
            return False
        size = np.array([file.size for file in self._files], np.uint64)[shard]
        offset = self._records["offset"]
        # offset + length could overflow
        return not ((offset > size).any() or (self._records["length"] > size - offset).any())

    # workers that are not forked open the files themselves
    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, self._opened

    def __len__(self) -> int:
        return len(self._records)

    def label(self, i: int) -> int:
        return int(self._records[i]["label"])

    def name(self, i: int) -> str:
        """Names the sample by its shard: a packed copy does not keep the original file's name."""
        return f"{self._split} sample {i} ({self._files[self._records[i]['shard']].name})"

    def digest(self) -> str:
        return self._digest

    def read(self, i: int) -> bytes:
        record = self._records[i]
        length = int(record["length"])
        content = os.pread(self._shards[record["shard"]].fileno(), length, int(record["offset"]))
        if len(content) != length:
            raise Unreadable("is truncated")
        return content


def _allow_open_files(count: int) -> None:
    """Raises the limit of open files of this process by ``count``, as far as its hard limit allows.
    It is often 1,024, and a copy of 2 million images has as many shards.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(soft + count, hard)), hard))


def _open(folder: Path, file: datasets.DataFile, again: str) -> BinaryIO:
    """Opens a file for reading. Raises InputError if it is missing or has another size."""
    path = folder / file.name
    try:
        opened = open(path, "rb", buffering=0, opener=files.without_waiting)  # noqa: SIM115
        size = os.fstat(opened.fileno()).st_size
    except OSError as error:
        fix = f"make it readable, or {again}"
        if error.errno == errno.EMFILE:
            fix = "raise the hard limit of open files (ulimit -Hn)"
        raise InputError(f"{str(path)!r} cannot be read ({error.strerror}): {fix}") from None
    if size != file.size:
        raise InputError(f"{str(path)!r} has {size} bytes instead of {file.size}: {again}")
    return opened
