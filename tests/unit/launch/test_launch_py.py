"""launch.py itself: it chooses the Python environment."""

import ast
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from recipes.core import errors
from tests.helpers import ROOT
from tests.unit.launch.stand_ins import Bench, executable


def test_python_3_6_can_read_launch_py() -> None:
    tree = ast.parse((ROOT / "launch.py").read_text(), feature_version=(3, 6))
    imported = {
        alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names
    }
    assert imported == {"importlib.util", "os", "subprocess", "sys"}
    for node in ast.walk(tree):
        assert not isinstance(node, ast.ImportFrom) or node.module != "__future__"
        if isinstance(node, ast.FunctionDef):
            for hint in (node.returns, *(argument.annotation for argument in node.args.args)):
                assert isinstance(hint, (ast.Constant, ast.Name)), ast.unparse(node)


def test_an_old_python_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RECIPES_PYTHON", sys.executable)
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    assert launch.main([]) == errors.EXIT_MACHINE
    assert "requires Python 3.10 or later, but this is 3.9" in capsys.readouterr().err


def launch_py(bench: Bench, *words: str, **environ: str) -> tuple[int, str, str]:
    """Runs launch.py of the bench with a Python that is no venv. Returns its exit status, stdout
    and stderr.
    """
    shutil.copy(ROOT / "launch.py", bench.root)
    argv = [os.path.realpath(sys.executable), bench.root / "launch.py", "recipe=toy", *words]
    variables = {"PATH": "/usr/bin:/bin", **environ}
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def stub_python(environment: Path) -> None:
    executable(environment / "bin/python", '#!/bin/sh\necho "taken: $*; $RECIPES_PYTHON"\n')


ENOUGH = {"PYTHONPATH": ":".join(sys.path[1:])}  # this Python has all packages


def test_launch_py_restarts_in_the_profiles_environment(bench: Bench) -> None:
    profile = bench.root / "env/clusters/here.yaml"
    environment = bench.folder / "envs"
    stub_python(environment)
    # the job loads the modules
    profile.write_text(f"environment: {environment}\nmodules:\n  - nosuch\n")
    taken = f"taken: {bench.root}/launch.py recipe=toy; {environment}/bin/python\n"
    (bench.folder / "bashrc").write_text("echo Site news\n")  # bash reads it at each start
    start_up = {"BASH_ENV": f"{bench.folder}/bashrc"}
    assert launch_py(bench, RECIPES_CLUSTER="here", **start_up, **ENOUGH) == (0, taken, "")
    # A conda environment is no venv.
    profile.write_text(f"environment: {Path(os.path.realpath(sys.executable)).parents[1]}\n")
    _, stdout, _ = launch_py(bench, "launcher=print", RECIPES_CLUSTER="here", **ENOUGH)
    assert stdout.startswith("#!/bin/bash")


@pytest.mark.parametrize(
    ("environ", "first"),
    [
        ({}, "taken: "),
        (ENOUGH, "#!/bin/bash"),
        ({"CONDA_PREFIX": "/conda", "CONDA_DEFAULT_ENV": "base"}, "taken: "),
        ({**ENOUGH, "CONDA_PREFIX": "/conda", "CONDA_DEFAULT_ENV": "base"}, "taken: "),
        ({**ENOUGH, "CONDA_PREFIX": "/conda", "CONDA_DEFAULT_ENV": "torch"}, "#!/bin/bash"),
    ],
)
def test_a_python_with_all_packages_comes_before_dot_venv(
    bench: Bench, environ: dict[str, str], first: str
) -> None:
    stub_python(bench.root / ".venv")
    _, stdout, stderr = launch_py(bench, "launcher=print", **environ)
    assert stdout.startswith(first), stderr


def test_launch_py_reads_utf8_in_every_locale(bench: Bench) -> None:
    posix = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", **ENOUGH}
    _, stdout, _ = launch_py(bench, "launcher=print", "run_dir=/über", **posix)
    assert "\nset -- 'run_dir=/über' \"$@\"\n" in stdout


def test_a_missing_or_unused_environment_is_reported(bench: Bench) -> None:
    (bench.root / "env/clusters/here.yaml").write_text(f"environment: {bench.folder}/envs\n")
    missing = f"there is no {bench.folder}/envs/bin/python on "
    for environ in ({}, ENOUGH):
        status, _, stderr = launch_py(bench, "launcher=local", RECIPES_CLUSTER="here", **environ)
        assert status == 3, stderr
        assert stderr.startswith(missing)
        assert len(stderr.splitlines()) == 1
    status, stdout, stderr = launch_py(
        bench, "launcher=print", "cluster=here", RECIPES_CLUSTER="other", **ENOUGH
    )
    # the script may be for another machine
    assert stdout[:2] == "#!"
    assert stderr.startswith(missing)
    assert status == 0
    stub_python(bench.folder / "active")
    active = {"VIRTUAL_ENV": f"{bench.folder}/active", "RECIPES_CLUSTER": "here"}
    _, stdout, stderr = launch_py(bench, **active, **ENOUGH)
    assert stdout.startswith("taken: ")
    expected = (
        f"the active environment {bench.folder}/active is used, not that of cluster=here "
        f"(environment: {bench.folder}/envs)\n"
    )
    assert stderr == expected
    _, stderr = bench.run("sbatch/mnist_1x1.sh", bench.run_dir, RECIPES_CLUSTER="here")
    assert expected.replace(f"{bench.folder}/active", f"{bench.folder}") in stderr


def test_a_reader_that_closes_the_pipe_causes_no_traceback() -> None:
    """``true`` has ended when the first line is printed."""
    command = f"{shlex.quote(sys.executable)} launch.py recipe=mnist launcher=print | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.returncode == 141
