"""One rank's device, its samples, its checkpoints and its output, without any other rank."""

from __future__ import annotations

import dataclasses
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recipes.core.config.run_keys import Device
from recipes.core.data import sampling
from recipes.core.data.sampling import GlobalBatches, Shard
from recipes.core.errors import InputError, MachineError
from recipes.core.place import gpus
from recipes.core.place.ranks import RankInfo
from recipes.core.run import command_line
from recipes.core.run.entry import Start
from recipes.core.train import checkpoint, failure, rendezvous, session, torch_errors
from recipes.core.train.checkpoint import State
from recipes.core.train.device import resolve_device
from tests import helpers
from tests.helpers import ROOT, clean_environment

HOST = socket.gethostname()


def rank(local_rank: int = 0, local_world_size: int = 1, in_slurm: bool = False) -> RankInfo:
    return RankInfo(
        rank=local_rank, local_rank=local_rank, node_rank=0, world_size=local_world_size, num_nodes=1,
        local_world_size=local_world_size, master_addr="127.0.0.1", master_port=29500, launcher="env", nodes=(),
        in_slurm=in_slurm, run_id=None, restart_count=0,
    )  # fmt: skip


def test_ranks_have_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for words, size in (([], 1), ([], 2), (["cpu_threads=5"], 2)):
        settings = command_line.parse(words, recipe="mnist", environ={})
        session._set_threads(Start(settings, dataclasses.replace(rank(), world_size=size), {}, None))
    assert threads == [1, 5]


# resolve_device


