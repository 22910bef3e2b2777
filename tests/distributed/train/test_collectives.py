"""Message passing on real ranks: results are checked, and bandwidths are computed as nccl-tests
does. Also the doctor's tests with torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from recipes import collectives
from recipes.conf.collectives import OPERATIONS, Config, sizes_of
from recipes.core.config import parser
from recipes.core.doctor import gpucheck, linkcheck
from recipes.core.errors import ConfigError
from recipes.core.run import watchdog
from recipes.core.train.world import World
from tests import helpers

LESSONS = [lesson.__name__ for lesson in collectives.LESSONS]
COMMAND = [*helpers.LOCAL[:2], "recipe=collectives", "launcher=local", "device=cpu"]


def run(run_dir: Path, ranks: int, *words: str) -> helpers.Ended:
    return helpers.run_fork([*COMMAND, f"ranks_per_node={ranks}", f"run_dir={run_dir}", *words])


@pytest.mark.parametrize("size", [1, 3])
def test_every_lesson_is_correct_on_an_odd_number_of_ranks(tmp_path: Path, size: int) -> None:
    ended = run(tmp_path, size).expect(0)
    results = {line[:20].strip(): line[20:36].strip() for line in ended.lines}
    expected = dict.fromkeys(LESSONS, f"ok on {size} ranks")
    if size == 1:
        expected |= dict.fromkeys(LESSONS[:3], "-")
    assert {lesson: results.get(lesson) for lesson in LESSONS} == expected


# By all_gather.cu, reduce_scatter.cu, alltoall.cu, gather.cu, scatter.cu, all_reduce.cu of
# nccl-tests.
PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def bus_factor(operation: str, size: int) -> float:
    if operation in PARTS:
        return (size - 1) / size
    return 2 * (size - 1) / size if operation == "all_reduce" else 1.0


@pytest.mark.parametrize("size", [1, 3])
def test_every_operation_is_timed(tmp_path: Path, size: int) -> None:
    ended = run(tmp_path, size, "mode=bench", "sizes=5..5K", "seconds=0.01").expect(0)
    best = helpers.read(tmp_path, "summary")["busbw"]
    sizes = defaultdict(list)
    bandwidths = defaultdict(list)
    for line in ended.lines:
        if re.match(r"\w+ +[\d,]+ +[\d,.]+ ", line):
            operation, length, _, _, bandwidth, *_ = line.replace(",", "").split()
            sizes[operation].append(int(length))
            bandwidths[operation].append(float(bandwidth))
    asked = (5, 20, 80, 320, 1280, 5120)
    cut = 16 * size  # each rank's part is a multiple of 16 bytes
    in_parts = sorted({max(cut, length // cut * cut) for length in asked})
    expected = {operation: [4, *asked[1:]] for operation in collectives.WHOLE}
    expected |= dict.fromkeys(PARTS, in_parts)
    if size == 1:
        del expected["send_recv"]
    assert sizes == expected
    assert best.keys() == expected.keys()
    for operation, value in best.items():
        assert value == pytest.approx(max(bandwidths[operation]), abs=0.001)


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
dist.all_gather_into_tensor = changed
session.run(collectives.main, START)
"""


def test_a_wrong_result_is_reported_with_its_rank(tmp_path: Path) -> None:
    helpers.run_ranks(FAULT, ["device=cpu", f"run_dir={tmp_path}"], 2).expect(1)
    expected = "all_gather: the result is wrong on 1 of 2 ranks; the first is rank 1 on "
    assert expected in helpers.read(tmp_path, "status")["reason"]


LINKCHECK = """
import json, os, socket
from types import SimpleNamespace
from recipes.core.doctor import linkcheck
durations = [9.0, 0.3, 0.25, 0.5, 0.4] * 9
readings = (reading for seconds in durations for reading in (100.0, 100.0 + seconds))
times = iter(json.loads(os.environ["TIMES"]))
linkcheck.time = SimpleNamespace(
    perf_counter=lambda: next(readings), monotonic=lambda: next(times), sleep=lambda _: None
)
linkcheck.SIZE = 1 << 20
rank = int(os.environ["RANK"])
port = int(os.environ["MASTER_PORT"])
fd = None
if rank == 0:
    listener = socket.create_server(("127.0.0.1", port))
    fd = listener.fileno()
nodes = json.loads(os.environ["NODES"])
linkcheck.main("gloo", nodes, rank, int(os.environ["GPUS"]), "127.0.0.1", port, fd, 20)
"""


