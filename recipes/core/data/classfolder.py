"""Lists class folders, ``FOLDER/<class>/*.jpg``, compactly: 1.28 M files take about 45 MB. Standard
library only.

`walk` and `say_left_out` also serve folders of text.
"""

import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from recipes.core import errors
from recipes.core.data import pillow
from recipes.core.errors import InputError

# torchvision's IMG_EXTENSIONS (datasets/folder.py), and other common endings of the same formats.
ENDINGS = tuple(b".jpg .jpeg .jpe .jfif .png .ppm .pgm .bmp .tif .tiff .webp .gif".split())
HIDDEN = (b"@eaDir", b"#recycle", b"__MACOSX", b"lost+found")  # made by file servers and archives
COMPRESSED = (b".gz", b".bz2", b".xz", b".zst")


class Listing:
    """The images below ``folder``, sorted by class, then by name, both as bytes. No Python object
    is kept for a sample.
    """

    kind = "files"  # for the log, as ``place`` is for error messages

    def __init__(self, folder: Path, classes: tuple[str, ...]):
        self.folder = folder
        self.place = str(folder)
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
        """The sample's path below ``folder``: ``<class>/<file>``; bytes that are not UTF-8 are
        decoded as by `os.fsdecode`.
        """
        file = bytes(self._names[self._ends[i] : self._ends[i + 1]])
        return f"{self.classes[self._labels[i]]}/{os.fsdecode(file)}"

    def read(self, i: int) -> bytes:
        """The sample's file. Raises Unreadable."""
        return pillow.read_file(Path(f"{self.place}/{self.name(i)}"))

    def digest(self) -> str:
        """SHA-256, in hexadecimal, of all names and labels in their order."""
        digest = hashlib.sha256("\0".join([*self.classes, ""]).encode("utf-8", "surrogateescape"))
        for part in (self._names, self._ends, self._labels):
            digest.update(part)
        return digest.hexdigest()

    def add(self, label: int, file: bytes) -> None:
        self._labels.append(label)
        self._names += file
        self._ends.append(len(self._names))


def class_names(folder: Path) -> tuple[tuple[str, ...], list[bytes]]:
    """The classes of ``folder``, which are its folders that are not hidden, sorted as bytes; and
    the names of the files in it. Raises InputError if there is no class.
    """
    _, folders, names = next(walk(os.fsencode(folder), set()))
    if not folders:
        fix = "put the images of each class into a folder <class>/"
        raise InputError(f"{str(folder)!r} has no class folders: {fix}")
    return tuple(map(os.fsdecode, folders)), names


def scan(
    folder: Path,
    classes: Sequence[str] | None = None,
    report: Callable[[object], None] = lambda done: None,
    say: Callable[[str], object] = lambda line: None,
) -> Listing:
    """Lists ``folder``. Folders below a class belong to it; hidden files and folders are skipped;
    links are followed.

    A folder that is reached twice is read once, and never as a part of another class.

    classes: labels are positions in these (for a validation set, the training set's); default: the
    folder's own. report: called with the number of classes done, at each class. say: gets a line if
    files are left out. Raises InputError (one line) when there is no folder or class, a class
    without an image, or one not in ``classes``.
    """
    names, others = class_names(folder)
    listing = Listing(folder, names if classes is None else tuple(classes))
    positions = {name: i for i, name in enumerate(listing.classes)}
    place = repr(listing.place)
    for name in names:
        if name not in positions:
            fix = "add it there, or remove it here"
            raise InputError(f"{place} has the class {name!r}, which the training set lacks: {fix}")

    places = [os.fsencode(folder / name) for name in names]
    seen = set(map(os.path.realpath, places))
    if len(seen) < len(names):
        raise InputError(f"{place} has two links to the same class folder: remove one")
    for done, name in enumerate(names):
        report(done)
        files = sorted(images(places[done], seen, others))
        if not files:
            raise InputError(
                f"{place} has no image in the class folder {name!r}: fill or remove it"
            )
        for file in files:
            listing.add(positions[name], file)
    say_left_out(listing.place, others, say)
    return listing


def images(folder: bytes, seen: set[bytes], others: list[bytes]) -> Iterator[bytes]:
    """Paths, relative to ``folder``, of the images in it and below. Adds the names of other files
    to ``others``.
    """
    for place, _, files in walk(folder, seen):
        below = place[len(folder) + 1 :]
        for name in files:
            if name.lower().endswith(ENDINGS):
                yield os.path.join(below, name)
            else:
                others.append(name)


def say_left_out(place: str, names: Sequence[bytes], say: Callable[[str], object]) -> None:
    """Says the number of files of each ending, such as .heic or .txt.gz, in one line, unless there
    are none.
    """
    if not names:
        return
    endings = []
    for name in names:
        stem, ending = os.path.splitext(name.lower())
        if ending in COMPRESSED:
            ending = os.path.splitext(stem)[1] + ending
        endings.append(os.fsdecode(ending) or "without an ending")
    counts = Counter(sorted(endings)).most_common()
    listed = ", ".join(f"{count} {ending}" for ending, count in counts)
    say(f"{place!r}: left out: {errors.shown(listed, 1000)}")


def walk(folder: bytes, seen: set[bytes]) -> Iterator[tuple[bytes, list[bytes], list[bytes]]]:
    """As `os.walk`, through links, without hidden files and folders. Raises InputError if a folder
    cannot be read.

    Links to a folder that contains ``folder``, or to one in ``seen``, are not followed. Adds the
    folders to ``seen``.
    """
    top = os.path.realpath(folder)

    def refuse(error: OSError) -> None:
        place = os.fsdecode(error.filename)
        fix = "make it readable, or give another folder"
        raise InputError(f"{place!r} cannot be read ({error.strerror}): {fix}") from None

    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(place)
        if place != folder and (real in seen or os.path.commonpath([top, real]) == real):
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        yield place, folders, [name for name in files if not _is_hidden(name)]


def _is_hidden(name: bytes) -> bool:
    return name.startswith(b".") or name in HIDDEN