@pytest.mark.parametrize(
    ("device", "info", "environ", "seen", "expected"),
    [
        ("auto", rank(), {}, 0, "cpu"),
        ("auto", rank(1, 2), {}, 0, "cpu"),
        ("cpu", rank(), {}, 8, "cpu"),
        ("cpu", rank(3, 4, True), {"SLURM_GPUS_ON_NODE": "2"}, 0, "cpu"),
        ("auto", rank(3, 4), {}, 8, "cuda:3"),
        ("cuda", rank(7, 8, True), {"SLURM_GPUS_ON_NODE": "8"}, 8, "cuda:7"),
        ("auto", rank(1, 2, True), {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, 2, "cuda:1"),
        # Indices of the machine's, which torch numbers anew; UUIDs; parts of a GPU.
        ("auto", rank(1, 2), {"CUDA_VISIBLE_DEVICES": "5,2"}, 2, "cuda:1"),
        ("auto", rank(1, 2), {"CUDA_VISIBLE_DEVICES": "GPU-8a1f0c3d,GPU-77b2"}, 2, "cuda:1"),
        ("auto", rank(), {"CUDA_VISIBLE_DEVICES": "MIG-GPU-8a1f0c3d/1/0"}, 1, "cuda:0"),
        # Each task is shown its own alone: --gpus-per-task=1, --gpu-bind=single:1.
        ("auto", rank(3, 4, True), {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "3"}, 1, "cuda:0"),
        ("auto", rank(3, 4, True), {"SLURM_GPUS_ON_NODE": "4", "ROCR_VISIBLE_DEVICES": "3"}, 1, "cuda:0"),
        # By a wrapper of the user's, where Slurm knows of no GPU; Slurm's own variables name all.
        ("auto", rank(3, 4), {"CUDA_VISIBLE_DEVICES": "3"}, 1, "cuda:0"),
        ("auto", rank(3, 4, True), {"HIP_VISIBLE_DEVICES": "3"}, 1, "cuda:0"),
        (
            "auto",
            rank(3, 4, True),
            {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "ROCR_VISIBLE_DEVICES": "3"},
            1,
            "cuda:0",
        ),
        # Four of the eight that were granted, as the user has chosen.
        ("auto", rank(3, 4, True), {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "1,3,5,7"}, 4, "cuda:3"),
        ("auto", rank(0, 1), {"CUDA_VISIBLE_DEVICES": ""}, 0, "cpu"),
        ("auto", rank(0, 1), {"CUDA_VISIBLE_DEVICES": "-1"}, 0, "cpu"),
    ],
)
def test_a_rank_takes_its_gpu(device: str, info: RankInfo, environ: dict[str, str], seen: int, expected: str) -> None:
    """Also on the second of two nodes, whose ranks have other numbers."""
    for there in (info, dataclasses.replace(info, rank=info.rank + 8, node_rank=1, num_nodes=2)):
        assert resolve_device(Device[device], there, environ, seen) == torch.device(expected)


@pytest.mark.parametrize(
    ("device", "info", "environ", "seen", "words"),
    [
        ("auto", rank(in_slurm=True), {}, 0, ["granted 0 GPUs", "sees 0", "--gpus-per-node"]),
        ("auto", rank(in_slurm=True), {"SLURM_GPUS_ON_NODE": "8"}, 0, ["granted 8 GPUs", "sees 0"]),
        ("auto", rank(0, 8, True), {"SLURM_GPUS_ON_NODE": "8"}, 7, ["granted 8 GPUs", "sees 7", "--exclude="]),
        ("auto", rank(0, 2), {"CUDA_VISIBLE_DEVICES": "0,1"}, 1, ["CUDA_VISIBLE_DEVICES names 2 GPUs", "sees 1"]),
        ("auto", rank(), {"CUDA_VISIBLE_DEVICES": "GPU-8a1f0c3d"}, 0, ["names 1 GPUs", "sees 0"]),
        ("cuda", rank(), {}, 0, ["device=cuda", "sees 0 GPUs", "device=cpu"]),
        ("auto", rank(1, 2), {}, 1, ["2 ranks and 1 GPUs"]),
        (
            "auto",
            rank(1, 2, True),
            {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"},
            1,
            ["2 ranks and 1 GPUs", "MIG slice", "--gpus-per-task=1"],
        ),
        (
            "auto",
            rank(in_slurm=True),
            {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": ""},
            0,
            ["granted 8", "CUDA_VISIBLE_DEVICES names none: unset it"],
        ),
        ("auto", rank(2, 3, True), {"SLURM_GPUS_ON_NODE": "2"}, 2, ["3 ranks and 2 GPUs", "one rank per GPU"]),
        ("auto", rank(1, 2, True), {"ROCR_VISIBLE_DEVICES": "0,1"}, 1, ["ROCR_VISIBLE_DEVICES names 2 GPUs", "sees 1"]),
        # One GPU on the node and two ranks: not one bound to each.
        ("auto", rank(1, 2, True), {"SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": "0"}, 1, ["2 ranks and 1 GPUs"]),
        ("auto", rank(in_slurm=True), {"CUDA_VISIBLE_DEVICES": ""}, 0, ["granted 0 GPUs"]),
    ],
)
def test_missing_gpus_are_reported_in_one_line_with_host_and_counts(
    device: str, info: RankInfo, environ: dict[str, str], seen: int, words: list[str]
) -> None:
    with pytest.raises(MachineError) as error:
        resolve_device(Device[device], info, environ, seen)
    text = str(error.value)
    assert HOST in text
    assert all(word in text for word in words), text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([["a", "nccl", "GPU-1"], ["a", "nccl", "GPU-2"], ["b", "nccl", "GPU-1"]], ""),
        ([["a", "gloo", ""], ["a", "gloo", ""]], ""),
        ([["a", "nccl", "GPU-1"], ["a", "nccl", "GPU-1"]], "a: ranks 1 and 0 have the same GPU GPU-1; there is one rank per GPU"),
        (
            [["a", "nccl", "GPU-1"], ["b", "gloo", ""]],
            "a: rank 0 uses nccl, rank 1 on b uses gloo: give the same device= and backend= on each",
        ),
    ],
)  # fmt: skip
def test_a_process_group_that_cannot_form_is_reported_in_one_line(found: list[list[str]], expected: str) -> None:
    assert rendezvous._mismatch(found, 0) == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.distributed.DistNetworkError("anything"), True),
        (RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Connection reset by peer"), True),
        (RuntimeError("NCCL error: ncclRemoteError: A call failed possibly due to a network error"), True),
        (RuntimeError("the loss at step 3 is nan"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("Connection reset by peer"), False),
    ],
)
def test_a_lost_peer_is_distinguished_from_an_own_error(error: BaseException, expected: bool) -> None:
    assert (torch_errors.peer_kind(error) is not None) is expected


# Samples of a rank


