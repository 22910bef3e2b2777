"""CIFAR-10 as IDX files, made from torchvision's copy or from class folders.

The IDX files are read when a run starts: no image is decoded then. Only torchvision's copy needs
torch.
"""

import contextlib
import shutil
from pathlib import Path

from recipes.core import files, trust
from recipes.core.data import classfolder, datasets, pillow
from recipes.core.errors import InputError

# torchvision's
BATCHES = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
Images = tuple[bytes, bytes]  # labels, and as many images of 3072 bytes: red, green and blue plane


def made_from(folder: Path) -> str:
    """The source of the valid IDX files in ``folder``. Empty if a file is missing or damaged."""
    index = files.read_json(folder / "index.json", files.without_waiting)
    try:
        return str(index.get("source")) if index.get("sha256") == _sha256_of(folder) else ""
    except OSError:
        return ""


def _sha256_of(folder: Path) -> dict[str, str]:
    return {name: files.sha256(folder / name) for name in datasets.CIFAR10_IDX}


def local_source(source: str) -> Path:
    """torchvision's folder or archive, or class folders, in ``source``. Raises InputError if it has
    none.
    """
    root = Path(source).expanduser().absolute()
    if datasets.kind(root / BATCHES, "source") == "folder":
        return root / BATCHES
    if datasets.kind(root / ARCHIVE, "source") == "file":
        return root / ARCHIVE
    if {"train", "test"} <= datasets.split_folders(root, "source").keys():
        return root
    fix = f"give a folder that has {BATCHES}/, {ARCHIVE}, or train/<class>/*.jpg and test/<class>/…"
    raise InputError(f"source={source!r} has no copy of CIFAR-10: {fix}")


def convert(source: Path, folder: Path, scratch: Path, name: str) -> None:
    """Writes the four IDX files and then index.json to ``folder``. scratch: an empty folder. name:
    of the source. Raises InputError.
    """
    classes: tuple[str, ...] = datasets.CIFAR10_CLASSES
    if source.name in (ARCHIVE, BATCHES):
        parts = _from_torchvision(source, scratch)
    else:
        folders = datasets.split_folders(source, "source")
        train = classfolder.scan(folders["train"])
        classes = train.classes
        if len(classes) > len(datasets.CIFAR10_CLASSES):
            excess = f"train/ has {len(classes)} classes, but CIFAR-10 has ten"
            raise InputError(f"source={str(source)!r}: {excess}")
        test = classfolder.scan(folders["test"], classes)
        parts = {"train": _from_listing(train), "test": _from_listing(test)}

    samples = {}
    for split, (labels, pixels) in parts.items():
        count = len(labels)
        samples[split] = count
        images = datasets.idx_header(count, 3, 32, 32) + pixels
        files.write_bytes(folder / f"{split}-images-idx4-ubyte", images)
        files.write_bytes(
            folder / f"{split}-labels-idx1-ubyte", datasets.idx_header(count) + labels
        )
    sha256 = _sha256_of(folder)
    index = {"source": name, "classes": classes, "samples": samples, "sha256": sha256}
    files.write_json(folder / "index.json", index)


def _from_torchvision(source: Path, scratch: Path) -> dict[str, Images]:
    """From torchvision's archive or folder. torchvision verifies the MD5 of every file before it
    unpickles one.

    It opens each file twice. The owner of the folder could exchange a file between, so this reads a
    copy.
    """
    from torchvision.datasets import CIFAR10, utils

    copy = scratch / source.name
    if source.name == ARCHIVE:
        if copy != source:  # it was downloaded here
            shutil.copyfile(source, copy)
        if not utils.check_integrity(str(copy), CIFAR10.tgz_md5):
            fix = "remove it, or give another source="
            raise InputError(f"{source} is damaged (its MD5 is not torchvision's): {fix}")
        utils.extract_archive(str(copy), str(scratch))
    else:
        copy.mkdir()
        for name, _ in (*CIFAR10.train_list, *CIFAR10.test_list, (CIFAR10.meta["filename"], "")):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(source / name, copy / name)

    parts = {}
    for split in ("train", "test"):
        try:
            part = CIFAR10(str(scratch), train=split == "train")
        except RuntimeError:
            fix = "give another source="
            raise InputError(f"{source} is incomplete or damaged (MD5): {fix}") from None
        parts[split] = bytes(part.targets), part.data.transpose(0, 3, 1, 2).tobytes()
    return parts


def _from_listing(listing: classfolder.Listing) -> Images:
    """The images of a class folder in its order, other sizes cropped to the centre and resized.
    Raises InputError.
    """
    from PIL import Image, ImageOps

    labels = bytearray()
    pixels = bytearray()
    for i in range(len(listing)):
        path = listing.folder / listing.name(i)
        try:
            image = pillow.decode(pillow.read_file(path, trust.without_links_of_others))
        except pillow.Unreadable as error:
            raise InputError(f"source=: {str(path)!r} {error}: repair or remove it") from None
        for band in ImageOps.fit(image, (32, 32), Image.Resampling.LANCZOS).split():
            pixels += band.tobytes()
        labels.append(listing.label(i))
    return bytes(labels), bytes(pixels)
