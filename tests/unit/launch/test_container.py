"""Ranks in a container: the runtime, the folders and the variables. tests/slurm starts real
containers.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

from recipes.core.errors import ConfigError, MachineError
from recipes.core.launch import batch, container
from recipes.core.run import command_line
from tests.helpers import ROOT
from tests.unit.launch.stand_ins import executable


@pytest.mark.parametrize(
    ("image", "runtime", "expected"),
    [
        ("docker://x/y:1", "auto", "apptainer"),
        ("registry#x/y:1", "auto", "pyxis"),
        ("docker://x", "pyxis", "pyxis"),
        ("registry#x/y:1", "singularity", "singularity"),
        ("docker://x.sqsh", "", "pyxis"),
    ],
)
def test_the_image_determines_the_runtime(image: str, runtime: str, expected: str) -> None:
    variables = {"": image, "_RUNTIME": runtime, "_MOUNTS": "~/a,/b:/c"}
    environ = {f"RECIPES_CONTAINER{name}": value for name, value in variables.items()}
    settings = command_line.parse([], recipe="toy", environ=environ)
    chosen = container.of_job(settings, environ)
    assert chosen.image == image
    assert chosen.runtime == expected
    assert chosen.mounts[-2:] == (f"{Path.home()}/a", "/b:/c")
    assert container.of_job(settings, {**environ, "RECIPES_CONTAINER": ""}) is None


def test_an_image_file_becomes_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.sif").touch()
    assert container.absolute_image("x.sif", tmp_path) == f"{tmp_path}/x.sif"
    assert container.absolute_image("docker://x", tmp_path) == "docker://x"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert container.absolute_image("~/x.sif", Path("/")) == f"{tmp_path}/x.sif"


def test_only_existing_folders_are_bound_and_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RECIPES_DATA", "TORCH_HOME"):
        monkeypatch.setenv(name, f"{tmp_path}/{name}")
    names = ["RECIPES_DATA", "TORCH_HOME", "data", "disk", "old", "other", "repository"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "repository/runs").symlink_to(tmp_path / "disk")
    (tmp_path / "other/file.env").write_text("")
    words = {
        "data_dir": f"{tmp_path}/data",
        "run_dir": f"{tmp_path}/repository/runs/new/1",
        "network": f"{tmp_path}/other/file.env",
        "stage_dir": "$TMPDIR",
        "resume": f"{tmp_path}/old/c.pt",
        "lr": f"{tmp_path}/lr",
    }
    settings = command_line.parse([], recipe="imagenet", environ={})
    (tmp_path / "earlier").mkdir()
    of_run = {"data_dir": f"{tmp_path}/earlier"}
    settings = dataclasses.replace(settings, typed=words, from_run=of_run)
    folders = container.folders_of_run(settings, tmp_path / "repository")
    assert folders == [str(tmp_path / name) for name in names]


@pytest.mark.parametrize("name", ["a,evil:/usr/bin,b", "a:/usr/bin"])
def test_a_folder_whose_name_is_several_mounts_is_refused(tmp_path: Path, name: str) -> None:
    """The run that is resumed, perhaps of another user, names it."""
    folder = tmp_path / name
    folder.mkdir(parents=True)
    settings = command_line.parse([], recipe="imagenet", environ={})
    settings = dataclasses.replace(settings, from_run={"data_dir": str(folder)})
    with pytest.raises(ConfigError, match="has a comma or a colon in its name"):
        container.folders_of_run(settings, ROOT)


def test_begin_starts_ranks_in_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECIPES_DATA", raising=False)  # it would also be bound
    (tmp_path / "x.sqsh").touch()
    executable(tmp_path / "bin/apptainer", "")
    for image, option in (
        (f"{tmp_path}/x.sqsh", f"--container-image={tmp_path}/x.sqsh"),
        ("docker://x", ""),
    ):
        environ = {
            "RECIPES_CONTAINER": image,
            "RECIPES_CONTAINER_MOUNTS": "/m",
            "PATH": f"{tmp_path}/bin",
        }
        shell = batch.begin("toy", Path(__file__), ["network=ethernet", "device=cpu"], environ)
        assert ("export", "NCCL_IB_DISABLE=1") in shell
        assert ("unset", "RECIPES_ATTEMPT") in shell  # there is no job
        assert [value for verb, value in shell if verb == "step"][:1] == [option][: bool(option)]
        inside = [value for verb, value in shell if verb == "inside"]
        assert inside[-1] == "python3"
        assert "--nv" not in inside
        if not option:
            assert {"docker://x", "/m", "apptainer", f"{ROOT}:{ROOT}"} <= set(inside)


@pytest.mark.parametrize("runtime", ["apptainer", "singularity"])
def test_variables_of_the_host_take_precedence_over_the_image(tmp_path: Path, runtime: str) -> None:
    """A value of the user, even an empty one, replaces that of the env file. A value for the inside
    only replaces both.
    """
    prefix = f"{runtime.upper()}ENV_"
    variables = {"NCCL_A": "file", "NCCL_B": "file", "OMP_X": 'a "b" $c'}
    executable(tmp_path / runtime, "")
    environ = {
        "NCCL_B": "mine",
        "NCCL_C": "mine",
        "UCX_D": "",
        "HOME": "/h",
        "PATH": str(tmp_path),
    }
    environ |= {f"{prefix}NCCL_E": "inside", "NCCL_E": "outside"}
    # a restart exports another attempt
    environ |= {"RECIPES_DATA": "/d", "RECIPES_ATTEMPT": "/r/attempts/0000", "RECIPES_SPEC": "{}"}
    image = container.Container("x.sif", runtime, variables=variables)
    exported = environ | container.exports(image, environ)
    # the shell inside does not expand values
    assert exported[f"{runtime.upper()}_NO_EVAL"] == "1"
    inside = {
        name.removeprefix(prefix): value
        for name, value in exported.items()
        if name.startswith(prefix)
    }
    assert exported["NCCL_A"] == "file"
    assert exported["NCCL_B"] == "mine"
    assert inside == {
        "NCCL_A": "file",
        "NCCL_B": "mine",
        "NCCL_C": "mine",
        "NCCL_E": "inside",
        "RECIPES_DATA": "/d",
        "UCX_D": "",
        "OMP_X": 'a "b" $c',
        "PYTHONNOUSERSITE": "1",
    }


def test_the_command_of_a_rank_in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has the folders of the run, the mounts, the folder of the code, and the network
    variables.
    """
    starts = ["NCCL", "GLOO", "UCX", "FI", "TORCH", "RECIPES", "MASTER", "SLURM"]
    environ = {f"{start}_X": "1" for start in starts} | {"PATH": "/bin", "RECIPES_DATA": "/d"}
    of_run = ("/c:/c", "/d:/d")
    place = (Path("/c"), environ)
    # the driver of AMD, or NVIDIA's
    for device, option in (
        ("/dev/null", "--rocm"),
        ("/dev/nosuch", "--nv"),
    ):
        monkeypatch.setattr(container, "AMD", device)
        assert option in container.step(container.Container("x.sif", "apptainer"), *place)[1]
    singularity = container.Container("x.sif", "singularity", (*of_run, "/m:/i"), False)
    options, inside = container.step(singularity, *place)
    assert options == []
    # set for the Python outside
    clean = ["env", "-u", "PYTHONPATH", "-u", "PYTHONHOME", "-u", "PYTHONSAFEPATH"]
    binds = ["--bind", "/c:/c", "--bind", "/d:/d", "--bind", "/m:/i", "--pwd", "/c"]
    shell = ["sh", "-c", container.EXEC, "singularity"]
    assert inside == [*clean, *shell, *binds, "x.sif", "python3"]
    pyxis = container.Container("x.sqsh", "pyxis", (*of_run, "/m:/i", "/n"), False, {"OMP_X": "1"})
    options, inside = container.step(pyxis, *place)
    names = "FI_X,GLOO_X,MASTER_X,NCCL_X,OMP_X,RECIPES_DATA,TORCH_X,UCX_X"
    assert options == [
        "--container-image=x.sqsh",
        "--container-mounts=/c:/c,/d:/d,/m:/i,/n:/n",
        "--container-workdir=/c",
        f"--container-env={names}",
    ]
    assert inside == [*clean, "python3"]


