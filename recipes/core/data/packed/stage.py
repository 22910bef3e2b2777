"""Copies a packed copy to a node's own disk. Standard library only.

No partial file has its final name, one process of a node copies at a time, and another user's folder is never used.
"""

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO

from recipes.core import files
from recipes.core.data import datasets
from recipes.core.data.datasets import DataFile
from recipes.core.data.packed import format
from recipes.core.data.packed.format import PackedCopy
from recipes.core.errors import InputError, MachineError

CHUNK_BYTES = 4 << 20
COPIERS = 4  # files at once: one stream saturates neither a parallel file system nor an NVMe disk
REPORT_S = 0.5
LOCK = ".lock"
Report = Callable[[int, int], None]


def to_local_disk(folder: Path, stage_dir: Path, report: Report) -> Path:
    """Copies a packed copy to a folder below ``stage_dir``, once for each node, and gives that folder.

    Every rank of the node calls it: the first one copies, the others wait. An interrupted copy continues, complete files are
    kept, and each file's SHA-256 is verified while it is copied. report: gets the bytes of complete files and of all files, at least
    once a second during copying and waiting. Raises InputError (``folder`` is not a packed copy, or a damaged one) and MachineError
    (disk full or not writable, no locks, another user's folder).
    """
    try:
        copy = format.read_index(folder)
    except InputError as error:
        raise InputError(f"stage_dir=: needs a packed copy as data_dir: {error}") from None
    target = Path(os.path.realpath(stage_dir)) / f"{folder.resolve().name}-{copy.sha256[:12]}-{os.geteuid()}"
    need = total = sum(file.size for file in copy.files)

    def show() -> None:
        report(total - sum(file.size for file in _missing(target, copy)), total)

    def wait_for_copy() -> None:
        show()
        time.sleep(REPORT_S)

    try:
        _make_own_folder(target)
        if not _is_finished(target, copy):
            with files.locked(target / LOCK, wait_for_copy) as held:
                if not held:
                    raise MachineError(
                        f"stage_dir={str(stage_dir)!r}: its file system has no locks: give a folder of a node's own disk"
                    )
                if not _is_finished(target, copy):
                    need = sum(file.size for file in _missing(target, copy)) + len(copy.content)
                    files.check_free(target, need)
                    _copy_missing(folder, target, copy, show)
    except OSError as error:
        raise files.disk_error(error, "stage_dir", target.parent, need) from None
    return target


def _make_own_folder(target: Path) -> None:
    """Makes ``target`` with mode 0700, or checks that it is this user's own folder and nobody else can write to it."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        target.mkdir(mode=0o700)
    found = target.lstat()  # not through a link: in /tmp, anyone can create one
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise MachineError(
            f"stage_dir={str(target.parent)!r}: {str(target)!r} is not a folder that you own and only you can write to: "
            "remove it, or give another stage_dir="
        )


def _is_finished(target: Path, copy: PackedCopy) -> bool:
    """Whether index.json, which is written last, and all other files are there."""
    try:
        return (target / format.INDEX).read_bytes() == copy.content and not _missing(target, copy)
    except OSError:
        return False


def _missing(target: Path, copy: PackedCopy) -> list[DataFile]:
    """The files of ``copy`` that are not plain files of their size in ``target``."""
    return [file for file in copy.files if not _is_there(target / file.name, file.size)]


def _is_there(path: Path, size: int) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def _copy_missing(folder: Path, target: Path, copy: PackedCopy, show: Callable[[], None]) -> None:
    """Copies the missing files, then index.json. The caller holds the lock. Raises InputError, OSError."""
    files.remove_temporary(target)
    (target / format.INDEX).unlink(missing_ok=True)  # of a copy that has lost a file since
    show()
    pool = ThreadPoolExecutor(COPIERS)
    try:
        pending = {pool.submit(_copy, file, folder, target) for file in _missing(target, copy)}
        while pending:
            finished, pending = wait(pending, REPORT_S, FIRST_EXCEPTION)
            for one in finished:
                one.result()
            show()
    finally:
        pool.shutdown(cancel_futures=True)
    files.write_bytes(target / format.INDEX, copy.content)


def _copy(file: DataFile, folder: Path, target: Path) -> None:
    """Raises OSError where the target cannot be written, InputError where the source is not what index.json says."""
    path = folder / file.name

    def fill(out: IO[bytes]) -> None:
        digest, size = hashlib.sha256(), 0
        for chunk in _chunks(path):
            digest.update(chunk)
            size += out.write(chunk)
        if fault := datasets.content_fault(size, digest.hexdigest(), file):
            raise InputError(f"{str(path)!r} {fault}: pack again: {format.prepare_command(folder)}")

    files.write_whole(target / file.name, fill)


def _chunks(path: Path) -> Iterator[bytes]:
    """The content of the source. Raises InputError, which distinguishes it from an error in writing the target."""
    try:
        with open(path, "rb", buffering=0) as source:
            while chunk := source.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read ({error.strerror})") from None
