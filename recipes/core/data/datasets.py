"""The files of each dataset: names, sizes, SHA-256, mirrors, and where they are searched. Standard library only."""

import hashlib
import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

from recipes.core.errors import InputError

CHUNK_BYTES = 1 << 20


class DataFileError(InputError):
    """A data file is missing or has the wrong content. One line: the file, what is wrong, the mend."""


@dataclass(frozen=True)
class DataFile:
    """A file as it lies in its folder: name, size in bytes, SHA-256 in hexadecimal.

    keep_packed: it is served, kept and hashed as it is; else it is served as NAME.gz and lies unpacked.
    """

    name: str
    size: int
    sha256: str
    keep_packed: bool = False

    @property
    def served_name(self) -> str:
        return self.name if self.keep_packed else f"{self.name}.gz"


@dataclass(frozen=True)
class Dataset:
    """A dataset of a few files: where below data_dir they belong, and base URLs that serve them."""

    name: str
    recipe: str
    folder: str
    files: tuple[DataFile, ...]
    mirrors: tuple[str, ...]


# The names, and the first mirror, are torchvision 0.30's (datasets/mnist.py); the second is the one that TensorFlow's
# examples use. Both serve the same bytes. yann.lecun.com is left out: it has no working https copy any more.
# Hashes are of the unpacked files, since a .gz packed again has other bytes and the same content.
MNIST = Dataset(
    name="mnist",
    recipe="mnist",
    folder="MNIST/raw",
    files=(
        DataFile(
            "train-images-idx3-ubyte", 47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
        ),
        DataFile("train-labels-idx1-ubyte", 60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        DataFile("t10k-images-idx3-ubyte", 7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        DataFile("t10k-labels-idx1-ubyte", 10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
)
IDX_KEYS = ("train_images", "train_labels", "test_images", "test_labels")
# Size and SHA-256 are those of the one file that https://www.cs.toronto.edu/~kriz/cifar.html serves.
CIFAR10 = Dataset(
    name="cifar10",
    recipe="cifar",
    folder="cifar10",
    files=(
        DataFile(
            "cifar-10-binary.tar.gz",
            170052171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            keep_packed=True,
        ),
    ),
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
)
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# What prepare makes of it, by the keys of IDX_KEYS: images of shape (N, 3, 32, 32).
CIFAR10_IDX = (
    "train-images-idx4-ubyte",
    "train-labels-idx1-ubyte",
    "test-images-idx4-ubyte",
    "test-labels-idx1-ubyte",
)


def default_dir() -> str:
    """Where data is kept where nothing else says: ``$RECIPES_DATA``, else ``data`` in the working folder."""
    return os.environ.get("RECIPES_DATA") or "data"


def search_folders(root: str | Path, dataset: Dataset) -> list[Path]:
    """The folders that may hold the dataset's files, in the order of search: torchvision's layout, by name, root."""
    base = Path(root).expanduser()
    return [base / dataset.folder, base / dataset.name, base]


def kind(path: Path, key: str = "data_dir") -> str:
    """``file`` or ``folder``, what links lead to; "" for neither. Raises DataFileError, naming ``key``, where one may not look."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as err:  # Path.is_file and its like raise it as it is, or from Python 3.14 on say no
        raise DataFileError(
            f"{key}: {str(path)!r} cannot be read ({_strerror(err)}): make it readable, or give another {key}="
        ) from None
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else ""


def local_copies(root: str | Path, dataset: Dataset, file: DataFile, key: str = "data_dir") -> list[Path]:
    """The copies of `file` that lie below `root`, unverified, in the order of preference: plain before .gz.

    key: whose value `root` is. Raises DataFileError as `kind` does.
    """
    ends = ("",) if file.keep_packed else ("", ".gz")
    candidates = [folder / (file.name + end) for folder in search_folders(root, dataset) for end in ends]
    return [path for path in candidates if kind(path, key) == "file"]


def prepare_command(dataset_name: str, data_dir: str | Path) -> str:
    """The command that mends missing or damaged data, ready to be pasted into a shell."""
    return f"python -m recipes.prepare {dataset_name} data_dir={shlex.quote(str(data_dir))}"


def find_mnist(data_dir: str | Path) -> dict[str, Path]:
    """MNIST's files below `data_dir`: train_images, train_labels, test_images, test_labels; their content unverified.

    Raises DataFileError, which names what was looked for and where, if one is missing.
    """
    found = {key: local_copies(data_dir, MNIST, file) for key, file in zip(IDX_KEYS, MNIST.files, strict=True)}
    missing = [file.name for file, paths in zip(MNIST.files, found.values(), strict=True) if not paths]
    if missing:
        folders = ", ".join(str(folder) for folder in search_folders(data_dir, MNIST))
        raise DataFileError(
            f"data_dir={str(data_dir)!r} lacks {', '.join(missing)} (plain or .gz; looked in {folders}): "
            f"on a machine with internet, run {prepare_command('mnist', data_dir)}"
        )
    return {key: paths[0] for key, paths in found.items()}


def find_cifar10(data_dir: str | Path) -> dict[str, Path]:
    """CIFAR-10's files as prepare leaves them below `data_dir`: train_images, train_labels, test_images, test_labels.

    Beside them lies index.json, written last: classes, source, samples, sha256. The files' content is unverified.
    Raises DataFileError, which names what was looked for and where, if one is missing.
    """
    folder = Path(data_dir).expanduser() / CIFAR10.folder
    missing = [name for name in (*CIFAR10_IDX, "index.json") if kind(folder / name) != "file"]
    if missing:
        raise DataFileError(
            f"data_dir={str(data_dir)!r} lacks {', '.join(missing)} (looked in {folder}): on a machine with internet, "
            f"or with source=FOLDER of a copy, run {prepare_command('cifar10', data_dir)}"
        )
    return {key: folder / name for key, name in zip(IDX_KEYS, CIFAR10_IDX, strict=True)}


def find_imagenet(data_dir: str | Path) -> Path:
    """The folder of class folders, train and val, or of a packed copy: `data_dir`, or imagenet in it. Their content is not checked.

    Raises DataFileError where there is none.
    """
    for folder in (Path(data_dir).expanduser(), Path(data_dir).expanduser() / "imagenet"):
        if kind(folder / "index.json") or all(kind(folder / split) == "folder" for split in ("train", "val")):
            return folder
    raise DataFileError(
        f"data_dir={str(data_dir)!r} has neither train/<class>/*.JPEG and val/<class>/*.JPEG nor a packed copy's index.json: give"
        f" the folder that holds them, or pack a copy: {prepare_command('imagenet', '…')} source=FOLDER"
    )


def fault_of(path: Path, file: DataFile) -> str | None:
    """What is wrong with the unpacked file at `path`: None if size and SHA-256 are right, else words for a message."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != file.size:
                return f"has {size} bytes instead of {file.size}"
            digest = hashlib.sha256()
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
    except FileNotFoundError:
        return "is not there"
    except OSError as err:
        return f"cannot be read ({_strerror(err)})"
    return None if digest.hexdigest() == file.sha256 else _sha256_fault(digest.hexdigest(), file)


def _sha256_fault(found: str, file: DataFile) -> str:
    return f"has the wrong content (SHA-256 {found[:8]}… instead of {file.sha256[:8]}…)"


def _strerror(err: BaseException) -> str:
    text = (err.strerror if isinstance(err, OSError) else None) or str(err) or type(err).__name__
    return " ".join(text.split())
