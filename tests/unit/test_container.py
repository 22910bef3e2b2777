"""Ranks in a container: which runtime, what it is shown, and which variable wins. What is really started is in tests/slurm."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from recipes.core.errors import ConfigError
from recipes.core.launch import batch, container, jobs, scripts
from recipes.core.run import command_line
from tests import helpers
from tests.helpers import ROOT


@pytest.mark.parametrize(
    ("image", "runtime", "expected"),
    [
        ("/a/torch.sif", "auto", "apptainer"), ("docker://x/y:1", "auto", "apptainer"), ("/a/torch.sqsh", "auto", "pyxis"),
        ("registry#x/y:1", "auto", "pyxis"), ("docker://x", "pyxis", "pyxis"), ("/a/torch.sqsh", "singularity", "singularity"),
    ],
)  # fmt: skip
def test_the_runtime_is_told_by_the_image(image: str, runtime: str, expected: str) -> None:
    found = container.chosen(image, runtime, "/a,/b:/c")
    assert found
    assert (found.runtime, found.mounts) == (expected, ("/a", "/b:/c"))


def test_an_image_that_is_a_file_is_found_wherever_the_job_starts(tmp_path: Path) -> None:
    (tmp_path / "x.sif").touch()
    assert container.whole("x.sif", tmp_path) == f"{tmp_path}/x.sif"
    assert container.whole("docker://x", tmp_path) == "docker://x"


def test_no_image_is_no_container() -> None:
    assert container.chosen("", "pyxis", "/a") is None


def test_folders_that_are_there_and_each_once(tmp_path: Path) -> None:
    for name in ("repository/runs", "data", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "other/file.env").write_text("")
    words = {
        "data_dir": f"{tmp_path}/data", "run_dir": f"{tmp_path}/repository/runs/new/1", "network": f"{tmp_path}/other/file.env",
        "stage_dir": "$TMPDIR", "config": "/", "lr": "/data",
    }  # fmt: skip
    keys = ("data_dir", "run_dir", "network", "stage_dir", "config")
    found = container.folders(words, keys, [tmp_path / "repository"])
    assert found == [str(tmp_path / name) for name in ("data", "other", "repository")]


def test_a_submitted_job_and_a_script_start_their_ranks_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECIPES_DATA", raising=False)  # a folder that is seen inside, too
    (tmp_path / "x.sqsh").touch()
    for image, option in ((f"{tmp_path}/x.sqsh", f"--container-image={tmp_path}/x.sqsh"), ("docker://x", "")):
        words = [f"container={image}", "container_mounts=/m", "network=ethernet", "device=cpu"]
        job = jobs.describe(command_line.parse(["recipe=toy", *words], environ={}), ROOT, ROOT)
        found: dict[str, Any] = scripts.submitit_parameters(job, "python")
        assert "export NCCL_IB_DISABLE=1" in "\n".join(found["setup"])
        assert (option in found["srun_args"]) is bool(option)
        inside = scripts.enter(job, "python")[1]
        assert inside[-1] == "python3"
        assert bool(option) or {"docker://x", "/m", "apptainer"} <= set(inside)
        with open(tmp_path / "lines", "w") as lines:
            environ = {
                "RECIPES_LINES": str(lines.fileno()),
                "RECIPES_CONTAINER": image,
                "RECIPES_CONTAINER_MOUNTS": "/m",
            }
            assert batch.begin("toy", ["network=ethernet", "device=cpu"], environ) == 0
        said = (tmp_path / "lines").read_text()
        assert "export NCCL_IB_DISABLE=1" in said
        assert f"inside=({shlex.join(inside)})" in said
        assert (f"step=({option} " if option else "step=()") in said


@pytest.mark.parametrize("runtime", ["apptainer", "singularity"])
def test_what_is_set_here_wins_over_the_image(runtime: str) -> None:
    """The env file's value, unless the user has one, also an empty one; over both the value that the user set for the inside alone."""
    prefix = f"{runtime.upper()}ENV_"
    lines = container.exports(
        container.Container("x.sif", runtime), {"NCCL_A": "file", "NCCL_B": "file", "OMP_X": 'a "b" $c'}
    )
    shell = "; ".join(["stop() { :; }", *lines, "env"])
    environ = {"NCCL_B": "mine", "NCCL_C": "mine", "UCX_D": "", "HOME": "/h", "PATH": "/usr/bin:/bin"}
    environ |= {f"{prefix}NCCL_E": "inside", "NCCL_E": "outside"}
    said = subprocess.run(["bash", "-c", shell], env=environ, capture_output=True, text=True, check=True).stdout
    assert f"{runtime.upper()}_NO_EVAL=1" in said.splitlines()  # a value is not expanded by the shell inside
    inside = dict(line.removeprefix(prefix).split("=", 1) for line in said.splitlines() if line.startswith(prefix))
    assert inside == {
        "NCCL_A": "file", "NCCL_B": "mine", "NCCL_C": "mine", "NCCL_E": "inside", "UCX_D": "", "OMP_X": 'a "b" $c',
        "PYTHONNOUSERSITE": "1",
    }  # fmt: skip


