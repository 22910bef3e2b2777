"""The device of a rank, its threads, and the errors of torch that tell of another rank."""

from __future__ import annotations

import dataclasses
import errno
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError

from recipes.core.config.run_keys import Backend, Device
from recipes.core.errors import ConfigError, DiskFull, Kind, MachineError
from recipes.core.place import gpus
from recipes.core.place.ranks import RankInfo
from recipes.core.run import command_line
from recipes.core.run.entry import Start
from recipes.core.train import failure, session, torch_errors
from recipes.core.train.device import check_mig, choose_backend, resolve_device, take_gpu

HOST = socket.gethostname()
GRANTED_2 = {"SLURM_GPUS_ON_NODE": "2"}


def rank(local_rank: int = 0, local_world_size: int = 1, in_slurm: bool = False) -> RankInfo:
    return RankInfo(
        rank=local_rank,
        local_rank=local_rank,
        node_rank=0,
        world_size=local_world_size,
        num_nodes=1,
        local_world_size=local_world_size,
        master_addr="127.0.0.1",
        master_port=29500,
        nodes=(),
        in_slurm=in_slurm,
        run_id=None,
        restart_count=0,
    )


def test_every_recipe_obeys_deterministic_and_ranks_have_one_thread_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    cases = (([], 1, False), (["deterministic=true"], 2, True), (["cpu_threads=5"], 2, False))
    for words, size, wanted in cases:
        settings = command_line.parse(words, recipe="toy", environ={})
        ranks = dataclasses.replace(rank(), world_size=size)
        session._set_up(Start(settings, ranks, {}, None))
        assert torch.are_deterministic_algorithms_enabled() is wanted
    assert threads == [1, 5]


@pytest.mark.parametrize(
    ("device", "info", "environ", "seen", "expected"),
    [
        ("auto", rank(1, 2), {}, 0, "cpu"),
        ("cpu", rank(3, 4, True), {"SLURM_GPUS_ON_NODE": "2"}, 0, "cpu"),
        ("cuda", rank(7, 8, True), {"SLURM_GPUS_ON_NODE": "8"}, 8, "cuda:7"),
        # torch renumbers the indices of the machine; UUIDs; parts of a GPU.
        ("auto", rank(1, 2), {"CUDA_VISIBLE_DEVICES": "5,2"}, 2, "cuda:1"),
        ("auto", rank(1, 2), {"CUDA_VISIBLE_DEVICES": "GPU-8a1f0c3d,GPU-77b2"}, 2, "cuda:1"),
        ("auto", rank(), {"CUDA_VISIBLE_DEVICES": "MIG-GPU-8a1f0c3d/1/0"}, 1, "cuda:0"),
        # Each task sees only its own GPU: --gpus-per-task=1, --gpu-bind=single:1, or a wrapper of
        # the user.
        (
            "auto",
            rank(3, 4, True),
            {"SLURM_GPUS_ON_NODE": "4", "ROCR_VISIBLE_DEVICES": "3"},
            1,
            "cuda:0",
        ),
        ("auto", rank(3, 4), {"CUDA_VISIBLE_DEVICES": "3"}, 1, "cuda:0"),
        # Four of the eight that were granted, as the user has chosen.
        (
            "auto",
            rank(3, 4, True),
            {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "1,3,5,7"},
            4,
            "cuda:3",
        ),
        ("auto", rank(0, 1), {"CUDA_VISIBLE_DEVICES": "-1"}, 0, "cpu"),
    ],
)
def test_a_rank_takes_its_gpu(
    device: str, info: RankInfo, environ: dict[str, str], seen: int, expected: str
) -> None:
    """Also on the second of two nodes, whose ranks have other numbers."""
    second = dataclasses.replace(info, rank=info.rank + 8, node_rank=1, num_nodes=2)
    for there in (info, second):
        assert resolve_device(Device[device], there, environ, seen) == torch.device(expected)


