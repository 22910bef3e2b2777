"""``backend=``: the ranks communicate through the chosen backend, or one line reports why they cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import launch
from recipes.core.config.run_keys import Backend
from recipes.core.errors import MachineError
from recipes.core.train import device
from tests import helpers


def test_nccl_on_cpus_is_refused_by_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["recipe=mnist", "device=cpu", "backend=nccl", "launcher=print"]) == 2
    line = "launch.py: backend=nccl: needs GPUs, but device=cpu: leave backend= out, or give backend=gloo\n"
    assert capsys.readouterr() == ("", line)


@pytest.mark.long
def test_a_check_does_not_use_the_jobs_backend(tmp_path: Path) -> None:
    argv = [sys.executable, str(helpers.ROOT / "launch.py"), "check", "recipe=toy", "backend=nccl", "launcher=print"]
    ended = helpers.run([*argv, f"run_dir={tmp_path}/run"])
    assert any(line.startswith("recipe: ok: ") for line in ended.lines), ended.out


def test_the_default_backend_and_nccl_without_gpus() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert [device.choose_backend(Backend.auto, one) for one in (gpu, cpu)] == ["nccl", "gloo"]
    assert [device.choose_backend(Backend[name], gpu) for name in ("nccl", "gloo")] == ["nccl", "gloo"]
    with pytest.raises(MachineError, match="backend=nccl requires GPUs, and torch sees none"):
        device.choose_backend(Backend.nccl, cpu)
