import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.core.data import datasets
from recipes.core.data.datasets import MNIST, find_files, read_idx
from recipes.core.errors import InputError


def idx(shape: tuple[int, ...], payload: bytes, dtype: int = 0x08) -> bytes:
    return bytes([0, 0, dtype, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + payload


GOOD = idx((2, 3, 4), bytes(range(24)))
PACKED = gzip.compress(GOOD, mtime=0)


@pytest.mark.parametrize("content", [GOOD, PACKED], ids=["plain", "gzip"])
def test_shape_and_payload(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x-idx3-ubyte"
    path.write_bytes(content)
    assert read_idx(path) == ((2, 3, 4), bytes(range(24)))


BAD = {
    "no magic": (b"<htm" + GOOD[4:], "is not an IDX file of bytes"),
    "int32": (idx((6,), bytes(24), dtype=0x0C), "is not an IDX file of bytes"),
    "short": (GOOD[:-1], "has 39 bytes, but its header says another size"),
    "long": (GOOD + b"x", "has 41 bytes, but its header says another size"),
    "header cut": (GOOD[:9], "has 9 bytes"),
    "no dimension": (idx((), b"x"), "has 5 bytes, but its header says another size"),
    "empty": (b"", "is not an IDX file of bytes"),
    "gzip cut": (PACKED[:-9], "end-of-stream marker"),
    "gzip crc": (PACKED[:-8] + bytes([PACKED[-8] ^ 1]) + PACKED[-7:], "CRC check failed"),
    "gzip damaged": (PACKED[:10] + b"\xff" * 9 + PACKED[19:], "Error -3"),
    "gone": (None, "No such file"),
}


@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
@pytest.mark.parametrize(("content", "words"), BAD.values(), ids=BAD.keys())
def test_a_damaged_idx_file_is_named_with_fix(
    tmp_path: Path, content: bytes | None, words: str, dataset: str
) -> None:
    path = tmp_path / dataset / "train-labels-idx1-ubyte"
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_idx(path)
    message = str(caught.value)
    assert words in message
    assert message.startswith(f"{path}: ")
    assert message.endswith(f"python -m recipes.prepare {dataset} with the same data_dir=")
    assert "\n" not in message


def test_find_mnist_prefers_torchvisions_folder_then_the_plain_file(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "mnist", tmp_path / "MNIST/raw"):
        folder.mkdir(parents=True, exist_ok=True)
        for suffix in (".gz", ""):
            for name in MNIST.names:
                (folder / f"{name}{suffix}").write_bytes(b"x")
            assert find_files(MNIST, tmp_path)[3] == folder / f"t10k-labels-idx1-ubyte{suffix}"


def test_find_mnist_names_the_missing_files_and_the_command(tmp_path: Path) -> None:
    data_dir = tmp_path / "my data"
    folder = data_dir / "MNIST/raw"
    folder.mkdir(parents=True)
    for name in MNIST.names[:2] + MNIST.names[3:]:
        (folder / name).write_bytes(b"x")
    with pytest.raises(InputError) as caught:
        find_files(MNIST, str(data_dir))
    message = str(caught.value)
    assert "lacks t10k-images-idx3-ubyte (plain or .gz, in MNIST/raw/, mnist/" in message
    assert f"python -m recipes.prepare mnist data_dir='{data_dir}'" in message
    assert "\n" not in message


@pytest.mark.parametrize("compress", [gzip.compress, bytes])
def test_no_more_of_a_file_is_read_than_a_data_set_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(datasets, "LARGEST_IDX", 1000)
    path = tmp_path / "bomb"
    path.write_bytes(compress(idx((1 << 20,), bytes(1 << 20))))
    with pytest.raises(InputError, match="has 1001 bytes"):
        read_idx(path)