@given(count=st.integers(0, 500), world_size=st.integers(1, 40))
def test_shares_are_a_partition_of_sizes_that_differ_by_one(count: int, world_size: int) -> None:
    parts = [list(range(count))[sampling.share(count, r, world_size)] for r in range(world_size)]
    assert [i for part in parts for i in part] == list(range(count))
    assert [len(part) for part in parts] == [count // world_size + (r < count % world_size) for r in range(world_size)]


@given(
    samples=st.integers(1, 300), batch_size=st.integers(1, 400), world_size=st.integers(1, 9), seed=st.integers(0, 2**62),
    epoch=st.integers(0, 10**6), from_batch=st.integers(0, 300),
)  # fmt: skip
def test_the_batches_of_an_epoch_do_not_depend_on_the_number_of_ranks(
    samples: int, batch_size: int, world_size: int, seed: int, epoch: int, from_batch: int
) -> None:
    def shards(rank: int, size: int, first_batch: int = 0) -> list[Shard]:
        return list(GlobalBatches(samples, batch_size, seed, rank, size).epoch(epoch, first_batch))

    alone = shards(0, 1)
    assert sorted(i for shard in alone for i in shard.indices.tolist()) == list(range(samples))
    by_rank = [shards(r, world_size) for r in range(world_size)]
    for whole, *parts in zip(alone, *by_rank, strict=True):
        assert [i for part in parts for i in part.indices.tolist()] == whole.indices.tolist()
        assert all(part.global_size == whole.global_size == len(whole.indices) for part in parts)
    for resumed, full in zip(shards(0, world_size, from_batch), by_rank[0][from_batch:], strict=True):
        assert (resumed.epoch, resumed.batch, resumed.global_size) == (full.epoch, full.batch, full.global_size)
        assert torch.equal(resumed.indices, full.indices)


def test_each_seed_and_epoch_has_its_own_order() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return next(GlobalBatches(1000, 1000, seed, 0, 1).epoch(epoch)).indices.tolist()

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert orders[0] == order(0, 0)
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert sampling.generator(3, 4).initial_seed() != sampling.generator(3, 4, stream=1).initial_seed()


# Checkpoints


def make_state(seed: int, steps: int) -> State:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    meta: dict[str, Any] = {"config": {"lr": 0.1}}
    state = State(net, optimizer, scheduler, ema=nn.Linear(3, 1), meta=meta)
    advance(state, steps)
    return state


def advance(state: State, steps: int) -> None:
    for _ in range(steps):
        state.optimizer.zero_grad()
        state.model(torch.randn(5, 3)).square().sum().backward()
        state.optimizer.step()
        state.scheduler.step()
        state.step += 1


def save(folder: Path, state: State) -> Path:
    rng = [checkpoint.rng_state(torch.device("cpu"))]
    return checkpoint.write(folder, checkpoint.content_of(state, {"seed": 1}, rng))


def test_candidates_are_checkpoints_newest_first(tmp_path: Path) -> None:
    names = ["step-00000009.pt", "step-00000010.pt", "step-123456789.pt"]
    for name in [*names, "latest", ".step-00000011.pt.77", "step-00000012.pt.bak", "step-3.pt", "other.pt"]:
        (tmp_path / name).touch()
    assert [p.name for p in checkpoint.candidates(tmp_path)] == names[::-1]
    assert checkpoint.candidates(tmp_path / "none") == []


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return save(tmp_path_factory.mktemp("good"), make_state(seed=1, steps=2)).read_bytes()


def test_a_checkpoint_with_a_hash_in_its_archives_comment_is_read(tmp_path: Path, good: bytes) -> None:
    """Earlier versions wrote one."""
    (tmp_path / "earlier.pt").write_bytes(good[:-2] + b"\x47\0sha256:" + b"0" * 64)
    assert checkpoint.read(tmp_path / "earlier.pt")["meta"]["step"] == 2


@pytest.mark.parametrize("content", [{"state_dict": {}}, [1, 2], {"model": {}, "meta": {}}])
def test_somebody_elses_checkpoint_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "foreign.pt")
    with pytest.raises(InputError, match=r"foreign\.pt: is not one of these recipes'"):
        checkpoint.read(tmp_path / "foreign.pt")
    with pytest.raises(InputError, match=r"none\.pt: cannot be read \(No such file or directory\)"):
        checkpoint.read(tmp_path / "none.pt")


# Output


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT, env=clean_environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


COPIED = """
import os, signal, subprocess, sys
from pathlib import Path
from recipes.core.run import logs
how, path = sys.argv[1:]
print("before")
with logs.copied_to(Path(path)) as terminal:
    assert terminal is None
    print("from Python")
    print("to stderr", file=sys.stderr)
    os.write(1, b"from below Python\\n")
    subprocess.run(["sh", "-c", "echo from a child; echo its stderr >&2"])
    if how == "signals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert len(children) == 2
        for child in children:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
                os.kill(int(child), number)
        print("after the signals")
    if how == "killed":
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
print("after")
"""


