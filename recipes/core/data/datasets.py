"""The files of each dataset: names, sizes, SHA-256, the folders in which they are searched, and the
IDX format. Standard library only.
"""

import gzip
import hashlib
import math
import os
import shlex
import stat
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from recipes.core import errors, files
from recipes.core.errors import InputError


@dataclass(frozen=True)
class DataFile:
    """A file's name, size in bytes and SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Dataset:
    """A dataset of files below data_dir, in ``folder``. names: training images and labels, test
    images and labels, and others. keys: those that its prepare requires. how: how to run it.
    """

    name: str
    folder: str
    names: tuple[str, ...]
    keys: str = ""
    how: str = "on a machine with internet (elsewhere, add source=FOLDER, which has the data)"

    def prepare(self, data_dir: str | Path) -> str:
        """The command that provides the data, ready to be pasted into a shell."""
        return f"{prepare_command(self.name, data_dir)} {self.keys}".rstrip()


# The names and the URL are torchvision 0.30's (datasets/mnist.py); yann.lecun.com has no working
# https copy. The hashes are of the unpacked files, since the same content can be compressed to
# different bytes.
MNIST_FILES = (
    DataFile(
        "train-images-idx3-ubyte",
        47040016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    DataFile(
        "train-labels-idx1-ubyte",
        60008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    DataFile(
        "t10k-images-idx3-ubyte",
        7840016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    DataFile(
        "t10k-labels-idx1-ubyte",
        10008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST = Dataset("mnist", "MNIST/raw", tuple(file.name for file in MNIST_FILES))

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
# The files that prepare writes: images of shape (N, 3, 32, 32).
CIFAR10_IDX = (
    "train-images-idx4-ubyte",
    "train-labels-idx1-ubyte",
    "test-images-idx4-ubyte",
    "test-labels-idx1-ubyte",
)
# index.json (source, classes, samples, sha256) is written last.
CIFAR10 = Dataset("cifar10", "cifar10", (*CIFAR10_IDX, "index.json"))
TEXT = Dataset("text", "text", ("index.json",), "source=FOLDER", "with the folder of your text")
DIALOGUES = Dataset(
    "dialogues",
    "dialogues",
    ("index.json",),
    "source=FOLDER model=FOLDER",
    "with your dialogues and the folder of the model",
)
# names of folders, in any case, and the split that each is for
SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}


def folder_of(data_dir: str | Path) -> Path:
    """The folder that a ``data_dir`` key means: empty is ``$RECIPES_DATA``, otherwise ``data`` in
    the working directory.
    """
    return Path(data_dir or os.environ.get("RECIPES_DATA") or "data").expanduser()


def _unreadable(path: Path, key: str, error: OSError) -> InputError:
    fix = f"make it readable, or give another {key}="
    return InputError(f"{key}: {str(path)!r} cannot be read ({error.strerror}): {fix}")


def kind(path: Path, key: str = "data_dir") -> str:
    """``file`` or ``folder``, links followed; "" for neither. Raises InputError with ``key`` if
    permission is missing.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    # Path.is_file and its like raise it unchanged, and return False from Python 3.14 on
    except OSError as error:
        raise _unreadable(path, key, error) from None
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else ""


def split_folders(folder: Path, key: str = "data_dir") -> dict[str, Path]:
    """The folders in ``folder`` for ``train``, ``val`` and ``test``, in any usual spelling, such as
    Validation/. Raises InputError if two are for the same split, as `kind` does otherwise.
    """
    splits = dict[str, Path]()
    if kind(folder, key) != "folder":
        return splits
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise _unreadable(folder, key, error) from None
    for name in names:
        split = SPLITS.get(name.lower(), "")
        if split and kind(folder / name, key) == "folder":
            first = splits.setdefault(split, folder / name).name
            if first != name:
                both = f"the folders {first!r} and {name!r} for the same split"
                raise InputError(f"{str(folder)!r} has {both}: remove or rename one")
    return splits


def fault_of(path: Path, file: DataFile) -> str | None:
    """The fault of the file at ``path`` as a clause for a message. None if its size and SHA-256 are
    correct.
    """
    try:
        with open(path, "rb", opener=files.without_waiting) as opened:
            return content_fault(opened.read(file.size + 1), file)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def content_fault(content: bytes, file: DataFile) -> str | None:
    """As `fault_of`, for the content of a file."""
    size = len(content)
    if size > file.size:
        return f"has more than {file.size} bytes"
    if size < file.size:
        return f"has {size} bytes instead of {file.size}"
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != file.sha256:
        return f"has invalid content (SHA-256 {sha256[:8]}… instead of {file.sha256[:8]}…)"
    return None


