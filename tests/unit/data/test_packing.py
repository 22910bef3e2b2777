import fcntl
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from recipes import prepare
from recipes.core.data import classfolder, pillow, progress
from recipes.core.data.packed import format, write
from recipes.core.errors import InputError, MachineError
from tests import helpers
from tests.helpers import ROOT
from tests.unit.data.common import encoded, picture, put

OPTIONS: dict[str, Any] = {
    "size": 24,
    "quality": 90,
    "workers": 2,
    "say": lambda text: None,
}
RUNNER = """
import sys
from recipes import prepare
from recipes.core.data.packed import write
write.SAMPLES_PER_SHARD = 4
sys.exit(prepare.main(["imagenet", "size=24", "workers=2", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module", autouse=True)
def small_shards() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "SAMPLES_PER_SHARD", 4)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """17 training images of three classes, 5 validation images of two."""
    root = tmp_path_factory.mktemp("source")
    for i in range(17):
        put(root / f"train/n0{i % 3}/{i:02d}.JPEG", encoded(picture(i, 30 + i, 45 - i, 3)))
    for i in range(5):
        put(root / f"val/n0{1 + i % 2}/{i}.JPEG", encoded(picture(100 + i, 40, 30, 3)))
    return root


@pytest.fixture(scope="module")
def unbroken(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("unbroken") / "packed"
    write.pack(source, target, **OPTIONS)
    return target


def both(source: Path, name: str) -> None:
    """Puts a good image of this name into train/ and val/."""
    for split in format.SPLITS:
        put(source / split / name, GOOD)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def samples(folder: Path, split: str) -> list[tuple[bytes, int, int, int]]:
    """Payload, label, height and width of each sample, by the format's description alone."""
    index = (folder / f"{split}.index").read_bytes()
    entries = []
    for offset, length, shard, label, height, width in struct.iter_unpack("<QIIIHH", index):
        payload = (folder / f"{split}-{shard:05d}.bin").read_bytes()[offset : offset + length]
        assert len(payload) == length
        entries.append((payload, label, height, width))
    return entries


def far_apart(image: Any, other: Any) -> int:
    """The largest difference of any value."""
    assert image.size == other.size
    assert image.mode == other.mode
    return max(abs(a - b) for a, b in zip(image.tobytes(), other.tobytes(), strict=True))


def test_a_packed_copy_has_the_documented_format(source: Path, unbroken: Path) -> None:
    index = json.loads((unbroken / "index.json").read_bytes())
    assert index["format"] == "packed images"
    assert index["version"] == 1
    assert index["encoding"] == "jpeg"
    assert index["size"] == 24
    assert index["quality"] == 90
    assert index["classes"] == ["n00", "n01", "n02"]
    shards = [shard["file"] for split in index["splits"].values() for shard in split["shards"]]
    assert shards == [*(f"train-{i:05d}.bin" for i in range(5)), "val-00000.bin", "val-00001.bin"]
    others = {"index.json", "packing.lock", "train.index", "val.index"}
    assert {path.name for path in unbroken.iterdir()} == {*shards, *others}
    for split, count in (("train", 17), ("val", 5)):
        files = sorted((source / split).rglob("*.JPEG"))
        entries = samples(unbroken, split)
        assert index["splits"][split]["samples"] == len(entries) == len(files) == count
        for path, (payload, label, height, width) in zip(files, entries, strict=True):
            assert label == int(path.parent.name[-1])
            image = Image.open(io.BytesIO(payload))
            original = Image.open(path).convert("RGB")
            assert image.format == "JPEG"
            assert image.mode == "RGB"
            assert image.size == (width, height)
            assert min(width, height) == 24
            assert far_apart(image, original.resize((width, height), Image.LANCZOS)) < 30
            assert abs(width / height - original.width / original.height) < 0.06


