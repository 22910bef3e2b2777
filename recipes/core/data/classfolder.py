"""Lists class folders, ``FOLDER/<class>/*.jpg``, compactly: 1.28 M files take about 45 MB. Standard library only."""

import hashlib
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from recipes.core.errors import InputError

# torchvision's IMG_EXTENSIONS (datasets/folder.py), and other common endings of the same formats.
ENDINGS = tuple(b".jpg .jpeg .jpe .jfif .png .ppm .pgm .bmp .tif .tiff .webp .gif".split())


class Listing:
    """The images below ``folder``, sorted by class, then by name, both as bytes. No Python object is kept for a sample."""

    kind = "files"

    def __init__(self, folder: Path, classes: tuple[str, ...]):
        self.folder, self.place = folder, str(folder)
        self.classes = classes
        self._labels = array("I")
        self._names = bytearray()  # paths below the class folder, back to back
        self._ends = array("Q", [0])

    def __len__(self) -> int:
        return len(self._labels)

    def label(self, i: int) -> int:
        """The position of the sample's class in ``classes``."""
        return self._labels[i]

    def name(self, i: int) -> str:
        """The sample's path below ``folder``: ``<class>/<file>``; bytes that are not UTF-8 are decoded as by `os.fsdecode`."""
        if i < 0:
            i += len(self)
        file = self._names[self._ends[i] : self._ends[i + 1]]
        return f"{self.classes[self._labels[i]]}/{os.fsdecode(bytes(file))}"

    def path(self, i: int) -> Path:
        return self.folder / self.name(i)

    def read(self, i: int) -> bytes:
        """The sample's file. Raises OSError."""
        with open(f"{self.place}/{self.name(i)}", "rb", buffering=0) as file:
            return file.readall()

    def digest(self) -> str:
        """SHA-256, in hexadecimal, of all names and labels in their order."""
        digest = hashlib.sha256("\0".join([*self.classes, ""]).encode("utf-8", "surrogateescape"))
        for part in (self._names, self._ends, self._labels):
            digest.update(part)
        return digest.hexdigest()

    def _add(self, label: int, files: Sequence[bytes]) -> None:
        for file in files:
            self._labels.append(label)
            self._names += file
            self._ends.append(len(self._names))


def class_names(folder: Path) -> tuple[str, ...]:
    """The classes of ``folder``: its folders that are not hidden, sorted as bytes. Raises InputError if there is none."""
    needs = f"each class needs a folder with its images, {str(folder)!r}/<class>/*.jpg"
    loose = 0
    found = []
    for entry in _entries(os.fsencode(folder), needs):
        if _is_image(entry):
            loose += 1
        elif _is_folder(entry):
            found.append(entry.name)
    if not found and loose:
        raise InputError(f"{str(folder)!r} has {loose} images and no class folders: {needs}")
    if not found:
        raise InputError(f"{str(folder)!r} has no class folders: {needs}")
    return tuple(os.fsdecode(name) for name in sorted(found))


def scan(
    folder: Path, classes: Sequence[str] | None = None, report: Callable[[object], None] = lambda done: None
) -> Listing:
    """Lists ``folder``. Folders below a class belong to it; hidden files and folders are skipped; links are followed.

    classes: labels are positions in these (for a validation set, the training set's); default: the folder's own.
    report: called with the number of classes done, at each class.
    Raises InputError (one line) when there is no folder, class or image, a class without any, or one not in ``classes``.
    """
    folder = Path(folder)
    own = class_names(folder)
    known = own if classes is None else tuple(classes)
    positions = {name: i for i, name in enumerate(known)}
    if strange := [name for name in own if name not in positions]:
        raise InputError(
            f"{str(folder)!r} has the class {strange[0]!r}{_more(strange)}, which the training set lacks: "
            "give both the same class folders"
        )
    listing = Listing(folder, known)
    empty = []
    for done, name in enumerate(own):
        report(done)
        files = sorted(_images(os.path.join(os.fsencode(folder), os.fsencode(name)), b"", ()))
        if not files:
            empty.append(name)
        listing._add(positions[name], files)
    if len(empty) == len(own):
        raise InputError(f"{str(folder)!r} has class folders without images: add <class>/*.jpg, .jpeg, .png, …")
    if empty:
        raise InputError(
            f"{str(folder)!r} has no image in the class folder {empty[0]!r}{_more(empty)}: fill or remove it"
        )
    return listing


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _images(folder: bytes, below: bytes, parents: tuple[tuple[int, int], ...]) -> Iterator[bytes]:
    """Paths, relative to the class, of the images in ``folder`` and below. parents: the folders above, to detect loops."""
    try:
        status = os.stat(folder)
    except OSError as error:
        raise _unreadable(folder, error) from None
    here = (status.st_dev, status.st_ino)
    if here in parents:
        return
    for entry in _entries(folder):
        if _is_image(entry):
            yield below + entry.name
        elif _is_folder(entry):
            yield from _images(entry.path, below + entry.name + b"/", (*parents, here))


def _entries(folder: bytes, needs: str = "") -> Iterator["os.DirEntry[bytes]"]:
    """The entries of ``folder`` that are not hidden."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith(b"."):
                    yield entry
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{os.fsdecode(folder)!r} is not a folder{f': {needs}' if needs else ' any more'}") from None
    except OSError as error:
        raise _unreadable(folder, error) from None


def _is_image(entry: "os.DirEntry[bytes]") -> bool:
    # A link's target is not checked: in a folder of links that would be one more file system call for each.
    return entry.name.lower().endswith(ENDINGS) and (entry.is_file(follow_symlinks=False) or entry.is_symlink())


def _is_folder(entry: "os.DirEntry[bytes]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circular link, or one without permission
        return False


def _unreadable(folder: bytes, error: OSError) -> InputError:
    return InputError(
        f"{os.fsdecode(folder)!r} cannot be read ({error.strerror}): make it readable, or give another folder"
    )
