"""CIFAR-10 as IDX files, made from torchvision's copy or from class folders.

The IDX files are mapped when a run starts: no image is decoded then. Only torchvision's copy needs torch.
"""

import functools
import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from recipes.core import errors, files
from recipes.core.data import classfolder, datasets, idx, pillow
from recipes.core.data.classfolder import Listing
from recipes.core.data.datasets import CIFAR10_CLASSES, CIFAR10_IDX, DataFileError
from recipes.core.data.progress import Progress
from recipes.core.errors import InputError

BATCHES, ARCHIVE = "cifar-10-batches-py", "cifar-10-python.tar.gz"  # torchvision's
MIRROR = "https://www.cs.toronto.edu/~kriz"
SAMPLES = {"train": 50_000, "test": 10_000}
IMAGE_BYTES = 3 * 32 * 32
Say = Callable[[str], None]
Chunks = Iterable[tuple[bytes, bytes]]  # labels, and as many images of 3072 bytes: red, green and blue plane


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
    made_of = str(index.get("source"))
    given = source.rstrip("/") if "://" in source or not source else str(Path(source).expanduser().absolute())
    if given and made_of != given and not made_of.startswith(os.path.join(given, "")):
        raise InputError(
            f"data_dir={str(folder.parent)!r}: its cifar10/ was made from {errors.shown(made_of, 1000)}: give that source= to "
            f"keep it, or another data_dir=, or remove {shlex.quote(str(folder))}"
        )
    samples, classes = index.get("samples") or {}, index.get("classes") or []
    content = f"{samples.get('train')} training and {samples.get('test')} test images, {len(classes)} classes"
    say(f"cifar10: already there, verified: {content}, from {errors.shown(made_of, 1000)}")
    return True


def local_source(source: str, data_dir: Path) -> Path | None:
    """torchvision's folder or archive, or class folders, in ``source``; if that is empty, torchvision's in ``data_dir``, or None.

    Raises InputError if ``source`` has none.
    """
    kind = functools.partial(datasets.kind, key="source" if source else "data_dir")
    given = Path(source).expanduser().absolute()
    roots = (given.parent, given) if given.name in (BATCHES, ARCHIVE) else (given,)
    for root in roots if source else (data_dir, data_dir / datasets.CIFAR10.folder):
        for name, wanted in ((BATCHES, "folder"), (ARCHIVE, "file")):
            if kind(root / name) == wanted:
                return root / name
    if source and kind(given / "train") == kind(given / "test") == "folder":
        return given
    if source:
        raise InputError(
            f"source={source!r} has no copy of CIFAR-10: give a folder that has {BATCHES}/, {ARCHIVE}, "
            "or train/<class>/*.jpg and test/<class>/…"
        )
    return None


def convert(
    source: Path, folder: Path, scratch: Path, say: Say, progress: Callable[[str, Progress], None], name: str
) -> list[dict[str, str]]:
    """Writes the four IDX files and then index.json to ``folder``; gives ``file`` and ``why`` of each image left out.

    scratch: an empty folder. progress: gets a split's name and how far it is. name: of the source, for index.json.
    Raises DataFileError (a damaged copy) and InputError (too many unreadable images, more than ten classes).
    """
    skipped: list[dict[str, str]] = []
    classes: tuple[str, ...] = CIFAR10_CLASSES
    if source.name == ARCHIVE:
        chunks = _from_archive(source, scratch)
    elif source.name == BATCHES:
        chunks = _from_torchvision(source.parent)
    else:
        train = classfolder.scan(source / "train")
        listings = {"train": train, "test": classfolder.scan(source / "test", train.classes)}
        if len(train.classes) > len(CIFAR10_CLASSES):
            raise InputError(f"source={str(source)!r}: {len(train.classes)} classes in train/, CIFAR-10 has ten")
        classes = train.classes
        chunks = {split: _from_listing(split, found, skipped, progress) for split, found in listings.items()}
    samples = {split: _write_idx(folder, split, chunks[split]) for split in SAMPLES}
    if not all(samples.values()):
        raise InputError(f"source={str(source)!r}: no image can be read; give another source=")
    index = {
        "classes": classes,
        "source": name,
        "samples": samples,
        "sha256": {idx_name: files.sha256(folder / idx_name) for idx_name in CIFAR10_IDX},
        "skipped": skipped,
    }
    files.write_json(folder / "index.json", index)
    say(f"cifar10: {samples['train']} training and {samples['test']} test images, {len(classes)} classes")
    return skipped


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


def _from_archive(path: Path, scratch: Path) -> dict[str, Chunks]:
    from torchvision.datasets import CIFAR10, utils

    if not utils.check_integrity(str(path), CIFAR10.tgz_md5):
        raise DataFileError(f"{path} is damaged (its MD5 is not torchvision's)")
    utils.extract_archive(str(path), str(scratch))
    return _from_torchvision(scratch)


def _from_torchvision(root: Path) -> dict[str, Chunks]:
    """From ``root/cifar-10-batches-py``. torchvision verifies the MD5 of every file before it unpickles one."""
    from torchvision.datasets import CIFAR10

    try:
        parts = {split: CIFAR10(str(root), train=split == "train") for split in SAMPLES}
    except RuntimeError:
        raise DataFileError(f"{root / BATCHES} is incomplete or damaged (by torchvision's MD5s)") from None
    except OSError as error:
        raise DataFileError(f"{root / BATCHES} cannot be read ({error.strerror})") from None
    return {split: [(bytes(part.targets), part.data.transpose(0, 3, 1, 2).tobytes())] for split, part in parts.items()}


def _from_listing(
    split: str, listing: Listing, skipped: list[dict[str, str]], progress: Callable[[str, Progress], None]
) -> Chunks:
    """The images of a class folder in its order, one at a time. skipped: gets those left out."""
    most, state = classfolder.allowed(len(listing)), Progress(len(listing))
    for i in range(len(listing)):
        try:
            pixels = _decode_32(listing.path(i))
        except pillow.Unreadable as error:
            skipped.append({"file": f"{split}/{listing.name(i)}", "why": str(error)})
            state.skipped += 1
            if state.skipped > most:
                last = f"{errors.shown(skipped[-1]['file'], 1000)} {error}"
                raise InputError(
                    f"source=: more than {most} of {len(listing)} images of {split}/ cannot be used (the last: {last}): "
                    "repair or remove them, or give another source="
                ) from None
        else:
            yield bytes([listing.label(i)]), pixels
        state.done += 1
        progress(split, state)


def _decode_32(path: Path) -> bytes:
    """The planes of an image, resized to 32 x 32 pixels. Raises pillow.Unreadable."""
    from PIL import Image

    image = pillow.to_rgb(pillow.open_image(pillow.read_file(path)))
    if image.size != (32, 32):
        short = min(image.size)
        left, top = (image.width - short) / 2, (image.height - short) / 2
        image = image.resize((32, 32), Image.Resampling.LANCZOS, (left, top, left + short, top + short))
    return b"".join(band.tobytes() for band in image.split())
