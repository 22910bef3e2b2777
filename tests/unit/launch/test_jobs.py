"""The job that is made from the settings of a launch."""

import dataclasses
from pathlib import Path

import pytest

from recipes.core.errors import ConfigError
from recipes.core.launch import container, jobs
from recipes.core.run import command_line
from recipes.core.slurm import jobstate
from tests.helpers import ROOT
from tests.unit.launch.stand_ins import describe, directives


def test_typed_options_take_precedence_over_the_profile(site: Path) -> None:
    site.write_text("gpus: --gres\nextra: --mem=64G --switches=2\n")
    typed = describe("cluster=here", "extra=--exclusive --switches=1")
    assert {"mem": "64G", "switches": "1", "exclusive": ""}.items() <= typed.directives.items()
    assert typed.directives["requeue"] == ""
    expedited = describe("extra=--requeue=expedite").directives
    assert expedited["requeue"] == "expedite"
    with pytest.raises(
        ConfigError, match="gpus=10: cluster=here requires --gres: give nodes= and gpus_per_node="
    ):
        describe("cluster=here", "gpus=10")
    assert describe("cluster=here", "gpus=10", "device=cpu").ranks == 10


def test_each_run_of_a_sweep_has_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = describe("sweep.lr=0.1,0.2", "run_dir=rel", "device=cpu")
    assert job.arguments == ("device=cpu",)
    folder = f"run_dir={tmp_path}/rel"
    assert job.elements == (("lr=0.1", f"{folder}/0"), ("lr=0.2", f"{folder}/1"))
    assert directives(jobs.sbatch_script(job))["--array"] == "0-1%2"


def test_paths_are_relative_to_the_folder_of_the_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/x.sif").touch()
    monkeypatch.chdir(tmp_path / "sub")
    paths = ("data_dir=d", "run_dir=../r", "network=infiniband", "resume=c.pt")
    job = describe(*paths, "container=x.sif")
    assert job.variables["RECIPES_CONTAINER"] == f"{tmp_path}/sub/x.sif"
    assert job.arguments == (
        f"data_dir={tmp_path}/sub/d",
        f"run_dir={tmp_path}/r",
        "network=infiniband",
        f"resume={tmp_path}/sub/c.pt",
    )
    [swept, _] = describe("sweep.data_dir=a,b", "resume=never").elements
    assert swept == (f"data_dir={tmp_path}/sub/a",)


def test_an_environment_that_is_no_file_is_refused_before_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there.tar").touch()
    monkeypatch.chdir(tmp_path)
    assert describe("environment=there.tar").arguments == (f"environment={tmp_path}/there.tar",)
    with pytest.raises(ConfigError, match=f"environment={tmp_path}: no such file"):
        describe("environment=.")


@pytest.mark.parametrize("gpus", ["--gres", "--gpus-per-task"])
def test_a_script_of_launch_py_is_submitted_again_as_it_requests_gpus(
    site: Path, gpus: str
) -> None:
    """Also a second time, and if it was printed: Slurm refuses two kinds of requests."""
    site.write_text(f"gpus: {gpus}\n")
    made = describe("cluster=here", "nodes=2", "gpus_per_node=4")
    size = {"nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "4"}
    job = jobstate.Job("7", "RUNNING", options=size)
    printed = jobs.sbatch_script(made)
    assert jobs.options_of(job, printed) == ["--nodes=2", "--ntasks-per-node=4"]
    submitted = dataclasses.replace(made, variables={"RECIPES_PYTHON": "/python"})
    assert jobs.options_of(job, jobs.sbatch_script(submitted)) == []


@pytest.mark.parametrize("bad", ["/a\nb", "/a\rb", "/a\x1b[0m", "/\udcff"])
def test_a_folder_with_an_unprintable_name_is_refused(
    bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="cannot be printed"):
        describe(root=Path(bad))
    monkeypatch.setattr(jobs.Path, "cwd", lambda: Path(bad))
    with pytest.raises(ConfigError, match="cannot be printed"):
        describe("epochs=1")


def test_a_job_that_resumes_a_cpu_run_requests_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(f"device: cpu\ndata_dir: {tmp_path}/data\n")
    job = describe(f"run_dir={run_dir}", "gpus_per_node=2")
    assert job.directives["ntasks-per-node"] == "2"
    assert "gpus-per-node" not in job.directives
    assert job.arguments == (f"run_dir={run_dir}",)
    settings = command_line.parse(["recipe=mnist", f"run_dir={run_dir}"], environ={})
    assert f"{tmp_path}/data" in container.folders_of_run(settings, ROOT)


PROGRAM = ("recipe=script", "program=/a.py", "workdir=/w")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("through=torchrun", "gpus_per_node=8"), []),  # as many as each node has
        (("through=torchrun", "gpus_per_node=8", "nproc_per_node=4"), ["nproc_per_node=4"]),
        (("through=accelerate", "device=cpu", "ranks_per_node=3"), ["nproc_per_node=3"]),
        (
            ("through=accelerate", "device=cpu", "ranks_per_node=3", "nproc_per_node=2"),
            ["nproc_per_node=2"],
        ),
        (("through=torchrun", "device=cpu", "gpus_per_node=2"), ["nproc_per_node=2"]),
        (("through=node", "device=cpu", "gpus_per_node=2"), []),
        (("device=cpu", "ranks_per_node=3"), []),
    ],
)
def test_the_ranks_that_a_launcher_starts_follow_from_the_keys_of_the_job(
    words: tuple[str, ...], expected: list[str]
) -> None:
    arguments = describe(*PROGRAM, *words).arguments
    assert [word for word in arguments if word.startswith("nproc_per_node")] == expected


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("through=torchrun", "ranks_per_node=8"),
            "ranks_per_node=8: through=torchrun starts one rank per GPU: give gpus_per_node=8",
        ),
        (
            ("through=accelerate", "gpus=8"),
            "gpus=8: through=accelerate needs the same number on each node: "
            "give nodes= and gpus_per_node=",
        ),
        (("gpus=2", "nodes=3"), "gpus=2: must be at least nodes=3, one GPU per node"),
        (
            ("gpus=4", "nodes=3", "restarts=1", "min_nodes=2"),
            "gpus=4: spare= and min_nodes= need the same number of ranks on each node: "
            "give nodes= and gpus_per_node=",
        ),
        (
            ("through=node", "device=cpu", "ranks_per_node=2"),
            "ranks_per_node=2: through=node starts one process per node: leave it out",
        ),
        (
            ("launcher_args=--x 1",),
            "launcher_args=--x 1: requires through=torchrun or through=accelerate",
        ),
        (
            ("through=node", "launcher_args=--x"),
            "launcher_args=--x: requires through=torchrun or through=accelerate",
        ),
        *(
            (
                ("through=torchrun", f"launcher_args={options}"),
                f"launcher_args={options}: leave out --standalone and --rdzv-backend: "
                "such a rendezvous can execute code of other users",
            )
            for options in ("--standalone", "--stand", "--rdzv_backend c10d", "--rdzv-backend=etcd")
        ),
        (
            ("through=torchrun", "launcher_args='"),
            "launcher_args=': No closing quotation; close the quotes",
        ),
    ],
)
def test_keys_that_do_not_fit_each_other_are_refused(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        describe(*PROGRAM, *words)
    assert str(error.value) == line
