"""A copy of the code, which a job runs: what is edited while it waits, runs or is queued again does it no harm. Standard library only.

Copied are ``recipes/``, ``env/`` and whatever Python lies beside them: modules, and folders that hold any. A copy lies in
``runs/code/<id>``, ``id`` by its content, so that jobs of the same code have one.
"""

import contextlib
import hashlib
import itertools
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from recipes.core.errors import MachineError
from recipes.core.files import private_folder, write_json
from recipes.core.run import source

MOST_BYTES = 64 << 20  # of a copy; data that lies among the code is not for each job to have anew


def take(root: Path) -> Path:
    """A copy of the code in the repository ``root``, made unless there is one of the same content. Gives its folder.

    Raises MachineError where it cannot be made, or is too large.
    """
    content = _read(root)
    commit, digest = source.commit(root), hashlib.sha256()
    for name, data in sorted(content.items()):
        digest.update(f"{name}\0{len(data)}\0".encode("utf-8", "surrogateescape") + data)
    digest.update(str(commit).encode())
    folder = private_folder(root, "code")
    for again in itertools.count():  # one that was changed, or thinned out by a purge of old files, is left to its jobs
        copy = folder / (digest.hexdigest()[:16] + (f"-{again}" if again else ""))
        if not copy.is_dir():
            _write(copy, content, {"root": str(root), "commit": commit}, source.difference(root))
        if source.stamp(copy) and all(_content(copy / name) == data for name, data in content.items()):
            return copy
    raise AssertionError("there is always another name")


def size(root: Path) -> str:
    """What a copy of the code would take, in words. Raises MachineError as `take` does, and makes nothing."""
    content = _read(root)
    return f"{len(content)} files, {sum(map(len, content.values())) / 1e6:.1f} MB"


def _content(path: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return None


def keep_for(copy: Path, job: str) -> None:
    """Leaves a link by which a job that is queued again finds its copy. Raises MachineError."""
    link = copy.with_name(f"job-{job}")
    new = copy.with_name(f".{link.name}.{os.getpid()}")
    try:
        new.symlink_to(copy.name)
        new.replace(link)
    except OSError as error:
        raise MachineError(f"{link}: cannot be made ({error.strerror})") from None


def _write(copy: Path, content: dict[str, bytes], stamp: dict[str, Any], diff: bytes) -> None:
    part = copy.with_name(f".{copy.name}.{secrets.token_hex(4)}")
    try:
        part.mkdir(mode=0o700)
        for name, data in content.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_bytes(data)
        (part / source.DIFF).write_bytes(diff)
        write_json(part / source.STAMP, stamp)
        part.chmod(0o777 & ~_umask())
        part.rename(copy)
    except OSError as error:
        if not copy.is_dir():  # another submission was first
            raise MachineError(
                f"{copy}: the copy of the code that the job would run cannot be made ({error.strerror}): make room in runs/"
            ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _read(root: Path) -> dict[str, bytes]:
    """The code's files by their paths under ``root``. Raises MachineError where they are too many bytes, or cannot be read."""
    content: dict[str, bytes] = {}
    total, path = 0, root
    try:
        for path in source.code_files(root):
            total += path.stat().st_size
            if total > MOST_BYTES:
                largest = max(source.code_files(root), key=lambda file: file.stat().st_size)
                raise MachineError(
                    f"{root}: has more than {MOST_BYTES >> 20} MB of code to copy for the job ({largest} is the largest): "
                    "move what is no code out of it, or give snapshot=false"
                )
            content[str(path.relative_to(root))] = path.read_bytes()
    except OSError as error:
        raise MachineError(f"{path}: cannot be copied for the job ({error.strerror})") from None
    return content


def _mode(path: Path) -> int:
    with contextlib.suppress(OSError):  # a link that leads nowhere
        return path.stat().st_mode
    return 0
