"""Stand-ins for a repository and for the commands of Slurm, and the scripts that the tests of this
folder share.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.core.launch import jobs
from recipes.core.launch.jobs import Job
from recipes.core.run import command_line
from tests.helpers import ROOT

SHARED = ROOT / "sbatch/job.sh"
READY = sorted(set((ROOT / "sbatch").glob("*.sh")) - {SHARED})
HOSTILE_ROOT = Path('/srv/it\'s a "repo"; $(touch canary) `touch canary` $HOME & <x> #y')
HOSTILE = (
    "data_dir=/$(touch canary)",
    "data_dir=/`touch canary`",
    "data_dir=/a b",
    "data_dir=/it's",
    'data_dir=/"x"',
    "data_dir=/;touch canary",
    "data_dir=/a&b|c>d<e",
    "data_dir=/*?[a]{b,c}",
    "data_dir=/~",
    "data_dir=/\\\\n",
    "data_dir=/é ü 中",
    "data_dir=/!!",
    "data_dir=/#x",
)


def describe(*words: str, root: Path = ROOT) -> Job:
    return jobs.describe(command_line.parse(["recipe=mnist", *words], environ={}), root)


def directives(text: str) -> dict[str, str]:
    """The options in the #SBATCH lines of a script, with their values as sbatch reads them."""
    options: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            name, _, value = word.partition("=")
            assert name not in options
            options[name] = value
    assert options
    return options


def executable(path: Path, text: str) -> str:
    """Writes a script that can be executed, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


class Bench:
    """A copy of the repository in which scripts run as in a job, with stubs of srun and Python."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder = folder
        self.root = root
        self.run_dir = f"run_dir={folder}/run"  # a word for `run`
        no_caches = shutil.ignore_patterns("__pycache__")
        for name in ("recipes", "env", "sbatch"):
            shutil.copytree(ROOT / name, root / name, ignore=no_caches)
        self.stub(
            "srun",
            'printf "%s\\0" "$@" > "$NOTES/srun"; echo "${RECIPES_CLUSTER-none}" > '
            '"$NOTES/cluster"; pwd > "$NOTES/pwd"; trap : USR1; for s in ${SIGNALS:-}; '
            'do kill -$s $PPID; sleep 0.2; done; exit "${STEP_ENDS:-0}"',
        )
        self.stub("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
        self.stub("python", f'exec {shlex.quote(sys.executable)} "$@"')

    def stub(self, name: str, body: str) -> None:
        executable(self.folder / "bin" / name, f"#!/bin/bash\n{body}\n")

    def run(
        self, script: Path | str, *words: str, cwd: str = "", **environ: str
    ) -> tuple[int, str]:
        """Runs a script as in a job. Returns its exit status and its stderr."""
        variables = {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            "NOTES": str(self.folder),
            "VIRTUAL_ENV": str(self.folder),
            "LC_ALL": "C.UTF-8",
            "SLURM_JOB_ID": "7",
            "HOME": str(self.folder),
            **environ,
        }
        ran = subprocess.run(
            ["bash", script, *words],
            cwd=cwd or self.root,
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return ran.returncode, ran.stderr

    @property
    def srun(self) -> list[str] | None:
        """The arguments of srun; None if it was not called."""
        path = self.folder / "srun"
        if not path.exists():
            return None
        return path.read_bytes().decode().split("\0")[:-1]

    @property
    def files(self) -> set[str]:
        return set(os.listdir(self.folder)) | set(os.listdir(self.root))


MODULE = {"BASH_FUNC_module%%": '() { echo "$*" >> "$NOTES/modules"; return "${MODULE_ENDS:-0}"; }'}


class Stubs:
    """Stubs for commands, found before the real ones. Each stub records its arguments in
    ``folder``.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setenv("NOTES", str(folder))
        monkeypatch.setenv("PATH", f"{folder}/stubs:/usr/bin:/bin")

    def add(self, name: str, body: str) -> None:
        """Makes or replaces the command ``name``. body: what it does, in bash."""
        record = f'printf "%s\\0" "$@" >> "$NOTES/{name}.calls"; echo >> "$NOTES/{name}.calls"'
        executable(self.folder / "stubs" / name, f"#!/bin/bash\n{record}\n{body}\n")

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call of the command ``name``."""
        path = self.folder / f"{name}.calls"
        if not path.exists():
            return []
        return [line.split("\0")[:-1] for line in path.read_text().splitlines()]