def linkchecks(nodes: str, gpus: int, times: list[int]) -> list[list[dict[str, Any]]]:
    """The lines of JSON of each rank, one per node. times: the clock's readings."""
    environ = {"NODES": nodes, "GPUS": str(gpus), "TIMES": str(times), "GLOO_SOCKET_IFNAME": "lo"}
    argv = [sys.executable, "-u", "-c", LINKCHECK]
    words = []
    for process in helpers.fork_ranks(argv, len(json.loads(nodes)), **environ):
        lines = helpers.finish(process).lines
        words.append([json.loads(line) for line in lines if line[0] == "{"])
    return words


def test_the_doctors_bandwidth_test_returns_the_bus_bandwidth_and_that_of_each_pair() -> None:
    of_ranks = linkchecks(nodes="[0, 1, 3, 5]", gpus=1, times=[0, 19])  # two nodes are left out
    stages = [
        "the creation of the process group",
        "the first collective",
        "an all_reduce",
        "the exchange between nodes 1 apart in the list of nodes",
        "the exchange between nodes 2 apart in the list of nodes",
        "the end",
    ]
    for words in of_ranks:
        assert [word["at"] for word in words if "at" in word] == stages
        [figure] = [word for word in words if "busbw" in word]
        assert figure["busbw"] == pytest.approx((1 << 20) / 0.25 * 2 * 3 / 4 / 1e9)
        assert figure["correct"] is True
    speed = pytest.approx((1 << 20) / 0.25 / 1e9)
    pairs = [[word["pair"] for word in words if "pair" in word] for words in of_ranks]
    assert pairs == [
        [[0, 1, 0, speed], [0, 3, 0, speed]],
        [[1, 5, 0, speed]],
        [[3, 5, 0, speed]],
        [],
    ]


def test_the_doctors_bandwidth_test_takes_the_gpus_in_turn_while_there_is_time() -> None:
    times = [0, 5, 9, 11]  # of 20 s; the third GPU would begin in the second half
    stages = ["the creation of the process group"]
    for gpu in (0, 1):
        of_gpu = f"with GPU {gpu} of each node"
        stages += [f"the first collective {of_gpu}", f"an all_reduce {of_gpu}"]
        stages += [f"the exchange between nodes 1 apart in the list of nodes {of_gpu}"]
    stages += ["the end"]
    of_ranks = linkchecks(nodes="[0, 1]", gpus=3, times=times)
    for words, pairs in zip(of_ranks, ([[0, 1, 0], [0, 1, 1]], []), strict=True):
        assert [word["at"] for word in words if "at" in word] == stages
        assert [word["pair"][:3] for word in words if "pair" in word] == pairs


@pytest.mark.parametrize("count", [2, 3, 9, 1000])
def test_each_node_is_paired_with_a_few_others(count: int) -> None:
    masks = linkcheck.masks(count)
    assert len(masks) <= 4
    for node in range(count):
        assert any(node ^ mask < count for mask in masks)


