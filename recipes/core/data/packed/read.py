"""Reads samples of a packed copy."""

import contextlib
import hashlib
import mmap
import os
import resource
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recipes.core.data.datasets import DataFileError
from recipes.core.data.decode import Pixels
from recipes.core.data.packed import format
from recipes.core.data.packed.format import PackedCopy
from recipes.core.data.pillow import Unreadable


class Packed:
    """A split of a packed copy. Nothing is kept a sample: its record is looked up in the index, which is mapped.

    Shards are read, not mapped: a disk's error is then this sample's and no SIGBUS, what is read at once is what is wanted,
    and pages that were read do not count as the job's memory.
    """

    _RECORD = struct.Struct("<QIIIHH")  # offset, length, shard, label, height, width
    _FIELDS = np.dtype("<u8, <u4, <u4, <u4, <u2, <u2")

    def __init__(self, folder: Path, copy: PackedCopy, split: str) -> None:
        again = format.prepare_command(folder)
        if split not in copy.splits:
            raise DataFileError(f"{str(folder)!r} has no {split}/ in it: pack one that has: {again}")
        found = copy.splits[split]
        for file in found.files:
            there = _file_size(folder / file.name)
            if there != file.size:
                fault = "is missing" if there is None else f"has {there} bytes, index.json says {file.size}"
                raise DataFileError(f"{str(folder / file.name)!r} {fault}: {again}")
        if not found.samples:
            raise DataFileError(f"{str(folder)!r} has no samples of {split}: {again}")
        self.kind, self.raw = f"packed {copy.encoding}, {copy.size} px", copy.encoding == "raw"
        self.classes, self.place = copy.classes, str(folder)
        self._folder, self._split, self._samples = folder, split, found.samples
        self._files = [file.name for file in found.shards]
        try:
            with open(folder / found.index.name, "rb") as opened:
                self._index = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        except OSError as error:
            raise DataFileError(
                f"{str(folder / found.index.name)!r} cannot be read ({error.strerror}): make it readable"
            ) from None
        self._digest = hashlib.sha256(self._index).hexdigest()
        if self._digest != found.index.sha256 or not self._fits([file.size for file in found.shards]):
            raise DataFileError(f"{str(folder / found.index.name)!r} is damaged: {again}")
        self._open: dict[int, int] = {}
        self._opening, self._scratch = threading.Lock(), threading.local()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # A quarter for each of two sets: the rest of the process wants some too.
        self._most_open = 1 << 20 if soft == resource.RLIM_INFINITY else soft // 4

    def __del__(self) -> None:
        for opened in getattr(self, "_open", {}).values():
            os.close(opened)

    def _fits(self, sizes: list[int]) -> bool:
        """Whether every record is about bytes that are there, and a label that is known."""
        for begin in range(0, self._samples, 1 << 16):  # a piece at a time, so that it takes no memory
            count = min(1 << 16, self._samples - begin)
            part = np.frombuffer(self._index, self._FIELDS, count, begin * self._RECORD.size)
            offset, length, shard, label, height, width = (part[name] for name in self._FIELDS.names or ())
            if (shard >= len(sizes)).any() or (label >= len(self.classes)).any():
                return False
            size = np.asarray(sizes, np.uint64)[shard]
            if (offset > size).any() or (length > size - offset).any():  # a sum could begin again at 0
                return False
            if self.raw and (height.astype(np.int64) * width * 3 != length).any():
                return False
        return True

    def _record(self, i: int) -> tuple[int, int, int, int, int, int]:
        return self._RECORD.unpack_from(self._index, i * 24)

    def __len__(self) -> int:
        return self._samples

    def label(self, i: int) -> int:
        return self._record(i)[3]

    def name(self, i: int) -> str:
        """The name of the file that it was is not kept."""
        return f"{self._split} sample {i} ({self._files[self._record(i)[2]]})"

    def digest(self) -> str:
        return self._digest

    def read(self, i: int) -> bytes:
        offset, length, shard, *_ = self._record(i)
        with self._shard(shard) as opened:
            content = os.pread(opened, length, offset)
        if len(content) != length:
            raise Unreadable("is cut short")
        return content

    def shape(self, i: int) -> tuple[int, int]:
        return self._record(i)[4:]

    def rows(self, i: int, first: int, count: int) -> Pixels:
        offset, _, shard, _, _, width = self._record(i)
        length = count * width * 3
        scratch = getattr(self._scratch, "bytes", b"")
        # One for each thread; as much again would be given out and filled with 0 each time.
        if len(scratch) < length:
            scratch = self._scratch.bytes = bytearray(length)
        with self._shard(shard) as opened:
            if os.preadv(opened, [memoryview(scratch)[:length]], offset + first * width * 3) != length:
                raise Unreadable("is cut short")
        return np.frombuffer(scratch, np.uint8, length).reshape(count, width, 3)

    @contextlib.contextmanager
    def _shard(self, shard: int) -> Iterator[int]:
        """The shard's file, open; one of so many shards that not all can be open at once is opened anew."""
        opened = self._open.get(shard)
        if opened is None:
            opened = self._opened(shard)
        if opened is not None:
            yield opened
            return
        opened = os.open(self._folder / self._files[shard], os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield opened
        finally:
            os.close(opened)

    def _opened(self, shard: int) -> int | None:
        with self._opening:
            if shard not in self._open and len(self._open) < self._most_open:
                self._open[shard] = os.open(self._folder / self._files[shard], os.O_RDONLY | os.O_CLOEXEC)
            return self._open.get(shard)


def _file_size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
