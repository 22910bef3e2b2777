"""CIFAR-10 as IDX files, made from any of its published forms or from class folders.

The IDX files are mapped when a run starts: no image is decoded then. Works without torch.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import shlex
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from recipes.core import errors, files
from recipes.core.data import classfolder, datasets, idx, pillow
from recipes.core.data.classfolder import Listing
from recipes.core.data.datasets import CIFAR10_CLASSES, CIFAR10_IDX, DataFileError
from recipes.core.data.progress import Progress
from recipes.core.errors import InputError

BATCH_IMAGES = 10_000
IMAGE_BYTES = 3 * 32 * 32
TRAIN_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
# torchvision 0.30's (datasets/cifar.py). They make unpickling safe: nobody can make other content for a given MD5.
PICKLE_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
SOURCES = (
    "cifar-10-batches-bin/, cifar-10-binary.tar.gz, cifar-10-batches-py/, or train/<class>/*.jpg and test/<class>/…"
)
Say = Callable[[str], None]
Chunks = Iterable[tuple[bytes, bytes]]  # labels, and as many images of 3072 bytes: red, green and blue plane


@dataclass
class _Counts:
    """Of the images of class folders."""

    skipped: list[dict[str, str]] = field(default_factory=list)
    resized: int = 0


def is_converted(folder: Path, source: str, say: Say) -> bool:
    """Whether ``folder`` has valid IDX files. Raises InputError if they were made from another source than ``source``."""
    index = files.read_json(folder / "index.json") or {}
    known = index.get("sha256")
    if not isinstance(known, dict):
        return False
    for name in CIFAR10_IDX:
        try:
            found = files.sha256(folder / name)
        except OSError:
            found = ""
        if found != known.get(name):
            say(f"{folder / name} is missing or damaged: all files are converted again")
            return False
    made_of, samples, classes = str(index.get("source")), index.get("samples") or {}, index.get("classes") or []
    content = f"{samples.get('train')} training and {samples.get('test')} test images, {len(classes)} classes"
    if source:
        given = source.rstrip("/") if "://" in source else str(Path(source).expanduser().absolute())
        matches, expected = made_of == given or made_of.startswith(os.path.join(given, "")), "the given source="
    else:
        own = {"train": len(TRAIN_BATCHES) * BATCH_IMAGES, "test": BATCH_IMAGES}
        matches, expected = (samples, classes) == (own, list(CIFAR10_CLASSES)), "CIFAR-10's own images"
    if not matches:
        raise InputError(
            f"data_dir={str(folder.parent)!r}: its cifar10/ was made from {errors.shown(made_of, 1000)} ({content}), not from "
            f"{expected}: give that source= to keep it, or another data_dir=, or remove {shlex.quote(str(folder))}"
        )
    say(f"cifar10: already there, verified: {content}, from {errors.shown(made_of, 1000)}")
    return True


def local_sources(source: str, data_dir: Path) -> list[Path]:
    """The copies in ``source``, or where it is empty in ``data_dir``: batches, then the archive, then class folders.

    Raises InputError where ``source`` has none.
    """
    archive = datasets.CIFAR10.files[0].name
    given = Path(source).expanduser().absolute() if source else None
    kind = functools.partial(datasets.kind, key="source" if given else "data_dir")
    if given and kind(given) == "file":
        return [given]
    found: list[Path] = []
    for root in [given] if given else [data_dir, data_dir / datasets.CIFAR10.folder]:
        folders = [root / "cifar-10-batches-bin", root / "cifar-10-batches-py", root]
        found += [folder for folder in folders if _is_batches(folder, ".bin", kind) or _is_batches(folder, "", kind)]
        found += [root / archive] if kind(root / archive) == "file" else []
        if given and kind(root / "train") == kind(root / "test") == "folder":
            found.append(root)
    if given and not found:
        raise InputError(f"source={source!r} has no copy of CIFAR-10: give a folder that has {SOURCES}")
    return list(dict.fromkeys(found))


def _is_batches(folder: Path, ending: str, kind: Callable[[Path], str] = datasets.kind) -> bool:
    return all(kind(folder / f"{name}{ending}") == "file" for name in (*TRAIN_BATCHES, "test_batch"))


def convert(
    source: Path, folder: Path, say: Say, progress: Callable[[str, Progress], None], name: str = ""
) -> list[dict[str, str]]:
    """Writes the four IDX files and then index.json to ``folder``; gives ``file`` and ``why`` of each image left out.

    progress: gets a split's name and how far it is. name: of the source in index.json, where it is not ``source``. Raises
    DataFileError (a damaged copy) and InputError (too many unreadable images, more than ten classes).
    """
    counts = _Counts()
    classes: tuple[str, ...] = CIFAR10_CLASSES
    with contextlib.ExitStack() as stack:
        if source.is_file():
            chunks = _from_tar(source, stack)
        elif _is_batches(source, ".bin"):
            chunks = _from_batches(functools.partial(_read_binary, source))
        elif _is_batches(source, ""):
            chunks = _from_batches(functools.partial(_read_pickle, source))
        else:
            train = classfolder.scan(source / "train")
            listings = {"train": train, "test": classfolder.scan(source / "test", train.classes)}
            if len(train.classes) > len(CIFAR10_CLASSES):
                raise InputError(f"source={str(source)!r}: {len(train.classes)} classes in train/, CIFAR-10 has ten")
            classes = train.classes
            chunks = {split: _from_listing(split, found, counts, progress) for split, found in listings.items()}
        samples = {split: _write_idx(folder, split, chunks[split]) for split in ("train", "test")}
    if not all(samples.values()):
        raise InputError(f"source={str(source)!r}: no image can be read; give another source=")
    index = {
        "classes": classes,
        "source": name or str(source),
        "samples": samples,
        "sha256": {idx_name: files.sha256(folder / idx_name) for idx_name in CIFAR10_IDX},
        "skipped": counts.skipped,
        "resized": counts.resized,
    }
    files.write_json(folder / "index.json", index)
    say(f"cifar10: {samples['train']} training and {samples['test']} test images, {len(classes)} classes")
    if counts.resized:
        say(f"cifar10: {counts.resized} images were resized to 32 x 32 pixels")
    return counts.skipped


def _write_idx(folder: Path, split: str, chunks: Chunks) -> int:
    """Writes a split's two IDX files and gives the number of images."""
    labels = bytearray()

    def fill(file: IO[bytes]) -> None:
        file.write(idx.header(0, 3, 32, 32))
        for some_labels, pixels in chunks:
            labels.extend(some_labels)
            file.write(pixels)
        file.seek(0)
        file.write(idx.header(len(labels), 3, 32, 32))

    files.write_whole(folder / f"{split}-images-idx4-ubyte", fill)
    files.write_whole(folder / f"{split}-labels-idx1-ubyte", lambda file: file.write(idx.header(len(labels)) + labels))
    return len(labels)


