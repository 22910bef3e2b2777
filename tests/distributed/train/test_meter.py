"""Where the time of a step goes, what ranks use, the arithmetic of a model, and a profile."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from torch.nn import functional as F

from recipes import gpt, toy
from recipes.core.place import processes
from recipes.core.train import meter
from tests import helpers


def world_of(ranks: int) -> Any:
    return SimpleNamespace(
        gather=lambda content: [content] * ranks,
        hosts=("a",) * ranks,
        pulse=SimpleNamespace(beat=lambda stage: None),
    )


def test_a_rank_does_not_wait_for_others_longer_than_its_pass_takes() -> None:
    """A wait of 2 s was measured in one of two steps; the other one had none."""
    clock: Any = SimpleNamespace(now=lambda: clock.time, time=0.0)
    measured = meter.Meter(clock, torch.device("cpu"))
    for part, seconds in (("data_wait", 1.0), ("forward_backward", 3.0)):
        clock.time += seconds
        measured.mark(part)
    measured.step_ends(1)
    measured.step_ends(1)
    lap = measured.lap(unhidden_s=2.0)
    assert lap["communication"] == lap["forward_backward"] == 0.75
    assert measured.of_ranks(world_of(1))["rank_step_s"] == [0.5]


def test_parts_of_a_step_are_shares_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = SimpleNamespace(now=lambda: clock.time, time=0.0)
    measured = meter.Meter(clock, torch.device("cpu"))
    for _ in range(2):
        for part, seconds in (
            ("data_wait", 1.0),
            ("forward_backward", 6.0),
            ("optimizer", 2.0),
            ("loop", 1.0),
        ):
            clock.time += seconds
            measured.mark(part)
        measured.step_ends(30)
    lap = measured.lap(unhidden_s=1.5)
    parts = {"data_wait": 0.1, "forward_backward": 0.6, "communication": 0.15, "optimizer": 0.2}
    assert lap == {**parts, "samples_per_second": 3.0}
    assert measured.spent == {"data": 2.0}
    for seconds in (60.0, 40.0):
        with measured.spending("evaluation"):
            clock.time += seconds
    assert measured.spent == {"data": 2.0, "evaluation": 100.0}
    assert measured.lap() == {"samples_per_second": 0.0}
    assert measured.samples == 60
    assert measured.train_s == 20.0
    world = world_of(2)
    told = measured.of_ranks(world)
    assert told["rank_step_s"] == [7.5, 7.5]  # without the 1.5 s in which it has waited
    assert 0.1 < told["memory_gb"] < 20
    clock.time += 4.0
    measured.mark("forward_backward")
    measured.step_ends(30)
    measured.lap()
    times = iter([(cpu_s, 1e9 + now) for cpu_s, now in ((0, 0), (6, 10), (7, 20), (7, 60))])
    monkeypatch.setattr(processes, "cpu_time", lambda: next(times))
    memories = iter([10**9, 3 * 10**9])
    monkeypatch.setattr(processes, "memory", lambda: next(memories))
    used = [measured.of_ranks(world) for _ in range(4)]
    assert used[0]["rank_step_s"] == [4.0, 4.0]  # since the row before
    # of two ranks on one node
    assert [row["cpus_used"] for row in used[1:]] == [1.2, 0.2, 0.0]
    assert [row["memory_gb"] for row in used] == [2.0, 2.0, 2.0, 6.0]  # measured once a minute
    assert "gpu_energy_kj" not in told  # no GPU: unknown


def test_a_wait_for_data_while_the_gpu_works_is_no_lost_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 4 s, in which the host has waited for 2 s, the GPU has worked for 3.5 s; then for more."""
    clock: Any = SimpleNamespace(now=lambda: clock.time, time=0.0)
    measured = meter.Meter(clock, torch.device("cuda"))
    for optimizer_s in (0.5, 1.5):
        on_gpu = {"forward_backward": 3.0, "optimizer": optimizer_s}
        monkeypatch.setattr(measured, "_on_gpu", lambda steps, on_gpu=on_gpu: on_gpu)
        for part in ("data_wait", "forward_backward"):
            clock.time += 2.0
            measured.mark(part)
        measured.step_ends(8)
        assert measured.lap()["data_wait"] == 0.5
        assert measured.spent["data"] == 0.5


