"""The parts of `launch.py check`."""

import re
from pathlib import Path

import pytest

from recipes.core.errors import ConfigError
from recipes.core.launch import checks
from recipes.core.run import command_line, dryrun
from recipes.core.run.dryrun import Request


def test_the_dry_run_is_one_rank_outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    of_jobs = {
        "RANK",
        "SLURM_JOB_ID",
        "PMI_RANK",
        "MASTER_ADDR",
        "RECIPES_SPEC",
        "PYTHONSAFEPATH",
    }
    for name in of_jobs:
        monkeypatch.setenv(name, "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("RECIPES_DATA", "/d")
    words = [
        "recipe=imagenet",
        "cluster=example",
        "stage_dir=$TMPDIR/x",
        "backend=nccl",
        "resume=c.pt",
    ]
    settings = command_line.parse([*words, "sweep.lr=0.5,0.1"], environ={})
    environ = checks.environment_of_dry_run(settings, Request("/f", 16))
    assert not of_jobs & set(environ)
    asked = dryrun.asked(environ)
    assert environ["RECIPES_DATA"] == "/d"
    assert environ["RECIPES_CLUSTER"] == "example"
    assert asked == Request("/f", 16)
    assert environ["CUDA_VISIBLE_DEVICES"] == ""
    assert environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert checks.arguments(settings, Path("/t/run")) == {
        "lr": "0.5",
        "stage_dir": "",
        "backend": "auto",
        "resume": f"{Path.cwd()}/c.pt",
        "device": "cpu",
        "run_dir": "/t/run",
    }


@pytest.mark.parametrize(
    ("is_divided", "gb", "expected"),
    [
        (False, 1.6, "1600.0 MB of 1.6 GB"),
        (
            False,
            1.5,
            "gpu_memory_gb=1.5: the training needs 1600.0 MB on each GPU, .*: "
            "give strategy=fsdp on several GPUs, or",
        ),
        (True, 1.9, "the training needs 2000.0 MB .*: divide it over more ranks"),
    ],
)
def test_a_model_that_does_not_fit_on_a_gpu_is_refused(
    is_divided: bool, gb: float, expected: str
) -> None:
    model = dryrun.Found(parameters=10**8, rank_bytes=16 * 10**8)
    try:
        line = checks.memory(model, is_divided, gb)
    except ConfigError as error:
        line = str(error)
    assert re.search(expected, line), line


def test_the_estimate_of_a_recipe_replaces_the_weights_of_an_evaluation() -> None:
    model = dryrun.Found(parameters=10**8, rank_bytes=16 * 10**8, activation_bytes=3 * 10**8)
    line = checks.memory(model, True, 3)
    assert line == "1900.0 MB of 3 GB on each GPU, with activations"