def test_a_resized_image_has_the_quality_and_no_comment_or_profile() -> None:
    image = picture(1, 90, 60, 3)
    content = encoded(image, quality=100, comment=b"spam" * 1000, icc_profile=b"spam" * 1000)
    payload, *_ = pillow.encode(content, 24, 30)
    again: Any = Image.open(io.BytesIO(payload))
    expected: Any = Image.open(io.BytesIO(encoded(image, quality=30)))
    assert again.quantization == expected.quantization
    assert b"spam" not in payload
    wide = encoded(Image.new("RGB", (70_000, 60)), "PNG")  # its copy is not too long
    assert pillow.encode(wide, 24, 90)[1:] == (24, 28_000)


@pytest.mark.parametrize(
    ("width", "height"),
    [
        (24, 60),
        (20, 20),
        (60, 24),
    ],
)
def test_a_small_jpeg_is_stored_unchanged(width: int, height: int) -> None:
    content = encoded(
        picture(1, width, height, 3), quality=50, comment=b"kept", progressive=width == 60
    )
    assert pillow.encode(content, 24, 90) == (content, height, width)


SMALL = picture(7, 20, 14, 3)
GREY16 = Image.frombytes("I;16", (10, 5), struct.pack("<50H", *range(0, 257 * 250, 257 * 5)))
ROTATED = Image.Exif()
ROTATED[0x0112] = 6
ODD = {  # content, what it looks like
    "cmyk": (encoded(SMALL.convert("CMYK")), SMALL),  # Adobe's, whose inks are inverted
    "png named jpeg": (encoded(SMALL, "PNG"), SMALL),
    "palette and alpha": (encoded(SMALL.quantize(64), "PNG", transparency=0), SMALL),
    "rotated": (encoded(SMALL, exif=ROTATED), SMALL.transpose(Image.Transpose.ROTATE_270)),
}


@pytest.mark.parametrize(("content", "seen"), ODD.values(), ids=ODD.keys())
def test_images_of_other_formats_are_converted(content: bytes, seen: Any) -> None:
    payload, *_ = pillow.encode(content, 24, 95)
    image = Image.open(io.BytesIO(payload))
    assert image.format == "JPEG"
    assert image.mode == "RGB"
    assert image.getexif().get(0x0112, 1) == 1
    assert far_apart(image, seen) < 40


def bomb() -> bytes:
    header = b"IHDR" + struct.pack(">2I5B", 20000, 20000, 8, 2, 0, 0, 0)
    content = encoded(SMALL, "PNG")
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


