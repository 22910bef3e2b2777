"""Judges the network by the reports of all nodes: links that fail, and bandwidth."""

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from recipes.core.doctor.verdict import Verdict

SLOW = 0.6  # a value below this fraction of the median is slow
# By the fault of a link (`reach.Link`): what a node sees of the other one, and the fix.
FAULTS = {
    "connect": (
        "cannot connect to {peer}",
        "check that its name resolves, that its interface is up, and that there is a route in both directions; a firewall must let the nodes"
        " of a job through",
    ),
    "small": (
        "connects to {peer}, but gets no answer",
        "look for a firewall or a link that loses packets between them",
    ),
    "large": (
        "reaches {peer} with small packets, but large ones are lost: the MTU on the path is smaller than the interface's",
        "give both interfaces, and every switch between them, the same MTU: ip link set DEV mtu 1500",
    ),
}


def links(reports: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Links that fail. The node of which the larger share of links fails is the bad one; of two equal ones the later."""
    tried: Counter[int] = Counter()
    failed: Counter[int] = Counter()
    faults: list[tuple[int, Mapping[str, Any]]] = []
    for node, report in reports.items():
        for link in report["links"]:
            if link["peer"] not in reports:
                continue  # a node that did not answer has an entry already
            tried.update((node, link["peer"]))
            if link["fault"]:
                failed.update((node, link["peer"]))
                faults.append((node, link))
    known_bad, named = verdict.bad_nodes, set[int]()
    for node, link in faults:
        peer = link["peer"]
        # The first node is the master: it is accused last.
        bad = max((node, peer), key=lambda one: (one in known_bad, failed[one] / tried[one], one))
        if bad in named:
            continue
        named.add(bad)
        what, fix = FAULTS[link["fault"]]
        count = f"{failed[bad]} of {tried[bad]} links of {verdict.host(bad)} fail"
        what = f"{verdict.host(node)} {what.format(peer=verdict.host(peer))} ({link['why']}; {count})"
        verdict.add([bad], what, fix, True)


def speeds(reports: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """The bandwidth of all nodes together, and nodes and pairs of nodes that are well below the others.

    A node is slow if the median of its pairs is, since one slow node makes one pair of every other node slow.
    """
    pairs: dict[tuple[int, int], float] = {}
    of_node: dict[int, list[float]] = {}
    for report in reports.values():
        measured = report.get("bandwidth", {})
        if "busbw" in measured:
            verdict.figures["all_reduce_busbw_gb_per_s"] = measured["busbw"]
        for one, other, speed in measured.get("pairs", []):
            pairs[one, other] = speed
            of_node.setdefault(one, []).append(speed)
            of_node.setdefault(other, []).append(speed)
    if not pairs:
        return
    middle = verdict.figures["pairs_median_gb_per_s"] = median(pairs.values())
    usual = f"where the median is {middle:.3g}"
    slow = {node for node, values in of_node.items() if len(values) > 1 and median(values) < SLOW * middle}
    for node in slow:
        what = f"its network is slow: {median(of_node[node]):.3g} GB/s with others, {usual}"
        verdict.add([node], what, "ethtool DEV, or ibstat, there: link speed, errors, a cable", True)
    for pair, speed in pairs.items():
        if speed < SLOW * middle and not slow.intersection(pair):
            fix = "a link between their switches, or one of the two: measure again with others"
            verdict.add(sorted(pair), f"the link between them is slow: {speed:.3g} GB/s, {usual}", fix, False)


def collectives(reports: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """The bandwidth test of all nodes: a wrong sum; and where it did not end, the nodes that are behind the others."""
    measured = {node: report["bandwidth"] for node, report in reports.items() if report.get("bandwidth")}
    for node, found in measured.items():
        if found.get("correct") is False:
            fix = "memory or a link corrupts data: leave it out"
            verdict.add([node], "an all_reduce has a wrong sum there", fix, True)
    cut = [node for node, found in measured.items() if not found.get("ended")]
    if not cut:
        return
    usual, _ = Counter(found["at"] for found in measured.values()).most_common(1)[0]
    behind = [node for node in cut if measured[node]["at"] != usual]
    found = measured[(behind or cut)[0]]
    what = f"the bandwidth test of all nodes stopped at {found['at']} ({found.get('error') or 'no error'})"
    fix = "NCCL_DEBUG=INFO python -m recipes.collectives over these nodes shows where; see the notes above"
    verdict.add(behind, what, fix, True)
