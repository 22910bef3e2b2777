"""environment=: an archive of a Python environment, which each node of a job unpacks on its disk.

Python looks for about 20,000 files until torch is imported, and a shared file system answers each
question of each rank. An archive is one file, which Slurm copies from the first node to the others.

python -m recipes.core.launch.unpack prepare FOLDER           prints FOLDER if it does not exist
python -m recipes.core.launch.unpack unpack FOLDER ARCHIVE    each runs once on each node
python -m recipes.core.launch.unpack unpack-copy FOLDER COPY  as unpack, and removes the copy
"""

import contextlib
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.core import errors, files, trust
from recipes.core.errors import EXIT_DONE, EXIT_MACHINE, ConfigError, MachineError
from recipes.core.run.logs import say
from recipes.core.slurm import client, environment
from recipes.core.variables import Environ

PYTHON = "bin/python"  # in a venv and in a conda environment
UNPACK_COPY = "unpack-copy"  # a step: of a node's copy, which is then removed
MISSING = 1


def on_all_nodes(archive: str, in_container: bool, environ: Environ) -> str:
    """Unpacks ``archive`` on each node of the job that has not done so for an earlier job, and
    returns the path of its Python. Raises ConfigError and MachineError.
    """
    if in_container or not environment.job_id(environ):
        why = "a container has its own" if in_container else "needs a job of Slurm"
        raise ConfigError(f"environment=: {why}; leave it out")
    try:
        status = Path(archive).stat()
    except OSError as error:
        raise MachineError(f"environment={archive}: {error.strerror}") from None
    version = f"{archive} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(version.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    began = time.monotonic()
    failed = f"environment={archive}: was not unpacked: the lines above say why"
    for parent in _folders():
        folder = parent / f"environment-{digest}"
        prepared = _on_each_node(environ, "prepare", folder)
        if prepared != EXIT_MACHINE:
            break
    if prepared not in (EXIT_DONE, MISSING):
        raise MachineError(failed)
    if prepared == MISSING:
        step = "unpack"
        source = Path(archive)
        if environment.num_nodes(environ) > 1:
            # another job may broadcast the same archive to a node at the same time
            job_id = environment.allocation_id(environ)
            copy = folder.with_name(f"{folder.name}.{job_id}.archive")
            client.broadcast(source, copy)
            step = UNPACK_COPY
            source = copy
        if _on_each_node(environ, step, folder, source):
            raise MachineError(failed)
        say(f"environment: {archive} is unpacked in {folder} ({time.monotonic() - began:.0f} s)")
    return str(folder / PYTHON)


def is_kept(python: str, nodes: Sequence[str], environ: Environ) -> bool:
    """Whether the Python of `on_all_nodes` is still on each of these nodes of the job, in a folder
    of this user. A cleaner of /tmp may have removed it, and another user may have replaced it.
    """
    return _on_each_node(environ, "prepare", Path(python).parents[1], nodes=nodes) == EXIT_DONE


def _folders() -> list[Path]:
    """Folders for environments, the usual one first. On a node where another user has made it, the
    job uses one whose name nobody can know in advance, and later jobs use it too.
    """
    usual = Path(tempfile.gettempdir(), f"recipes-{os.getuid()}")
    own = list[Path]()
    for folder in sorted(usual.parent.glob(f"{usual.name}-*")):
        with contextlib.suppress(MachineError):
            own.append(trust.private_folder(folder))
    return [usual, *own[:1], usual.with_name(f"{usual.name}-{secrets.token_hex(8)}")]


def _on_each_node(environ: Environ, step: str, *paths: Path, nodes: Sequence[str] = ()) -> int:
    """Runs a step of `main` on each node of the job. Returns its exit status, or MISSING."""
    command = client.on_each_node(environ, nodes)
    command += [sys.executable, "-m", __name__, step, *map(str, paths)]
    done = subprocess.run(command, env=environ, cwd=files.ROOT, stdout=subprocess.PIPE)
    # srun prints an error line for each task with another status than 0
    return done.returncode or MISSING * (os.fsencode(paths[0]) in done.stdout)


def unpack(folder: Path, archive: Path) -> None:
    """Unpacks ``archive`` into ``folder`` of this node, unless it exists. Waits while another job
    unpacks on this node. Raises MachineError.
    """
    part = folder.with_name(f".{folder.name}")
    lock = files.locked(folder.parent / ".lock", wait=lambda: None)
    with files.writing_to(folder.parent, "environment"), lock:
        if not folder.exists():
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            done = subprocess.run(["tar", "-xf", archive, "-C", part], stderr=subprocess.PIPE)
            if done.returncode or not (part / PYTHON).exists():
                said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
                rule = said or f"has no {PYTHON}; pack with: tar -cf FILE -C ENVIRONMENT ."
                shutil.rmtree(part, ignore_errors=True)
                raise MachineError(f"{os.uname().nodename}: {archive}: {errors.shown(rule)}")
            part.rename(folder)


def main(argv: list[str]) -> int:
    step, folder, *archives = argv
    # nobody else may exchange what the ranks run
    trust.private_folder(Path(folder).parent, "set TMPDIR to a folder of your own")
    if step == "prepare":
        if not Path(folder).exists():
            print(folder)
        return EXIT_DONE
    archive = Path(archives[0])
    try:
        unpack(Path(folder), archive)
    finally:
        if step == UNPACK_COPY:
            archive.unlink(missing_ok=True)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(errors.status_of("environment", main))
