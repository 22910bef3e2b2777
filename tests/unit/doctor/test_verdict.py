"""Verdicts on reports of nodes, some of them missing, slow or invalid."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes.core.doctor import judge, reach, verdict

Report = dict[str, Any]


def hosts(count: int) -> tuple[str, ...]:
    return tuple(f"node{i}" for i in range(count))


def healthy(count: int, gpus: int = 8) -> list[Report]:
    """The reports of so many nodes, one rank each, of which nothing is wrong."""

    def of(node: int) -> Report:
        others = reach.peers(node, count)
        return {
            "node_rank": node, "host": f"node{node}", "findings": [],
            "facts": {
                "system": {"kernel": "6.1", "python": "3.11.7", "driver": "580.1", "project": "abc", "time": 1.0},
                "torch": {"torch": "2.15.0", "cuda": "13.2", "nccl": "2.30.1"},
                "gpus": {"granted": gpus, "gpus": [
                    {"index": i, "uuid": f"GPU-{node}-{i}", "name": "H200", "correct": True, "tflops": 700.0 + i, "free": 9, "total": 9}
                    for i in range(gpus)
                ]},
                "cpus": {"allowed": 64},
                "interfaces": {"interfaces": {"ib0": {"mtu": 4092, "mbit": 400_000, "state": "up"}}, "chosen": {"interface": "ib0"}},
            },
            "links": [
                {"peer": peer, "host": f"node{peer}", "fault": "", "why": "", "clock_s": 0.001} for peer in others
            ],
            "bandwidth": {"at": "the end", "ended": True, "correct": True, "busbw": 40.0, "pairs": [[node, peer, 45.0] for peer in others if peer > node]},
        }  # fmt: skip

    return [of(node) for node in range(count)]


def judged(reports: list[Any], count: int) -> verdict.Verdict:
    by_node = {report["node_rank"]: report for report in json.loads(json.dumps(reports))}
    return judge.verdict_of(hosts(count), by_node)


def bad(found: verdict.Verdict) -> dict[str, str]:
    return {found.hosts[node]: entry.what for entry in found.entries if entry.bad for node in entry.nodes}


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
def test_healthy_nodes_have_no_finding(count: int) -> None:
    found = judged(healthy(count), count)
    assert found.entries == []
    assert found.healthy
    assert found.exclude == []
    assert verdict.lines(found)[-1] == f"healthy: {count} node{'s' if count > 1 else ''}"
    assert len(found.table) == count


def test_nodes_may_have_different_numbers_of_granted_gpus() -> None:
    reports = healthy(3)
    few = reports[2]["facts"]["gpus"]
    few["gpus"] = few["gpus"][:2]
    few["granted"] = 0
    assert "the number of GPUs is 2, 8 on 2 others" in bad(judged(reports, 3))["node2"]
    few["granted"] = 2
    assert judged(reports, 3).entries == []


def test_of_two_nodes_without_a_link_either_may_be_at_fault() -> None:
    reports = healthy(2)
    for report in reports:
        report["links"][0].update(fault="connect", why="timed out")
    found = judged(reports, 2)
    assert bad(found)["node1"].endswith("; no other node can tell which of the two is at fault)")
    reports = healthy(4)
    for report in reports:
        for link in report["links"]:
            if 2 in (report["node_rank"], link["peer"]):
                link.update(fault="connect", why="timed out")
    assert "which of the two" not in bad(judged(reports, 4))["node2"]


def test_bad_nodes_among_sixty_four_are_found() -> None:
    reports: list[Any] = healthy(64)
    for report in reports:  # node 9's network is slow, whoever measures
        for pair in report["bandwidth"]["pairs"]:
            if 9 in pair[:2]:
                pair[2] = 4.0
    reports[12]["facts"]["torch"]["nccl"] = "2.18.3"
    reports[20]["facts"]["gpus"]["gpus"][3]["tflops"] = 90.0
    reports[21]["facts"]["gpus"]["gpus"].pop()
    reports[22]["findings"].append({"what": "GPU 2 computes a matrix product wrongly", "fix": "drain it", "bad": True})
    reports[23]["findings"].append(
        {"what": "open files (ulimit -n) are limited to 1024", "fix": "raise it", "bad": False}
    )
    for link in reports[30]["links"]:
        link.update(clock_s=7.5)  # its clock is 7.5 s late
    for report in reports:  # whatever has to do with node 33 fails
        for link in report["links"]:
            if 33 in (link["peer"], report["node_rank"]):
                link.update(fault="connect", why="timed out")
    reports[40]["bandwidth"]["correct"] = False
    reports[50] = {
        "node_rank": 50,
        "host": ["?"],
        "facts": "none",
        "findings": {"what": 1},
        "links": 7,
        "bandwidth": [],
    }
    reports[51] = {"node_rank": 9999, "host": "node51"}
    reports[52] = {"node_rank": 52, "findings": [{"what": "\x1b[2J nonsense", "fix": "x", "bad": True}]}
    reports[53]["facts"]["gpus"]["gpus"] = [{"tflops": float("nan"), "index": {}}, 5, None]
    reports[54]["bandwidth"]["pairs"] = [[54, 60, -1.0], [1, 2, 0.001], [54, 1 << 40, 3.0], "x", [54]]
    del reports[63], reports[5]
    found = judged(reports, 64)
    assert set(bad(found)) == {f"node{i}" for i in (5, 9, 12, 20, 21, 22, 33, 40, 51, 52, 53, 63)}
    assert set(found.exclude) == set(bad(found))
    assert "its network is slow" in bad(found)["node9"]
    assert "NCCL is 2.18.3, 2.30.1 on" in bad(found)["node12"]
    assert "GPU 3 (GPU-20-3) is slow" in bad(found)["node20"]
    assert "cannot connect" in bad(found)["node33"]
    assert "did not answer" in bad(found)["node63"]
    told = "\n".join(verdict.lines(found))
    assert "node30: its clock is -7.5 s off" in told
    assert "node23: open files" in told
    assert "12 of 64 nodes bad: sbatch --exclude=node5,node9," in told
    assert "\x1b" not in told
    assert all("\n" not in line for line in verdict.lines(found))


def test_a_pair_that_fails_is_one_of_the_two_and_never_the_first_node() -> None:
    reports = healthy(2)
    for report in reports:
        report["links"][0].update(fault="master", why="timed out")
    found = judged(reports, 2)
    assert found.exclude == ["node1"]
    assert "not its master port" in bad(found)["node1"]
    assert "MASTER_PORT" in verdict.lines(found)[3]


def test_of_a_failing_pair_the_node_with_another_fault_is_bad() -> None:
    reports = healthy(2)
    reports[0]["findings"].append({"what": "no route to node1", "fix": "ip route", "bad": True})
    for report in reports:
        report["links"][0].update(fault="connect", why="timed out")
    assert judged(reports, 2).exclude == ["node0"]


@pytest.mark.parametrize(
    ("part", "name", "usual", "other", "called", "is_bad"),
    [
        ("torch", "torch", "2.15.0", "2.10.0", "torch", True),
        ("torch", "nccl", "2.30.1", "2.18.3", "NCCL", True),
        ("system", "project", "abc", "abc-dirty", "these recipes' commit", True),
        ("system", "driver", "580.1", "550.54", "the NVIDIA driver", False),
    ],
)
def test_the_one_node_that_differs_is_named(
    part: str, name: str, usual: str, other: str, called: str, is_bad: bool
) -> None:
    reports = healthy(4)
    reports[2]["facts"][part][name] = other
    found = judged(reports, 4)
    (entry,) = found.entries
    assert (entry.nodes, entry.what, entry.bad) == ([2], f"{called} is {other}, {usual} on 3 others", is_bad)
    assert found.exclude == (["node2"] if is_bad else [])


def test_another_mtu_or_kind_of_gpu_is_named() -> None:
    reports = healthy(4)
    reports[1]["facts"]["interfaces"]["interfaces"]["ib0"]["mtu"] = 1500
    (entry,) = judged(reports, 4).entries
    assert (entry.nodes, entry.what, entry.bad) == ([1], "the MTU of the interface is 1500, 4092 on 3 others", False)
    reports = healthy(4)
    for gpu in reports[3]["facts"]["gpus"]["gpus"]:
        gpu["name"] = "H100"
    assert bad(judged(reports, 4)) == {"node3": "the kind of GPU is H100, H200 on 3 others"}


def test_the_clock_of_the_first_node_may_be_off() -> None:
    reports = healthy(4)
    for report in reports[1:]:
        for link in report["links"]:
            if link["peer"] == 0:
                link["clock_s"] = -600.0
    found = judged(reports, 4)
    (entry,) = found.entries
    assert (entry.nodes, entry.what, entry.bad) == ([0], "its clock is -600.0 s off the others'", False)


def test_a_fault_that_all_nodes_share_excludes_none_of_them() -> None:
    reports = healthy(3)
    for report in reports:
        report["findings"] = [{"what": "data_dir=/data cannot be used", "fix": "mount it", "bad": True}]
    found = judged(reports, 3)
    assert (found.healthy, found.exclude) == (False, [])
    reports[1]["findings"] = []
    assert judged(reports, 3).exclude == ["node0", "node2"]
    for report in reports:
        report["findings"] = [{"what": "NCCL_NET: is empty", "fix": "unset it", "bad": True, "leave_out": False}]
    reports[1]["findings"] = []
    found = judged(reports, 3)
    assert (set(bad(found)), found.exclude) == ({"node0", "node2"}, [])


def all_pairs(count: int) -> list[Report]:
    reports = healthy(count)
    for node, report in enumerate(reports):
        report["bandwidth"]["pairs"] = [[node, peer, 45.0] for peer in range(node + 1, count)]
    return reports


def test_a_slow_link_is_a_note_and_a_slow_node_is_excluded() -> None:
    reports = all_pairs(6)
    reports[1]["bandwidth"]["pairs"][2][2] = 20.0  # nodes 1 and 4
    found = judged(reports, 6)
    (entry,) = found.entries
    assert (entry.nodes, entry.bad, found.exclude) == ([1, 4], False, [])
    assert entry.what == "the link between them is slow: 20 GB/s, where the median is 45"
    reports = all_pairs(6)
    for report in reports:
        for pair in report["bandwidth"]["pairs"]:
            pair[2] = 26.0 if pair[1] == 5 else 28.0 if pair[0] == 3 else 45.0  # 0.6 of the median is 27
    found = judged(reports, 6)
    assert bad(found) == {"node5": "its network is slow: 26 GB/s with others, where the median is 45"}
    assert found.figures == {"all_reduce_busbw_gb_per_s": 40.0, "pairs_median_gb_per_s": 45.0}


def test_where_all_nodes_are_bad_leaving_them_out_is_not_the_fix() -> None:
    reports = healthy(2)
    for number, report in enumerate(reports):
        report["findings"] = [{"what": f"/dev/shm has {30 + number} MB free", "fix": "clear it", "bad": True}]
    assert verdict.lines(judged(reports, 2))[-1] == (
        "all 2 nodes are bad: fix them as the lines above say; sbatch --exclude=node0,node1 selects other nodes, if the cluster has enough"
    )


def test_the_table_shows_what_each_node_has() -> None:
    reports = healthy(2)
    reports[1]["facts"]["gpus"]["gpus"][3]["correct"] = False
    reports[1]["findings"] = [{"what": "GPU 3 computes a matrix product wrongly", "fix": "drain it", "bad": True}]
    reports[0]["findings"] = [{"what": "a note", "fix": "nothing", "bad": False}]
    found = judged(reports, 2)
    row = {
        "node": "node0", "verdict": "ok", "gpus": "8/8", "tflops": "704", "torch": "2.15.0", "network": "ib0 400G",
    }  # fmt: skip
    assert found.table == [row, {**row, "node": "node1", "verdict": "BAD", "gpus": "7/8"}]
    lines = verdict.lines(found)
    assert [line.split()[:2] for line in lines[:3]] == [["node", "verdict"], ["node0", "ok"], ["node1", "BAD"]]
    assert lines[3:] == [
        "BAD   node1: GPU 3 computes a matrix product wrongly: drain it",
        "note  node0: a note: nothing",
        "all_reduce busbw 40 GB/s; pairs of nodes, median 45 GB/s",
        "1 of 2 nodes bad: sbatch --exclude=node1 leaves them out",
    ]
    as_json = verdict.as_json(found)
    assert (as_json["healthy"], as_json["exclude"], as_json["hosts"]) == (False, ["node1"], ["node0", "node1"])
    assert verdict.as_json(judged(healthy(2), 2))["healthy"] is True


def test_of_many_nodes_the_table_shows_the_bad_ones() -> None:
    reports = healthy(20)
    reports[13]["findings"] = [{"what": "broken", "fix": "drain it", "bad": True}]
    lines = verdict.lines(judged(reports, 20))
    assert [line.split()[0] for line in lines[:3]] == ["node", "node13", "BAD"]


def test_if_all_nodes_hang_none_is_excluded_and_the_result_is_unhealthy() -> None:
    reports = healthy(4)
    for report in reports:
        report["bandwidth"] = {"at": "its start", "error": "did not answer in 30 s"}
    found = judged(reports, 4)
    assert not found.healthy
    assert found.exclude == []
    reports[2]["bandwidth"]["at"] = "meeting the others"
    reports[1]["bandwidth"]["at"] = reports[3]["bandwidth"]["at"] = "meeting the others"
    assert judged(reports, 4).exclude == ["node0"]


def test_if_only_one_node_is_seen_run_dir_is_not_shared() -> None:
    found = judged(healthy(4)[:1], 4)
    assert set(bad(found)) == {"node1", "node2", "node3"}
    assert found.exclude == []
    assert "give a run_dir= on a file system that all nodes share" in "\n".join(verdict.lines(found))
    assert judged(healthy(4)[:2], 4).exclude == ["node2", "node3"]
    assert judged(healthy(2)[:1], 2).exclude == ["node1"]


def test_a_finding_without_a_node_counts_no_node() -> None:
    reports = healthy(2)
    for report in reports:
        report["bandwidth"] = {"at": "meeting the others", "error": "timed out", "pairs": []}
    told = verdict.lines(judged(reports, 2))
    assert any(line.startswith("BAD   the nodes together: ") for line in told)
    assert told[-1] == "not healthy, and no single node is to blame"


def test_versions_without_a_majority_exclude_no_node() -> None:
    reports = healthy(4)
    for report in reports[:2]:
        report["facts"]["torch"]["torch"] = "2.10.0"
    found = judged(reports, 4)
    assert found.exclude == []
    assert "torch is 2.10.0, and the nodes have no majority" in "\n".join(verdict.lines(found))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 16, 255, 4096])
def test_a_node_asks_at_most_three_others_and_each_is_asked(count: int) -> None:
    asked = [reach.peers(node, count) for node in range(count)]
    assert max(map(len, asked)) <= 3
    assert all(node not in others for node, others in enumerate(asked))
    assert {peer for others in asked for peer in others} == set(range(count))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_report_whatever_is_in_it_stops_the_judge(data: st.DataObject) -> None:
    reports: list[Any] = healthy(3)
    for _ in range(data.draw(st.integers(1, 6))):
        target: Any = reports
        while isinstance(target, (list, dict)) and target and data.draw(st.integers(0, 3)):
            place = data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
            if not isinstance(target[place], (list, dict)) or not target[place]:
                target[place] = data.draw(JUNK)
                break
            target = target[place]
        else:
            if isinstance(target, list):
                target.append(data.draw(JUNK))
            elif isinstance(target, dict):
                target[data.draw(st.text(max_size=5))] = data.draw(JUNK)
    by_node = {node: copy.deepcopy(one) for node, one in enumerate(reports) if isinstance(one, dict)}
    found = judge.verdict_of(hosts(3), by_node)
    for line in verdict.lines(found):
        assert line.isprintable()
    json.dumps(verdict.as_json(found))
    assert all(math.isfinite(value) for value in found.figures.values())


def test_numbers_without_an_end_and_words_where_lists_should_be() -> None:
    reports = healthy(2)
    reports[0].update(more="x", partial=True)
    reports[1]["links"][0]["clock_s"] = 10**400
    reports[1]["facts"]["gpus"]["gpus"][0]["tflops"] = 10**400
    assert judged(reports, 2).healthy