def _from_batches(read: Callable[[str], tuple[bytes, bytes]]) -> dict[str, Chunks]:
    return {"train": map(read, TRAIN_BATCHES), "test": map(read, ("test_batch",))}


def _from_tar(path: Path, stack: contextlib.ExitStack) -> dict[str, Chunks]:
    """The batches of cifar-10-binary.tar.gz; nothing is extracted to the disk. Raises DataFileError unless its SHA-256 is correct."""
    if fault := datasets.fault_of(path, datasets.CIFAR10.files[0]):
        raise DataFileError(f"{path} {fault}")
    tar = tarfile.open(path, "r:gz")  # noqa: SIM115
    stack.enter_context(tar)

    def read(name: str) -> tuple[bytes, bytes]:
        member = tar.getmember(f"cifar-10-batches-bin/{name}.bin")
        stream = tar.extractfile(member) if member.isreg() else None  # links of an archive can lead anywhere
        if stream is None or member.size != BATCH_IMAGES * (1 + IMAGE_BYTES):
            raise DataFileError(f"{path}: {name}.bin is not a batch of {BATCH_IMAGES} images")
        return _planes(stream.read(), f"{name}.bin")

    return _from_batches(read)


def _read_binary(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / f"{name}.bin"
    return _planes(_read(path, BATCH_IMAGES * (1 + IMAGE_BYTES)), str(path))


def _read_pickle(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / name
    content = _read(path, 2 * BATCH_IMAGES * IMAGE_BYTES)
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != PICKLE_MD5[name]:
        raise DataFileError(f"{path} has invalid content (MD5 {found[:8]}… instead of {PICKLE_MD5[name][:8]}…)")
    batch = pickle.loads(content, encoding="bytes")
    return bytes(batch[b"labels"]), batch[b"data"].tobytes()


def _read(path: Path, limit: int) -> bytes:
    """At most one byte more than ``limit``."""
    try:
        with path.open("rb") as file:
            return file.read(limit + 1)
    except OSError as error:
        raise DataFileError(f"{path} cannot be read ({error.strerror})") from None


def _planes(records: bytes, name: str) -> tuple[bytes, bytes]:
    """Labels and images of a binary batch: a label and 3072 bytes each (https://www.cs.toronto.edu/~kriz/cifar.html)."""
    size = 1 + IMAGE_BYTES
    if len(records) != BATCH_IMAGES * size:
        raise DataFileError(f"{name} does not have the {BATCH_IMAGES * size} bytes of a batch")
    labels = records[::size]
    if max(labels) >= len(CIFAR10_CLASSES):
        raise DataFileError(f"{name} has a label {max(labels)}, CIFAR-10 has ten classes")
    return labels, b"".join(records[start + 1 : start + size] for start in range(0, len(records), size))


def _from_listing(split: str, listing: Listing, counts: _Counts, progress: Callable[[str, Progress], None]) -> Chunks:
    """The images of a class folder in its order, one at a time."""
    most, state = classfolder.allowed(len(listing)), Progress(len(listing))
    for i in range(len(listing)):
        try:
            pixels, resized = _decode_32(listing.path(i))
        except pillow.Unreadable as error:
            counts.skipped.append({"file": f"{split}/{listing.name(i)}", "why": str(error)})
            state.skipped += 1
            if state.skipped > most:
                last = f"{errors.shown(counts.skipped[-1]['file'], 1000)} {error}"
                raise InputError(
                    f"source=: more than {most} of {len(listing)} images of {split}/ cannot be used (the last: {last}): "
                    "repair or remove them, or give another source="
                ) from None
        else:
            counts.resized += resized
            yield bytes([listing.label(i)]), pixels
        state.done += 1
        progress(split, state)


def _decode_32(path: Path) -> tuple[bytes, bool]:
    """The planes of an image at 32 x 32 pixels, and whether it was resized. Raises pillow.Unreadable."""
    from PIL import Image

    image = pillow.to_rgb(pillow.open_image(pillow.read_file(path)))
    resized = image.size != (32, 32)
    if resized:
        short = min(image.size)
        left, top = (image.width - short) / 2, (image.height - short) / 2
        image = image.resize((32, 32), Image.Resampling.LANCZOS, (left, top, left + short, top + short))
    return b"".join(band.tobytes() for band in image.split()), resized
