"""The IDX format of MNIST, which CIFAR-10 is converted to. Standard library only."""

import gzip
import math
import mmap
import os
import zlib
from pathlib import Path
from typing import IO

from recipes.core.data import datasets, download
from recipes.core.data.datasets import DataFileError


def read_idx(path: str | Path) -> tuple[tuple[int, ...], bytes | memoryview]:
    """Shape and payload (row-major uint8, as many bytes as the shape's product) of an IDX file, plain or gzip.

    A plain file is mapped, so that the ranks of a node share its pages; the mapping is private: writing to the view
    changes neither the file nor another process's view, and costs memory. A gzip file is unpacked into bytes.
    Raises DataFileError (one line: file, fault, mend). Format: http://yann.lecun.com/exdb/mnist/, "THE IDX FILE
    FORMAT": two zero bytes, type, number of dimensions, the dimensions as big-endian uint32, the data.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            packed = file.read(1) == b"\x1f"
            file.seek(0)
            return _read_packed_idx(file) if packed else _map_idx(file)
    except DataFileError as err:
        fault = str(err)
    except (EOFError, OSError, zlib.error) as err:
        fault = download._content_fault(err) or f"cannot be read ({datasets._strerror(err)})"
    raise DataFileError(f"{path}: {fault}; to mend it: {_mend(path)}")


def _read_packed_idx(file: IO[bytes]) -> tuple[tuple[int, ...], bytes]:
    packed_size = os.fstat(file.fileno()).st_size
    with gzip.GzipFile(fileobj=file) as plain:
        shape = _idx_shape(plain)
        size = math.prod(shape)
        # Deflate packs at most 1032 to 1 (zlib's technical notes): a header that claims more asks for memory in vain.
        if size > 1032 * packed_size:
            raise DataFileError(f"its header says {size} bytes, which {packed_size} packed ones cannot hold")
        payload = plain.read(size + 1)
    if len(payload) != size:
        more = "more" if len(payload) > size else f"only {len(payload)}"
        raise DataFileError(f"its header says {size} bytes of data, it has {more}")
    return shape, payload


def _map_idx(file: IO[bytes]) -> tuple[tuple[int, ...], memoryview]:
    shape = _idx_shape(file)
    size, offset = math.prod(shape), file.tell()
    there = os.fstat(file.fileno()).st_size - offset
    if there != size:
        raise DataFileError(f"its header says {size} bytes of data, it has {there}")
    # ACCESS_COPY, not ACCESS_READ: torch.frombuffer warns of a read-only buffer.
    return shape, memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))[offset:]


def _idx_shape(file: IO[bytes] | gzip.GzipFile) -> tuple[int, ...]:
    magic = file.read(4)
    if len(magic) < 4:
        raise DataFileError(f"has only {len(magic)} bytes, an IDX header needs more")
    if magic[:2] != b"\0\0" or not 1 <= magic[3] <= 8:
        raise DataFileError(f"is no IDX file (magic number {magic.hex()})")
    if magic[2] != 0x08:
        raise DataFileError(f"holds IDX type 0x{magic[2]:02x}, only uint8 (0x08) is read here")
    dimensions = file.read(4 * magic[3])
    if len(dimensions) < 4 * magic[3]:
        raise DataFileError(f"ends inside its IDX header ({magic[3]} dimensions announced)")
    return tuple(int.from_bytes(dimensions[i : i + 4], "big") for i in range(0, len(dimensions), 4))


def _mend(path: Path) -> str:
    """The command that makes a file again, found from where `find_mnist` or `find_cifar10` has found it."""
    folder = path.parent
    if folder.name == datasets.CIFAR10.folder:
        return datasets.prepare_command("cifar10", folder.parent)
    if folder.parts[-2:] == Path(datasets.MNIST.folder).parts:
        folder = folder.parent.parent
    elif folder.name == datasets.MNIST.name:
        folder = folder.parent
    return datasets.prepare_command("mnist", folder)
