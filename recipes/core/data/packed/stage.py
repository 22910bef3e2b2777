"""Copies a packed copy to a node's own disk. Standard library only.

Invariants: no partial file has its final name, one process of a node copies at a time, another user's folder is never used.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from recipes.core.data.packed import format
from recipes.core.data.packed.format import PackedCopy, PackedFile
from recipes.core.errors import InputError, MachineError

CHUNK_BYTES = 4 << 20
COPIERS = 4  # files at once: one stream fills neither a parallel file system nor an NVMe disk
BEAT_S = 0.5
LOCK, TEMPORARY = ".lock", ".copying-"
Beat = Callable[[int, int], None]


def to_local_disk(folder: Path, stage_dir: Path, beat: Beat) -> Path:
    """A packed copy as a folder below ``stage_dir``: copied there by whichever process of the node comes first, once.

    Every rank of the node calls it; the others wait. A copy that was broken off goes on, whole files are kept; each file's
    SHA-256 is verified while it is copied. beat: told bytes done, of how many, at least once a second while there is
    something to wait for. Raises InputError (``folder`` is no packed copy, or a damaged one) and MachineError (no room; not
    writable; without locks; not this user's own).
    """
    try:
        copy = format.read_index(folder)
    except InputError as error:
        raise InputError(f"stage_dir=: wants a packed copy as data_dir: {error}") from None
    target = Path(os.path.realpath(stage_dir)) / f"{folder.resolve().name}-{copy.sha256[:12]}-{os.geteuid()}"
    _own_folder(target)
    if not _is_finished(target, copy):
        try:
            with _locked(target, copy, beat):
                if not _is_finished(target, copy):
                    _copy_all(folder, target, copy, beat)
        except OSError as error:
            raise _disk_error(error, target) from None
    return target


def _own_folder(target: Path) -> None:
    """Makes ``target`` with mode 0700, or sees that what is there is this user's own folder, closed to others' writing."""
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            target.mkdir(mode=0o700)
        found = target.lstat()  # what a link points to is not asked: in /tmp, anyone may have put it there
    except OSError as error:
        raise _disk_error(error, target) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise MachineError(
            f"stage_dir={str(target.parent)!r}: {str(target)!r} is there and is no folder that is yours alone: "
            "remove it, or give another stage_dir"
        )


def _is_finished(target: Path, copy: PackedCopy) -> bool:
    """index.json, which comes last, is there, and so are all files as far as `_is_whole` looks."""
    try:
        return (target / "index.json").read_bytes() == copy.content and not _missing(target, copy)
    except OSError:
        return False


def _missing(target: Path, copy: PackedCopy) -> list[PackedFile]:
    return [file for file in copy.files if not _is_whole(target / file.name, file)]


def _is_whole(path: Path, file: PackedFile) -> bool:
    """A shard has its size; an index, by which every sample is found, is read too: a wrong one would end every start."""
    if _size(path) != file.size:
        return False
    if not file.name.endswith(".index"):
        return True
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
    except OSError:
        return False


def _size(path: Path) -> int:
    """The size of a plain file, -1 where there is none."""
    try:
        found = path.lstat()
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


@contextlib.contextmanager
def _locked(target: Path, copy: PackedCopy, beat: Beat) -> Iterator[None]:
    """Holds the folder's lock, which the kernel lets go of with its process, whatever ends that."""
    total = sum(file.size for file in copy.files)
    lock = os.open(target / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                beat(min(total, _bytes_there(target)), total)
                time.sleep(BEAT_S)
            except OSError as error:
                raise MachineError(
                    f"stage_dir={str(target.parent)!r}: has no file locks ({error.strerror}): give a node's own disk"
                ) from None
        yield
    finally:
        os.close(lock)


def _bytes_there(target: Path) -> int:
    with os.scandir(target) as entries:
        return sum(max(0, _size(Path(entry.path))) for entry in entries)


def _copy_all(folder: Path, target: Path, copy: PackedCopy, beat: Beat) -> None:
    """Copies what is missing, index.json last. The lock is held. Raises OSError too."""
    for left in target.glob(f"{TEMPORARY}*"):
        left.unlink()
    with contextlib.suppress(FileNotFoundError):
        (target / "index.json").unlink()  # of a copy that has lost a file since
    missing, total = _missing(target, copy), sum(file.size for file in copy.files)
    need = sum(file.size for file in missing) + len(copy.content)
    free = _free(target)
    if free is not None and free < need:
        raise _no_room(target, need, free)
    work = _Copying(folder, target, total - sum(file.size for file in missing))
    beat(work.done, total)
    with ThreadPoolExecutor(COPIERS) as pool:
        pending = {pool.submit(work.copy, file) for file in missing}
        try:
            while pending:
                finished, pending = wait(pending, BEAT_S, FIRST_EXCEPTION)
                for one in finished:
                    one.result()
                beat(work.done, total)
        except BaseException as error:
            work.stopped = True
            pool.shutdown(cancel_futures=True)
            if isinstance(error, OSError):
                raise _disk_error(error, target, need - (work.done - (total - need))) from None
            raise
    try:
        _write_whole(target, "index.json", lambda out: _write(out, copy.content))
    except OSError as error:
        raise _disk_error(error, target, len(copy.content)) from None


class _Copying:
    """Copies files, several at once. done: bytes so far, of what was there before too."""

    def __init__(self, folder: Path, target: Path, done: int) -> None:
        self.folder, self.target, self.done = folder, target, done
        self.stopped = False
        self._lock = threading.Lock()

    def copy(self, file: PackedFile) -> None:
        """Raises OSError where it cannot be written, InputError where it is not what index.json says."""
        _write_whole(self.target, file.name, lambda out: self._fill(out, file))

    def _fill(self, out: int, file: PackedFile) -> None:
        path, digest, size = self.folder / file.name, hashlib.sha256(), 0
        again = format.prepare_command(self.folder)
        chunk = memoryview(bytearray(CHUNK_BYTES))
        with _reading(path):
            source = open(path, "rb", buffering=0)  # noqa: SIM115
        with source:
            while True:
                with _reading(path):
                    got = source.readinto(chunk)
                if not got or self.stopped:
                    break
                size += got
                if size > file.size:
                    break
                digest.update(chunk[:got])
                _write(out, chunk[:got])
                with self._lock:
                    self.done += got
        if self.stopped:
            raise InputError("stopped")  # another file's error is on its way
        if size != file.size:
            there = "more" if size > file.size else size
            raise InputError(f"{str(path)!r} has {there} bytes, index.json says {file.size}: {again}")
        if digest.hexdigest() != file.sha256:
            raise InputError(f"{str(path)!r} is damaged (its SHA-256 is not index.json's): {again}")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read ({error.strerror})") from None


def _write_whole(folder: Path, name: str, fill: Callable[[int], None]) -> None:
    """A file that comes under its name when all of it is on the disk. Only for who holds the lock."""
    temporary = folder / f"{TEMPORARY}{name}"
    out = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fill(out)
            os.fsync(out)
        finally:
            os.close(out)
        os.replace(temporary, folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _write(out: int, content: bytes | memoryview) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(out, left) :]


def _free(folder: Path) -> int | None:
    """Bytes that this user may still write there; None where the file system does not say."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _no_room(target: Path, need: int, free: int | None) -> MachineError:
    there = "" if free is None else f", {_gigabytes(free)} are free"
    return MachineError(
        f"stage_dir={str(target.parent)!r}: no room: {_gigabytes(need)} are to be written{there}: "
        "make room, or give another stage_dir, or none"
    )


def _disk_error(error: OSError, target: Path, need: int = 0) -> MachineError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = None
        with contextlib.suppress(OSError):
            free = _free(target)
        return _no_room(target, need, free)
    return MachineError(
        f"stage_dir={str(target.parent)!r}: cannot be written ({error.strerror}): give a folder of a node's own disk"
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
