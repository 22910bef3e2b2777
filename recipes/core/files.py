"""Files: where the project lies, atomic writes, private folders. Standard library only."""

from pathlib import Path

import contextlib
import json
import os
import pwd
import secrets
import shlex
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any
from recipes.core.errors import MachineError


ROOT = Path(__file__).resolve().parents[2]  # of this clone, or of a job's copy of it


def private_folder(root: Path, name: str) -> Path:
    """The folder ``runs/NAME``, made private: jobs run what lies there.

    Raises MachineError where it belongs to, or can be written by, somebody else.
    """
    runs = root / "runs"
    if runs.is_symlink() and not runs.exists():
        raise MachineError(f"{runs}: is a link to {os.path.realpath(runs)}, which is not there: make that folder")
    folder = runs / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise MachineError(
            f"{folder}: cannot be made ({error.strerror}); what jobs run has to be written there"
        ) from None
    if found.st_uid != os.getuid():
        raise MachineError(
            f"{folder}: belongs to {_user(found.st_uid)}, and must be yours, since jobs run what lies there: use a clone of your own"
        )
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise MachineError(
            f"{folder}: must be yours and nobody else's to write, since jobs run what lies there: chmod 700 {shlex.quote(str(folder))}"
        )
    return folder


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def write_whole(
    path: Path, write: Callable[[IO[bytes]], object], before_rename: Callable[[], None] = lambda: None
) -> None:
    """Lets ``write`` fill a file that comes under its name when all of it is on the disk: a reader finds the old file or the
    new one, never a part. before_rename: may raise, and leave the old one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "x+b") as file:
            try:
                write(file)
            except RuntimeError as error:  # torch's archive writer hides the disk's own word
                if isinstance(error.__context__, OSError):
                    raise OSError(error.__context__.errno, error.__context__.strerror, str(path)) from None
                raise
            file.flush()
            os.fsync(file.fileno())
        before_rename()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes ``content`` as `write_whole` does."""
    write_whole(path, lambda file: file.write(json.dumps(content, indent=1).encode() + b"\n"))


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``; None where there is none or it is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    """The process's umask, for a while."""
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


def size_text(size: int) -> str:
    """A number of bytes for a person: kB, MB or GB."""
    if size >= 10_000_000_000:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
