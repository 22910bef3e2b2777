"""Message passing on real ranks: every answer is checked on 1 to 4 of them, and figures are computed as nccl-tests does."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import itertools
import json
import math
import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from recipes import collectives
from recipes.conf.collectives import OPERATIONS, Config, Mode, bytes_of, sizes_of
from recipes.core import bandwidth, drawing, outliers
from recipes.core.doctor import gpucheck, linkcheck
from recipes.core.place import ranks
from recipes.core.train.run import Run
from recipes.core.train.world import World
from tests import helpers

LESSONS = (
    "send_and_recv", "isend_and_irecv", "batch_isend_irecv", "broadcast", "reduce sum", "reduce product", "reduce max", "reduce min",
    "reduce avg", "all_reduce sum", "all_reduce product", "all_reduce max", "all_reduce min", "all_reduce avg", "gather", "scatter",
    "all_gather", "reduce_scatter", "all_to_all", "subgroups", "barrier",
)  # fmt: skip
GROUP_S = datetime.timedelta(seconds=20)


def in_forks(folder: Path, size: int, work: Callable[[int, int, int], Any]) -> list[Any]:
    """The results of ``work(rank, port, descriptor)`` on each of ``size`` forks of this process, which has imported torch already.

    port, descriptor: of a listening socket for rank 0's store. An exception of ``work`` is returned as its text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pids = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in range(size):
            if pid := os.fork():
                pids.append(pid)
                continue
            try:
                gc.freeze()  # to collect a process group of this process in a fork waits for threads that a fork lacks
                faulthandler.dump_traceback_later(2 * GROUP_S.total_seconds(), exit=True)  # a hang prints where
                torch.set_num_threads(1)  # a fork lacks the threads that this process may have
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                try:
                    found = work(rank, listener.getsockname()[1], listener.fileno())
                except Exception as error:
                    traceback.print_exc()
                    found = f"{type(error).__name__}: {error}"
                (folder / f"found{rank}").write_bytes(pickle.dumps(found))
            finally:
                os._exit(0)
    for pid in pids:
        os.waitpid(pid, 0)
    return [pickle.loads((folder / f"found{rank}").read_bytes()) for rank in range(size)]


