"""Samples of a packed copy, for a loader's threads."""

import hashlib
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from recipes.core.data.datasets import DataFileError
from recipes.core.data.packed import format
from recipes.core.data.packed.format import PackedCopy
from recipes.core.data.pillow import Unreadable

FIELDS = np.dtype("<u8, <u4, <u4, <u4, <u2, <u2")  # format.Record's
assert FIELDS.itemsize == format.RECORD.size


class Packed:
    """A split of a packed copy. No Python object is kept for a sample: its record is read from the index, which is mapped.

    Shards are read, not mapped: a disk error then belongs to one sample and is no SIGBUS, each read fetches exactly
    one sample, and the pages do not count as the job's memory.
    """

    def __init__(self, folder: Path, copy: PackedCopy, split: str) -> None:
        again = f"pack again: {format.prepare_command(folder)}"
        if split not in copy.splits:
            raise DataFileError(f"{str(folder)!r} has no {split}/: give a source= that has one, and {again}")
        found = copy.splits[split]
        for file in found.files:
            actual = _file_size(folder / file.name)
            if actual != file.size:
                fault = "is missing" if actual is None else f"has {actual} bytes instead of {file.size}"
                raise DataFileError(f"{str(folder / file.name)!r} {fault}: {again}")
        if not found.samples:
            raise DataFileError(f"{str(folder)!r} has no samples of {split}: {again}")
        self.kind = f"packed jpeg, {copy.size} px"
        self.classes, self.place = copy.classes, str(folder)
        self._folder, self._split, self._samples = folder, split, found.samples
        self._files = [file.name for file in found.shards]
        path = folder / found.index.name
        try:
            with open(path, "rb") as opened:
                self._index = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        except OSError as error:
            raise DataFileError(f"{str(path)!r} cannot be read ({error.strerror}): make it readable") from None
        self._digest = hashlib.sha256(self._index).hexdigest()
        if self._digest != found.index.sha256 or not self._is_valid([file.size for file in found.shards]):
            raise DataFileError(f"{str(path)!r} is damaged: {again}")
        self._open: dict[int, int] = {}
        self._opening = threading.Lock()

    def __del__(self) -> None:
        for opened in getattr(self, "_open", {}).values():
            os.close(opened)

    def _is_valid(self, sizes: list[int]) -> bool:
        """Whether every record has a known label and points into a shard. sizes: of the shards, in bytes."""
        for begin in range(0, self._samples, 1 << 16):  # in parts, to bound the memory
            count = min(1 << 16, self._samples - begin)
            part = np.frombuffer(self._index, FIELDS, count, begin * FIELDS.itemsize)
            offset, length, shard, label, *_ = (part[name] for name in FIELDS.names or ())
            if (shard >= len(sizes)).any() or (label >= len(self.classes)).any():
                return False
            size = np.asarray(sizes, np.uint64)[shard]
            if (offset > size).any() or (length > size - offset).any():  # offset + length could overflow
                return False
        return True

    def __len__(self) -> int:
        return self._samples

    def label(self, i: int) -> int:
        return format.record(self._index, i).label

    def name(self, i: int) -> str:
        """Names the sample by its shard: a packed copy does not keep the original file's name."""
        return f"{self._split} sample {i} ({self._files[format.record(self._index, i).shard]})"

    def digest(self) -> str:
        return self._digest

    def read(self, i: int) -> bytes:
        record = format.record(self._index, i)
        content = os.pread(self._shard(record.shard), record.length, record.offset)
        if len(content) != record.length:
            raise Unreadable("is truncated")
        return content

    def _shard(self, shard: int) -> int:
        """The shard's file descriptor, which stays open."""
        with self._opening:
            if shard not in self._open:
                self._open[shard] = os.open(self._folder / self._files[shard], os.O_RDONLY | os.O_CLOEXEC)
            return self._open[shard]


def _file_size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
