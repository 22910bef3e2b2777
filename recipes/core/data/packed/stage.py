"""Copies a packed copy to a node's own disk. Standard library only.

No partial file has its final name, one process of a node copies at a time, and another user's folder is never used.
"""

import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from recipes.core import files
from recipes.core.data import datasets
from recipes.core.data.datasets import DataFile
from recipes.core.data.packed import format
from recipes.core.errors import InputError

COPIERS = 4  # files at once: one stream saturates neither a parallel file system nor an NVMe disk
REPORT_S = 0.5
LOCK = ".lock"
Report = Callable[[int, int], None]


def to_local_disk(folder: Path, stage_dir: Path, report: Report) -> Path:
    """Copies a packed copy to a folder below ``stage_dir``, once for each node, and gives that folder.

    Every rank of the node calls it: the first one copies, the others wait. An interrupted copy continues, complete files are
    kept, and each file's SHA-256 is verified while it is copied. report: gets the bytes of complete files and of all files, at least
    once a second during copying and waiting. Raises InputError (``folder`` is not a packed copy, or a damaged one) and MachineError
    (disk full or not writable, another user's folder).
    """
    try:
        copy = format.read_index(folder)
    except InputError as error:
        raise InputError(f"stage_dir=: needs a packed copy as data_dir: {error}") from None
    target = Path(os.path.realpath(stage_dir)) / f"{folder.resolve().name}-{copy.index.sha256[:12]}-{os.geteuid()}"
    all_files = copy.files
    total = sum(file.size for file in all_files)

    def missing() -> list[DataFile]:
        return [file for file in all_files if not _is_there(target / file.name, file.size)]

    def show() -> None:
        report(total - sum(file.size for file in missing()), total)

    def wait_for_copy() -> None:
        show()
        time.sleep(REPORT_S)

    with files.writing_to(target.parent, "stage_dir"):
        files.private_folder(target, "remove it, or give another stage_dir=")
        if missing():
            with files.locked(target / LOCK, wait_for_copy):
                files.remove_temporary(target)
                files.check_free(target, sum(file.size for file in missing()))
                _copy_all(missing(), folder, target, show)
    return target


def _is_there(path: Path, size: int) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def _copy_all(missing: list[DataFile], folder: Path, target: Path, show: Callable[[], None]) -> None:
    """Copies these files. The caller holds the lock. Raises InputError, OSError."""
    show()
    pool = ThreadPoolExecutor(COPIERS)
    try:
        pending = {pool.submit(_copy, file, folder, target) for file in missing}
        while pending:
            finished, pending = wait(pending, REPORT_S, FIRST_EXCEPTION)
            for one in finished:
                one.result()
            show()
    finally:
        pool.shutdown(cancel_futures=True)


def _copy(file: DataFile, folder: Path, target: Path) -> None:
    """Raises OSError where the target cannot be written, InputError where the source is not what index.json says."""
    path = folder / file.name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read ({error.strerror})") from None
    if fault := datasets.content_fault(content, file):
        raise InputError(f"{str(path)!r} {fault}: pack again: {datasets.prepare_command('imagenet', folder)}")
    files.write_bytes(target / file.name, content)
