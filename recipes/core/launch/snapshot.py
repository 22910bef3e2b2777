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
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.core.run import rundir
from recipes.core.errors import MachineError

DIFF = "code.diff"  # in a copy and in a run directory: how the code differs from that commit
MOST_BYTES = 64 << 20  # of a copy; data that lies among the code is not for each job to have anew
MOST_DIFF = 4 << 20  # bytes of a difference that are kept
LEFT_OUT = {"runs", "data", "tests", "sbatch", "build", "__pycache__"}  # at the top, where they are no packages
GIT_S = 20.0
PLAIN = ("--binary", "--no-ext-diff", "--no-textconv", "--no-color")  # of git diff, whatever the user has configured


def take(root: Path) -> Path:
    """A copy of the code in the repository ``root``, made unless there is one of the same content. Gives its folder.

    Raises MachineError where it cannot be made, or is too large.
    """
    content = _read(root)
    commit, digest = git_commit(root), hashlib.sha256()
    for name, data in sorted(content.items()):
        digest.update(f"{name}\0{len(data)}\0".encode("utf-8", "surrogateescape") + data)
    digest.update(str(commit).encode())
    folder = rundir.private_folder(root, "code")
    for again in itertools.count():  # one that was changed, or thinned out by a purge of old files, is left to its jobs
        copy = folder / (digest.hexdigest()[:16] + (f"-{again}" if again else ""))
        if not copy.is_dir():
            _write(copy, content, {"root": str(root), "commit": commit}, difference(root))
        if rundir.stamp(copy) and all(_content(copy / name) == data for name, data in content.items()):
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
        (part / DIFF).write_bytes(diff)
        rundir.write_json(part / rundir.STAMP, stamp)
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
        for path in _files(root):
            total += path.stat().st_size
            if total > MOST_BYTES:
                largest = max(_files(root), key=lambda file: file.stat().st_size)
                raise MachineError(
                    f"{root}: has more than {MOST_BYTES >> 20} MB of code to copy for the job ({largest} is the largest): "
                    "move what is no code out of it, or give snapshot=false"
                )
            content[str(path.relative_to(root))] = path.read_bytes()
    except OSError as error:
        raise MachineError(f"{path}: cannot be copied for the job ({error.strerror})") from None
    return content


def _files(root: Path) -> Iterator[Path]:
    for entry in sorted(root.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir() and _is_code(entry):
            yield from _files_of(entry)
        elif entry.suffix == ".py" and entry.is_file():
            yield entry


def _is_code(folder: Path) -> bool:
    """Whether a folder at the top is copied: what it holds is Python's to import."""
    if folder.name in LEFT_OUT:
        return (folder / "__init__.py").exists()
    modules = (path for path in folder.glob("*.py") if not path.name.startswith("."))
    return folder.name == "env" or any(modules) or any(folder.glob("*/__init__.py"))


def _files_of(folder: Path) -> Iterator[Path]:
    """A folder's files, also through links, but each folder once."""
    seen: set[str] = set()
    for path, folders, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(path)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and not name.endswith(".pyc") and stat.S_ISREG(_mode(Path(path, name))):
                yield Path(path, name)


def _mode(path: Path) -> int:
    with contextlib.suppress(OSError):  # a link that leads nowhere
        return path.stat().st_mode
    return 0


def git_commit(code: Path) -> str | None:
    """The commit of the code, ``-dirty`` behind it where files differ; None outside of a repository."""
    if there := rundir.stamp(code):
        commit = there.get("commit")
        return commit if isinstance(commit, str) else None
    return _git(code, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").decode().strip() or None


def difference(code: Path) -> bytes:
    """How the code differs from its commit, as ``git apply`` takes it: with the new files that a copy has and git does not ignore.

    New files that would make it larger than MOST_DIFF are named at its top instead.
    """
    if rundir.stamp(code):
        with contextlib.suppress(OSError):
            return (code / DIFF).read_bytes()
        return b""
    diff = _git(code, "diff", "HEAD", *PLAIN, "--", ".")
    if len(diff) > MOST_DIFF:
        return b"# more than can be kept here\n"
    listed = set(_git(code, "ls-files", "--others", "--exclude-standard", "-z").split(b"\0"))
    left_out = b""
    for path in _new_files(code, listed):
        name = os.fsencode(path)
        try:
            size = (code / path).stat().st_size
        except OSError:  # removed since, by an editor for example
            continue
        added = _git(code, "diff", "--no-index", *PLAIN, "--", os.devnull, str(path)) if size <= MOST_DIFF else b""
        if added and len(diff) + len(added) <= MOST_DIFF:
            diff += added
        else:
            left_out += b"# new file %s, %d bytes: not kept here\n" % (name, size)
    return left_out + diff


def _new_files(code: Path, listed: set[bytes]) -> list[Path]:
    """The code's files, by their paths under ``code``, that are in ``listed``; none where the folder cannot be read."""
    with contextlib.suppress(OSError):
        if listed - {b""}:
            return [path for file in _files(code) if os.fsencode(path := file.relative_to(code)) in listed]
    return []


def _git(root: Path, *words: str) -> bytes:
    """What git prints; nothing where there is no git, or no repository."""

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, timeout=GIT_S)
        different = 1 if "--no-index" in words else 0
        return done.stdout if done.returncode in (0, different) else b""
    return b""
