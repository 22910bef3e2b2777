"""Message passing on real ranks: every answer right on 1 to 4 of them, and what is timed has nccl-tests' figures."""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes.conf.collectives import OPERATIONS, bytes_of, sizes_of
from recipes.core import bandwidth, outliers
from tests import helpers

LESSONS = (
    "send_and_recv", "isend_and_irecv", "batch_isend_irecv", "broadcast", "reduce sum", "reduce product", "reduce max", "reduce min",
    "reduce avg", "all_reduce sum", "all_reduce product", "all_reduce max", "all_reduce min", "all_reduce avg", "gather", "scatter",
    "all_gather", "reduce_scatter", "all_to_all", "subgroups", "barrier",
)  # fmt: skip
# The recipe, with what stands in the place of PATCH done to torch first.
BENT = """
from recipes.core import entry
START = entry.begin("collectives")
import torch.distributed as dist
from recipes import collectives
from recipes.core import session
PATCH
session.run(collectives.main, START)
"""


def run(run_dir: Path, ranks: int, *words: str) -> helpers.Ended:
    command = [*helpers.LOCAL[:2], "recipe=collectives", "launcher=local", "device=cpu", f"ranks_per_node={ranks}"]
    return helpers.run([*command, f"run_dir={run_dir}", *words])


@pytest.mark.parametrize("ranks", [helpers.long(1), helpers.long(2), helpers.long(3), 4])
def test_every_lesson_is_right_on_every_rank(tmp_path: Path, ranks: int) -> None:
    ended = run(tmp_path, ranks)
    assert ended.status == 0, ended.out
    table = {line[:20].strip(): line[20:36].strip() for line in ended.lines if line[:20].strip() in LESSONS}
    alone = dict.fromkeys(LESSONS[:3], "-") if ranks == 1 else {}
    assert table == dict.fromkeys(LESSONS, f"right on {ranks}") | alone
    assert helpers.read(tmp_path, "summary")["missing"] == []
    assert helpers.read(tmp_path, "status")["state"] == "done"


@pytest.mark.parametrize("ranks", [helpers.long(1), helpers.long(2), 3, helpers.long(4)])
def test_what_is_timed_is_right_too(tmp_path: Path, ranks: int) -> None:
    ended = run(tmp_path, ranks, "mode=bench", "sizes=4,4K,1M", "seconds=0.01")
    assert ended.status == 0, ended.out
    rows = [json.loads(line) for line in (tmp_path / "bandwidth.jsonl").read_text().splitlines()]
    assert {row["operation"] for row in rows} == set(OPERATIONS) - ({"send_recv"} if ranks == 1 else set())
    assert {row["form"] for row in rows if row["operation"] in ("all_gather", "reduce_scatter")} == {
        "in place",
        "out of place",
    }
    for row in rows:
        assert row["wrong"] == 0
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert row["algbw"] == pytest.approx(row["size"] / row["median_s"] / 1e9)
        assert row["busbw"] == pytest.approx(row["algbw"] * bandwidth.FACTORS[row["operation"]](ranks))
        if row["operation"] not in bandwidth.WHOLE:  # cut into parts of whole 16 bytes
            assert row["size"] % (16 * ranks) == 0
    assert sorted({row["size"] for row in rows if row["operation"] == "all_reduce"}) == [4, 4096, 1 << 20]
    assert len([line for line in ended.lines if line.endswith("  right")]) == len(rows)


def test_sizes_of_which_nothing_can_be_sent_are_told(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, "mode=bench", "sizes=3,5,40", "seconds=0.01", "operations=all_reduce,all_gather")
    assert ended.status == 0, ended.out
    assert "all_reduce     3 bytes left out: the least is 4" in ended.lines
    assert "all_gather     3, 5 bytes left out: the least is 32" in ended.lines
    rows = [json.loads(line) for line in (tmp_path / "bandwidth.jsonl").read_text().splitlines()]
    assert [(row["operation"], row["size"]) for row in rows] == [
        ("all_reduce", 4), ("all_reduce", 40), ("all_gather", 32), ("all_gather", 32),
    ]  # fmt: skip


def test_the_memory_that_a_jobs_cgroup_leaves_is_what_is_free(tmp_path: Path) -> None:
    groups = tmp_path / "proc/self/cgroup"
    groups.parent.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 32000 kB\nMemAvailable: 16000 kB\n")
    groups.write_text("0::/\n")
    assert bandwidth.free_memory(tmp_path) == 16000 << 10

    def group(folder: str, **files: object) -> None:
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (tmp_path / "sys/fs/cgroup" / folder / f"memory.{name}").write_text(f"{content}\n")

    group("job/step", max="max", current=5000, stat="anon 1\ninactive_file 100")
    group("job", max=9000, current=7000, stat="anon 1\ninactive_file 200\nactive_file 100")
    groups.write_text("0::/job/step\n")
    assert bandwidth.free_memory(tmp_path) == 2300
    group("memory/job/step", limit_in_bytes=8000, usage_in_bytes=6000, stat="inactive_file 1\ntotal_inactive_file 50")
    groups.write_text("9:cpu,cpuacct:/job\n4:memory:/job/step\n0::/\n")
    assert bandwidth.free_memory(tmp_path) == 2050
    assert bandwidth.free_memory() > 0


