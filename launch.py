"""Submits a recipe to Slurm, runs it on this machine, or prints the sbatch script: ``python launch.py recipe=mnist nodes=2``.

``launcher=slurm`` (default) submits through submitit and does not wait; ``launcher=local`` starts the ranks on this machine;
``launcher=print`` prints the sbatch script. ``python launch.py check recipe=mnist …`` validates a job without submitting it.
``python launch.py --help`` lists the keys. Exit status: 0 done or submitted; 2 invalid keys; 3 this machine, or Slurm, cannot run it.

This file only chooses the Python environment; recipes/core/launch/cli.py does the work. Python 3.6, the oldest on login nodes,
can read this file.
"""

import importlib.util
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))


def main(argv: "list[str]") -> int:
    _use_project_python(argv)
    from recipes.core.launch import cli

    return cli.main(argv, active_environment())


def active_environment() -> str:
    """The folder of the active venv or conda environment, or of this Python's; "" for none, or conda's base."""
    conda = "" if _in_conda_base() else os.environ.get("CONDA_PREFIX")
    own = sys.prefix if sys.prefix != sys.base_prefix else ""
    return os.environ.get("VIRTUAL_ENV") or conda or own


def _in_conda_base() -> bool:
    """Whether conda's base environment is active. conda activates it in every shell, so the user did not choose it."""
    return os.environ.get("CONDA_DEFAULT_ENV") == "base"


def _use_project_python(argv: "list[str]") -> None:
    """Starts again in the Python of the profile's environment, or of .venv, where it exists and no environment is active."""
    if sys.getfilesystemencoding().lower() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # In a locale such as POSIX or ISO-8859-1 this Python would misread paths; keys, scripts and logs are UTF-8.
        os.execve(sys.executable, [sys.executable, str(ROOT / "launch.py"), *argv], dict(os.environ, PYTHONUTF8="1"))
    words = dict(word.partition("=")[::2] for word in argv)
    cluster = words.get("cluster") or os.environ.get("RECIPES_CLUSTER", "")
    profile, python = ROOT / "env" / "clusters" / f"{cluster}.yaml", ROOT / ".venv" / "bin" / "python"
    text = profile.read_text(errors="replace") if re.fullmatch("[A-Za-z0-9_-]+", cluster) and profile.is_file() else ""
    named = re.search(r"^environment: *([^\s#]+)", text, re.MULTILINE)
    if named:
        python = Path(named[1]) / "bin" / "python"
    active = active_environment()
    here = os.path.realpath(sys.prefix) == os.path.realpath(str(python.parents[1]))
    # A container image has all packages, and may not be able to run a Python from outside.
    enough = all(importlib.util.find_spec(name) for name in ("omegaconf", "submitit", "torch"))
    if named and not active and not here and not enough and not python.exists():
        print(
            f"launch.py: cluster={cluster}: environment: {named[1]} has no bin/python on this machine: make that"
            f" environment, or correct env/clusters/{cluster}.yaml",
            file=sys.stderr,
        )
        sys.exit(3)
    if not active and not here and (named or not enough or _in_conda_base()) and python.exists():
        os.execv(str(python), [str(python), str(ROOT / "launch.py"), *argv])
    if sys.version_info < (3, 10):  # noqa: UP036
        version = ".".join(map(str, sys.version_info[:2]))
        print(
            f"launch.py: requires Python 3.10 or later, this is {version}: activate your environment, or run make install",
            file=sys.stderr,
        )
        sys.exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
