"""The IDX format, in which MNIST is published and `recipes.prepare` stores CIFAR-10. Standard library only.

http://yann.lecun.com/exdb/mnist/, "THE IDX FILE FORMAT": two zero bytes, the type, the number of dimensions, the dimensions
as big-endian uint32, the data. Only the type uint8 is used here.
"""

import gzip
import math
import mmap
import os
import zlib
from pathlib import Path
from typing import IO

from recipes.core.data.datasets import CIFAR10, MNIST, DataFileError

UINT8 = 0x08


def header(*shape: int) -> bytes:
    """The bytes before the data of an array of ``shape``."""
    return bytes([0, 0, UINT8, len(shape)]) + b"".join(length.to_bytes(4, "big") for length in shape)


def read_idx(path: Path) -> tuple[tuple[int, ...], bytes | memoryview]:
    """Shape and payload (row-major uint8, as many bytes as the shape's product) of an IDX file, plain or gzip.

    A plain file is mapped, so that the ranks of a node share its pages. The mapping is private: writing to the view
    changes neither the file nor another process's view. A gzip file is unpacked into bytes.
    Raises DataFileError (one line: file, fault, fix).
    """
    try:
        with path.open("rb") as file:
            packed = file.read(1) == b"\x1f"
            file.seek(0)
            return _unpack(file) if packed else _map(file)
    except DataFileError as error:
        fault = str(error)
    except EOFError:
        fault = "is truncated (gzip without its end)"
    except (gzip.BadGzipFile, zlib.error) as error:
        fault = f"is damaged ({error})"
    except OSError as error:
        fault = f"cannot be read ({error.strerror})"
    name = CIFAR10.name if path.parent.name == CIFAR10.folder else MNIST.name
    raise DataFileError(f"{path}: {fault}; to replace it: python -m recipes.prepare {name}, with the same data_dir=")


def _unpack(file: IO[bytes]) -> tuple[tuple[int, ...], bytes]:
    packed_size = os.fstat(file.fileno()).st_size
    with gzip.GzipFile(fileobj=file) as plain:
        shape = _shape(plain)
        size = math.prod(shape)
        # Deflate's limit is 1032 to 1 (zlib's technical notes): do not allocate what the header of a damaged file claims.
        if size > 1032 * packed_size:
            raise DataFileError(f"its header says {size} bytes, which {packed_size} compressed ones cannot hold")
        payload = plain.read(size + 1)
    if len(payload) != size:
        more = "more" if len(payload) > size else f"only {len(payload)}"
        raise DataFileError(f"its header says {size} bytes of data, it has {more}")
    return shape, payload


def _map(file: IO[bytes]) -> tuple[tuple[int, ...], memoryview]:
    shape = _shape(file)
    size, offset = math.prod(shape), file.tell()
    actual = os.fstat(file.fileno()).st_size - offset
    if actual != size:
        raise DataFileError(f"its header says {size} bytes of data, it has {actual}")
    # ACCESS_COPY, not ACCESS_READ: torch.frombuffer warns about a read-only buffer.
    return shape, memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))[offset:]


def _shape(file: IO[bytes] | gzip.GzipFile) -> tuple[int, ...]:
    magic = file.read(4)
    if len(magic) < 4:
        raise DataFileError(f"has only {len(magic)} bytes, too few for an IDX header")
    if magic[:2] != b"\0\0" or not 1 <= magic[3] <= 8:
        raise DataFileError(f"is not an IDX file (magic number {magic.hex()})")
    if magic[2] != UINT8:
        raise DataFileError(f"has IDX type 0x{magic[2]:02x}, only uint8 (0x08) is supported")
    dimensions = file.read(4 * magic[3])
    if len(dimensions) < 4 * magic[3]:
        raise DataFileError(f"ends inside its IDX header of {magic[3]} dimensions")
    return tuple(int.from_bytes(dimensions[i : i + 4], "big") for i in range(0, len(dimensions), 4))