@pytest.mark.parametrize(
    ("device", "info", "environ", "seen", "words"),
    [
        ("auto", rank(in_slurm=True), {}, 0, ["granted 0 GPUs", "sees 0", "--gpus-per-node"]),
        (
            "auto",
            rank(0, 8, True),
            {"SLURM_GPUS_ON_NODE": "8"},
            7,
            ["granted 8 GPUs", "sees 7", "--exclude="],
        ),
        (
            "auto",
            rank(0, 2),
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            1,
            ["CUDA_VISIBLE_DEVICES names 2 GPUs", "sees 1"],
        ),
        ("cuda", rank(), {}, 0, ["device=cuda", "sees 0 GPUs", "device=cpu"]),
        ("auto", rank(1, 2), {}, 1, ["2 ranks and 1 GPUs", "one rank per GPU"]),
        (
            "auto",
            rank(1, 2, True),
            {**GRANTED_2, "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"},
            1,
            ["one slice for each task"],
        ),
        (
            "auto",
            rank(in_slurm=True),
            {**GRANTED_2, "CUDA_VISIBLE_DEVICES": ""},
            0,
            ["names none: unset it"],
        ),
        # --gpu-bind=closest: each rank sees the GPUs of its socket.
        (
            "auto",
            rank(1, 4, True),
            {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1"},
            2,
            ["--gpu-bind=", "leave that option out"],
        ),
        # One GPU on the node and two ranks: not one bound to each.
        (
            "auto",
            rank(1, 2, True),
            {"SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": "0"},
            1,
            ["2 ranks and 1 GPUs"],
        ),
    ],
)
def test_missing_gpus_are_reported_in_one_line_with_host_and_counts(
    device: str, info: RankInfo, environ: dict[str, str], seen: int, words: list[str]
) -> None:
    with pytest.raises(MachineError) as error:
        resolve_device(Device[device], info, environ, seen)
    text = str(error.value)
    assert HOST in text
    for word in words:
        assert word in text, text
    assert "\n" not in text


def test_ranks_on_mig_slices_need_a_new_nccl() -> None:
    check_mig(rank(0, 2), {"CUDA_VISIBLE_DEVICES": "MIG-a"}, (2, 31, 1))
    check_mig(rank(0, 2), {"CUDA_VISIBLE_DEVICES": "0,1"}, (2, 30))
    one_of_two_nodes = dataclasses.replace(rank(), world_size=2, num_nodes=2)
    check_mig(one_of_two_nodes, {"CUDA_VISIBLE_DEVICES": "MIG-a"}, (2, 30))
    line = rf"^{HOST}: NCCL 2.30.4 does not support 2 ranks on MIG slices: give backend=gloo"
    with pytest.raises(MachineError, match=line):
        check_mig(rank(0, 2), {"CUDA_VISIBLE_DEVICES": "MIG-a"}, (2, 30, 4))


def test_the_default_backend_and_nccl_without_gpus() -> None:
    gpu = torch.device("cuda", 0)
    cpu = torch.device("cpu")
    assert choose_backend(Backend.auto, gpu) == "nccl"
    assert choose_backend(Backend.auto, cpu) == "gloo"
    for name in ("nccl", "gloo"):
        assert choose_backend(Backend[name], gpu) == name
    with pytest.raises(MachineError, match="backend=nccl requires GPUs, and torch sees none"):
        choose_backend(Backend.nccl, cpu)


@pytest.mark.parametrize(
    ("error", "kind", "status", "line"),
    [
        (torch.distributed.DistNetworkError("anything"), Kind.peer_lost, 1, "anything"),
        (
            RuntimeError(
                "[/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
            ),
            Kind.peer_lost,
            1,
            "Connection closed by peer",
        ),
        (
            RuntimeError(
                "NCCL error: ncclRemoteError: A call failed possibly due to a network error"
            ),
            Kind.peer_lost,
            1,
            "ncclRemoteError",
        ),
        (
            RuntimeError("NCCL error: remote process exited or there was a network error"),
            Kind.peer_lost,
            1,
            "remote process exited",
        ),
        (
            DistBackendError("NCCL communicator was aborted on rank 1."),
            Kind.peer_lost,
            1,
            "was aborted",
        ),
        (
            DistBackendError("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL("),
            Kind.timeout,
            1,
            "Watchdog caught",
        ),
        (
            DistBackendError("unhandled system error\nncclSystemError: System"),
            Kind.peer_lost,
            1,
            "ncclSystemError: System",
        ),
        (
            DistBackendError("invalid usage\nncclInvalidUsage: This"),
            Kind.error,
            1,
            "DistBackendError: ncclInvalidUsage: This",
        ),
        (RuntimeError("Socket Timeout"), Kind.timeout, 1, "Socket Timeout"),
        (
            RuntimeError("the loss at step 3 is nan"),
            Kind.error,
            1,
            "RuntimeError: the loss at step 3 is nan",
        ),
        (
            ValueError("Connection reset by peer"),
            Kind.error,
            1,
            "ValueError: Connection reset by peer",
        ),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded", "/a"),
            Kind.disk_full,
            3,
            "/a cannot be written (Disk quota exceeded): free some space there",
        ),
        (DiskFull("full"), Kind.disk_full, 3, "full"),
        *(
            (
                error,
                Kind.machine,
                3,
                "is reached: run ulimit -n 65536 before srun, or lower num_workers=",
            )
            for error in (
                OSError(errno.EMFILE, "Too many open files", "/a"),
                # as a worker of a DataLoader passes it on
                OSError(
                    "Caught OSError in DataLoader worker process 0.\n[Errno 24] Too many open files"
                ),
                RuntimeError(
                    "unable to open shared memory object </torch_1> in read-write mode: "
                    "Too many open files (24)"
                ),
                RuntimeError("received 0 items of ancdata"),
                MachineError(
                    "run_dir='/a': cannot be written (Too many open files): give another run_dir="
                ),
            )
        ),
        # as llm raises for a job without model=
        (ConfigError("model= is missing"), Kind.input, 2, "model= is missing"),
        (
            MemoryError("no more"),
            Kind.out_of_memory,
            1,
            "out of memory: no more: use a smaller global_batch_size=, or a larger accumulate=",
        ),
    ],
)
def test_the_kind_of_an_error_and_its_exit_status(
    error: BaseException, kind: Kind, status: int, line: str
) -> None:
    """A lost peer is distinguished from an own error."""
    cause = failure.cause_of(error)
    assert cause.kind == kind
    assert cause.exit_status == status
    assert line in cause.line


