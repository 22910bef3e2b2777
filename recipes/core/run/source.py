"""The project's own code: which files belong to it, its commit, how it differs from that, and whether this is a job's copy."""

import contextlib
import os
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.core.files import read_json

STAMP = "snapshot.json"  # in a copy of the code that a job runs: where the repository is, and its commit
DIFF = "code.diff"  # in a copy and in a run directory: how the code differs from that commit
MOST_DIFF = 4 << 20  # bytes of a difference that are kept
LEFT_OUT = {"runs", "data", "tests", "sbatch", "build", "__pycache__"}  # at the top, where they are no packages
GIT_S = 20.0
PLAIN = ("--binary", "--no-ext-diff", "--no-textconv", "--no-color")  # of git diff, whatever the user has configured


def code_files(root: Path) -> Iterator[Path]:
    """The files that a job runs: modules and packages of Python at the top, env/, and sbatch/job.sh."""
    if (shell := root / "sbatch/job.sh").is_file():
        yield shell
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
    """The mode of what a path leads to; 0 for a link to nothing, as editors leave them."""
    with contextlib.suppress(OSError):
        return path.stat().st_mode
    return 0


def commit(code: Path) -> str | None:
    """The commit of the code, ``-dirty`` behind it where files differ; None outside of a repository."""
    if there := stamp(code):
        commit = there.get("commit")
        return commit if isinstance(commit, str) else None
    return _git(code, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").decode().strip() or None


def difference(code: Path) -> bytes:
    """How the code differs from its commit, as ``git apply`` takes it: with the new files that a copy has and git does not ignore.

    New files that would make it larger than MOST_DIFF are named at its top instead.
    """
    if stamp(code):
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
            return [path for file in code_files(code) if os.fsencode(path := file.relative_to(code)) in listed]
    return []


def _git(root: Path, *words: str) -> bytes:
    """What git prints; nothing where there is no git, or no repository."""

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, timeout=GIT_S)
        different = 1 if "--no-index" in words else 0
        return done.stdout if done.returncode in (0, different) else b""
    return b""


def stamp(code: Path) -> dict[str, Any] | None:
    """What a copy of the code knows of where it comes from; None where ``code`` is the repository itself."""
    found = read_json(code / STAMP)
    return found if found and isinstance(found.get("root"), str) else None


def home(code: Path) -> Path:
    """The repository that ``code`` is, or is a copy from."""
    found = stamp(code)
    return Path(found["root"]) if found else code


def go_home(code: Path) -> None:
    """Makes the repository the working folder of a process that runs a copy of its code: what is typed is relative to it.

    Modules are still found in the copy, whose path is the first that Python looks in.
    """
    if stamp(code):
        os.chdir(home(code))


def other_code(code: Path, environ: Mapping[str, str]) -> str:
    """A line that names both folders where Python has imported ``code`` in place of the code that the job runs; else ""."""
    expected = environ.get("RECIPES_SOURCE", "")
    with contextlib.suppress(OSError):
        if not expected or os.path.samefile(code, expected):
            return ""
    return (
        f"Python imports the recipes from {code}, but this job runs {expected}: uninstall the one that is installed (pip uninstall"
        " slurm-torch-recipes), or remove it from PYTHONPATH and from Python's startup files"
    )
