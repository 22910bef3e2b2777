"""Damaged data and interrupted downloads: the file is named, no partial file is left, and valid
files are used.

Bytes are changed at random, always the same for a case's number, in the kinds of files that the
project parses.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import resource
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from recipes import prepare
from recipes.core.data import decode, image_sets
from recipes.core.data.packed import format, write
from recipes.core.data.pillow import Unreadable
from recipes.core.errors import InputError
from recipes.core.train import models
from tests.unit.data import serving
from tests.unit.data.common import decoder, encoded, picture, put
from tests.unit.data.serving import Handler, Server, dropped, whole

__all__ = ["decoder"]
# decoders warn of what they are given
pytestmark = [
    pytest.mark.fault(35, 36),
    pytest.mark.filterwarnings("ignore"),
]


def damaged(chance: random.Random, content: bytes) -> bytes:
    """``content`` with bits flipped, bytes put in, left out, doubled, zeroed or cut off: always
    another.
    """
    changed = content
    while changed == content:
        end = len(content) if chance.random() < 0.5 else min(64, len(content))
        at = chance.randrange(end)
        count = chance.choice((1, 1, 2, 8, 100))
        kind = chance.randrange(6)
        if kind == 0:
            flipped = content[at] ^ 1 << chance.randrange(8)
            changed = content[:at] + bytes([flipped]) + content[at + 1 :]
        elif kind == 1:
            changed = content[:at] + chance.randbytes(count) + content[at:]
        elif kind == 2:
            changed = content[:at] + content[at + count :]
        elif kind == 3:
            changed = content[:at] + content[at : at + count] + content[at:]
        elif kind == 4:
            changed = content[:at] + bytes(len(content[at : at + count])) + content[at + count :]
        else:
            changed = content[:at]
    return changed


def one_line(text: str, *names: object) -> None:
    assert text.isprintable(), ascii(text)
    assert len(text) < 1500
    for name in names:
        assert str(name) in text, text


@contextlib.contextmanager
def bounded(more: int = 2 << 30) -> Iterator[None]:
    """At most so much more memory than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# --- images


def photo(seed: int, width: int = 90, height: int = 70, **options: object) -> bytes:
    return encoded(picture(seed, width, height), quality=90, **options)