def test_an_error_in_code_that_torch_fx_has_made_is_described() -> None:
    """The globals of such code have no __name__."""
    net = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        net(torch.ones(2, 4))
    assert "shapes cannot be multiplied" in failure.cause_of(caught.value).line


def test_one_value_per_channel_is_refused_with_the_keys_that_change_it() -> None:
    with pytest.raises(ValueError, match="1 value per channel") as caught:
        torch.nn.BatchNorm2d(4)(torch.zeros(1, 4, 1, 1))
    cause = failure.cause_of(caught.value)
    assert cause.kind == Kind.input
    assert cause.exit_status == 2
    assert "give a larger global_batch_size=, a smaller accumulate= or fewer ranks" in cause.line
    # by its place, not by its text
    assert failure.cause_of(ValueError(str(caught.value))).kind is Kind.error


def test_a_gpu_that_cannot_be_used_is_reported_with_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def broken(device: torch.device) -> torch.Tensor:
        return torch.zeros(2) @ torch.zeros(3)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    line = rf"^{HOST}: cuda:1 cannot be used .*, or exclude the node: sbatch --exclude={HOST}$"
    with pytest.raises(MachineError, match=line):
        take_gpu(torch.device("cuda", 1))


def test_of_an_nccl_error_the_line_holds_its_code_and_the_last_error() -> None:
    text = (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:328, unhandled system "
        "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: "
        f"System call (e.g. socket, malloc) {'x' * 300} \nLast error:\nsocketStartConnect: Connect "
        "to 10.0.0.2<52822> failed : No route to host"
    )
    error = DistBackendError(text)
    line = (
        "DistBackendError: ncclSystemError: socketStartConnect: Connect to 10.0.0.2<52822> "
        "failed : No route to host"
    )
    assert torch_errors.text_of(error) == line
    # of another library
    assert torch_errors.text_of(RuntimeError(text)).startswith("RuntimeError: NCCL error in")
    invalid = DistBackendError("ncclInvalidUsage: This\nuses")
    assert torch_errors.text_of(invalid).endswith("This uses")


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        ("", 0),
        ("0, 1", 2),
        ("0,-1,1", 1),
        ("NoDevFiles", 0),
        ("GPU-a,GPU-b", 2),
        ("MIG-a,MIG-b", 1),
    ],
)
def test_gpus_that_cuda_shows(listed: str, count: int) -> None:
    assert gpus.listed_gpus(listed) == count
    environ = {"ROCR_VISIBLE_DEVICES": "0,1,2", gpus.VISIBLE[0]: listed}
    assert gpus.named_gpus(environ) == (gpus.VISIBLE[0], count)
    fewer = {"CUDA_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0"}
    assert gpus.named_gpus(fewer) == ("ROCR_VISIBLE_DEVICES", 1)


def test_gpus_are_found_by_their_drivers(tmp_path: Path) -> None:
    assert gpus.visible_gpus({}, tmp_path) == 0
    for number, gpu_id in enumerate(
        ("0", "0", "4321", "4322")
    ):  # two sockets and two GPUs of AMD's
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{gpu_id}\n")
    assert gpus.visible_gpus({}, tmp_path) == 2
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    assert gpus.visible_gpus({}, tmp_path) == 3
    assert gpus.visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == 1


def test_nccls_flight_record_is_kept_with_the_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda: b"record", raising=False)
    for backend in ("gloo", "nccl"):
        run: Any = SimpleNamespace(dir=tmp_path, world=SimpleNamespace(rank=1, backend=backend))
        failure._keep_flight_record(run)
        assert (tmp_path / "logs" / "flight-1").exists() == (backend == "nccl")
