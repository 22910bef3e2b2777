"""Snapshots of the code, so that edits do not affect a job that is pending, running or requeued.
Standard library only.

A snapshot contains the files of `source.code_files`. Its path is ``runs/code/<id>``. The id depends
on the content and the user's key, so that jobs with the same code share a snapshot. A folder that
was copied into ``runs/code``, such as with the runs of another user, is not used.
"""

import hashlib
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import Any

from recipes.core.errors import MachineError
from recipes.core.files import read_json, write_json
from recipes.core.run import directory, source
from recipes.core.trust import private_folder, secret_name

# largest size of a snapshot; data among the code must not be copied for each job
MAX_BYTES = 64 << 20
PURPOSE = "snapshot"  # in the mark of its stamp


def take(root: Path) -> Path:
    """Makes a snapshot of the code in the repository ``root``, unless this user has made one with
    the same content.

    Returns its folder. Raises MachineError if the snapshot cannot be made or is too large.
    """
    content = _read(root)
    commit = source.commit(root)
    digest = hashlib.sha256()
    for name, data in sorted(content.items()):
        digest.update(f"{name}\0{len(data)}\0".encode("utf-8", "surrogateescape") + data)
    digest.update(str(commit).encode())
    folder = private_folder((root / "runs/code").resolve())
    copy = folder / (secret_name(digest.hexdigest()) or secrets.token_hex(8))
    while os.path.lexists(copy) and not _is_own(copy, content):
        copy = copy.with_name(f"{copy.name}-")
    for compiled in copy.rglob("__pycache__"):  # Python would run what was copied into it
        shutil.rmtree(compiled, ignore_errors=True)
    if not copy.is_dir():
        _write(copy, content, {"root": str(root), "commit": commit}, source.difference(root))
    return copy


def was_begun(repository: Path, job: str, run_dir: Path) -> bool:
    """Whether an earlier start of this job has called `keep_for` with this run directory."""
    return str(run_dir) in read_json(repository / f"runs/code/.job-{job}.json")


def keep_for(copy: Path, job: str, run_dir: Path) -> None:
    """Creates a link with which a requeued job finds its snapshot again, and notes its run
    directory. Raises MachineError.
    """
    link = copy.with_name(f"job-{job}")
    folders = copy.with_name(f".job-{job}.json")
    new = copy.with_name(f".{link.name}.{os.getpid()}")
    try:
        new.symlink_to(copy.name)
        new.replace(link)
        write_json(folders, {**read_json(folders), str(run_dir): True})
    except OSError as error:
        raise MachineError(f"{link}: cannot be made ({error.strerror})") from None


def _is_own(copy: Path, content: dict[str, bytes]) -> bool:
    """Whether this user has made the snapshot here, and it has this content still. Files may have
    been purged, or copied into it.
    """
    stamp = source.stamp(copy)
    if stamp.get("purpose") != PURPOSE or not directory.is_marked(copy, stamp):
        return False
    names = {
        str(path.relative_to(copy))
        for path in copy.rglob("*")
        if (path.is_symlink() or not path.is_dir()) and path.parent.name != "__pycache__"
    }
    if names != content.keys() | {source.STAMP, source.DIFF}:
        return False
    return all((copy / name).read_bytes() == data for name, data in content.items())


def _write(copy: Path, content: dict[str, bytes], stamp: dict[str, Any], diff: bytes) -> None:
    part = copy.with_name(f".{copy.name}.{secrets.token_hex(4)}")
    try:
        part.mkdir()
        for name, data in content.items():
            file = part / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            if data.startswith(b"#!"):
                file.chmod(file.stat().st_mode | stat.S_IXUSR)
        (part / source.DIFF).write_bytes(diff)
        write_json(part / source.STAMP, directory.marked(part, {**stamp, "purpose": PURPOSE}))
        part.rename(copy)
    except OSError as error:
        if not _is_own(copy, content):  # else another submission made it first
            raise MachineError(
                f"{copy}: cannot be made ({error.strerror}): free some space in runs/"
            ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _read(root: Path) -> dict[str, bytes]:
    """The content of each file of the code, by its path relative to ``root``.

    Raises MachineError if the files have more than MAX_BYTES in total or cannot be read.
    """
    try:
        sizes = {path: path.stat().st_size for path in source.code_files(root)}
        if sum(sizes.values()) > MAX_BYTES:
            largest = max(sizes, key=sizes.__getitem__)
            raise MachineError(
                f"{root}: its code exceeds {MAX_BYTES >> 20} MiB, the limit of a snapshot "
                f"(largest file: {largest}): move files that are not code to another folder, "
                "or give snapshot=false"
            )
        return {str(path.relative_to(root)): path.read_bytes() for path in sizes}
    except OSError as error:
        raise MachineError(
            f"{error.filename}: cannot be copied to a snapshot ({error.strerror})"
        ) from None