def test_what_the_ranks_of_uneven_nodes_use() -> None:
    """Memory of the node that uses most, CPUs per node, energy of all GPUs."""
    clock: Any = SimpleNamespace(now=lambda: 0.0)
    measured = meter.Meter(clock, torch.device("cpu"))
    ranks = []
    for rank, memory in enumerate((4 * 10**9, 10**9, 2 * 10**9, 6 * 10**9)):
        ranks.append(meter.OF_RANK.pack(0.1 * rank, 0.5 * rank, 1000.0 * rank, memory, 0))
    world: Any = SimpleNamespace(
        gather=lambda content: ranks,
        hosts=("a", "a", "a", "b"),
        pulse=SimpleNamespace(beat=lambda stage: None),
    )
    assert measured.of_ranks(world) == {
        "rank_step_s": [0.0, 0.1, 0.2, 0.3],
        "memory_gb": 7.0,
        "cpus_used": 1.5,
        "gpu_energy_kj": 6.0,
    }


def test_arithmetic_of_a_known_network() -> None:
    net = torchvision.models.resnet50().eval()
    with meter.Flops() as flops:
        net(torch.zeros(2, 3, 224, 224))
    of_first = 112 * 112 * 64 * 3 * 49  # its input, the images, has no gradient
    expected = 2 * (3 * 4.089e9 - of_first)  # torchvision's documentation: 4.09 GFLOPS, in products
    assert flops.count / 2 == pytest.approx(expected, rel=0.001)
    for parameter in net.parameters():
        parameter.requires_grad = False
    with meter.Flops() as flops:
        net(torch.zeros(1, 3, 224, 224))
    assert flops.count == pytest.approx(2 * 4.089e9, rel=0.001)  # only forward


@pytest.mark.parametrize("names", [(), ("weight",), ("input", "weight")])
def test_tensors_that_are_given_by_name_count_too(names: tuple[str, ...]) -> None:
    tensors = {"input": torch.zeros(5, 3), "weight": torch.zeros(2, 3)}
    by_name = {name: tensors.pop(name) for name in names}
    with meter.Flops() as flops:
        F.linear(*tensors.values(), **by_name)
    assert flops.count == 2 * 5 * 2 * 3


def test_a_layer_that_is_called_as_a_function_counts() -> None:
    """gpt joins the matrices of queries, keys and values, and multiplies by all three at once."""
    block = gpt.Block(128, 2)
    with meter.Flops() as flops:
        block(
            torch.zeros(3, 5, 128, requires_grad=True), *gpt.rotary_factors(5, torch.device("cpu"))
        )
    weights = sum(parameter.numel() for parameter in block.parameters())
    assert flops.count == 3 * 2 * 3 * 5 * weights  # three passes, two operations, fifteen tokens


TOY = [sys.executable, "-m", "recipes.toy", "device=cpu", "max_steps=12", "log_every_steps=4"]


def test_rows_have_the_parts_of_a_step_and_a_profile_is_written(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "profile/trace.json.gz").symlink_to(tmp_path / "mine")  # in a copied run
    helpers.run_fork([*TOY, "profile=3", f"run_dir={tmp_path}"]).expect(0)
    last = helpers.rows(tmp_path)[-1]
    summary = helpers.read(tmp_path, "summary")
    assert last["forward_backward"] > 0
    assert last["communication"] == 0
    assert last["tflops"] > 0
    assert sum(last[name] for name in meter.PARTS) <= 1.01
    assert len(last["rank_step_s"]) == 1
    assert summary["parameters"] > 0
    assert summary["global_batch_size"] > 0
    trace = json.loads(gzip.decompress((tmp_path / "profile/trace.json.gz").read_bytes()))
    assert any(event.get("name") == "aten::addmm" for event in trace["traceEvents"])
    assert "aten::addmm" in (tmp_path / "profile/summary.txt").read_text()
    assert (tmp_path / "mine").read_text() == "mine"


def test_the_time_of_each_rank_and_the_first_thing_to_change(tmp_path: Path) -> None:
    code = """
import sys, time, recipes.toy as toy
from recipes.core.train.step import Step
backward = Step.backward
def late(step, losses):
    time.sleep(0.04 + 0.1 * step._common.run.world.rank)
    backward(step, losses)
Step.backward = late
start = toy.entry.begin("toy")
toy.session.run(toy.main, start)
"""
    words = [*TOY[3:], f"run_dir={tmp_path}"]
    ended = helpers.run_ranks(code, words, 2).expect(0)
    last = helpers.rows(tmp_path)[-1]
    summary = helpers.read(tmp_path, "summary")
    assert last["rank_step_s"][1] > 0.05 + last["rank_step_s"][0]
    with meter.Flops() as flops:
        toy.make_net()(torch.zeros(1, 20))
    of_sample = flops.count / 1e12
    # of one rank
    assert last["tflops"] == pytest.approx(of_sample * last["samples_per_second"] / 2, rel=0.01)
    # rank 0 waits
    assert "of each step waits for the gradients of other ranks" in summary["efficiency"]
    assert f"efficiency: {summary['efficiency']}\n" in ended.out