PHOTOS = (
    photo(0),
    photo(1, progressive=True),
    photo(2, exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"),
    photo(3, subsampling=0),
)


def cropped(content: bytes, decoder: str, crop: Callable[..., object]) -> str:
    """What becomes of an image while it is trained on: ``read``, or why it is unreadable."""
    made = decode.make_decoder(decoder)
    try:
        crop(made, decode.decode_any(made, content), 32)
    except Unreadable as error:
        one_line(str(error))
        return str(error)
    return "read"


CROPS = (
    partial(decode.centre_crop, shorter=40),
    partial(decode.random_crop, least=0.08, flip=True),
)


def test_a_damaged_photo_is_decoded_or_skipped(decoder: str) -> None:
    with bounded():
        read = 0
        for number in range(300):
            content = damaged(random.Random(number), PHOTOS[number % len(PHOTOS)])
            read += cropped(content, decoder, CROPS[number % 2]) == "read"
    assert 30 < read < 270


def announcing(width: int, height: int, behind: bytes = b"") -> bytes:
    """A small photo whose header says that it is large. behind: what stands in front of that
    header.
    """
    content = bytearray(photo(0, 16, 16))
    at = content.index(b"\xff\xc0")
    content[at + 5 : at + 9] = struct.pack(">2H", height, width)
    return bytes(content[:at] + behind + content[at:])


@pytest.mark.parametrize(
    "behind",
    [
        b"",
        b"\xff\xff\xff",
        b"\xff\x01",
        b"\xff\xd0",
        b"\0\0junk",
        b"\xff\xfe\0\x09\xff\xc0\0\x10\0\x10x",
    ],
)
def test_a_small_file_with_the_header_of_a_huge_image_is_skipped(
    behind: bytes, decoder: str
) -> None:
    """A decoder takes 3 bytes for each pixel that the header has, before it looks any further."""
    with bounded():
        for crop in CROPS:
            for width, height in ((65500, 65500), (60000, 3000)):
                content = announcing(width, height, behind)
                assert "178 million pixels" in cropped(content, decoder, crop)
            assert cropped(photo(0, 16, 16), decoder, crop) == "read"


@pytest.mark.parametrize(("width", "height"), [(60000, 1), (1, 60000)])
def test_a_very_long_narrow_image_is_not_enlarged_in_memory(
    width: int, height: int, decoder: str
) -> None:
    """With a shorter side of 256 px it would take 11 GiB."""
    content = encoded(Image.new("RGB", (width, height)))
    with bounded():
        whole = cropped(content, decoder, partial(decode.centre_crop, shorter=256))
        assert "its longer side is too long" in whole
        assert cropped(content, decoder, CROPS[1]) == "read"


# --- packed copies


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packed")
    for split in format.SPLITS:
        for number in range(8):
            folder = root / "source" / split / f"class{number % 2}"
            put(folder / f"{number}.JPEG", PHOTOS[number % len(PHOTOS)])
    write.pack(root / "source", root / "copy", size=32, quality=90, workers=1, say=print)
    return root / "copy"


def with_files(packed: Path, folder: Path, versions: Iterator[dict[str, bytes]]) -> Counter[str]:
    """Reads all of a packed copy, as a loader does, with each of these versions of some files;
    counts the results.
    """
    seen: Counter[str] = Counter()
    with bounded():
        for changed in versions:
            for path in packed.iterdir():
                (folder / path.name).unlink(missing_ok=True)
                if path.name in changed:
                    (folder / path.name).write_bytes(changed[path.name])
                else:
                    (folder / path.name).symlink_to(path)
            try:
                images = image_sets.open_images(folder, "train")
                for i in range(min(len(images), 64)):
                    images.label(i)
                    images.name(i)
                    images.read(i)
                seen["read"] += 1
            except InputError as error:
                one_line(str(error), folder)
                seen["named"] += 1
    return seen


HUGE = (*b'Infinity NaN 1e999 -1 true null "x" [] {}'.split(), b"9" * 30, b"9" * 5000, b"[" * 3000)


def test_a_damaged_index_of_a_packed_copy_is_reported(packed: Path, tmp_path: Path) -> None:
    good = (packed / "index.json").read_bytes()
    numbers = [number for number in (b"8", b"32", b"1", b"0") if b": " + number in good]

    def versions() -> Iterator[dict[str, bytes]]:
        for number in range(600):
            chance = random.Random(number)
            content = damaged(chance, good)
            if number % 3 == 0:
                number_there = b": " + chance.choice(numbers)
                content = good.replace(number_there, b": " + chance.choice(HUGE), 1)
            yield {"index.json": content}

    seen = with_files(packed, tmp_path, versions())
    assert min(seen["read"], seen["named"]) > 20, seen


def test_a_packed_copy_with_false_records_is_reported(packed: Path, tmp_path: Path) -> None:
    """The checksums of the index are valid, but its offsets, lengths, shards or labels are
    impossible.
    """
    description = json.loads((packed / "index.json").read_bytes())
    good = (packed / "train.index").read_bytes()
    odd = (0, 1, 2**16 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)

    def versions() -> Iterator[dict[str, bytes]]:
        for number in range(400):
            chance = random.Random(number)
            place = number % 6
            records = [list(record) for record in format.RECORD.iter_unpack(good)]
            limit = (2**64, 2**32, 2**32, 2**32, 2**16, 2**16)[place]
            fits = [n for n in odd if n < limit]
            chance.choice(records)[place] = chance.choice([*fits, limit - chance.randint(1, 5000)])
            content = b"".join(format.RECORD.pack(*record) for record in records)
            description["splits"]["train"]["index_sha256"] = hashlib.sha256(content).hexdigest()
            yield {"train.index": content, "index.json": json.dumps(description).encode()}

    seen = with_files(packed, tmp_path, versions())
    assert min(seen["read"], seen["named"]) > 20, seen


# --- weights

WEIGHTS = random.Random(5).randbytes(200_000)


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Path]]:
    """A server of resnet18's weights, which are a few numbers here; and the file that they
    become.
    """
    buffer = io.BytesIO()
    torch.save({"a": torch.frombuffer(bytearray(WEIGHTS), dtype=torch.uint8)}, buffer)
    content = buffer.getvalue()
    name = f"resnet18-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    chosen = models.find_weights("resnet18", "true")
    with serving.serving({name: content}) as server:
        monkeypatch.setattr(chosen.value, "url", f"{server.url}{name}")
        yield server, models.cached(chosen)


@pytest.mark.parametrize("fault", ["drops", "another file", "nothing there"])
def test_incomplete_weights_leave_no_file(
    fault: str, weights: tuple[Server, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    server, path = weights
    server.answers[path.name] = {
        "drops": dropped,
        "another file": serving.content(WEIGHTS),
        "nothing there": serving.status(404),
    }[fault]
    assert prepare.main(["weights", "arch=resnet18"]) == 3
    err = capsys.readouterr().err
    one_line(err.splitlines()[-1], path, server.url)
    assert "Traceback" not in err
    assert not path.parent.exists()
    server.answers.clear()
    assert prepare.main(["weights", "arch=resnet18"]) == 0
    assert os.listdir(path.parent) == [path.name]
    assert models.fault_of(path) == ""


def test_weights_fetched_by_several_processes_are_complete(weights: tuple[Server, Path]) -> None:
    server, path = weights
    together = threading.Barrier(4)

    def all_here(handler: Handler) -> None:
        together.wait(30)
        whole(handler)

    server.answers[path.name] = all_here
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(prepare.main, [["weights", "arch=resnet18"]] * 4)) == [0, 0, 0, 0]
    assert os.listdir(path.parent) == [path.name]
    assert models.fault_of(path) == ""