@pytest.mark.parametrize("how", ["ended", "signals", "killed"])
def test_output_goes_to_the_log_and_to_the_terminal(tmp_path: Path, how: str) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("from the attempt before\n")
    ended = python(COPIED, how, str(log))
    inside = ["from Python", "from below Python", "from a child"]
    inside += {"ended": [], "signals": ["after the signals"], "killed": ["last words"]}[how]
    after = [] if how == "killed" else ["after"]
    assert ended.returncode == (-signal.SIGKILL if how == "killed" else 0), ended.stderr
    assert ended.stdout.splitlines() == ["before", *inside, *after]
    assert ended.stderr.splitlines() == ["to stderr", "its stderr"]
    before, _, now = log.read_text().partition("\f\n")
    assert before == "from the attempt before\n"
    assert sorted(now.splitlines()) == sorted([*inside, "to stderr", "its stderr"])


UNREAD = """
import sys
from pathlib import Path
from recipes.core.run import logs
with logs.copied_to(Path(sys.argv[1])):
    for number in range(4):
        sys.stdin.readline()
        print("line", number)
"""


def test_the_log_continues_after_stdout_is_closed(tmp_path: Path) -> None:
    """Ctrl-C ends the user's ``tee`` just when the run has to save."""
    command, log = [sys.executable, "-c", UNREAD, str(tmp_path / "log")], tmp_path / "log"
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        for number in range(4):
            process.stdin.write("on\n")
            process.stdin.flush()
            assert process.stdout.closed or process.stdout.readline() == "line 0\n"
            process.stdout.close()
            helpers.wait_until(lambda: f"line {number}\n" in log.read_text(), 10, f"line {number}")  # noqa: B023
        assert process.wait(10) == 0


IN_ONE_WRITE = """
import os, sys
from pathlib import Path
from recipes.core.run import logs
with logs.copied_to(Path(sys.argv[1])):
    read_end, write_end = os.pipe2(os.O_DIRECT)  # keeps what is written apart: one read gives one write
    os.dup2(write_end, 1)
    print("line", 1)
    print("line", 2)
    sys.exit(os.read(read_end, 100) != b"line 1\\n")
"""


def test_each_line_is_one_write(tmp_path: Path) -> None:
    ended = helpers.run([sys.executable, "-u", "-c", IN_ONE_WRITE, str(tmp_path / "log")])
    assert ended.status == 0, ended.out


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    from recipes.core.run import logs

    with pytest.raises(MachineError, match=r"rank0\.log"), logs.copied_to(tmp_path / "none" / "rank0.log"):
        pass


def test_latest_names_the_newest_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20, 25, 40):
        (tmp_path / f"step-{step:08d}.pt").touch()
    steps = [40, 25, 20, 10]
    assert [int(p.stem[5:]) for p in checkpoint.candidates(tmp_path)] == steps
    (tmp_path / "latest").write_text("step-00000025.pt\n")  # a run that was sent back to step 20 and has saved since
    assert [int(p.stem[5:]) for p in checkpoint.candidates(tmp_path)] == [25, 20, 10, 40]
    (tmp_path / "latest").write_text("\0torn")
    assert [int(p.stem[5:]) for p in checkpoint.candidates(tmp_path)] == steps


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        ("", 0),
        ("0", 1),
        ("0,1", 2),
        ("0, 1", 2),
        ("0,-1,1", 1),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("GPU-a,GPU-b", 2),
        ("MIG-a,MIG-b", 1),
    ],
)
def test_gpus_that_cuda_shows(listed: str, count: int) -> None:
    assert gpus.listed_gpus(listed) == count


def test_gpus_are_found_by_their_drivers(tmp_path: Path) -> None:
    assert gpus.visible_gpus({}, tmp_path) == 0
    for number, found in enumerate(("0", "0", "4321", "4322")):  # two sockets and two GPUs of AMD's
        node = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(number)
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{found}\n")
    assert gpus.visible_gpus({}, tmp_path) == 2
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    assert gpus.visible_gpus({}, tmp_path) == 3
    assert gpus.visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == 1


def test_nccls_flight_record_is_kept_with_the_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"record", raising=False)
    for backend in ("gloo", "nccl"):
        run: Any = SimpleNamespace(dir=tmp_path, world=SimpleNamespace(rank=1, backend=backend))
        failure._keep_flight_record(run)
        assert (tmp_path / "logs" / "flight-1").exists() == (backend == "nccl")
