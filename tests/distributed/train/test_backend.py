"""``backend=``: the ranks communicate through the chosen backend, or one line reports why they cannot."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import torch

import launch
from recipes.core.config.run_keys import Backend
from recipes.core.errors import MachineError
from recipes.core.train import device
from tests import helpers

# The recipe on a torch that says it has MPI, for which gloo stands: rank and size are then MPI's to say, as they are in RANK_OF_MPI.
WITH_MPI = """
from recipes.core.run import entry
START = entry.begin("toy")
import os
import torch.distributed as dist
from recipes import toy
from recipes.core.train import session
real = dist.init_process_group
def init(backend, **kwargs):
    assert (backend, kwargs) == ("mpi", {})
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    store = dist.FileStore(os.environ["MEETING"], size)
    shift = int(os.environ.get("SHIFT", 0))
    real("gloo", store=store, rank=(rank + shift) % size, world_size=size)
dist.is_mpi_available, dist.init_process_group = lambda: True, init
session.run(toy.main, START)
"""


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="this torch has MPI")
def test_mpi_without_support_in_torch_is_reported_in_one_line(tmp_path: Path) -> None:
    ended = helpers.run_fork([*helpers.LOCAL, "ranks_per_node=1", "backend=mpi", f"run_dir={tmp_path}/run"])
    assert ended.status == 3, ended.out
    [line] = ended.lines
    assert line.startswith(
        f"mnist: {socket.gethostname()}: rank 0 cannot join the group of 1 (RuntimeError: Distributed package doesn't have MPI"
    )


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.long
def test_mpi_numbers_the_ranks(shift: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated, since no torch with MPI is available: its initialisation, and the check of its rank numbers."""
    monkeypatch.setenv("SHIFT", str(int(shift)))
    monkeypatch.setenv("MEETING", f"{tmp_path}/meeting")
    words = ["backend=mpi", "device=cpu", "max_steps=2", f"run_dir={tmp_path}/run"]
    ended = helpers.run_ranks(WITH_MPI, words, 2)
    if shift:
        assert ended.status == 3, ended.out
        assert (
            "backend=mpi: MPI says rank 1 of 2, the environment says rank 0 of 2: start the ranks with mpirun"
            in ended.out
        )
        assert all(
            line.startswith(f"toy: {socket.gethostname()}: backend=mpi: MPI says rank ") for line in ended.lines
        ), ended.out
    else:
        assert ended.status == 0, ended.out
        assert "toy: 2 ranks on 1 node, cpu, mpi" in ended.lines
        assert "network: chosen by MPI" in ended.lines
        assert helpers.read(tmp_path / "run", "summary")["backend"] == "mpi"


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
