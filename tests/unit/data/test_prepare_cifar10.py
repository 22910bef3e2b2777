import functools
import hashlib
import io
import json
import pickle
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision.datasets
from PIL import Image

from recipes import prepare
from recipes.core.data import cifar10, datasets
from recipes.core.data.datasets import CIFAR10, CIFAR10_CLASSES, find_files, read_idx
from recipes.core.errors import InputError
from tests.unit.data.common import encoded, picture, put
from tests.unit.data.serving import serving

REAL_URL = cifar10.URL
BATCHES = (
    "data_batch_1",
    "data_batch_2",
    "data_batch_3",
    "data_batch_4",
    "data_batch_5",
    "test_batch",
)
N = 12  # images of a batch here


def batch(number: int) -> list[tuple[int, bytes]]:
    draw = random.Random(number)
    return [(draw.randrange(10), draw.randbytes(3072)) for _ in range(N)]


DATA = {name: batch(number) for number, name in enumerate(BATCHES)}
TRAIN = [image for name in BATCHES[:5] for image in DATA[name]]
TEST = DATA["test_batch"]


def pickled(images: list[tuple[int, bytes]]) -> bytes:
    pixels = np.frombuffer(b"".join(pixels for _, pixels in images), np.uint8).reshape(-1, 3072)
    return pickle.dumps({"data": pixels, "labels": [label for label, _ in images]}, protocol=2)