def test_the_tmpdir_of_a_node_is_mounted_if_it_exists(tmp_path: Path) -> None:
    inside = container.step(container.Container("x.sif", "echo", (), False), Path("/c"), {})[1]
    for folder, mounted in (
        (f"{tmp_path}", f"--bind {tmp_path} "),
        (f"{tmp_path}/nosuch", ""),
        ("", ""),
    ):
        environ = {"PATH": "/usr/bin:/bin", "TMPDIR": folder}
        output = subprocess.run(
            inside, env=environ, capture_output=True, text=True, check=True
        ).stdout
        assert output == f"exec {mounted}--pwd /c x.sif python3\n"


def test_precedence_of_the_container_keys(site: Path) -> None:
    site.write_text("container: docker://profile\ncontainer_mounts: /scratch\n")
    around = {"RECIPES_CONTAINER": "docker://surroundings"}
    for words, environ, image in (
        ((), {}, "docker://profile"),
        ((), around, "docker://surroundings"),
        (("container=docker://typed",), around, "docker://typed"),
    ):
        job = command_line.parse(["recipe=toy", "cluster=here", *words], environ=environ).job
        assert job.container == image
        assert job.container_mounts == "/scratch"
        if not words:  # a batch script has no typed keys
            in_script = command_line.parse([], recipe="toy", environ={"RECIPES_CLUSTER": "here"})
            chosen = container.of_job(in_script, environ)
            assert chosen.image == image
            assert chosen.runtime == "apptainer"
            assert chosen.mounts[-1] == "/scratch"


