"""The IDX format, in which MNIST is published and `recipes.prepare` stores CIFAR-10. Standard library only.

http://yann.lecun.com/exdb/mnist/, "THE IDX FILE FORMAT": two zero bytes, the type, the number of dimensions, the dimensions
as big-endian uint32, the data. Only the type uint8 is used here.
"""

import math
from pathlib import Path

from recipes.core import errors
from recipes.core.data.datasets import CIFAR10, DataFileError

UINT8 = 0x08


def header(*shape: int) -> bytes:
    """The bytes before the data of an array of ``shape``."""
    return bytes([0, 0, UINT8, len(shape)]) + b"".join(length.to_bytes(4, "big") for length in shape)


def read_idx(path: Path) -> tuple[tuple[int, ...], bytes]:
    """Shape and payload (row-major uint8, as many bytes as the shape's product) of an IDX file.

    Raises DataFileError (one line: file, fault, fix).
    """
    try:
        content = path.read_bytes()
        if content[:3] != bytes([0, 0, UINT8]):
            raise DataFileError(f"is not an IDX file of bytes (it starts with {content[:4].hex() or 'nothing'})")
        end = 4 + 4 * content[3] if len(content) > 3 else 0
        shape = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, end, 4))
        if not shape or len(content) != end + math.prod(shape):
            raise DataFileError(f"has {len(content)} bytes, which is not what its header says")
        return shape, content[end:]
    except (DataFileError, OSError) as error:
        name = "cifar10" if path.parent.name == CIFAR10.folder else "mnist"
        fix = f"to replace it: python -m recipes.prepare {name}, with the same data_dir="
        raise DataFileError(f"{path}: {errors.shown(error)}; {fix}") from None