def on_ranks(folder: Path, size: int, work: Callable[[Run], Any]) -> list[Any]:
    """What ``work`` returns on each of ``size`` ranks with a process group. Its run has a world, a folder, and the lines that it says."""

    def on_rank(rank: int, port: int, descriptor: int) -> Any:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        store = dist.TCPStore(
            "127.0.0.1", port, size, rank == 0, GROUP_S, wait_for_workers=False, master_listen_fd=descriptor if rank == 0 else None
        )  # fmt: skip
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=GROUP_S)
        info = ranks.detect(
            {**{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "h", "MASTER_PORT": "1"}
        )
        world = World(info, torch.device("cpu"), "gloo", ("host",) * size, store)
        lines: list[str] = []
        cast(Any, collectives).drawing = SimpleNamespace(bandwidths=drawn, matrix=drawn)
        run = SimpleNamespace(world=world, dir=folder, say=lines.append, lines=lines, agree_to_stop=str)
        try:
            return work(cast(Run, run))
        finally:
            with contextlib.suppress(RuntimeError):
                dist.barrier()  # the store ends with rank 0

    return in_forks(folder, size, on_rank)


def drawn(what: object, *more: object) -> None:
    """In the place of a plot: matplotlib's import would take longer than all else. `test_plots_are_drawn` draws."""
    (*_, path, say) = more if len(more) > 1 else (what, *more)
    cast(Any, say)(f"plot: {path}")


def said(run: Run) -> list[str]:
    return cast(Any, run).lines  # type: ignore[no-any-return]


def stopwatch(seconds: Iterable[float]) -> SimpleNamespace:
    """In the place of ``time``: readings in pairs, of which the second is the next of ``seconds`` after the first."""
    readings = (reading for one in seconds for reading in (100.0, 100.0 + one))
    return SimpleNamespace(perf_counter=lambda: next(readings), sleep=lambda _: None)


def run(run_dir: Path, ranks_here: int, *words: str) -> helpers.Ended:
    command = [*helpers.LOCAL[:2], "recipe=collectives", "launcher=local", "device=cpu", f"ranks_per_node={ranks_here}"]
    return helpers.run_fork([*command, f"run_dir={run_dir}", *words])


def results_of(lines: list[str]) -> dict[str, str]:
    """What the lessons' lines say, by the operation."""
    return {line[:20].strip(): line[20:36].strip() for line in lines if line[:20].strip() in LESSONS}


@pytest.mark.parametrize("size", [1, 3])
def test_every_lesson_is_correct_on_an_odd_number_of_ranks(tmp_path: Path, size: int) -> None:
    found = on_ranks(tmp_path, size, lambda run: (collectives.learn(run), results_of(said(run))))
    alone = dict.fromkeys(LESSONS[:3], "-") if size == 1 else {}
    assert found == [({"missing": []}, dict.fromkeys(LESSONS, f"ok on {size} ranks") | alone)] * size


# By all_gather.cu, reduce_scatter.cu, alltoall.cu, gather.cu, scatter.cu, all_reduce.cu of nccl-tests.
PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def bus_factor(operation: str, size: int) -> float:
    return (size - 1) / size if operation in PARTS else 2 * (size - 1) / size if operation == "all_reduce" else 1.0


@pytest.mark.parametrize("size", [1, 3])
def test_every_operation_is_timed_and_its_answer_checked(tmp_path: Path, size: int) -> None:
    def work(run: Run) -> Any:
        cast(Any, bandwidth).A_BATCH_S = 1e-4
        cfg = Config(mode=Mode.bench, sizes="3,5,40,4K,1M", seconds=0.01)
        return collectives.bench(run, cfg), said(run)

    found = on_ranks(tmp_path, size, work)
    summary, lines = found[0]
    assert [one[0] for one in found] == [summary] * size  # the same figures on all ranks
    assert summary["missing"] == []
    rows = [json.loads(line) for line in (tmp_path / "bandwidth.jsonl").read_text().splitlines()]
    cut = 16 * size  # each rank's part is a multiple of 16 bytes
    timed = {operation: [4, 40, 4096, 1 << 20] for operation in bandwidth.WHOLE}
    timed |= {name: sorted({max(cut, one // cut * cut) for one in (5, 40, 4096, 1 << 20)}) for name in PARTS}
    if size == 1:
        del timed["send_recv"]
    assert {operation: [row["size"] for row in rows if row["operation"] == operation] for operation in timed} == timed
    assert {row["operation"] for row in rows} == set(timed)
    for row in rows:
        assert (row["wrong"], row["ranks"]) == (0, size)
        assert row["algbw"] == pytest.approx(row["size"] / row["median_s"] / 1e9)
        assert row["busbw"] == pytest.approx(row["algbw"] * bus_factor(row["operation"], size))
        best = max(other["busbw"] for other in rows if other["operation"] == row["operation"])
        assert summary["busbw"][row["operation"]] == round(best, 4)
    assert len([line for line in lines if line.endswith("  ok")]) == len(rows)


def test_a_wrong_result_is_reported_with_its_rank(tmp_path: Path) -> None:
    def work(run: Run) -> Any:
        real = dist.all_gather_into_tensor

        def bent(out: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            real(out, *args, **kwargs)
            out[0] += dist.get_rank() == 1

        dist.all_gather_into_tensor = bent
        errors = []
        bench = Config(mode=Mode.bench, sizes="1K", seconds=0.01, operations="all_gather,all_reduce")
        for call in (lambda: collectives.learn(run), lambda: collectives.bench(run, bench)):
            with pytest.raises(collectives.RunError) as error:
                call()
            errors.append(str(error.value))
        return errors, [line.rpartition("  ")[2] for line in said(run) if line.startswith("all_gather ")]

    wrong = "all_gather: the result is wrong on 1 of 3 ranks; the first is rank 1 on host"
    timed = "all_gather of 1008: the result is wrong on 1 of 3 ranks"
    assert on_ranks(tmp_path, 3, work) == [([wrong, timed], ["wrong on 1 ranks"])] * 3


def test_a_barrier_that_does_not_wait_is_detected(tmp_path: Path) -> None:
    def work(run: Run) -> Any:
        real, dist.barrier = dist.barrier, lambda: None
        try:
            collectives.learn(run)
        finally:
            dist.barrier = real

    found = "RunError: barrier: the result is wrong on 1 of 2 ranks; the first is rank 0 on host"
    assert on_ranks(tmp_path, 2, work) == [found] * 2


def test_unsupported_operations_are_named_and_other_errors_raised(tmp_path: Path) -> None:
    def work(run: Run) -> Any:
        why = "Backend gloo does not support alltoall"

        def bent(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(why)

        dist.all_to_all_single = bent
        assert collectives.learn(run) == {"missing": ["all_to_all"]}
        assert f"{'all_to_all':<20}{'-':<16}gloo does not support it: {why}" in said(run)
        bench = Config(mode=Mode.bench, sizes="1K,4K", seconds=0.01, operations="all_to_all")
        assert collectives.bench(run, bench)["missing"] == ["all_to_all"]
        why = "CUDA error: operation not supported"  # the device's own words
        return collectives.learn(run)

    assert on_ranks(tmp_path, 2, work) == ["RuntimeError: CUDA error: operation not supported"] * 2


def test_pairs_are_a_matrix_with_the_figure_of_the_lower_rank(tmp_path: Path) -> None:
    def work(run: Run) -> Any:
        def exchange(world: World, peer: int, size: int, budget_s: float) -> float:
            assert (size, budget_s) == (64 << 10, 0.5)
            return 1e9 * (100 * world.rank + peer)

        bandwidth.exchange = exchange
        found = collectives.pairs(run, Config(pairs=True, pair_size="64K", seconds=0.5))
        of_two = bandwidth.every_pair(run.world, [0, 2], 64 << 10, 0.5) / 1e9  # rank 1 is on another node's side
        return found, said(run)[-1 - (run.world.rank == 0)], of_two.nan_to_num(-1).tolist()

    matrix = [[None, 1, 2], [1, None, 102], [2, 102, None]]
    names = ["rank 0", "rank 1", "rank 2"]
    assert [one[0] for one in on_ranks(tmp_path, 3, work)] == [{"pairs": names, "pairs_gb_per_s": matrix}] * 3
    assert [one[2] for one in on_ranks(tmp_path / "again", 3, work)] == [[[-1, 2], [2, -1]]] * 3
    nodes = SimpleNamespace(ranks=SimpleNamespace(num_nodes=3), hosts=("a", "a", "b", "c", "c"), size=5)
    assert bandwidth.first_ranks(cast(World, nodes)) == [0, 2, 3]


def test_a_pair_repeats_as_often_as_its_lower_rank_says_and_gives_the_median(tmp_path: Path) -> None:
    def work(run: Run) -> Any:
        # Warm-up first, which connects; then five times by the lower rank's warm-up.
        taken = [9.0, 0.5, 1.0, 16.0, 2.0, 8.0, 3.0] if run.world.rank == 0 else [9.0, 0.01, *[1.0] * 5]
        cast(Any, bandwidth).time = stopwatch(taken)
        return bandwidth.exchange(run.world, 1 - run.world.rank, 3000, 2.5)

    assert on_ranks(tmp_path, 2, work) == [1000.0, 3000.0]


def test_the_doctors_bandwidth_test_gives_the_bus_bandwidth_and_each_pairs(tmp_path: Path) -> None:
    def work(rank: int, port: int, descriptor: int) -> Any:
        said: list[dict[str, Any]] = []
        nodes = [0, 1, 3, 5]  # two nodes are left out
        place = {
            "RANK": rank,
            "WORLD_SIZE": 4,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "NODES": json.dumps(nodes),
        }
        bent = cast(Any, linkcheck)
        bent.os = SimpleNamespace(
            environ={name: str(value) for name, value in place.items()}, _exit=lambda status: None
        )
        bent.time, bent.SIZE = stopwatch([9.0, 0.3, 0.25, 0.5, 0.4] * 3), 1 << 20
        bent.say = lambda **found: said.append(found)
        linkcheck.main("gloo", descriptor, GROUP_S.total_seconds())
        return said

    found = in_forks(tmp_path, 4, work)
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


@pytest.mark.parametrize("count", [2, 3, 5, 8, 9, 100, 1000])
def test_each_node_is_paired_with_a_few_others(count: int) -> None:
    masks = linkcheck.masks(count)
    assert len(masks) <= linkcheck.PARTNERS
    assert all(any(node ^ mask < count for mask in masks) for node in range(count))
    assert len({node ^ mask for node in range(count) for mask in masks if node ^ mask < count}) == count


def test_a_wrong_sum_is_found_by_the_doctors_bandwidth_test(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    fake = SimpleNamespace(barrier=lambda: None, all_reduce=lambda data: data.fill_(next(results)))
    monkeypatch.setattr(linkcheck, "dist", fake)
    monkeypatch.setattr(linkcheck, "SIZE", 64)
    assert linkcheck.all_reduce(torch.device("cpu"), 0, 2)[1]  # 1 + 2
    assert not linkcheck.all_reduce(torch.device("cpu"), 0, 2)[1]


def test_sizes_that_do_not_fit_on_the_smallest_node_are_left_out(tmp_path: Path) -> None:
    def work(run: Run) -> Any:
        bandwidth.free_memory = lambda: (8 - 4 * run.world.rank) << 20  # of which two ranks take a half
        return bandwidth.that_fit([1 << 18, 1 << 19, 1 << 20], run.world, run.say), said(run)

    told = "1 sizes of at least 1,048,576 bytes are left out: two arrays must fit into 0.0 GB per rank"
    assert on_ranks(tmp_path, 2, work) == [([1 << 18, 1 << 19], [told])] * 2


def test_plots_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canvas = pytest.importorskip("matplotlib.figure").Figure
    shown: list[Any] = []
    save = canvas.savefig
    monkeypatch.setattr(canvas, "savefig", lambda self, path: (shown.append(self.axes[0]), save(self, path)))
    lines: list[str] = []
    figures = [
        bandwidth.Figure(operation, 4, size, 1.0, size / 1e9 / speed, 9.0, 0)
        for size in (1 << 10, 1 << 20)
        for operation, speed in (("all_gather", 8.0), ("broadcast", 3.0))
    ]
    drawing.bandwidths(figures, tmp_path / "bandwidth.png", lines.append)
    drawing.matrix([[math.nan, 7.5], [7.5, math.nan]], ["rank 0", "rank 1"], tmp_path / "pairs.png", lines.append)
    assert lines == [f"plot: {tmp_path}/bandwidth.png", f"plot: {tmp_path}/pairs.png"]
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in ("bandwidth.png", "pairs.png"))
    plot, matrix = shown
    curves = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in plot.get_lines()}
    assert curves == {
        name: ([1 << 10, 1 << 20], pytest.approx([busbw, busbw]))
        for name, busbw in (("all_gather", 6.0), ("broadcast", 3.0))
    }
    assert [label.get_text() for label in matrix.get_yticklabels()] == ["rank 0", "rank 1"]


# --- the arithmetic, without a clock


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


@pytest.mark.parametrize(("others", "expected"), [(0.0, [0.001, 0.003]), (0.002, [0.002, 0.003]), (0.05, [0.05, 0.05])])
def test_seconds_are_the_time_of_one_call_on_the_slowest_rank(
    monkeypatch: pytest.MonkeyPatch, others: float, expected: list[float]
) -> None:
    """This rank takes 1 s for its first call, then 1 ms, and 3 ms in the last batch; a GPU's work ends when it is waited for."""
    other, calls = OtherRank(others), itertools.count()
    for name in ("dist", "time"):
        monkeypatch.setattr(bandwidth, name, other)
    monkeypatch.setattr(bandwidth, "synchronize", other.synchronize)
    repeated = 20 if others < 0.01 else 1  # so that a batch takes 20 ms
    repeated = 10 if others == 0.002 else repeated
    batches = 5

    def call() -> None:
        number = next(calls)
        other.pending += 1.0 if number == 0 else 0.003 if number >= 2 + (batches - 1) * repeated else 0.001

    budget_s = batches * repeated * max(others, 0.001) * 1.01
    world = cast(World, SimpleNamespace(device=torch.device("cpu")))
    found = bandwidth.seconds_of(call, world, budget_s)
    assert next(calls) == 2 + batches * repeated
    assert found == pytest.approx([expected[0]] * (batches - 1) + [expected[1]])


def test_the_figures_of_an_operation_are_minimum_median_and_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "seconds_of", lambda call, world, budget_s: [4.0, 1.0, 9.0, 2.0, 64.0])
    monkeypatch.setattr(bandwidth, "wrong_ranks", lambda right, world: [0, 2] if right else [])
    monkeypatch.setattr(dist, "all_reduce", lambda data: data.fill_(1.0 + 2.0 + 3.0))
    world = cast(World, SimpleNamespace(size=3, rank=1, device=torch.device("cpu")))
    found = bandwidth.measure("all_reduce", 1002, world, 1.0)
    assert found == bandwidth.Figure("all_reduce", 3, 1000, 1.0, 4.0, 64.0, 2)
    figure = bandwidth.Figure("all_gather", 4, 6_000_000_000, 1.0, 2.0, 5.0, 0)
    assert (figure.algbw, figure.busbw) == (3.0, 2.25)  # 1e9 bytes are a GB
    slower = replace(figure, median_s=3.0)
    assert bandwidth.best([slower, figure, slower, found]) == {"all_gather": 2.25, "all_reduce": round(found.busbw, 4)}
    assert figure.row() == {
        "operation": "all_gather", "ranks": 4, "size": 6_000_000_000, "min_s": 1.0, "median_s": 2.0, "max_s": 5.0,
        "wrong": 0, "algbw": 3.0, "busbw": 2.25,
    }  # fmt: skip
    assert figure.line().split() == [
        "all_gather", "6,000,000,000", "1,000,000.0", "2,000,000.0", "5,000,000.0", "3.000", "2.250", "ok",
    ]  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_size_counts_the_parts_of_all_ranks(operation: str) -> None:
    """Of what is cut, or put together, the parts of all ranks are counted, as in nccl-tests."""
    world = cast(World, SimpleNamespace(size=4, rank=0, device=torch.device("cpu")))
    case = bandwidth.make_case(operation, 4100, world)
    storages = {one.untyped_storage().data_ptr(): one for one, _ in (*case.fill, *case.expected)}.values()
    largest = max(one.untyped_storage().nbytes() for one in storages)
    assert largest == (4100 if operation in bandwidth.WHOLE else 4096)


def test_a_gpus_speed_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_free_memory_respects_the_limit_of_the_cgroup(tmp_path: Path) -> None:
    groups = tmp_path / "proc/self/cgroup"
    groups.parent.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 32000 kB\nMemAvailable: 16000 kB\n")
    groups.write_text("0::/\n")
    assert bandwidth.free_memory(tmp_path) == 16000 << 10

    def group(folder: str, **files: object) -> None:
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (tmp_path / "sys/fs/cgroup" / folder / f"memory.{name}").write_text(f"{content}\n")

    group("job/step", max="max")
    group("job", max=9000)
    groups.write_text("0::/job/step\n")
    assert bandwidth.free_memory(tmp_path) == 9000
    group("memory/job/step", limit_in_bytes=8000)
    groups.write_text("9:cpu,cpuacct:/job\n4:memory:/job/step\n0::/\n")
    assert bandwidth.free_memory(tmp_path) == 8000
    assert bandwidth.free_memory() > 0


def test_pairs_of_one_rank_are_refused(tmp_path: Path) -> None:
    found = on_ranks(tmp_path, 1, lambda run: collectives.pairs(run, Config(pairs=True)))
    assert found == ["InputError: pairs=true: requires at least 2 ranks"]


def test_sums_are_exact_in_float32_whatever_the_number_of_ranks() -> None:
    count = 1024
    cases = [
        bandwidth.make_case("reduce_scatter", 16 * count, SimpleNamespace(size=count, rank=rank, device="cpu"))
        for rank in range(count)
    ]
    total = torch.zeros(count)
    for case in cases:  # one after another, as round a ring
        total += torch.as_tensor(case.fill[0][1]).flatten()
    assert total.tolist() == [case.expected[0][1] for case in cases]


@pytest.mark.parametrize("count", range(2, 14))
def test_every_pair_is_measured_once_and_no_rank_twice_in_a_round(count: int) -> None:
    rounds = list(bandwidth.rounds(count))
    assert sorted(pair for pairs in rounds for pair in pairs) == list(itertools.combinations(range(count), 2))
    assert all(len({one for pair in pairs for one in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == count - 1 + count % 2


def test_the_slow_node_and_the_slow_pair_are_named() -> None:
    speed = torch.full((6, 6), 40.0)
    speed[2, :] = speed[:, 2] = 5.0
    speed[0, 5] = speed[5, 0] = 10.0
    speed.fill_diagonal_(math.nan)
    lines = bandwidth.pair_lines(speed, [f"node{i}" for i in range(6)])
    assert lines[-3:] == [
        "median 40.000 GB/s each way",
        "node2 is slow: 5.000 GB/s, the median of its pairs",
        "node0 and node5 are slow: 10.000 GB/s",
    ]
    assert outliers.slow({("a", "b"): 1.0}) == outliers.Slow(1.0, {}, {})
    few = {("a", "b"): 1.0, ("c", "d"): 4.0, ("e", "f"): 4.0}  # which of the two it is, no other pair tells
    assert outliers.slow(few) == outliers.Slow(4.0, {}, {("a", "b"): 1.0})
    assert outliers.slow({}) == outliers.Slow(0.0, {}, {})


def test_sizes() -> None:
    assert sizes_of("4..1G") == tuple(4**i for i in range(1, 16))
    assert sizes_of("1K..8K:2") == (1024, 2048, 4096, 8192)
    assert sizes_of("64M,4") == (64 << 20, 4)
    assert bytes_of("16M") == 16 << 20
    assert [bandwidth.shown_size(size) for size in (4, 1024, 1536, 16 << 20, 1 << 30)] == [
        "4",
        "1K",
        "1536",
        "16M",
        "1G",
    ]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("sizes=8..4", "must have FROM of at least 1"),
        ("sizes=0", "a size is 1 to 64G"),
        ("sizes=1..2T", "must be FROM..TO"),
        ("sizes=4..1G:1", "must have FROM of at least 1"),
        ("sizes=1..128G", "must be at most 64G"),
        ("operations=allreduce", "did you mean 'all_reduce'?"),
        ("mode=test", "must be one of learn, bench"),
        ("pair_size=0", "pair_size=0: must be 1 to 64G"),
    ],
)  # fmt: skip
def test_invalid_keys_are_reported_in_one_line(tmp_path: Path, word: str, expected: str) -> None:
    ended = run(tmp_path, 1, word)
    assert ended.status == 2
    assert len(ended.lines) == 1, ended.out
    assert expected in ended.out


@pytest.mark.long
def test_a_signal_ends_the_benchmark_between_two_sizes(tmp_path: Path) -> None:
    command = [*helpers.LOCAL[:2], "recipe=collectives", "launcher=local", "device=cpu", "ranks_per_node=2"]
    process = helpers.start([*command, f"run_dir={tmp_path}", "mode=bench", "sizes=1K..64K:2", "seconds=1"])
    try:
        helpers.wait_until(
            lambda: (tmp_path / "bandwidth.jsonl").exists() or process.poll() is not None, 60, "its begin"
        )
        process.send_signal(signal.SIGTERM)
        ended = helpers.finish(process, 60)
    finally:
        process.kill()
    assert ended.status == 75, ended.out
    assert helpers.read(tmp_path, "status")["state"] == "preempted"
    assert "stopped by SIGTERM" in ended.out
