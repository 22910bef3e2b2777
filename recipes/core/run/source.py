"""The project's own code: its files, its commit, its difference from the commit, and whether it is
a job's snapshot.
"""

import contextlib
import glob
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from recipes.core.files import Json, read_json, sha256
from recipes.core.slurm import script

# file in a snapshot of the code: the path of the repository, and the commit
STAMP = "snapshot.json"
# file in a snapshot and in a run directory: the difference between the code and the commit
DIFF = "code.diff"
MAX_DIFF_BYTES = 4 << 20  # largest difference that is kept
# folders in the top folder that are not code to import
LEFT_OUT = {
    "runs",
    "data",
    "tests",
    script.FOLDER,
    "build",
}
GIT_S = 20.0  # timeout for git


def code_files(root: Path) -> Iterator[Path]:
    """The files that a job needs: modules and packages in the top folder, env/, sbatch/job.sh. No
    hidden files; links are followed.
    """
    patterns = ["*.py", script.SHARED, "env/**"]
    for name in sorted(set(glob.glob("*", root_dir=root)) - LEFT_OUT):
        top = root / name
        if any(top.glob("*.py")) or any(top.glob("*/__init__.py")):
            patterns.append(f"{glob.escape(name)}/**")
    for pattern in patterns:
        for name in sorted(glob.glob(pattern, root_dir=root, recursive=True)):
            if "__pycache__" not in name and (root / name).is_file():
                yield root / name


def name_in(code: Path, path: str) -> str:
    """The path of a Python file relative to ``code``; "" if it is outside, or in an environment
    such as .venv.
    """
    if not (path.startswith(f"{code}/") and path.endswith(".py")):
        return ""
    name = os.path.relpath(path, code)
    return "" if re.match(r"\.|.*(site-packages|lib/python3[^/]*)/", name) else name


def loaded(code: Path) -> dict[str, str]:
    """The SHA-256 of each imported file of ``code`` that a run's results depend on, by its path: a
    recipe, its keys, data, train, own modules.
    """
    names = {
        name_in(code, str(getattr(module, "__file__", ""))) for module in list(sys.modules.values())
    }
    other = re.compile(r"$|tests/|recipes/core/(?!data/|train/)")
    return {
        name: sha256(code / name)
        for name in sorted(names)
        if not other.match(name) and (code / name).exists()
    }


def commit(code: Path) -> str | None:
    """The commit of the code, followed by ``-dirty`` if files differ; None outside a git
    repository.
    """
    snapshot = stamp(code)
    if snapshot:
        return snapshot.get("commit")
    name = _git(code, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return name.decode().strip() or None


def difference(code: Path) -> bytes:
    """The difference between the code and its commit, in the format of ``git apply``. A note if it
    is too large.

    It includes new Python files of at most MAX_DIFF_BYTES that a snapshot contains and git does not
    ignore.
    """
    # A file may be removed in the meantime, for example by an editor.
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory() as folder:
        if stamp(code):
            return (code / DIFF).read_bytes()
        index = {"GIT_INDEX_FILE": f"{folder}/index"}  # the index of the user does not change
        _git(code, "read-tree", "HEAD", **index)
        # other new files may hold secrets
        names = [
            str(path.relative_to(code))
            for path in code_files(code)
            if path.suffix == ".py"
            and os.access(path, os.R_OK)
            and path.stat().st_size <= MAX_DIFF_BYTES
        ]
        # it leaves out files that git ignores
        _git(code, "add", "--intent-to-add", "--", *names, **index)
        # whatever the user has configured for git diff
        options = ("--binary", "--no-ext-diff", "--no-textconv", "--no-color")
        diff = _git(code, "diff", *options, "--", ".", **index)
        if len(diff) > MAX_DIFF_BYTES:
            return b"# the difference is too large to be kept here\n"
        return diff
    return b""


def _git(root: Path, *words: str, **variables: str) -> bytes:
    """The stdout of a git command; empty if there is no git or no repository, or if the command
    fails.
    """
    command = ["git", "-C", str(root), *words]
    # a repository in a folder above may be another user's, whose configuration can name commands
    environ = {**os.environ, **variables, "GIT_CEILING_DIRECTORIES": str(root.parent)}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, env=environ, capture_output=True, timeout=GIT_S, check=True
        ).stdout
    return b""


def stamp(code: Path) -> Json:
    """The origin of a snapshot of the code (repository and commit); {} if ``code`` is the
    repository itself.
    """
    origin = read_json(code / STAMP)
    return origin if isinstance(origin.get("root"), str) else {}


def home(code: Path) -> Path:
    """The repository of ``code``: ``code`` itself, or the repository from which the snapshot was
    made.
    """
    snapshot = stamp(code)
    return Path(snapshot["root"]) if snapshot else code


def go_home(code: Path) -> None:
    """Changes to the repository, since typed paths are relative to it. Modules are still imported
    from the snapshot, if this is one.
    """
    if stamp(code):
        os.chdir(home(code))
