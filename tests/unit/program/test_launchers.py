"""The command of a task for each value of through=, and the variables of a rank and of a node."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.core import files
from recipes.core.errors import MachineError
from recipes.core.place.ranks import RankInfo
from recipes.core.program import launchers
from recipes.core.program.launchers import Launch

# Rank 10 of 2 nodes, with 8 ranks and with 4.
RANK = RankInfo(10, 2, 1, 12, 4, 2, ("n1", "n2"), "n1", 29500)
# the second of two tasks, one per node
NODE = RankInfo(1, 0, 1, 2, 1, 2, ("n1", "n2"), "n1", 29500)
ALONE = RankInfo(0, 0, 0, 1, 1, 1, ())
WRAPPER = f"env -C {files.ROOT} {sys.executable} -u -m recipes.script program=a.py lr=1"


def command(
    through: str, nproc: int, info: RankInfo = NODE, *extra: str, on_cpu: bool = False
) -> str:
    launch = Launch(through, ["a.py"], extra, nproc, on_cpu)
    words = " ".join(launch.command(info, ["program=a.py", "lr=1"]))
    return words.removeprefix(f"{sys.executable} -u -m ")


@pytest.fixture(autouse=True)
def _no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate has no configuration of the user."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def test_torchrun_starts_a_wrapper_for_each_rank_of_the_node() -> None:
    expected = (
        "torch.distributed.run --nnodes=2 --node-rank=1 --nproc-per-node=8 --rdzv-backend=static "
        f"--master-addr=n1 --master-port=29500 --max-restarts=1 --no-python {WRAPPER}"
    )
    assert command("torchrun", 8, NODE, "--max-restarts=1") == expected


def test_the_wrapper_comes_from_the_snapshot_and_not_from_an_edited_clone(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/__init__.py").write_text("raise SystemExit('from the clone')")
    words = Launch("torchrun", ["a.py"], (), 1, True).command(ALONE, ["--help"])
    wrapper = words[words.index("--no-python") + 1 :]
    done = subprocess.run(wrapper, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_accelerate_starts_a_wrapper_for_each_rank_of_the_node() -> None:
    expected = (
        "accelerate.commands.launch --multi_gpu --num_machines=2 --machine_rank=1 "
        f"--num_processes=16 --main_process_ip=n1 --main_process_port=29500 --no_python {WRAPPER}"
    )
    assert command("accelerate", 8) == expected
    assert "--multi_gpu" in command("accelerate", 1)  # on each of two nodes
    alone = command("accelerate", 1, ALONE)
    assert "--multi_gpu" not in alone
    assert "--main_process_port=0 " in alone  # nobody can take it before accelerate does
    ends = " -W error::UserWarning:accelerate.utils.launch -u -m accelerate"
    assert ends in alone  # if all ports are taken


@pytest.mark.parametrize("end", ["yaml", "json", ""])
def test_the_configuration_of_accelerate_chooses_fsdp(tmp_path: Path, end: str) -> None:
    """--multi_gpu would switch it off, from the user's default configuration or from
    launcher_args=.
    """
    (tmp_path / "accelerate").mkdir()
    if end:
        (tmp_path / f"accelerate/default_config.{end}").touch()
    words = command("accelerate", 8, NODE, *(() if end else ("--config_file", "fsdp.yaml")))
    assert "--multi_gpu" not in words
    assert ("--config_file fsdp.yaml --no_python" in words) == (not end)


def test_the_configuration_of_accelerate_may_be_in_another_cache(tmp_path: Path) -> None:
    (tmp_path / "huggingface/accelerate").mkdir(parents=True)
    (tmp_path / "huggingface/accelerate/default_config.yml").touch()
    assert launchers.has_accelerate_config({"XDG_CACHE_HOME": str(tmp_path)})
    assert not launchers.has_accelerate_config({"HF_HOME": str(tmp_path)})


def test_accelerate_on_cpus_starts_torchrun() -> None:
    """It would start a single process."""
    words = command("accelerate", 3, NODE, "--mixed_precision", "bf16", on_cpu=True)
    single = "--cpu --num_machines=1 --num_processes=1 --mixed_precision bf16 --no_python"
    torchrun = f"{sys.executable} -u -m torch.distributed.run --nnodes=2 --node-rank=1"
    assert words.startswith(f"accelerate.commands.launch {single} {torchrun} ")
    assert words.endswith(
        " --nproc-per-node=3 --rdzv-backend=static --master-addr=n1 --master-port=29500 "
        f"--no-python {WRAPPER}"
    )


def test_a_single_rank_needs_no_address() -> None:
    words = command("torchrun", 1, ALONE).split()
    assert "--master-addr=127.0.0.1" in words
    [port] = [word.partition("=")[2] for word in words if word.startswith("--master-port=")]
    assert int(port) > 0
    variables = launchers.variables_of_rank(ALONE)
    assert variables["MASTER_ADDR"] == "127.0.0.1"
    assert int(variables["MASTER_PORT"]) > 0


def test_a_rank_gets_its_place_under_torchruns_names() -> None:
    assert launchers.variables_of_rank(RANK) == {
        "RANK": "10",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
    }


def test_a_node_gets_its_place_among_the_nodes() -> None:
    assert launchers.variables_of_node(NODE, {"CUDA_VISIBLE_DEVICES": "0,1,2"}) == {
        "NNODES": "2",
        "NODE_RANK": "1",
        "NODES": "n1 n2",
        "GPUS_PER_NODE": "3",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
    }
    assert launchers.variables_of_node(ALONE, {})["NODES"] == socket.gethostname()


def test_a_launcher_starts_a_rank_per_gpu_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert [launchers.nproc_here(nproc, False) for nproc in (0, 2)] == [3, 2]
    assert [launchers.nproc_here(nproc, True) for nproc in (0, 2)] == [1, 2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        MachineError, match="sees no GPU: request GPUs, or give device=cpu nproc_per_node=N"
    ):
        launchers.nproc_here(0, False)
    assert launchers.nproc_here(2, False) == 2
