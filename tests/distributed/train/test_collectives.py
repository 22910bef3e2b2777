"""Message passing on real ranks: every result is checked, and bandwidths are computed as nccl-tests does. Also the doctor's tests with torch."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from recipes.collectives import lessons
from recipes.conf.collectives import OPERATIONS, Config, sizes_of
from recipes.core import bandwidth
from recipes.core.config import parser
from recipes.core.doctor import gpucheck, linkcheck
from recipes.core.errors import ConfigError
from recipes.core.train.world import World
from tests import helpers

LESSONS = [name for name, _, _ in lessons()]
COMMAND = [*helpers.LOCAL[:2], "recipe=collectives", "launcher=local", "device=cpu"]


def run(run_dir: Path, ranks: int, *words: str) -> helpers.Ended:
    return helpers.run_fork([*COMMAND, f"ranks_per_node={ranks}", f"run_dir={run_dir}", *words])


@pytest.mark.parametrize("size", [1, 3])
def test_every_lesson_is_correct_on_an_odd_number_of_ranks(tmp_path: Path, size: int) -> None:
    ended = run(tmp_path, size)
    assert ended.status == 0, ended.out
    found = {line[:20].strip(): line[20:36].strip() for line in ended.lines if line[:20].strip() in LESSONS}
    alone = dict.fromkeys(LESSONS[:3], "-") if size == 1 else {}
    assert found == dict.fromkeys(LESSONS, f"ok on {size} ranks") | alone


# By all_gather.cu, reduce_scatter.cu, alltoall.cu, gather.cu, scatter.cu, all_reduce.cu of nccl-tests.
PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def bus_factor(operation: str, size: int) -> float:
    return (size - 1) / size if operation in PARTS else 2 * (size - 1) / size if operation == "all_reduce" else 1.0


@pytest.mark.parametrize("size", [1, 3])
def test_every_operation_is_timed_and_its_result_checked(tmp_path: Path, size: int) -> None:
    ended = run(tmp_path, size, "mode=bench", "sizes=3,5,40,4K", "seconds=0.01")
    assert ended.status == 0, ended.out
    best = helpers.read(tmp_path, "summary")["busbw"]
    rows = [json.loads(line) for line in (tmp_path / "bandwidth.jsonl").read_text().splitlines()]
    cut = 16 * size  # each rank's part is a multiple of 16 bytes
    timed = {operation: [4, 40, 4096] for operation in bandwidth.WHOLE}
    timed |= {name: sorted({max(cut, one // cut * cut) for one in (5, 40, 4096)}) for name in PARTS}
    if size == 1:
        del timed["send_recv"]
    assert {operation: [row["size"] for row in rows if row["operation"] == operation] for operation in timed} == timed
    assert {row["operation"] for row in rows} == set(timed) == set(best)
    for row in rows:
        assert (row["wrong"], row["ranks"]) == (0, size)
        assert row["algbw"] == pytest.approx(row["size"] / row["median_s"] / 1e9)
        assert row["busbw"] == pytest.approx(row["algbw"] * bus_factor(row["operation"], size))
        of_operation = [other["busbw"] for other in rows if other["operation"] == row["operation"]]
        assert best[row["operation"]] == round(max(of_operation), 4)


FAULT = """
from recipes.core.run import entry
START = entry.begin("collectives")
import torch.distributed as dist
from recipes import collectives
from recipes.core.train import session
real = dist.all_gather_into_tensor
def changed(out, *args, **kwargs):
    real(out, *args, **kwargs)
    out[0] += dist.get_rank() == 1
{fault}
session.run(collectives.main, START)
"""
WRONG = "dist.all_gather_into_tensor = changed"


@pytest.mark.parametrize(
    ("fault", "words", "expected"),
    [
        (WRONG, (), "all_gather: the result is wrong on 1 of 2 ranks; the first is rank 1 on "),
        (WRONG, ("mode=bench", "sizes=1K", "operations=all_gather"), "all_gather of 1024 bytes: the result is wrong on 1 of 2 ranks"),
        ("dist.barrier = lambda: None", (), "barrier: the result is wrong on 1 of 2 ranks; the first is rank 0 on "),
    ],
)  # fmt: skip
def test_a_wrong_result_is_reported_with_its_rank(
    tmp_path: Path, fault: str, words: tuple[str, ...], expected: str
) -> None:
    keys = ["device=cpu", "seconds=0.01", f"run_dir={tmp_path}", *words]
    ended = helpers.run_ranks(FAULT.format(fault=fault), keys, 2)
    assert ended.status == 1, ended.out
    assert expected in helpers.read(tmp_path, "status")["reason"]


LINKCHECK = """
import os, socket
from types import SimpleNamespace
from recipes.core.doctor import linkcheck
readings = (reading for one in [9.0, 0.3, 0.25, 0.5, 0.4] * 3 for reading in (100.0, 100.0 + one))
linkcheck.time = SimpleNamespace(perf_counter=lambda: next(readings), sleep=lambda _: None)
linkcheck.SIZE = 1 << 20
listener = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))) if os.environ["RANK"] == "0" else None
linkcheck.main("gloo", listener.fileno() if listener else -1, 20)
"""


def test_the_doctors_bandwidth_test_returns_the_bus_bandwidth_and_that_of_each_pair() -> None:
    nodes = "[0, 1, 3, 5]"  # two nodes are left out
    argv = [sys.executable, "-u", "-c", LINKCHECK]
    processes = helpers.fork_ranks(argv, 4, NODES=nodes, GLOO_SOCKET_IFNAME="lo")
    found = [[json.loads(line) for line in helpers.finish(process).lines if line[0] == "{"] for process in processes]
    for one in found:
        assert [word["at"] for word in one if "at" in word] == [
            "meeting the others", "an all_reduce", "pairs, 1 apart", "pairs, 2 apart", "the end",
        ]  # fmt: skip
        figure = next(word for word in one if "busbw" in word)
        assert figure["busbw"] == pytest.approx((1 << 20) / 0.25 * 2 * 3 / 4 / 1e9)
        assert figure["correct"] is True
    speed = pytest.approx((1 << 20) / 0.25 / 1e9)
    pairs = [[word["pair"] for word in one if "pair" in word] for one in found]
    assert pairs == [[[0, 1, speed], [0, 3, speed]], [[1, 5, speed]], [[3, 5, speed]], []]


@pytest.mark.parametrize("count", [2, 3, 9, 1000])
def test_each_node_is_paired_with_a_few_others(count: int) -> None:
    masks = linkcheck.masks(count)
    assert len(masks) <= linkcheck.PARTNERS
    assert all(any(node ^ mask < count for mask in masks) for node in range(count))


def test_a_wrong_sum_is_found_by_the_doctors_bandwidth_test(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    fake = SimpleNamespace(barrier=lambda: None, all_reduce=lambda data: data.fill_(next(results)))
    monkeypatch.setattr(linkcheck, "dist", fake)
    monkeypatch.setattr(linkcheck, "SIZE", 64)
    assert linkcheck.all_reduce(torch.device("cpu"), 0, 2)[1]  # 1 + 2
    assert not linkcheck.all_reduce(torch.device("cpu"), 0, 2)[1]


class OtherRank:
    """In the place of torch.distributed: a second rank that takes ``call_s`` for each call; and of ``time``."""

    def __init__(self, call_s: float) -> None:
        self.call_s, self.now, self.pending = call_s, 0.0, 0.0
        self.ReduceOp = dist.ReduceOp

    def perf_counter(self) -> float:
        return self.now

    def synchronize(self, _: object) -> None:
        self.now, self.pending = self.now + self.pending, 0.0

    def barrier(self) -> None:
        self.pending += 7.0  # waits for the other rank; not to be timed

    def all_reduce(self, values: torch.Tensor, op: object) -> None:
        assert op == dist.ReduceOp.MAX  # the slowest rank counts
        values.copy_(values.clamp(min=self.call_s))


@pytest.mark.parametrize(("others", "repeated"), [(0.0, 20), (0.05, 1)])
def test_seconds_are_the_time_of_one_call_on_the_slowest_rank(
    monkeypatch: pytest.MonkeyPatch, others: float, repeated: int
) -> None:
    """This rank takes 1 s for its first call, then 1 ms. repeated: calls in a batch of 20 ms, or one."""
    other, calls, batches = OtherRank(others), itertools.count(), 5
    for name in ("dist", "time"):
        monkeypatch.setattr(bandwidth, name, other)
    monkeypatch.setattr(bandwidth, "synchronize", other.synchronize)

    def call() -> None:
        other.pending += 0.001 if next(calls) else 1.0

    slowest = max(others, 0.001)
    world = cast(World, SimpleNamespace(device=torch.device("cpu")))
    assert bandwidth.seconds_of(call, world, batches * repeated * slowest * 1.01) == pytest.approx([slowest] * batches)
    assert next(calls) == 2 + batches * repeated


def test_the_figures_of_an_operation_are_minimum_median_and_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "seconds_of", lambda call, world, budget_s: [4.0, 1.0, 9.0, 2.0, 64.0])
    monkeypatch.setattr(bandwidth, "wrong_ranks", lambda right, world: [0, 2] if right else [])
    monkeypatch.setattr(dist, "all_reduce", lambda data: data.fill_(1.0 + 2.0 + 3.0))
    world = cast(World, SimpleNamespace(size=3, rank=1, device=torch.device("cpu")))
    found = bandwidth.measure("all_reduce", 1002, world, 1.0)
    assert found == bandwidth.Figure("all_reduce", 3, 1000, 1.0, 4.0, 64.0, 2)
    figure = replace(found, operation="all_gather", ranks=4, size=6_000_000_000, median_s=2.0, max_s=5.0, wrong=0)
    assert (figure.algbw, figure.busbw) == (3.0, 2.25)  # 1e9 bytes are a GB
    assert figure.line().split() == [
        "all_gather", "6,000,000,000", "1,000,000.0", "2,000,000.0", "5,000,000.0", "3.000", "2.250", "ok",
    ]  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_size_counts_the_parts_of_all_ranks(operation: str) -> None:
    """As in nccl-tests, for operations that divide or join arrays."""
    world = cast(World, SimpleNamespace(size=4, rank=0, device=torch.device("cpu")))
    case = bandwidth.make_case(operation, 4100, world)
    storages = {one.untyped_storage().data_ptr(): one for one, _ in (*case.fill, *case.expected)}.values()
    largest = max(one.untyped_storage().nbytes() for one in storages)
    assert largest == (4100 if operation in bandwidth.WHOLE else 4096)


def test_sums_are_exact_in_float32_for_any_number_of_ranks() -> None:
    count = 1024
    cases = [
        bandwidth.make_case("reduce_scatter", 16 * count, SimpleNamespace(size=count, rank=rank, device="cpu"))
        for rank in range(count)
    ]
    total = torch.zeros(count)
    for case in cases:  # one after another, as in a ring
        total += torch.as_tensor(case.fill[0][1]).flatten()
    assert total.tolist() == [case.expected[0][1] for case in cases]


def test_a_gpus_speed_and_result(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.count(0, 0.005)  # 5 ms for each of the products
    monkeypatch.setattr(gpucheck, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    monkeypatch.setattr(gpucheck, "TIMED_SIDE", 100)
    cuda = SimpleNamespace(
        device=contextlib.nullcontext, is_bf16_supported=lambda **_: True, synchronize=lambda _: None, device_count=lambda: 2,
        mem_get_info=lambda _: (3, 9), get_device_properties=lambda _: SimpleNamespace(uuid="abc", name="H200"),
    )  # fmt: skip
    for name, value in vars(cuda).items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert gpucheck.speed(torch.device("cpu")) == pytest.approx(2 * 100**3 / 0.005 / 1e12)
    monkeypatch.setattr(gpucheck, "speed", lambda _: 123.44)
    one = {"uuid": "GPU-abc", "name": "H200", "free": 3, "total": 9, "correct": True, "tflops": 123.4}
    assert gpucheck.one(torch.device("cpu")) == one
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, _: tensor + (torch.arange(len(tensor)) == 7))
    assert gpucheck.one(torch.device("cpu"))["correct"] is False

    def broken(device: torch.device) -> dict[str, Any]:
        if device.index:
            raise RuntimeError("CUDA error: an illegal\nmemory access")
        return one

    monkeypatch.setattr(gpucheck, "one", broken)
    assert gpucheck.gpus() == [{"index": 0, **one}, {"index": 1, "error": "CUDA error: an illegal memory access"}]


def test_sizes() -> None:
    assert sizes_of("4..1G") == tuple(4**i for i in range(1, 16))
    assert sizes_of("1K..8K") == (1024, 4096)
    assert sizes_of("64M,4") == (64 << 20, 4)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("sizes=8..4", "TO must be at least FROM"),
        ("sizes=1..2T", "must be FROM..TO"),
        ("operations=allreduce", "did you mean 'all_reduce'?"),
    ],
)
def test_invalid_keys_are_reported(word: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parser.parse_keys(Config, [word])


@pytest.mark.long
def test_a_signal_ends_the_benchmark_between_two_sizes(tmp_path: Path) -> None:
    command = [*COMMAND, "ranks_per_node=2", f"run_dir={tmp_path}", "mode=bench", "sizes=1K..64M", "seconds=1"]
    process = helpers.start(command)
    helpers.wait_until(lambda: (tmp_path / "bandwidth.jsonl").exists() or process.poll() is not None, 60, "its begin")
    process.send_signal(signal.SIGTERM)
    ended = helpers.finish(process, 60)
    assert ended.status == 75, ended.out
    assert helpers.read(tmp_path, "status")["state"] == "preempted"
    assert "stopped by SIGTERM" in ended.out