@pytest.mark.long
def test_a_wrong_answer_is_found_with_its_rank(tmp_path: Path) -> None:
    wrong = """
real = dist.all_gather_into_tensor
def bent(out, *args, **kwargs):
    real(out, *args, **kwargs)
    if dist.get_rank() == 1:
        out[0] += 1
dist.all_gather_into_tensor = bent
"""
    code = BENT.replace("PATCH", wrong)
    ended = helpers.run_ranks(code, ["device=cpu", f"run_dir={tmp_path}/learn"], 2)
    assert ended.status == 1
    assert "collectives: failed: rank 0 on" in ended.out
    assert "all_gather: a wrong answer on rank 1 on" in ended.out
    words = [
        "device=cpu",
        f"run_dir={tmp_path}/bench",
        "mode=bench",
        "sizes=1K",
        "seconds=0.01",
        "operations=all_gather",
    ]
    ended = helpers.run_ranks(code, words, 2)
    assert ended.status == 1
    assert "1 wrong" in ended.out
    assert "all_gather of 1K: 1 ranks had a wrong answer" in ended.out


@pytest.mark.long
def test_a_barrier_that_lets_one_go_early_is_found(tmp_path: Path) -> None:
    open_gate = "dist.barrier = lambda: None"
    ended = helpers.run_ranks(BENT.replace("PATCH", open_gate), ["device=cpu", f"run_dir={tmp_path}"], 2)
    assert ended.status == 1
    assert "barrier: a wrong answer on rank 0 on" in ended.out


@pytest.mark.long
def test_what_the_backend_has_not_is_told(tmp_path: Path) -> None:
    missing = """
def bent(*args, **kwargs):
    raise RuntimeError("Backend gloo does not support alltoall")
dist.all_to_all_single = bent
"""
    ended = helpers.run_ranks(BENT.replace("PATCH", missing), ["device=cpu", f"run_dir={tmp_path}"], 2)
    assert ended.status == 0, ended.out
    assert re.search(
        r"^all_to_all +- +gloo does not have it: Backend gloo does not support alltoall$", ended.out, re.MULTILINE
    )
    assert helpers.read(tmp_path, "summary")["missing"] == ["all_to_all"]


@pytest.mark.long
def test_any_other_error_is_no_missing_operation(tmp_path: Path) -> None:
    broken = """
def bent(*args, **kwargs):
    raise RuntimeError("the network is on fire")
dist.all_to_all_single = bent
"""
    ended = helpers.run_ranks(BENT.replace("PATCH", broken), ["device=cpu", f"run_dir={tmp_path}"], 2)
    assert ended.status == 1
    assert "failed first: RuntimeError: the network is on fire" in ended.out


@pytest.mark.long
def test_pairs_are_a_matrix(tmp_path: Path) -> None:
    ended = run(tmp_path, 3, "pairs=true", "pair_size=64K", "seconds=0.02")
    assert ended.status == 0, ended.out
    found = helpers.read(tmp_path, "summary")["pairs_gb_per_s"]
    assert [[value is None for value in row] for row in found] == [[i == j for j in range(3)] for i in range(3)]
    assert all(found[i][j] == found[j][i] > 0 for i, j in itertools.combinations(range(3), 2))
    assert re.search(r"^median \d+\.\d+ GB/s each way$", ended.out, re.MULTILINE)


def test_pairs_of_one_rank_are_refused(tmp_path: Path) -> None:
    ended = run(tmp_path, 1, "pairs=true")
    assert ended.status == 2
    assert "pairs=true: takes two ranks or more" in ended.out


def test_sums_are_exact_in_float32_whatever_the_number_of_ranks() -> None:
    count = 1024
    cases = [
        next(bandwidth.cases("reduce_scatter", 16 * count, SimpleNamespace(size=count, rank=rank, device="cpu")))
        for rank in range(count)
    ]
    total = torch.zeros(count)
    for case in cases:  # one after another, as round a ring
        total += torch.as_tensor(case.fill[0][1]).flatten()
    assert total.tolist() == [case.right[0][1] for case in cases]


@pytest.mark.parametrize("ranks", range(2, 17))
def test_the_factors_are_those_of_nccl_tests(ranks: int) -> None:
    # By all_gather.cu, reduce_scatter.cu, alltoall.cu, gather.cu, scatter.cu; all_reduce.cu has twice that.
    part = (ranks - 1) / ranks
    wanted = {
        "all_reduce": (2 * (ranks - 1)) / ranks, "all_gather": part, "reduce_scatter": part, "all_to_all": part, "gather": part,
        "scatter": part, "broadcast": 1.0, "reduce": 1.0, "send_recv": 1.0,
    }  # fmt: skip
    assert {name: factor(ranks) for name, factor in bandwidth.FACTORS.items()} == wanted
    assert set(wanted) == set(OPERATIONS)


@pytest.mark.parametrize("count", range(2, 14))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(count: int) -> None:
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
        ("sizes=8..4", "wants FROM of at least 1"),
        ("sizes=0", "a size is 1 to 64G"),
        ("sizes=1..2T", "wants FROM..TO"),
        ("sizes=4..1G:1", "wants FROM of at least 1"),
        ("sizes=1..128G", "the most is 64G"),
        ("operations=allreduce", "did you mean 'all_reduce'?"),
        ("mode=test", "wants one of learn, bench"),
        ("pair_size=0", "pair_size=0: wants 1 to 64G"),
    ],
)  # fmt: skip
def test_bad_keys_are_one_line(tmp_path: Path, word: str, expected: str) -> None:
    ended = run(tmp_path, 1, word)
    assert ended.status == 2
    assert len(ended.lines) == 1, ended.out
    assert expected in ended.out


@pytest.mark.long
def test_a_signal_ends_it_between_two_sizes(tmp_path: Path) -> None:
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
