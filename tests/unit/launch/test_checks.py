"""The parts of `launch.py check`."""

from pathlib import Path

import pytest

from recipes.core.errors import MachineError
from recipes.core.launch import checks
from recipes.core.run import command_line, dryrun
from recipes.core.run.dryrun import Request
from tests.helpers import ROOT
from tests.unit.launch.stand_ins import MODULE, Bench


def test_check_loads_the_profiles_modules(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"PATH": "/usr/bin:/bin", "NOTES": str(bench.folder), "RECIPES_CLUSTER": "here", **MODULE}
    assert checks.load_modules(ROOT, ("gcc/12", "x"), environ) == "gcc/12, x"
    assert (bench.folder / "modules").read_text() == "load gcc/12\nload x\n"
    with pytest.raises(MachineError, match=r"cluster=here: module load gcc/12 failed on "):
        checks.load_modules(ROOT, ("gcc/12", "x"), {**environ, "MODULE_ENDS": "1"})
    del environ["BASH_FUNC_module%%"]
    expected = "not tried, this machine has no command module: gcc/12"
    assert checks.load_modules(ROOT, ("gcc/12",), environ) == expected


def test_the_dry_run_is_one_rank_outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_JOB_ID", "PMI_RANK", "MASTER_ADDR", "RECIPES_BATCH"):
        monkeypatch.setenv(name, "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("RECIPES_DATA", "/d")
    words = [
        "recipe=imagenet",
        "cluster=example",
        "stage_dir=$TMPDIR/x",
        "backend=nccl",
        "resume=c.pt",
        "sweep.lr=0.5,0.1",
    ]
    settings = command_line.parse(words, environ={})
    environ = checks.environment(settings, Request("/f", 16))
    assert not {"RANK", "SLURM_JOB_ID", "PMI_RANK", "MASTER_ADDR", "RECIPES_BATCH"} & set(environ)
    asked = dryrun.asked(environ)
    assert (environ["RECIPES_DATA"], environ["RECIPES_CLUSTER"], asked) == (
        "/d",
        "example",
        Request("/f", 16),
    )
    assert (environ["CUDA_VISIBLE_DEVICES"], environ["NCCL_SOCKET_IFNAME"], environ["GLOO_SOCKET_IFNAME"]) == (
        "",
        "lo",
        "lo",
    )
    assert checks.arguments(settings, Path("/t/run"), Path("/base")) == {
        "lr": "0.5", "stage_dir": "", "backend": "auto", "resume": "/base/c.pt", "device": "cpu", "run_dir": "/t/run",
    }  # fmt: skip
