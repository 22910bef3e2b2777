"""Damaged data and interrupted downloads: the file is named, no partial file is left, and valid files are used.

Bytes are changed at random, always the same for a case's number, in the kinds of files that the project parses.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import math
import os
import random
import resource
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recipes import prepare
from recipes.core.data import crops, decode, idx, image_sets, pillow
from recipes.core.data.crops import CentreCrop, Crop, RandomCrop
from recipes.core.data.datasets import DataFileError
from recipes.core.data.decode import Decoder
from recipes.core.data.packed import format, write
from recipes.core.data.packed.format import PackOptions
from recipes.core.data.pillow import Unreadable
from recipes.core.errors import InputError
from recipes.core.train import models
from tests.unit.data import serving
from tests.unit.data import test_prepare as tiny
from tests.unit.data.serving import Handler, Server, dropping, whole

pytestmark = [pytest.mark.fault(35, 36), pytest.mark.filterwarnings("ignore")]  # decoders warn of what they are given


def damaged(chance: random.Random, content: bytes) -> bytes:
    """``content`` with bits flipped, bytes put in, left out, doubled, zeroed or cut off: always another."""
    changed = content
    while changed == content:
        at = chance.randrange(len(content)) if chance.random() < 0.5 else chance.randrange(min(64, len(content)))
        count = chance.choice((1, 1, 2, 8, 100))
        kind = chance.randrange(6)
        if kind == 0:
            changed = content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
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
    assert all(str(name) in text for name in names), text


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


# --- IDX


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_a_damaged_idx_file_is_reported_or_read_as_its_header_says(packed: bool, tmp_path: Path) -> None:
    plain = bytes([0, 0, 8, 3]) + struct.pack(">3I", 40, 9, 9) + random.Random(0).randbytes(40 * 81)
    whole, path = gzip.compress(plain, mtime=0) if packed else plain, tmp_path / "t-images-idx3-ubyte"
    seen: Counter[str] = Counter()
    with bounded():
        for number in range(900):
            content = damaged(random.Random(number), whole)
            path.write_bytes(content)
            try:
                shape, payload = idx.read_idx(path)
            except DataFileError as error:
                one_line(str(error), path, "recipes.prepare mnist")
                seen["named"] += 1
                continue
            seen["read"] += 1
            assert math.prod(shape) == len(payload)
            if packed:  # what gzip does not check is around the content
                assert (shape, bytes(payload)) == ((40, 9, 9), plain[16:]), number
            elif content[:1] != b"\x1f":
                assert bytes(payload) == content[4 + 4 * len(shape) :], number
    assert min(seen["named"], seen["read"]) > 5, seen


# --- images


def photo(seed: int, width: int = 90, height: int = 70, **options: object) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (8, 10, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90, **options)
    return buffer.getvalue()


PHOTOS = (
    photo(0),
    photo(1, progressive=True),
    photo(2, exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"),
    photo(3, subsampling=0),
)


def test_a_damaged_photo_is_packed_or_unreadable() -> None:
    seen: Counter[str] = Counter()
    with bounded():
        for number in range(250):
            content = damaged(random.Random(number), PHOTOS[number % len(PHOTOS)])
            try:
                payload, height, width = pillow.encode(content, 48, 90)
            except Unreadable as error:
                one_line(str(error))
                seen["unreadable"] += 1
                continue
            seen["packed"] += 1
            assert Image.open(io.BytesIO(payload)).size == (width, height)
    assert min(seen.values()) > 30, seen


class Alone:
    """A set of one image, given as its bytes."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def read(self, i: int) -> bytes:
        return self.content