def tarred(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


PICKLES = {f"cifar-10-batches-py/{name}": pickled(images) for name, images in DATA.items()}
PICKLES["cifar-10-batches-py/batches.meta"] = pickle.dumps({"label_names": list(CIFAR10_CLASSES)})
ARCHIVE = tarred(PICKLES)
SOURCES = {"py": PICKLES, "tar": {cifar10.ARCHIVE: ARCHIVE}}


def put_all(root: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        put(root / name, content)
    return root


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torchvision take this CIFAR-10 of few images for the published one. Nothing is
    downloaded.
    """
    theirs = torchvision.datasets.CIFAR10
    sums = {
        name.rpartition("/")[2]: hashlib.md5(content).hexdigest()
        for name, content in PICKLES.items()
    }
    monkeypatch.setattr(theirs, "train_list", [[name, sums[name]] for name in BATCHES[:5]])
    monkeypatch.setattr(theirs, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(theirs, "meta", {**theirs.meta, "md5": sums["batches.meta"]})
    monkeypatch.setattr(theirs, "tgz_md5", hashlib.md5(ARCHIVE).hexdigest())
    monkeypatch.setattr(cifar10, "URL", "http://127.0.0.1:9")


def run(data_dir: Path, source: object = "") -> int:
    return prepare.main(["cifar10", f"data_dir={data_dir}", f"source={source}"])


def read(data_dir: Path) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
    """Training and test images with their labels, as they are found and read again."""
    files = find_files(CIFAR10, data_dir)
    splits = []
    for images_path, labels_path in (files[:2], files[2:4]):
        shape, pixels = read_idx(images_path)
        count, labels = read_idx(labels_path)
        assert shape == (*count, 3, 32, 32)
        images = [bytes(pixels[i * 3072 : (i + 1) * 3072]) for i in range(shape[0])]
        splits.append(list(zip(bytes(labels), images, strict=True)))
    return splits[0], splits[1]


def assert_complete(data_dir: Path) -> dict[str, Any]:
    """The small set is there as it should be, with nothing beside it; gives index.json."""
    assert read(data_dir) == (TRAIN, TEST)
    folder = data_dir / "cifar10"
    assert sorted(p.name for p in folder.iterdir()) == sorted([*datasets.CIFAR10_IDX, "index.json"])
    index: dict[str, Any] = json.loads((folder / "index.json").read_bytes())
    assert index["classes"] == list(CIFAR10_CLASSES)
    assert index["samples"] == {"train": 5 * N, "test": N}
    assert index["sha256"] == {
        n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in datasets.CIFAR10_IDX
    }
    return index


@pytest.mark.parametrize("contents", SOURCES.values(), ids=SOURCES.keys())
def test_all_kinds_of_sources_give_the_same_files(
    contents: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = put_all(tmp_path / "source", contents)
    assert run(tmp_path / "my data", source) == 0
    index = assert_complete(tmp_path / "my data")
    assert index["source"].startswith(str(source))
    out, err = capsys.readouterr()
    assert err == ""
    *_, last = out.splitlines()
    assert last == f"next: python launch.py recipe=cifar data_dir='{tmp_path}/my data'"
    assert all((source / name).is_file() for name in contents)


@pytest.mark.parametrize("contents", SOURCES.values(), ids=SOURCES.keys())
def test_a_file_that_its_owner_exchanges_after_the_check_is_not_read(
    contents: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = put_all(tmp_path / "source", contents)
    of_theirs = {
        of: of.check_integrity for of in (torchvision.datasets.utils, torchvision.datasets.cifar)
    }

    def check(of: Any, path: str, md5: str | None = None) -> bool:
        is_right: bool = of_theirs[of](path, md5)
        put_all(tmp_path / "source", dict.fromkeys(contents, pickle.dumps("exchanged")))
        return is_right

    for of in of_theirs:
        monkeypatch.setattr(of, "check_integrity", functools.partial(check, of))
    assert run(tmp_path / "data", source) == 0
    assert_complete(tmp_path / "data")


def test_an_archive_that_was_not_published_is_never_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = put_all(tmp_path / "source", {cifar10.ARCHIVE: tarred({"../outside": b"x"})})
    assert run(tmp_path / "data", source) == 2
    err = capsys.readouterr().err
    assert f"{cifar10.ARCHIVE} is damaged (its MD5 is not torchvision's)" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("outside"))


def planes(image: Image.Image) -> bytes:
    return b"".join(band.tobytes() for band in image.convert("RGB").split())


def test_a_class_folder_is_decoded_as_pillow_does(tmp_path: Path) -> None:
    files = {
        **{f"train/{i}/1.png": encoded(picture(i, 32, 32), "PNG") for i in range(8)},
        "train/cat/b.png": encoded(picture(1, 32, 32), "PNG"),
        "train/cat/a.jpg": encoded(picture(2, 32, 32)),
        "train/dog/cmyk.jpg": encoded(picture(4, 32, 32).convert("CMYK")),
        "test/dog/1.png": encoded(picture(6, 32, 32), "PNG"),
    }
    source = put_all(tmp_path / "source", files)
    assert run(tmp_path / "data", source) == 0
    train, test = read(tmp_path / "data")
    classes = [*"01234567", "cat", "dog"]
    order = [*(f"{i}/1.png" for i in range(8)), "cat/a.jpg", "cat/b.png", "dog/cmyk.jpg"]
    assert train == [
        (classes.index(n.partition("/")[0]), planes(Image.open(source / "train" / n)))
        for n in order
    ]
    assert test == [(9, planes(picture(6, 32, 32)))]
    index = json.loads((tmp_path / "data/cifar10/index.json").read_bytes())
    assert index["classes"] == classes
    assert index["source"] == str(source)


def test_other_sizes_are_resized(tmp_path: Path) -> None:
    wide = Image.new("RGB", (96, 64), "red")
    wide.paste("blue", (16, 0, 80, 64))  # the middle square
    images = {
        "train/a/1.png": wide,
        "train/a/2.png": picture(1, 20, 16),
        "test/a/1.png": picture(3),
    }
    files = {name: encoded(image, "PNG") for name, image in images.items()}
    assert run(tmp_path / "data", put_all(tmp_path / "source", files)) == 0
    train, _ = read(tmp_path / "data")
    (_, pixels), _ = train
    for number in range(96):  # red, green and blue
        row = pixels[32 * number : 32 * (number + 1)]
        blue = b"\xff" if number >= 64 else b"\0"
        assert row[4:28] == blue * 24, "not the middle"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["x.txt"], "has no copy of CIFAR-10: give a folder that has cifar-10-batches-py/"),
        (["train/a/1.png", "test/b/1.png"], "class 'b', which the training set lacks"),
        (
            [f"{split}/{i:02d}/1.png" for split in ("train", "test") for i in range(11)],
            "train/ has 11 classes, but CIFAR-10 has ten",
        ),
        (
            ["train/a/1.png", "train/a/bad.png", "test/a/1.png"],
            "train/a/bad.png' is empty: repair or remove it",
        ),
    ],
)
def test_an_invalid_source_of_cifar10_is_one_line(
    names: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = put_all(
        tmp_path / "in",
        {name: b"" if "bad" in name else encoded(picture(0), "PNG") for name in names},
    )
    assert run(tmp_path / "data", source) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_valid_conversion_is_kept_a_damaged_one_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = put_all(tmp_path / "source", PICKLES)
    assert run(tmp_path / "data", source) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data/cifar10").iterdir()}
    assert run(tmp_path / "data") == run(tmp_path / "data", source) == 0
    holds = f"already there, verified, made from {source}/cifar-10-batches-py"
    assert capsys.readouterr().out.count(holds) == 2
    assert before == {path: path.stat().st_mtime_ns for path in before}
    for name in ("test-labels-idx1-ubyte", "index.json"):
        path = tmp_path / "data/cifar10" / name
        path.write_bytes(path.read_bytes()[:-1] + b"~")
        assert run(tmp_path / "data", source) == 0
        assert_complete(tmp_path / "data")


def test_an_interrupted_conversion_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*args: Any) -> None:
        raise KeyboardInterrupt

    source = put_all(tmp_path / "source", PICKLES)
    assert run(tmp_path / "data", source) == 0
    path = tmp_path / "data/cifar10/test-labels-idx1-ubyte"
    path.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(cifar10, "convert", end)
        assert run(tmp_path / "data", source) == 130
    path.write_bytes(b"half")
    with pytest.raises(
        InputError, match=r"lacks index.json .*python -m recipes.prepare cifar10 data_dir="
    ):
        find_files(CIFAR10, tmp_path / "data")


def test_the_archive_is_fetched_verified_and_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with serving({cifar10.ARCHIVE: ARCHIVE}) as server:
        url = f"{server.url}{cifar10.ARCHIVE}"
        monkeypatch.setattr(cifar10, "URL", url)
        assert run(tmp_path) == 0
    assert assert_complete(tmp_path)["source"] == url


def test_sizes_and_mirrors_are_the_published_ones() -> None:
    theirs = torchvision.datasets
    assert theirs.CIFAR10.url == REAL_URL
    assert theirs.CIFAR10.base_folder == cifar10.BATCHES
    sizes = [16 + 60_000 * 784, 8 + 60_000, 16 + 10_000 * 784, 8 + 10_000]
    assert [file.size for file in datasets.MNIST_FILES] == sizes
    published = [name for name, _ in theirs.MNIST.resources]
    assert [f"{name}.gz" for name in datasets.MNIST.names] == published
    assert datasets.MNIST_URL in theirs.MNIST.mirrors
    assert all(url.startswith("https://") for url in (datasets.MNIST_URL, REAL_URL))