def test_each_run_of_a_sweep_has_its_folders(tmp_path: Path) -> None:
    for name in ("a", "b", "out", "image.sif"):
        (tmp_path / name).mkdir()
    words = [
        "recipe=toy",
        f"container={tmp_path}/image.sif",
        f"run_dir={tmp_path}/out/s",
        f"sweep.resume={tmp_path}/a,{tmp_path}/b",
    ]
    bound = jobs.describe(command_line.parse(words, environ={}), ROOT, ROOT).bound
    assert {f"{tmp_path}/{name}" for name in ("a", "b", "out")} <= set(bound)


def test_gpus_are_shown_where_there_are_any() -> None:
    here = container.Container("x.sif", "apptainer")
    assert "--nv" in container.step(here, Path("/c"), ["/c"], {}, {}, gpus=True)[1]
    assert "--nv" not in container.step(here, Path("/c"), ["/c"], {}, {}, gpus=False)[1]


def test_what_a_rank_is_started_with_inside() -> None:
    """The folders of the run and those asked for, in the code's folder, with the variables that say how a network is used."""
    environ = {f"{start}_X": "1" for start in ["NCCL", "GLOO", "UCX", "FI", "TORCH", "RECIPES", "MASTER", "SLURM"]} | {
        "PATH": "/bin"
    }
    given = (Path("/c"), ["/c", "/d"], {"OMP_X": "1"}, environ, False)
    options, inside = container.step(container.Container("x.sif", "singularity", ("/m:/i",)), *given)
    assert options == []
    binds = ["--bind", "/c:/c", "--bind", "/d:/d", "--bind", "/m:/i"]
    clean = ["env", "-u", "PYTHONPATH", "-u", "PYTHONHOME", "-u", "PYTHONSAFEPATH"]  # set for the outside's Python
    assert inside == [*clean, "sh", "-c", container.EXEC, "singularity", *binds, "--pwd", "/c", "x.sif", "python3"]
    options, inside = container.step(container.Container("x.sqsh", "pyxis", ("/m:/i", "/n")), *given)
    names = "FI_X,GLOO_X,MASTER_X,NCCL_X,OMP_X,RECIPES_X,TORCH_X,UCX_X"
    assert options == [
        "--container-image=x.sqsh", "--container-mounts=/c:/c,/d:/d,/m:/i,/n:/n", "--container-workdir=/c", f"--container-env={names}",
    ]  # fmt: skip
    assert inside == [*clean, "python3"]


def test_the_tmpdir_of_a_rank_s_node_is_mounted_where_it_exists(tmp_path: Path) -> None:
    inside = container.step(container.Container("x.sif", "echo"), Path("/c"), [], {}, {}, gpus=False)[1]
    for folder, mounted in ((f"{tmp_path}", f"--bind {tmp_path} "), (f"{tmp_path}/nosuch", ""), ("", "")):
        environ = {"PATH": "/usr/bin:/bin", "TMPDIR": folder}
        said = subprocess.run(inside, env=environ, capture_output=True, text=True, check=True).stdout
        assert said == f"exec {mounted}--pwd /c x.sif python3\n"


def test_typed_wins_over_the_surroundings_and_those_over_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "env/clusters").mkdir(parents=True)
    (tmp_path / "env/common.env").write_text("")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "env/clusters/site.yaml").write_text("container: docker://profile\ncontainer_mounts: /scratch\n")
    helpers.use_root(monkeypatch, tmp_path)
    around = {"RECIPES_CONTAINER": "docker://surroundings"}
    for words, environ, image in (
        ((), {}, "docker://profile"),
        ((), around, "docker://surroundings"),
        (("container=docker://typed",), around, "docker://typed"),
    ):
        job = command_line.parse(["recipe=toy", "cluster=site", *words], environ=environ).job
        assert (job.container, job.container_mounts) == (image, "/scratch")
        if not words:  # a batch script has nothing typed
            in_script = command_line.parse([], recipe="toy", environ={"RECIPES_CLUSTER": "site"})
            found = batch.container_of(in_script, environ)
            assert found == container.Container(image, "apptainer", ("/scratch",))


@pytest.mark.parametrize(
    "word",
    [
        "container=/nosuch/torch.sif", "container=torch.sqsh", "container=a b", "container=$(x)", "container=a;b", "container_runtime=docker",
        "container_mounts=/a:/b:/c:/d", "container_mounts=/a,,/b", "container_mounts=/a b",
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        command_line.parse(["recipe=toy", word], environ={})
    assert str(caught.value).startswith(word.partition("=")[0] + "=")


@pytest.mark.parametrize("name", ["Dockerfile", "apptainer.def"])
def test_the_images_have_what_the_recipes_need(name: str) -> None:
    text = (ROOT / "env" / name).read_text()
    [line] = re.findall(r"pip install .*", text)
    project = (ROOT / "pyproject.toml").read_text()
    blocks = re.findall(r"^(?:dependencies|fast) = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)
    wanted = {found for block in blocks for found in re.findall(r'"([a-z-]+)[<>=]', block)}
    assert len(wanted) == 6
    assert wanted == set(line.split("tested-versions.txt ")[1].split())
    assert "libibverbs1 ibverbs-providers librdmacm1" in text