@pytest.fixture(params=["torchvision", "opencv"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    if request.param == "opencv":
        pytest.importorskip("cv2", reason="decoder=opencv: pip install opencv-python-headless")
        pytest.importorskip("simplejpeg", reason="decoder=opencv: pip install simplejpeg")
    return decode.make_decoder(str(request.param))


def cropped(content: bytes, decoder: Decoder, crop: Crop) -> str:
    """What becomes of an image while it is trained on: ``read``, or why it is unreadable."""
    try:
        crop(Alone(content), decoder, 0, 0, np.zeros((32, 32, 3), np.uint8))  # type: ignore[arg-type]
    except Unreadable as error:
        one_line(str(error))
        return str(error)
    return "read"


CROPS = (CentreCrop(40), RandomCrop(torch.rand(1, 2 * crops.TRIES + 2), 0.08))


def test_a_damaged_photo_is_decoded_or_skipped(decoder: Decoder) -> None:
    with bounded():
        seen = Counter(
            cropped(damaged(random.Random(number), PHOTOS[number % len(PHOTOS)]), decoder, CROPS[number % 2]) == "read"
            for number in range(300)
        )
    assert min(seen[True], seen[False]) > 30, seen


def announcing(width: int, height: int, behind: bytes = b"") -> bytes:
    """A small photo whose header says that it is large. behind: what stands in front of that header."""
    content = bytearray(photo(0, 16, 16))
    at = content.index(b"\xff\xc0")
    content[at + 5 : at + 9] = struct.pack(">2H", height, width)
    return bytes(content[:at] + behind + content[at:])


@pytest.mark.parametrize(
    "behind", [b"", b"\xff\xff\xff", b"\xff\x01", b"\xff\xd0", b"\0\0junk", b"\xff\xfe\0\x09\xff\xc0\0\x10\0\x10x"]
)
def test_a_small_file_with_the_header_of_a_huge_image_is_skipped(behind: bytes, decoder: Decoder) -> None:
    """A decoder takes 3 bytes for each pixel that the header has, before it looks any further."""
    with bounded():
        for crop in CROPS:
            assert "178 million pixels" in cropped(announcing(65500, 65500, behind), decoder, crop)
            assert "178 million pixels" in cropped(announcing(60000, 3000, behind), decoder, crop)
            assert cropped(photo(0, 16, 16), decoder, crop) == "read"


@pytest.mark.parametrize(("width", "height"), [(60000, 1), (1, 60000)])
def test_a_very_long_narrow_image_is_not_enlarged_in_memory(width: int, height: int, decoder: Decoder) -> None:
    """With a shorter side of 256 px it would take 11 GiB."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "JPEG")
    with bounded():
        assert "too long for its width" in cropped(buffer.getvalue(), decoder, CentreCrop(256))
        assert cropped(buffer.getvalue(), decoder, CROPS[1]) == "read"


# --- packed copies


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packed")
    for split in format.SPLITS:
        for number in range(8):
            path = root / "source" / split / f"class{number % 2}" / f"{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(PHOTOS[number % len(PHOTOS)])
    write.pack(root / "source", root / "copy", PackOptions(size=32, workers=1), say=lambda text: None)
    return root / "copy"


def look_through(folder: Path) -> None:
    """Opens a split of a packed copy and reads all of it, as a loader does."""
    found = image_sets.open_images(folder, "train")
    for i in range(min(len(found), 64)):
        found.label(i)
        found.name(i)
        found.read(i)


HUGE = (
    b"Infinity",
    b"-Infinity",
    b"NaN",
    b"1e999",
    b"-1",
    b"9" * 30,
    b"9" * 5000,
    b"true",
    b"null",
    b'"x"',
    b"[]",
    b"{}",
    b"[" * 3000,
)


def test_a_damaged_index_of_a_packed_copy_is_reported(packed: Path, tmp_path: Path) -> None:
    good, names = (packed / "index.json").read_bytes(), os.listdir(packed)
    for name in names:
        (tmp_path / name).symlink_to(packed / name)
    (tmp_path / "index.json").unlink()
    numbers = [b"8", b"32", b"1", b"0"]
    seen: Counter[str] = Counter()
    with bounded():
        for number in range(600):
            chance = random.Random(number)
            content = damaged(chance, good)
            if number % 3 == 0:
                one = chance.choice([n for n in numbers if b": " + n in good])
                content = good.replace(b": " + one, b": " + chance.choice(HUGE), 1)
            (tmp_path / "index.json").write_bytes(content)
            try:
                look_through(tmp_path)
                seen["read"] += 1
            except InputError as error:
                one_line(str(error), tmp_path)
                seen["named"] += 1
    assert min(seen["read"], seen["named"]) > 20, seen


def test_a_packed_copy_with_false_records_is_reported(packed: Path, tmp_path: Path) -> None:
    """The checksums of the index are valid, but its offsets, lengths, shards or labels are impossible."""
    names = os.listdir(packed)
    for name in names:
        (tmp_path / name).symlink_to(packed / name)
    for name in ("index.json", "train.index"):
        (tmp_path / name).unlink()
    description, good = json.loads((packed / "index.json").read_bytes()), (packed / "train.index").read_bytes()
    odd = (0, 1, 2**16 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
    seen: Counter[str] = Counter()
    with bounded():
        for number in range(400):
            chance = random.Random(number)
            records = [list(format.RECORD.unpack_from(good, at)) for at in range(0, len(good), format.RECORD.size)]
            place = chance.randrange(6)
            limit = (2**64, 2**32, 2**32, 2**32, 2**16, 2**16)[place]
            chance.choice(records)[place] = chance.choice(
                [n for n in odd if n < limit] + [limit - chance.randint(1, 5000)]
            )
            content = b"".join(format.RECORD.pack(*record) for record in records)
            description["splits"]["train"]["index_sha256"] = hashlib.sha256(content).hexdigest()
            (tmp_path / "train.index").write_bytes(content)
            (tmp_path / "index.json").write_text(json.dumps(description))
            try:
                look_through(tmp_path)
                seen["read"] += 1
            except InputError as error:
                one_line(str(error), tmp_path)
                seen["named"] += 1
    assert min(seen["read"], seen["named"]) > 20, seen


# --- weights

WEIGHTS = random.Random(5).randbytes(200_000)


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Path]]:
    """A server of resnet18's weights, which are a few numbers here; and the file that they become."""
    buffer = io.BytesIO()
    torch.save({"a": torch.frombuffer(bytearray(WEIGHTS), dtype=torch.uint8)}, buffer)
    content = buffer.getvalue()
    name = f"resnet18-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setitem(tiny.SERVED, name, content)
    chosen = models.find_weights("resnet18", "true")
    with serving.serving(tiny.SERVED) as server:
        monkeypatch.setattr(chosen.value, "url", f"{server.url}{name}")
        yield server, models.cached(chosen)


@pytest.mark.parametrize("fault", ["drops", "another file", "nothing there", "an endless error"])
def test_incomplete_weights_leave_no_file(
    fault: str, weights: tuple[Server, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    server, path = weights
    server.answers[path.name] = {
        "drops": dropping(parts=9),
        "another file": serving.content(WEIGHTS),
        "nothing there": serving.status(404),
        "an endless error": serving.status(500),
    }[fault]
    assert prepare.main(["weights", "arch=resnet18"]) == 3
    err = capsys.readouterr().err
    one_line(err.splitlines()[-1], path, server.url)
    assert "Traceback" not in err
    assert os.listdir(path.parent) == []
    server.answers.clear()
    assert prepare.main(["weights", "arch=resnet18"]) == 0
    assert os.listdir(path.parent) == [path.name]
    assert models.fault_of(path) == ""


def test_damaged_weights_are_downloaded_again(weights: tuple[Server, Path]) -> None:
    server, path = weights
    assert prepare.main(["weights", "arch=resnet18"]) == 0
    good = path.read_bytes()
    for number in range(5):
        path.write_bytes(damaged(random.Random(number), good))
        assert models.fault_of(path)
        assert prepare.main(["weights", "arch=resnet18"]) == 0
        assert path.read_bytes() == good
    assert len(server.requests) == 6


def test_weights_fetched_by_several_processes_are_complete(weights: tuple[Server, Path]) -> None:
    server, path = weights
    together = threading.Barrier(4)

    def all_here(handler: Handler) -> None:
        together.wait(30)
        whole(handler)

    server.answers[path.name] = all_here
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(prepare.main(["weights", "arch=resnet18"]))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert statuses == [0, 0, 0, 0]
    assert os.listdir(path.parent) == [path.name]
    assert models.fault_of(path) == ""
