import gzip
import struct
from pathlib import Path

import pytest

from recipes.core.data.datasets import MNIST, DataFileError, find_mnist
from recipes.core.data.idx import read_idx


def idx(shape: tuple[int, ...], payload: bytes, dtype: int = 0x08) -> bytes:
    return bytes([0, 0, dtype, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + payload


GOOD = idx((2, 3, 4), bytes(range(24)))
PACKED = gzip.compress(GOOD)


@pytest.mark.parametrize("content", [GOOD, PACKED], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", ["x-idx3-ubyte", "x-idx3-ubyte.gz"])
def test_shape_and_payload_do_not_depend_on_the_name(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    shape, payload = read_idx(path)
    assert shape == (2, 3, 4)
    assert bytes(payload) == bytes(range(24))


def test_a_file_without_samples_is_read(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.write_bytes(idx((0, 28, 28), b""))
    shape, payload = read_idx(path)
    assert (shape, len(payload)) == ((0, 28, 28), 0)


def test_a_plain_file_is_mapped_and_writing_to_the_view_does_not_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(GOOD)
    _, payload = read_idx(path)
    assert str(path.resolve()) in Path("/proc/self/maps").read_text()
    assert isinstance(payload, memoryview)
    payload[0] = 99
    assert path.read_bytes() == GOOD


BAD = {
    "no magic": (b"<htm" + GOOD[4:], "is not an IDX file"),
    "no dimensions": (b"\0\0\x08\0", "is not an IDX file"),
    "int32": (idx((6,), bytes(24), dtype=0x0C), "type 0x0c, only uint8"),
    "short": (GOOD[:-1], "says 24 bytes of data, it has 23"),
    "long": (GOOD + b"\0", "says 24 bytes of data, it has 25"),
    "header cut": (GOOD[:9], "ends inside its IDX header"),
    "three bytes": (GOOD[:3], "has only 3 bytes"),
    "empty": (b"", "has only 0 bytes"),
    "gzip short": (gzip.compress(GOOD[:-1]), "says 24 bytes of data, it has only 23"),
    "gzip long": (gzip.compress(GOOD + b"\0"), "says 24 bytes of data, it has more"),
    "gzip cut": (PACKED[:-9], "truncated"),
    "gzip crc": (PACKED[:-8] + bytes([PACKED[-8] ^ 1]) + PACKED[-7:], "CRC check failed"),
    "gzip body": (PACKED[:12] + b"\xff" + PACKED[13:], "is damaged"),
    "gzip claims terabytes": (gzip.compress(idx((2**31, 2**31), bytes(9))), "cannot hold"),
}


@pytest.mark.parametrize(("content", "words"), BAD.values(), ids=BAD.keys())
def test_a_damaged_idx_file_is_reported_with_fault_and_fix(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(DataFileError) as caught:
        read_idx(path)
    message = str(caught.value)
    assert words in message
    assert message.startswith(f"{path}: ")
    assert message.endswith("python -m recipes.prepare mnist, with the same data_dir=")
    assert "\n" not in message


def test_a_missing_file_or_a_folder_is_a_data_file_error(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="No such file"):
        read_idx(tmp_path / "nope")
    with pytest.raises(DataFileError, match="directory"):
        read_idx(tmp_path)


def fill(folder: Path, suffix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in MNIST.files:
        (folder / (file.name + suffix)).write_bytes(b"x")


def test_find_mnist_prefers_torchvisions_folder_then_the_plain_file(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "mnist", tmp_path / "MNIST" / "raw"):
        for suffix in (".gz", ""):
            fill(folder, suffix)
            found = find_mnist(tmp_path)
            assert list(found) == ["train_images", "train_labels", "test_images", "test_labels"]
            assert found["train_images"] == folder / f"train-images-idx3-ubyte{suffix}"
            assert found["test_labels"] == folder / f"t10k-labels-idx1-ubyte{suffix}"


def test_find_mnist_names_the_missing_files_and_the_command(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(DataFileError) as caught:
        find_mnist(str(tmp_path))
    message = str(caught.value)
    assert "t10k-images-idx3-ubyte" in message
    assert "train-images" not in message
    assert f"{tmp_path}/MNIST/raw, {tmp_path}/mnist, {tmp_path}" in message
    assert f"python -m recipes.prepare mnist data_dir={tmp_path}" in message
    assert "\n" not in message