def prepare_command(dataset_name: str, data_dir: str | Path) -> str:
    """The command that provides the data, ready to be pasted into a shell."""
    return f"python -m recipes.prepare {dataset_name} data_dir={shlex.quote(str(data_dir))}"


def find_files(dataset: Dataset, data_dir: str | Path) -> list[Path]:
    """The dataset's files below ``data_dir``, unverified, in the order of its names. Raises
    InputError if one is missing.
    """
    base = folder_of(data_dir)
    paths = {name: find_file(base, dataset, name) for name in dataset.names}
    missing = [name for name, path in paths.items() if not path]
    if missing:
        folders = "/, ".join(dict.fromkeys([dataset.folder, dataset.name]))
        where = f"plain or .gz, in {folders}/ or the folder itself"
        command = dataset.prepare(base)
        lacking = f"lacks {', '.join(missing)} ({where})"
        raise InputError(f"data_dir={str(base)!r} {lacking}: run this {dataset.how}: {command}")
    return [path for path in paths.values() if path]


def find_file(base: Path, dataset: Dataset, name: str, key: str = "data_dir") -> Path | None:
    """The file ``name`` below ``base``, plain or .gz: in the dataset's folder, in one with its
    name, or in ``base`` itself.
    """
    for folder in (base / dataset.folder, base / dataset.name, base):
        for path in (folder / name, folder / f"{name}.gz"):
            if kind(path, key) == "file":
                return path
    return None


def find_imagenet(data_dir: str | Path) -> Path:
    """The folder ``data_dir``, or ``imagenet`` in it, that has ``train/`` and ``val/`` or a packed
    copy. Raises InputError if none has.
    """
    base = folder_of(data_dir)
    for folder in (base, base / "imagenet"):
        if kind(folder / "index.json") or {"train", "val"} <= split_folders(folder).keys():
            return folder
    either = "neither train/<class>/*.JPEG and val/<class>/*.JPEG nor a packed copy's index.json"
    command = prepare_command("imagenet", "…")
    fix = f"give the folder that has them, or pack a copy: {command} source=FOLDER"
    raise InputError(f"data_dir={str(base)!r} has {either}: {fix}")


# The IDX format, in which MNIST is published and `recipes.prepare` stores CIFAR-10
# (http://yann.lecun.com/exdb/mnist/, "THE IDX FILE FORMAT"): two zero bytes, the type, the number
# of dimensions, the dimensions as big-endian uint32, the data. Only the type uint8 is used here.
UINT8 = 0x08
LARGEST_IDX = 1 << 30  # bytes; a small .gz, or one with holes, may stand for more than the memory


def idx_header(*shape: int) -> bytes:
    """The bytes of an IDX file before the data of an array of ``shape``."""
    return bytes([0, 0, UINT8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)


def read_idx(path: Path) -> tuple[tuple[int, ...], bytes]:
    """Shape and payload (row-major uint8) of an IDX file, plain or gzip. Raises InputError (one
    line: file, fault, fix).
    """
    try:
        with path.open("rb") as file:
            is_compressed = file.peek(2)[:2] == b"\x1f\x8b"
            opened = gzip.GzipFile(fileobj=file) if is_compressed else file
            content = opened.read(LARGEST_IDX + 1)
        if content[:3] != bytes([0, 0, UINT8]):
            start = content[:4].hex() or "nothing"
            raise InputError(f"is not an IDX file of bytes (it starts with {start})")
        end = 4 + 4 * int.from_bytes(content[3:4], "big")
        shape = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, end, 4))
        if not shape or len(content) != end + math.prod(shape):
            raise InputError(f"has {len(content)} bytes, but its header says another size")
        return shape, content[end:]
    except (InputError, OSError, EOFError, zlib.error) as error:
        name = "cifar10" if path.parent.name == CIFAR10.folder else "mnist"
        fix = f"to replace it, run python -m recipes.prepare {name} with the same data_dir="
        raise InputError(f"{path}: {errors.shown(error)}; {fix}") from None