GOOD = encoded(picture(2, 64, 64, 3))
BAD = {
    "empty": (b"", "is empty"),
    "text": (b"<html>not found</html>", "is not an image"),
    "truncated": (GOOD[: len(GOOD) // 2], "is damaged (OSError: image file is truncated"),
    "truncated png": (encoded(SMALL, "PNG")[:-60], "is damaged"),
    "16 bits": (encoded(GREY16, "PNG"), "has more than 8 bits per value"),
    "float": (encoded(GREY16.convert("F"), "TIFF"), "has more than 8 bits per value"),
    "32 bits": (encoded(GREY16.convert("I"), "TIFF"), "has more than 8 bits per value"),
    "bomb": (bomb(), "has more than 178 million pixels"),
    "too long": (
        encoded(Image.new("RGB", (65501, 1)), "PNG"),
        "is 65501 x 1 pixels: its longer side is too long",
    ),
}


@pytest.mark.parametrize(("content", "why"), BAD.values(), ids=BAD.keys())
def test_the_fault_of_an_unreadable_image_is_named(content: bytes, why: str) -> None:
    with pytest.raises(pillow.Unreadable, match=re.escape(why)):
        pillow.encode(content, 24, 90)


def test_file_names_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    both(tmp_path / "in", os.fsdecode(b"caf\xe9/\xff\n1.jpg"))
    put(tmp_path / os.fsdecode(b"in/train/caf\xe9/\xff\n2.jpg"), b"")
    write.pack(tmp_path / "in", tmp_path / "out", **OPTIONS)
    index = json.loads((tmp_path / "out/index.json").read_bytes())
    assert os.fsencode(index["classes"][0]) == b"caf\xe9"
    [skipped] = index["splits"]["train"]["skipped"]
    assert os.fsencode(skipped["file"]) == b"train/caf\xe9/\xff\n2.jpg"


def test_the_bytes_do_not_depend_on_the_number_of_workers(
    source: Path, unbroken: Path, tmp_path: Path
) -> None:
    write.pack(source, tmp_path, **OPTIONS | {"workers": 1})
    assert contents(tmp_path) == contents(unbroken)


def test_too_many_unreadable_images_end_packing(tmp_path: Path) -> None:
    both(tmp_path / "in", "a/00.jpg")
    for i in range(1, 11):
        put(tmp_path / f"in/train/a/{i:02d}.jpg", b"")
    write.pack(tmp_path / "in", tmp_path / "ten", **OPTIONS)
    put(tmp_path / "in/train/a/11.jpg", b"")
    with pytest.raises(InputError) as caught:
        write.pack(tmp_path / "in", tmp_path / "out", **OPTIONS)
    message = str(caught.value)
    assert "11 of 12 images of train/ cannot be used ('train/a/01.jpg' is empty; " in message
    assert "\n" not in message
    assert not (tmp_path / "out/index.json").exists()
    put(tmp_path / "in/val/a/00.jpg", b"")
    (tmp_path / "in/train/a/11.jpg").unlink()
    with pytest.raises(InputError, match="1 of 1 images of val/ cannot be used"):
        write.pack(tmp_path / "in", tmp_path / "none", **OPTIONS)


@pytest.mark.parametrize("faults", [12, 13])
def test_one_image_of_a_hundred_may_be_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: int
) -> None:
    put(tmp_path / "a/1.jpg")
    listing = classfolder.Listing(tmp_path, ("a",))
    for _ in range(1200):
        listing.add(0, b"1.jpg")
    numbers = itertools.count()

    def encode(data: bytes) -> tuple[bytes, int, int]:
        if next(numbers) < faults:
            raise pillow.Unreadable("is empty")
        return data, 1, 1

    monkeypatch.setattr(write, "SAMPLES_PER_SHARD", 2048)
    if faults == 12:
        assert write._write_split("train", listing, tmp_path, encode, 1, print)["samples"] == 1188
        return
    with pytest.raises(InputError, match="13 of 1200 images of train/ cannot be used"):
        write._write_split("train", listing, tmp_path, encode, 1, print)


def test_progress_is_a_line_every_few_seconds(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    write.pack(source, tmp_path / "quick", **OPTIONS | {"say": said.append})
    assert said == []
    monkeypatch.setattr(progress, "EVERY_S", 0)
    write.pack(source, tmp_path / "slow", **OPTIONS | {"say": said.append})
    ends = [line.partition(" images, about 0:00:")[0] for line in said[4:]]
    assert ends == ["train: 17 of 17", "val: 4 of 5", "val: 5 of 5"]


def test_an_error_in_one_shard_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also Ctrl-C: without a wait for the rest of 2,048 images."""
    (tmp_path / "in/a").mkdir(parents=True)
    for name in "0123":
        (tmp_path / f"in/a/{name}.jpg").write_text(name)
    stopped = threading.Event()
    both = threading.Barrier(2)
    encoded = list[bytes]()

    def encode(data: bytes) -> tuple[bytes, int, int]:
        encoded.append(data)
        if data == b"0":
            both.wait()
            raise OSError("full")
        if data == b"2":
            both.wait()
            stopped.wait(10)
        return data, 1, 1

    monkeypatch.setattr(write, "threading", SimpleNamespace(Event=lambda: stopped))
    monkeypatch.setattr(write, "SAMPLES_PER_SHARD", 2)
    listing = classfolder.scan(tmp_path / "in")
    with pytest.raises(OSError, match="full"):
        write._write_split("train", listing, tmp_path, encode, 2, print)
    assert sorted(encoded) == [b"0", b"2"]
    assert list(tmp_path.glob("*.bin")) == []


def test_the_rest_of_the_time_follows_from_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line says it at most every 10 s, and not if the total is unknown."""
    times = iter([100.0, 109.0, 120.0, 129.0, 140.0, 0.0, 10.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    said = list[str]()
    known = progress.progress("copy", 40, "MiB", said.append)
    for done in (9, 10, 20, 30):
        known(done)
    progress.progress("copy", 0, "MiB", said.append)(5)
    assert said == [
        "copy: 10 of 40 MiB, about 0:01:00 left",
        "copy: 30 of 40 MiB, about 0:00:13 left",
        "copy: 5 MiB",
    ]


@pytest.mark.parametrize(
    ("number", "status", "err"),
    [
        (signal.SIGKILL, -9, ""),
        (signal.SIGINT, 130, "error: interrupted; run the same command again\n"),
    ],
)
def test_stopped_packing_restarts(
    source: Path, tmp_path: Path, number: signal.Signals, status: int, err: str
) -> None:
    many = tmp_path / "many"
    target = tmp_path / "out"
    whole = tmp_path / "whole"
    both(many, "a/good.jpg")
    for i in range(600):
        os.link(source / "train/n00/00.JPEG", many / f"train/a/{i}.png")
    write.pack(many, whole, **OPTIONS)
    command = [sys.executable, "-c", RUNNER, f"source={many}", f"data_dir={target}"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        helpers.wait_until(lambda: list(target.glob("*.bin")), 20, "a shard")
        child.send_signal(number)
        assert child.communicate(timeout=20)[1] == err
    assert child.returncode == status
    assert not (target / "index.json").exists()
    assert number == signal.SIGKILL or not list(target.glob(".*"))
    write.pack(many, target, **OPTIONS)
    assert contents(target) == contents(whole)


def test_a_second_process_is_refused(source: Path, tmp_path: Path) -> None:
    with (tmp_path / "packing.lock").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(MachineError) as caught:
            write.pack(source, tmp_path, **OPTIONS)
    assert f"{tmp_path}/packing.lock' is locked" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["packing.lock"]


def test_a_copy_that_another_process_finishes_meanwhile_stays(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this one lists the source. The finished copy can be in use."""
    scan = classfolder.scan
    finished = set[int]()

    def inodes() -> set[int]:
        return {path.stat().st_ino for path in tmp_path.iterdir()}

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(classfolder, "scan", scan)
        write.pack(source, tmp_path, **OPTIONS)
        finished.update(inodes())
        return scan(*args, **kwargs)

    monkeypatch.setattr(classfolder, "scan", meanwhile)
    write.pack(source, tmp_path, **OPTIONS)
    assert inodes() == finished


def test_invalid_source_and_target_folders_are_refused(source: Path, tmp_path: Path) -> None:
    inside = shutil.copytree(source, tmp_path / "in")
    (tmp_path / "file").write_text("")
    for start, target, words in (
        (inside, inside, "has other files ('train'): give"),
        (inside, inside / "val" / "n01", "has other files ('0.JPEG'): give"),
        (inside, tmp_path / "file", "cannot be written (File exists)"),
        (tmp_path / "nope", tmp_path / "out", "must have train/<class>/*.JPEG and val/"),
    ):
        with pytest.raises((InputError, MachineError)) as caught:
            write.pack(start, target, **OPTIONS)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


LIMITED = """
import resource, sys
import mmap  # as numpy does later; this needs a file in Python 3.14
from pathlib import Path
from recipes.core.data.packed import format
from recipes.core.data.packed.read import Packed
copy = format.read_index(Path(sys.argv[1]))
soft, hard = map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
for split in format.SPLITS:
    print(len(Packed(Path(sys.argv[1]), copy, split)))
"""


def test_a_copy_may_have_more_files_than_a_process_may_open(unbroken: Path) -> None:
    """As the soft limit lets a process open; the hard limit is larger."""
    command = [sys.executable, "-c", LIMITED, str(unbroken)]
    assert helpers.run([*command, "7", "50"], cwd=ROOT).expect(0).lines == ["17", "5"]
    refused = helpers.run([*command, "7", "7"], cwd=ROOT).expect(1)
    assert "(Too many open files): raise the hard limit of open files (ulimit -Hn)" in refused.out


def test_a_finished_copy_is_verified_and_damage_is_reported(
    source: Path, unbroken: Path, tmp_path: Path
) -> None:
    target = tmp_path / "packed"
    shutil.copytree(unbroken, target)
    assert write.pack(source, target, **OPTIONS) == format.read_index(target)
    for other in ({"size": 25}, {"quality": 80}):
        with pytest.raises(
            InputError, match="was packed with size=24 quality=90: give these keys, or remove"
        ):
            write.pack(source, target, **OPTIONS | other)
    shard = target / "train-00003.bin"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    with pytest.raises(
        InputError,
        match=rf"damaged \(train-00003.bin has invalid content .*: remove {target} and run",
    ):
        write.pack(source, target, **OPTIONS)


@pytest.mark.parametrize(
    "changed", [{"version": 2}, {"splits": 1}, {"more": " " * format.MOST_BYTES}]
)
def test_an_invalid_index_is_reported(
    source: Path, unbroken: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    target = shutil.copytree(unbroken, tmp_path / "copy")
    index = target / "index.json"
    index.write_text(json.dumps({**json.loads(index.read_bytes()), **changed}))
    with pytest.raises(
        InputError, match=rf"'{index}' is damaged or of another version: remove it and pack again"
    ):
        write.pack(source, target, **OPTIONS)
    index.unlink()
    (target / "train-00077.bin").write_bytes(b"of a larger source")
    write.pack(source, target, **OPTIONS)
    assert contents(target) == contents(unbroken)


def test_a_disk_that_fills_up_is_reported(tmp_path: Path) -> None:
    noise = Image.frombytes("RGB", (64, 64), random.Random(0).randbytes(64 * 64 * 3))
    both(tmp_path / "in", "a/good.jpg")
    for i in range(30):
        put(tmp_path / f"in/train/a/{i}.jpg", encoded(noise))
    with helpers.small_disk(tmp_path / "small", "64k") as small:
        with pytest.raises(MachineError) as caught:
            write.pack(tmp_path / "in", small, **OPTIONS | {"size": 64})
        message = str(caught.value)
        assert f"data_dir='{small}': cannot be written (No space left on device" in message
        assert "\n" not in message
        assert list(small.glob(".*")) == []


def test_a_missing_folder_of_temporary_files_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(MachineError, match=rf"^TMPDIR='{tmp_path}/none': cannot be written"):
        write.pack(source, tmp_path / "out", **OPTIONS)


def test_prepare_names_skipped_images_and_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both(tmp_path / "in", "n00/good.jpg")
    (tmp_path / "in/val/n00/bad.jpg").symlink_to("nowhere")
    argv = [
        "imagenet",
        f"data_dir={tmp_path}/a b",
        f"source={tmp_path}/in",
        "size=24",
        "quality=80",
        "workers=1",
    ]
    for first in (True, False):
        assert prepare.main(argv) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert "val: 1 images skipped; index.json names them" in out.splitlines()
        assert ("imagenet: a packed copy exists already; verifying it" in out) is not first
        *_, last = out.splitlines()
        assert last == f"next: python launch.py recipe=imagenet data_dir='{tmp_path}/a b'"
    index = json.loads((tmp_path / "a b/index.json").read_bytes())
    assert index["size"] == 24
    assert index["quality"] == 80
    skipped = {"file": "val/n00/bad.jpg", "why": "cannot be read (No such file or directory)"}
    assert index["splits"]["val"]["skipped"] == [skipped]