def test_a_missing_container_runtime_is_reported(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"^container=: \S+ has no apptainer: if an environment"):
        container.exports(container.Container("x.sif", "apptainer"), {"PATH": str(tmp_path)})


@pytest.mark.parametrize("name", ["Dockerfile", "apptainer.def"])
def test_the_images_install_all_dependencies(name: str) -> None:
    text = (ROOT / "env" / name).read_text()
    [line] = re.findall(r"pip install .*", text)
    project = (ROOT / "pyproject.toml").read_text()
    blocks = re.findall(
        r"^(?:dependencies|digits|fast) = \[(.*?)\]", project, re.MULTILINE | re.DOTALL
    )
    wanted = {package for block in blocks for package in re.findall(r'"([a-z-]+)[<>=]', block)}
    assert len(wanted) == 8
    assert wanted == set(line.split("tested-versions.txt ")[1].split())
    assert "libibverbs1 ibverbs-providers librdmacm1" in text


@pytest.mark.parametrize("gpus", [True, False])
def test_pyxis_gets_the_variables_with_which_enroot_gives_it_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: bool
) -> None:
    monkeypatch.setattr(
        container.profiles, "env_variables", lambda *arguments: {"NVIDIA_VISIBLE_DEVICES": "0"}
    )
    settings = command_line.parse([] if gpus else ["device=cpu"], recipe="toy", environ={})
    pyxis = container.of_job(settings, {"RECIPES_CONTAINER": "registry#x"})
    [*_, names] = container.step(pyxis, Path("/c"), {})[0]
    exported = container.exports(pyxis, {})
    assert exported.get("NVIDIA_DRIVER_CAPABILITIES") == ("compute,utility" if gpus else None)
    assert exported["NVIDIA_VISIBLE_DEVICES"] == "0"  # of an env file
    capabilities = "NVIDIA_DRIVER_CAPABILITIES," if gpus else ""
    assert names == f"--container-env={capabilities}NVIDIA_VISIBLE_DEVICES"