def test_a_wrong_sum_is_found_by_the_doctors_bandwidth_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = iter([3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    fake = SimpleNamespace(barrier=lambda: None, all_reduce=lambda data: data.fill_(next(results)))
    monkeypatch.setattr(linkcheck, "dist", fake)
    monkeypatch.setattr(linkcheck, "SIZE", 64)
    assert linkcheck.all_reduce(torch.device("cpu"), 0, 2)[1]  # 1 + 2
    assert not linkcheck.all_reduce(torch.device("cpu"), 0, 2)[1]


class OtherRank:
    """In the place of torch.distributed: a second rank that takes ``call_s`` for each call; and of
    ``time``.
    """

    def __init__(self, call_s: float) -> None:
        self.call_s = call_s
        self.now = 0.0
        self.pending = 0.0
        self.ReduceOp = dist.ReduceOp

    def perf_counter(self) -> float:
        return self.now

    def synchronize(self, _: object) -> None:
        self.now = self.now + self.pending
        self.pending = 0.0

    def barrier(self) -> None:
        self.pending += 7.0  # waits for the other rank; not to be timed

    def all_reduce(self, values: torch.Tensor, op: object) -> None:
        assert op == dist.ReduceOp.MAX  # the slowest rank counts
        values.copy_(values.clamp(min=self.call_s))


@pytest.mark.parametrize(
    ("others", "timeout_s", "batches"), [(0.0, 600.0, 5), (0.05, 600.0, 5), (0.05, 2.0, 11)]
)
def test_seconds_are_the_time_of_one_call_on_the_slowest_rank(
    monkeypatch: pytest.MonkeyPatch, others: float, timeout_s: float, batches: int
) -> None:
    """This rank takes 1 s for its first call, then 1 ms. No batch takes as long as timeout_s, and
    each one is progress.
    """
    other = OtherRank(others)
    calls = itertools.count()
    for name in ("dist", "time"):
        monkeypatch.setattr(collectives, name, other)
    monkeypatch.setattr(collectives, "synchronize", other.synchronize)

    def call() -> None:
        other.pending += 0.001 if next(calls) else 1.0

    slowest = max(others, 0.001)
    budget_s = 101 * slowest
    pulse = watchdog.Pulse()
    place = SimpleNamespace(device=torch.device("cpu"), timeout_s=timeout_s, pulse=pulse)
    seconds = collectives.seconds_of(call, cast(World, place), budget_s)
    assert seconds == pytest.approx([slowest] * batches)
    repeated = 100 // batches
    assert next(calls) == collectives.WARM_UP + batches * repeated
    assert pulse.read()[0] == collectives.WARM_UP + batches


def test_bandwidths_are_those_of_the_median_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [4e-9, 1e-9, 9e-9, 2e-9, 64e-9]
    monkeypatch.setattr(collectives, "seconds_of", lambda call, world, budget_s: seconds)
    world = cast(World, SimpleNamespace(size=4, rank=1, device=torch.device("cpu")))
    figures = collectives.measure("all_reduce", 1000, world, 1.0)
    assert figures == pytest.approx((4e-9, 250.0, 375.0))
    for operation in OPERATIONS:
        figures = collectives.measure(operation, 640, world, 1.0)
        assert figures == pytest.approx((4e-9, 160.0, 160.0 * bus_factor(operation, 4)))


def test_a_gpus_speed_and_result(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.count(0, 0.005)  # 5 ms for each of the products
    monkeypatch.setattr(gpucheck, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    monkeypatch.setattr(gpucheck, "TIMED_SIDE", 100)
    cuda = SimpleNamespace(
        device=contextlib.nullcontext,
        is_bf16_supported=lambda **_: True,
        synchronize=lambda _: None,
        device_count=lambda: 2,
        mem_get_info=lambda _: (3, 9),
        get_device_properties=lambda _: SimpleNamespace(uuid="abc", name="H200"),
    )
    for name, value in vars(cuda).items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert gpucheck.product_speed(torch.device("cpu")) == pytest.approx(2 * 100**3 / 0.005 / 1e12)
    monkeypatch.setattr(gpucheck, "product_speed", lambda _: 123.44)
    healthy = {
        "uuid": "GPU-abc",
        "name": "H200",
        "free": 3,
        "total": 9,
        "correct": True,
        "tflops": 123.4,
    }
    assert gpucheck.examine(torch.device("cpu")) == healthy

    def changed(tensor: torch.Tensor, _: object) -> torch.Tensor:
        return tensor + (torch.arange(len(tensor)) == 7)

    monkeypatch.setattr(torch.Tensor, "to", changed)
    assert gpucheck.examine(torch.device("cpu"))["correct"] is False

    def broken(device: torch.device) -> dict[str, Any]:
        if device.index:
            raise RuntimeError("CUDA error: an illegal\nmemory access")
        return {**healthy}

    monkeypatch.setattr(gpucheck, "examine", broken)
    failed = {"index": 1, "error": "RuntimeError: CUDA error: an illegal memory access"}
    assert gpucheck.gpus() == [{"index": 0, **healthy}, failed]


def test_copies_go_from_each_gpu_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(gpucheck, "examine", lambda device: {"correct": True})
    readings = iter([0.0, 0.5, 1.0, 1.25, 2.0, 3.0])
    monkeypatch.setattr(gpucheck, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    speed = pytest.approx(gpucheck.COPIED / 0.25 / 1e9, abs=0.05)
    assert gpucheck.copies(torch.device("cpu"), torch.device("cpu")) == {"to_next": speed}

    def copies(device: torch.device, other: torch.device) -> dict[str, float]:
        return {"to_next": 10.0 * device.index + other.index}

    monkeypatch.setattr(gpucheck, "copies", copies)
    assert [gpu["to_next"] for gpu in gpucheck.gpus()] == [1.0, 12.0, 20.0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "to_next" not in gpucheck.gpus()[0]


def test_sizes() -> None:
    assert sizes_of("4..1G") == [4**i for i in range(1, 16)]
    assert sizes_of("1K..8K") == [1024, 4096]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("sizes=8..4", "FROM must be at least 1, and TO at least FROM"),
        ("sizes=1..2T", "must be FROM..TO"),
        ("operations=allreduce", "did you mean 'all_reduce'?"),
    ],
)
def test_invalid_keys_are_reported(word: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parser.parse_keys(Config, [word])
