"""Verdicts on reports of nodes, some of them missing or slow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recipes.core.doctor import judge, reach, verdict

Report = dict[str, Any]


def hosts(count: int) -> tuple[str, ...]:
    return tuple(f"node{i}" for i in range(count))


def healthy(count: int, gpus: int = 8) -> list[Report]:
    """The reports of so many nodes, one rank each, of which nothing is wrong."""

    def of(node: int) -> Report:
        others = reach.peers(node, count)
        return {
            "node_rank": node,
            "host": f"node{node}",
            "findings": [],
            "facts": {
                "python": "3.11.7",
                "torch": "2.15.0",
                "cuda": "13.2",
                "nccl": "2.30.1",
                "gpu_count": gpus,
                "gpu_name": "H200",
                "gpus": [
                    {
                        "index": i,
                        "uuid": f"GPU-{node}-{i}",
                        "name": "H200",
                        "correct": True,
                        "tflops": 700.0 + i,
                        "free": 9,
                        "total": 9,
                    }
                    for i in range(gpus)
                ],
                "interface": "ib0",
            },
            "links": [{"peer": peer, "fault": "", "why": ""} for peer in others],
            "bandwidth": {
                "at": "the end",
                "ended": True,
                "correct": True,
                "busbw": 40.0,
                "pairs": [[node, peer, 0, 45.0] for peer in others if peer > node],
            },
        }

    return [of(node) for node in range(count)]


def judged(reports: list[Any], count: int) -> verdict.Verdict:
    by_node = {report["node_rank"]: report for report in json.loads(json.dumps(reports))}
    return judge.verdict_of(hosts(count), by_node)


def bad(judgement: verdict.Verdict) -> dict[str, str]:
    return {
        judgement.hosts[node]: entry.what
        for entry in judgement.entries
        if entry.bad
        for node in entry.nodes
    }


@pytest.mark.parametrize("count", [1, 16])
def test_healthy_nodes_have_no_finding(count: int) -> None:
    judgement = judged(healthy(count), count)
    assert judgement.entries == []
    assert judgement.healthy
    assert judgement.exclude == []
    _, *nodes, _, last = verdict.lines(judgement)
    assert last == f"healthy: {count} node{'s' if count > 1 else ''}"
    assert len(nodes) == count


def finding(problem: str, fix: str, bad: bool = True, leave_out: bool = True) -> dict[str, Any]:
    return {"what": problem, "fix": fix, "bad": bad, "leave_out": leave_out}


def test_a_bad_node_alone_is_excluded_too() -> None:
    [report] = healthy(1)
    report["findings"].append(finding("GPU 2 computes a matrix product wrongly", "drain it"))
    assert judged([report], 1).exclude == ["node0"]


def fail(reports: list[Report], fault: str, node: int | None = None) -> None:
    """Makes the links of a node fail, or all."""
    for report in reports:
        for link in report["links"]:
            if node in (None, report["node_rank"], link["peer"]):
                link.update(fault=fault, why="timed out")


def test_bad_nodes_among_sixty_four_are_found_and_only_they_are_in_the_table() -> None:
    reports = healthy(64)
    for report in reports:  # node 9's network is slow with each peer
        for pair in report["bandwidth"]["pairs"]:
            if 9 in pair[:2]:
                pair[3] = 4.0
    reports[12]["facts"]["nccl"] = "2.18.3"
    reports[20]["facts"]["gpus"][3]["tflops"] = 90.0
    reports[22]["findings"].append(
        finding("GPU 2 computes a matrix product\x1b[2J wrongly", "drain it")
    )
    reports[23]["findings"].append(
        finding("open files (ulimit -n) are limited to 1024", "raise it", bad=False)
    )
    reports[40]["bandwidth"]["correct"] = False
    for node in (33, 63):
        fail(reports, "connect", node)
    del reports[63]
    judgement = judged(reports, 64)
    assert set(bad(judgement)) == {f"node{i}" for i in (9, 12, 20, 22, 33, 40, 63)}
    assert set(judgement.exclude) == set(bad(judgement))
    assert "its network is slow" in bad(judgement)["node9"]
    assert "NCCL is 2.18.3, but 2.30.1 on" in bad(judgement)["node12"]
    assert "GPU 3 (GPU-20-3) is slow" in bad(judgement)["node20"]
    assert bad(judgement)["node33"].endswith(" links of node33 fail)")
    assert "cannot connect to node" in bad(judgement)["node33"]
    assert bad(judgement)["node40"] == "an all_reduce returned a wrong sum there"
    [silent] = [entry for entry in judgement.entries if 63 in entry.nodes]
    assert silent.what.startswith("did not answer")
    lines = verdict.lines(judgement)
    assert [line.split()[0] for line in lines[:9]] == ["node", *judgement.exclude, "BAD"]
    assert any("node23: open files" in line for line in lines)
    excluded = "node9,node12,node20,node22,node33,node40,node63"
    assert lines[-1] == f"bad nodes: 7 of 64; to exclude: sbatch --exclude={excluded}"
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("broken", "count"),
    [
        ((4, 5), 6),
        ((1, 2, 3), 8),
        ((62, 63), 64),
        (tuple(range(40, 56)), 64),
    ],
)
def test_nodes_without_a_network_are_named_and_the_healthy_first_is_not(
    broken: tuple[int, ...], count: int
) -> None:
    reports = healthy(count)
    for node in broken:
        fail(reports, "connect", node)
    assert judged(reports, count).exclude == [f"node{node}" for node in broken]


def test_of_two_nodes_without_a_link_the_second_is_named() -> None:
    reports = healthy(2)
    fail(reports, "small")
    judgement = judged(reports, 2)
    assert judgement.exclude == ["node1"]
    assert "but gets no answer (timed out; 2 of 2 links of node1 fail)" in bad(judgement)["node1"]
    assert "firewall" in verdict.lines(judgement)[3]


def test_of_a_failing_pair_the_node_with_another_fault_is_bad() -> None:
    reports = healthy(2)
    reports[0]["findings"].append(finding("no route to node1", "ip route"))
    fail(reports, "large")
    judgement = judged(reports, 2)
    assert judgement.exclude == ["node0"]
    line = verdict.lines(judgement)[4]
    assert "large ones are lost: the MTU" in line
    assert "give both interfaces" in line


@pytest.mark.parametrize(
    ("name", "usual", "other", "called"),
    [
        ("nccl", "2.30.1", "2.18.3", "NCCL"),
        ("gpu_count", 8, 7, "the number of GPUs"),
        ("cuda", "13.2", "12.4", "CUDA"),
        ("python", "3.11.7", "3.12.1", "Python"),
        ("gpu_name", "H200", "H100", "the kind of GPU"),
    ],
)
def test_the_one_node_that_differs_is_named(
    name: str, usual: object, other: object, called: str
) -> None:
    reports = healthy(4)
    reports[2]["facts"][name] = other
    reports[3]["facts"][name] = None  # it could not be found out
    judgement = judged(reports, 4)
    (entry,) = judgement.entries
    assert entry.nodes == [2]
    assert entry.what == f"{called} is {other}, but {usual} on 2 others"
    assert entry.bad is True
    assert judgement.exclude == ["node2"]


def test_a_fault_that_all_nodes_share_excludes_none_of_them() -> None:
    reports = healthy(3)
    for report in reports:
        report["findings"] = [finding("data_dir=/data cannot be used", "mount it")]
    judgement = judged(reports, 3)
    assert judgement.healthy is False
    assert judgement.exclude == []
    line = verdict.lines(judgement)[4]
    assert line == "BAD   all 3 nodes: data_dir=/data cannot be used: mount it"
    assert judged(reports[:2], 3).exclude == ["node2"]  # which did not answer
    reports[1]["findings"] = []
    assert judged(reports, 3).exclude == ["node0", "node2"]
    for report in reports:
        report["findings"] = [finding("NCCL_NET: is empty", "unset it", leave_out=False)]
    reports[1]["findings"] = []
    judgement = judged(reports, 3)
    assert set(bad(judgement)) == {"node0", "node2"}
    assert judgement.exclude == []
    assert verdict.lines(judgement)[-1] == "bad nodes: 2 of 3"


def all_pairs(count: int) -> list[Report]:
    reports = healthy(count)
    for node, report in enumerate(reports):
        report["bandwidth"]["pairs"] = [[node, peer, 0, 45.0] for peer in range(node + 1, count)]
    return reports


def test_a_slow_node_is_excluded_and_a_slow_link_accuses_none() -> None:
    reports = all_pairs(6)
    reports[1]["bandwidth"]["pairs"][2][3] = 20.0  # nodes 1 and 4
    assert judged(reports, 6).entries == []
    for node, report in enumerate(reports):  # pairs of different nodes, the last one slow
        speed = 20.0 if node == 4 else 45.0
        report["bandwidth"]["pairs"] = [] if node % 2 else [[node, node + 1, 0, speed]]
    assert judged(reports, 6).entries == []
    reports = all_pairs(6)
    for report in reports:
        for pair in report["bandwidth"]["pairs"]:
            # 0.6 of the median is 27
            if pair[1] == 5:
                pair[3] = 26.0
            elif pair[0] == 3:
                pair[3] = 28.0
    judgement = judged(reports, 6)
    assert bad(judgement) == {
        "node5": "its network is slow: 26 GB/s with other nodes; the median is 45"
    }
    assert judgement.figures == {"all_reduce_busbw_gb_per_s": 40.0, "pairs_median_gb_per_s": 45.0}


def test_one_gpu_with_a_slow_network_or_slow_copies_makes_a_node_bad() -> None:
    reports = all_pairs(6)
    for report in reports:
        pairs = report["bandwidth"]["pairs"]
        report["bandwidth"]["pairs"] = [
            [*pair[:2], gpu, 45.0] for gpu in range(8) for pair in pairs
        ]
        for pair in report["bandwidth"]["pairs"]:
            usual = 20.0 if pair[2] == 7 else 45.0  # GPU 7 of each node
            pair[3] = 11.0 if pair[2] == 5 and 2 in pair[:2] else usual
    problem = "its network is slow from its GPU 5: 11 GB/s with other nodes; the median is 45"
    assert bad(judged(reports, 6)) == {"node2": problem}
    reports = healthy(4)
    for report in reports:  # GPUs 3 and 4 are on two sockets
        for gpu in report["facts"]["gpus"]:
            gpu["to_next"] = 20.0 if gpu["index"] == 3 else 200.0
    reports[1]["facts"]["gpus"][6]["to_next"] = 21.0
    problem = "copies from its GPU 6 to the next GPU are slow: 21 GB/s; the median is 200"
    assert bad(judged(reports, 4)) == {"node1": problem}
    assert bad(judged(reports[:2], 2)) == {}  # of two, either may be the usual one
    reports = healthy(3, gpus=1)
    reports[2]["facts"]["gpus"][0]["tflops"] = 415.0
    problem = "GPU 0 (GPU-2-0) is slow: 415 TFLOP/s; the median is 700"
    assert bad(judged(reports, 3)) == {"node2": problem}


def test_the_table_shows_what_each_node_has() -> None:
    reports = healthy(2)
    reports[1]["facts"]["gpus"][3]["correct"] = False
    reports[1]["findings"] = [finding("GPU 3 returns a wrong matrix product", "drain it")]
    reports[0]["findings"] = [finding("a note", "nothing", bad=False)]
    judgement = judged(reports, 2)
    row = {
        "node": "node0",
        "verdict": "ok",
        "gpus": "8/8",
        "tflops": "704",
        "torch": "2.15.0",
        "network": "ib0",
    }
    assert judgement.table == [row, {**row, "node": "node1", "verdict": "BAD", "gpus": "7/8"}]
    head, first, second, *others = verdict.lines(judgement)
    assert head.split()[:2] == ["node", "verdict"]
    assert first.split()[:2] == ["node0", "ok"]
    assert second.split()[:2] == ["node1", "BAD"]
    assert others == [
        "BAD   node1: GPU 3 returns a wrong matrix product: drain it",
        "note  node0: a note: nothing",
        "all_reduce busbw 40 GB/s; pairs of nodes, median 45 GB/s",
        "bad nodes: 1 of 2; to exclude: sbatch --exclude=node1",
    ]
    assert judgement.healthy is False
    assert judgement.exclude == ["node1"]
    assert judgement.hosts == ["node0", "node1"]


def test_if_all_nodes_hang_none_is_excluded_and_the_result_is_unhealthy() -> None:
    reports = healthy(4)
    for report in reports:
        report["bandwidth"] = {"at": "its start", "error": "did not answer in 30 s"}
    judgement = judged(reports, 4)
    assert not judgement.healthy
    assert judgement.exclude == []
    reports[2]["bandwidth"]["at"] = "the first collective"
    reports[1]["bandwidth"]["at"] = reports[3]["bandwidth"]["at"] = "the first collective"
    assert judged(reports, 4).exclude == ["node0"]
    reports[0]["bandwidth"]["at"] = "the first collective"
    lines = verdict.lines(judged(reports, 4))
    stopped = (
        "BAD   the nodes together: the bandwidth test of all nodes stopped after the first "
        "collective (did not answer in 30 s): "
    )
    assert any(line.startswith(stopped) for line in lines)
    assert lines[-1] == "not healthy, and the cause is not a single node"
    reports[1]["bandwidth"] = {"at": "the end", "ended": True}
    assert bad(judged(reports, 4)) == {}  # the node that came further is not behind
    for node in (0, 3):
        reports[node]["bandwidth"] = {"at": "the end", "ended": True}
    assert judged(reports, 4).exclude == ["node2"]


def test_nodes_that_answered_only_at_first_are_excluded_unless_all_did() -> None:
    reports = healthy(3)
    for node in (2, 1):
        reports[node]["early"] = True
    assert judged(reports, 3).exclude == ["node1", "node2"]
    reports[0]["early"] = True
    assert judged(reports, 3).exclude == []
    assert not judged(reports, 3).healthy
    [alone] = healthy(1)
    assert judged([{**alone, "early": True}], 1).exclude == ["node0"]


def test_if_only_one_node_is_seen_run_dir_is_not_shared() -> None:
    judgement = judged(healthy(4)[:1], 4)
    assert set(bad(judgement)) == {"node1", "node2", "node3"}
    assert judgement.exclude == []
    text = "\n".join(verdict.lines(judgement))
    assert "give a run_dir= on a file system that all nodes share" in text
    assert judged(healthy(4)[:2], 4).exclude == ["node2", "node3"]
    assert judged(healthy(2)[:1], 2).exclude == ["node1"]


def test_versions_without_a_majority_exclude_no_node() -> None:
    reports = healthy(4)
    for report in reports[:2]:
        report["facts"]["torch"] = "2.10.0"
    judgement = judged(reports, 4)
    assert judgement.exclude == []
    text = "\n".join(verdict.lines(judgement))
    assert "torch is 2.10.0, and no value has a majority of the nodes" in text


@pytest.mark.parametrize(
    ("nodes", "count", "names"),
    [
        ([0], 1, "node0"),
        ([0, 2], 3, "node0, node2"),
        ([0, 1, 2], 3, "all 3 nodes"),
        (list(range(8)), 20, ", ".join(hosts(8))),
        (list(range(9)), 20, f"{', '.join(hosts(8))} and 1 more"),
    ],
)
def test_the_nodes_of_a_finding_are_named(nodes: list[int], count: int, names: str) -> None:
    rows = [{"node": host} for host in hosts(count)]
    finding = verdict.Finding("is slow", "replace it", nodes=nodes)
    lines = verdict.lines(verdict.Verdict([finding], hosts=list(hosts(count)), table=rows))
    assert f"BAD   {names}: is slow: replace it" in lines
