"""launch.py itself: it chooses the Python environment."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers import ROOT
from tests.unit.launch.stand_ins import Bench


def test_python_3_6_can_read_launch_py() -> None:
    tree = ast.parse((ROOT / "launch.py").read_text(), feature_version=(3, 6))
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"importlib.util", "os", "re", "sys"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for hint in (node.returns, *(argument.annotation for argument in node.args.args)):
            assert isinstance(hint, (ast.Constant, ast.Name)), ast.unparse(node)


def test_launch_py_restarts_in_the_profiles_environment(tmp_path: Path) -> None:
    copied = tmp_path / "clone"
    shutil.copytree(ROOT / "recipes", copied / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "env", copied / "env")
    shutil.copy(ROOT / "launch.py", copied)
    (tmp_path / "envs/bin").mkdir(parents=True)
    (tmp_path / "envs/bin/python").write_text('#!/bin/sh\necho "taken: $*"\n')
    (tmp_path / "envs/bin/python").chmod(0o755)
    (copied / "env/clusters/here.yaml").write_text(f"environment: {tmp_path}/envs\n")
    environ = {"PATH": "/usr/bin:/bin", "RECIPES_CLUSTER": "here"}
    base = os.path.realpath(sys.executable)
    done = subprocess.run(
        [base, copied / "launch.py", "recipe=toy"], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"taken: {copied}/launch.py recipe=toy\n"
    # One of conda's is no venv: what runs it is there already.
    (copied / "env/clusters/here.yaml").write_text(f"environment: {Path(base).parents[1]}\n")
    environ["PYTHONPATH"] = ":".join(sys.path[1:])
    done = subprocess.run(
        [base, copied / "launch.py", "recipe=toy", "launcher=print"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith("#!/bin/bash"), done.stderr
    # .venv is for a Python that has not what is wanted.
    shutil.copytree(tmp_path / "envs", copied / ".venv")
    enough = {"PYTHONPATH": environ["PYTHONPATH"]}
    for variables, first in (
        ({}, "taken: "),
        (enough, "#!/bin/bash"),
        ({"CONDA_PREFIX": "/conda", "CONDA_DEFAULT_ENV": "base"}, "taken: "),  # each shell of conda's users has it
        ({**enough, "CONDA_PREFIX": "/conda", "CONDA_DEFAULT_ENV": "base"}, "taken: "),
        ({**enough, "CONDA_PREFIX": "/conda", "CONDA_DEFAULT_ENV": "torch"}, "#!/bin/bash"),
    ):
        done = subprocess.run(
            [base, copied / "launch.py", "recipe=toy", "launcher=print"], env={"PATH": "/usr/bin:/bin", **variables},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.stdout.startswith(first), done.stderr


def test_a_missing_or_unused_environment_is_reported(bench: Bench) -> None:
    shutil.copy(ROOT / "launch.py", bench.root)
    (bench.root / "env/clusters/here.yaml").write_text(f"environment: {bench.folder}/envs\n")
    base, missing = (
        os.path.realpath(sys.executable),
        f"cluster=here: environment: {bench.folder}/envs has",
    )

    def launch_py(*words: str, **environ: str) -> tuple[int, str, str]:
        variables = {"PATH": "/usr/bin:/bin", "RECIPES_CLUSTER": "here", **environ}
        argv = [base, bench.root / "launch.py", *words]
        done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    here = {"PYTHONPATH": ":".join(sys.path[1:])}
    for environ in ({}, here):  # a Python without and one with what launch.py imports
        status, _, stderr = launch_py("recipe=toy", "launcher=local", **environ)
        assert (status, stderr.startswith(f"launch.py: {missing}"), len(stderr.splitlines())) == (3, True, 1), stderr
    status, _, stderr = launch_py("check", "recipe=doctor", "launcher=local", "device=cpu", **here)
    assert (status, stderr) == (
        3,
        f"python: failed: {missing} no bin/python on this machine: make that environment, or correct env/clusters/here.yaml\n",
    )
    status, stdout, stderr = launch_py("recipe=toy", "launcher=print", **here)
    assert (status, stdout[:2]) == (0, "#!")
    assert missing in stderr
    unused = f"the active environment {bench.folder} is used, not environment: {bench.folder}/envs of cluster=here\n"
    assert launch_py("recipe=toy", "launcher=print", VIRTUAL_ENV=str(bench.folder), **here)[2] == f"launch.py: {unused}"
    _, stderr = bench.run("sbatch/mnist_1x1.sh", "run_dir=/nosuch", RECIPES_CLUSTER="here")
    assert unused in stderr
