"""The parts of `launch.py check`."""

from pathlib import Path

import pytest

from recipes.core.launch import checks
from recipes.core.run import command_line, dryrun
from recipes.core.run.dryrun import Request


def test_the_dry_run_is_one_rank_outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_JOB_ID", "PMI_RANK", "MASTER_ADDR", "RECIPES_BATCH", "PYTHONSAFEPATH"):
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
    assert not {"RANK", "SLURM_JOB_ID", "PMI_RANK", "MASTER_ADDR", "RECIPES_BATCH", "PYTHONSAFEPATH"} & set(environ)
    asked = dryrun.asked(environ)
    assert (environ["RECIPES_DATA"], environ["RECIPES_CLUSTER"], asked) == ("/d", "example", Request("/f", 16))
    changed = [environ[name] for name in ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")]
    assert changed == ["", "lo", "lo"]
    assert checks.arguments(settings, Path("/t/run"), Path("/base")) == {
        "lr": "0.5", "stage_dir": "", "backend": "auto", "resume": "/base/c.pt", "device": "cpu", "run_dir": "/t/run",
    }  # fmt: skip
