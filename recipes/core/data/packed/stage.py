"""Copies a packed copy to a node's own disk. Standard library only.

No partial file has its final name, one process of a node copies at a time, and another user's
folder is never used.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from recipes.core import files, trust
from recipes.core.data import datasets
from recipes.core.data.datasets import DataFile
from recipes.core.data.packed import format
from recipes.core.errors import InputError

COPIERS = 4  # files at once: one stream saturates neither a parallel file system nor an NVMe disk
LOCK = ".lock"


def to_local_disk(
    folder: Path,
    stage_dir: Path,
    report: Callable[[int, int], None],
    warn: Callable[[str], None] = print,
) -> Path:
    """Copies a packed copy to a folder below ``stage_dir``, once for each node, and returns that
    folder. If another user has taken its name, warns and returns ``folder`` itself.

    Every rank of the node calls it: the first one copies, the others wait. An interrupted copy
    continues, complete files are kept, and each file's SHA-256 is verified while it is copied.
    report: gets the bytes of complete files and of all files: after each file, and twice a second
    during waiting. Raises InputError (``folder`` is not a packed copy, or a damaged one) and
    MachineError (disk full or not writable, a folder that others can write to).
    """
    try:
        copy = format.read_index(folder)
    except InputError as error:
        raise InputError(f"stage_dir= requires a packed copy in data_dir, but {error}") from None
    name = f"{folder.resolve().name}-{copy.index.sha256[:12]}-{os.geteuid()}"
    target = Path(os.path.realpath(stage_dir), name)

    def is_missing(file: DataFile) -> bool:
        path = target / file.name
        return not path.is_file() or path.stat().st_size != file.size

    def missing() -> list[DataFile]:
        return [file for file in copy.files if is_missing(file)]

    total = _bytes(copy.files)

    def show() -> None:
        report(total - _bytes(missing()), total)

    with files.writing_to(target.parent, "stage_dir"):
        if os.path.lexists(target) and not trust.is_own(target, follow_symlinks=False):
            warn(f"stage_dir=: {target} belongs to another user: this rank reads {folder}")
            return folder
        trust.private_folder(target, "remove it, or give another stage_dir=")
        if not missing():
            return target
        with files.locked(target / LOCK, show):
            files.remove_temporary(target)
            files.check_free(target, _bytes(missing()))
            show()
            # an error ends map(), which cancels what has not begun
            with ThreadPoolExecutor(COPIERS) as pool:
                for _ in pool.map(lambda file: _copy(file, folder, target), missing()):
                    show()
    return target


def _bytes(parts: Iterable[DataFile]) -> int:
    return sum(file.size for file in parts)


def _copy(file: DataFile, folder: Path, target: Path) -> None:
    """Raises OSError if the target cannot be written, InputError if the source differs from
    index.json.
    """
    path = folder / file.name
    try:
        content = files.read_bounded(path, file.size)
        fault = datasets.content_fault(content, file)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read ({error.strerror})") from None
    except ValueError as error:
        fault = f"is {error}"
    if fault:
        command = datasets.prepare_command("imagenet", folder)
        raise InputError(f"{str(path)!r} {fault}: pack again: {command}")
    files.write_bytes(target / file.name, content)
