"""Submits a recipe to Slurm, runs it on this machine, or prints the sbatch script.

    python launch.py recipe=mnist nodes=2           # submits a job
    python launch.py check recipe=mnist nodes=2     # validates it without submitting it
    python launch.py --help                         # lists the keys

``launcher=slurm`` (default) submits through submitit and does not wait; ``launcher=local`` starts
the ranks on this machine; ``launcher=print`` prints the sbatch script. Exit status: 0 done or
submitted; 2 invalid keys; 3 this machine, or Slurm, cannot run it.

This file only starts the Python environment that sbatch/job.sh chooses; recipes/core/launch/cli.py
does the work. Python 3.6, the oldest on login nodes, can read this file.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
# Modules are not loaded here: the job loads them on its node. The Python is printed last, without a
# line break: a file of the user ($BASH_ENV) may print lines before it.
CHOOSE = (
    '. sbatch/job.sh; load() { :; }; site >&2; find_python "$PWD" "$@" >&2; printf %s "$python"'
)


def main(argv: "list[str]") -> int:
    python = os.environ.pop("RECIPES_PYTHON", "") or _choose_python(argv)
    if sys.version_info < (3, 10):  # noqa: UP036
        version = ".".join(map(str, sys.version_info[:2]))
        fix = "activate your environment, or run make install"
        print(
            f"launch.py: requires Python 3.10 or later, but this is {version}: {fix}",
            file=sys.stderr,
        )
        return 3
    from recipes.core.launch import cli

    return cli.main(argv, python)


def _choose_python(argv: "list[str]") -> str:
    """The Python of this job. Starts launch.py again if that is another Python than this one."""
    end = argv.index("--") if "--" in argv else None  # the rest is for a program of the user
    words = dict(word.partition("=")[::2] for word in argv[:end])
    cluster = words.get("cluster") or os.environ.get("RECIPES_CLUSTER", "")
    # Without .venv, torch is not required here: the ranks may run in an image.
    packages = ["omegaconf", "submitit"]
    if (ROOT / ".venv").exists():
        packages.append("torch")
    # conda activates base in each shell of its users, so they did not choose it.
    enough = os.environ.get("CONDA_DEFAULT_ENV") != "base" and all(
        map(importlib.util.find_spec, packages)
    )
    chosen = sys.executable
    # an image may have no bash
    if not enough or (ROOT / "env" / "clusters" / (cluster + ".yaml")).is_file():
        environ = dict(os.environ, RECIPES_CLUSTER=cluster)
        # the user has typed this venv, whether it is active or not
        if sys.prefix != sys.base_prefix:
            environ["VIRTUAL_ENV"] = sys.prefix
        command = ["bash", "-c", CHOOSE, "launch.py", *([chosen] if enough else [])]
        done = subprocess.run(command, cwd=str(ROOT), env=environ, stdout=subprocess.PIPE)
        if done.returncode == 0:
            chosen = os.fsdecode(done.stdout.rpartition(b"\n")[2])
        # print is for any machine
        elif done.returncode != 3 or not enough or words.get("launcher") != "print":
            sys.exit(done.returncode)
    is_this = chosen == sys.executable or os.path.samefile(sys.prefix, Path(chosen).parent.parent)
    is_utf8 = sys.getfilesystemencoding().lower() == "utf-8"  # else this Python would misread paths
    if not is_this or not is_utf8:
        environ = dict(os.environ, PYTHONUTF8="1", RECIPES_PYTHON=chosen)
        os.execve(chosen, [chosen, str(ROOT / "launch.py"), *argv], environ)
    return chosen


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe: launch.py … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 141
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
