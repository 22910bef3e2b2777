"""File operations: the project's root, atomic writes, locks, free space and SHA-256.

Standard library only.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from recipes.core.errors import DiskFull, MachineError

# the top folder of this clone, or of the snapshot that a job runs
ROOT = Path(__file__).resolve().parents[2]

Json = dict[str, Any]  # an object in a JSON file


def without_waiting(path: str, flags: int) -> int:
    """For ``opener=`` of open(): raises OSError for a named pipe or a device, which may block or
    have no end.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not an ordinary file", path)
    return descriptor


def without_links(path: str, flags: int) -> int:
    """For ``opener=`` of open(): as `without_waiting`, and raises OSError if ``path`` is a symbolic
    link.

    For files in run directories, where another user may have planted it.
    """
    return without_waiting(path, flags | os.O_NOFOLLOW)


def write_whole(
    path: Path, write: Callable[[IO[bytes]], object], staging: Path | None = None
) -> None:
    """Writes a file atomically: readers find either the old file or the complete new one.

    write: writes the content to a temporary file, which is then flushed to the disk and renamed.
    staging: folder of the temporary file, on the same file system; default: the folder of ``path``.
    Raises OSError, the exceptions of ``write``, and MachineError if a later attempt has removed
    ``staging``. The temporary file is removed in this case.
    """
    name = f".{path.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    temporary = (staging or path.parent) / name
    try:
        with open(temporary, "x+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        # torch's archive writer raises RuntimeError in place of the OSError
        cause = error.__context__
        is_of_torch = isinstance(error, RuntimeError) and not isinstance(error, MachineError)
        if is_of_torch and isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(path)) from None
        is_missing = isinstance(error, FileNotFoundError)
        if is_missing and staging and not staging.exists() and path.parent.exists():
            line = "a later attempt writes to this run directory, so this attempt ends"
            raise MachineError(f"{path.parent.parent}: {line}") from None
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = os.path.realpath(path)  # not in /proc
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot flush a folder
            raise
    finally:
        os.close(folder)


def remove_temporary(folder: Path) -> None:
    """Removes temporary files of killed `write_whole` calls. The caller must hold the folder's
    lock, or own the run directory.
    """
    for name in os.listdir(folder):
        if re.fullmatch(r"\..+\.\d+\.[0-9a-f]{8}", name):
            (folder / name).unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes ``content`` atomically. Raises as `write_whole`."""
    write_whole(path, lambda file: file.write(content))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes ``content`` as JSON, atomically."""
    write_bytes(path, json.dumps(content, indent=1).encode() + b"\n")


def json_line(content: object) -> str:
    """``content`` as JSON, as commands print it: JSON has no NaN and no infinity, so such a number
    is null.
    """
    text = json.dumps(content, default=str)
    return json.dumps(json.loads(text, parse_constant=lambda name: None))


def read_json(path: Path, opener: Callable[[str, int], int] = without_links) -> Json:
    """The JSON object in the file ``path``. {} if the file cannot be read, is larger than 64 MiB or
    contains something else.

    opener: `without_waiting` for data and models, whose files may be links.
    """
    try:
        content = json.loads(read_bounded(path, 64 << 20, opener))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_bounded(
    path: Path, limit: int, opener: Callable[[str, int], int] = without_waiting
) -> bytes:
    """The content of an ordinary file of at most ``limit`` bytes. Raises OSError; ValueError for a
    larger one.
    """
    # a given size saves a call for each file
    with open(path, "rb", buffering=1 << 16, opener=opener) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, limit) + 1)  # as many bytes are allocated at first
    if len(content) > limit:
        raise ValueError(f"larger than {limit} bytes")
    return content


@contextlib.contextmanager
def locked(path: Path, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds an exclusive lock on the file ``path`` within the ``with`` block, if the file system
    has locks.

    The kernel releases it when the process ends. The file is created if necessary and is not
    removed. wait: called twice a second while another process holds the lock. Without ``wait``,
    MachineError is raised if another process holds the lock. Raises OSError if the file cannot be
    opened.
    """
    # The name is predictable, and a symbolic link planted by another user would create a file
    # elsewhere.
    with open(path, "ab", opener=without_links) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if wait is None:
                    fix = "wait until it ends, or give another folder"
                    line = f"is locked: another process uses this folder: {fix}"
                    raise MachineError(f"{os.path.realpath(path)!r} {line}") from None
                wait()
                time.sleep(0.5)
            except OSError:  # no locks
                break
        yield


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content as hexadecimal digits. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb", opener=without_waiting) as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def free_bytes(folder: Path) -> int | None:
    """This user's free space in ``folder``, in bytes; None if the file system does not report it.
    Raises OSError.
    """
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else None  # some network file systems report 0 of 0


def check_free(folder: Path, need: int) -> None:
    """Raises OSError with ENOSPC and both sizes if fewer than ``need`` bytes are free in
    ``folder``.
    """
    free = free_bytes(folder)
    if free is not None and free < need:
        sizes = f"{size_text(need)} needed, {size_text(free)} free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}; {sizes}", str(folder))


@contextlib.contextmanager
def writing_to(folder: Path, key: str) -> Iterator[None]:
    """Raises MachineError in place of an OSError within the ``with`` block, which writes into
    ``folder``, the value of ``key``.
    """
    try:
        yield
    except BrokenPipeError:  # of stdout
        raise
    except OSError as error:
        fix = f"give another {key}="
        if is_full(error):
            fix = f"free some space there, or {fix}"
        line = f"{key}={str(folder)!r}: cannot be written ({error.strerror or error}): {fix}"
        raise machine_error(error, line) from None


def machine_error(error: OSError, line: str) -> MachineError:
    """The MachineError with this line for an OSError; a DiskFull if `is_full`."""
    return (DiskFull if is_full(error) else MachineError)(line)


def is_full(error: OSError) -> bool:
    """Whether a disk or a quota is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def size_text(size: int) -> str:
    """A number of bytes as text in kB, MB or GB."""
    if size >= 10_000_000_000:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
