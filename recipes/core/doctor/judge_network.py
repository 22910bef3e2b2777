"""Judges the network by the reports of all nodes: links that fail, clocks and bandwidth."""

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from recipes.core import outliers
from recipes.core.doctor import untrusted
from recipes.core.doctor.untrusted import text_at, value_at
from recipes.core.doctor.verdict import Verdict

CLOCK_S = 2.0  # between two nodes; with more, time stamps mislead
MANY = 4  # links that are named in a line
# By the fault of a link (`reach.Link`): what a node sees of the other one, and the fix.
FAULTS = {
    "name": ("cannot resolve {peer}", "add the name to DNS, or to /etc/hosts on each node"),
    "silent": ("found no port of {peer} in run_dir", "check that both nodes see run_dir"),
    "connect": (
        "cannot connect to {peer}",
        "check that its interface is up and that there is a route in both directions; a firewall must let the nodes of a job through",
    ),
    "small": (
        "connects to {peer}, but gets no answer",
        "look for a firewall or a link that loses packets between them",
    ),
    "large": (
        "reaches {peer} with small packets, but large ones are lost: the MTU on the path is smaller than the interface's",
        "give both interfaces, and every switch between them, the same MTU: ip link set DEV mtu 1500",
    ),
    "foreign": (
        "reaches another program or node at the address of {peer}",
        "two nodes have this address, or a name points to the wrong one: compare ip -br address on both with DNS",
    ),
    "master": (
        "reaches {peer}, but not its master port",
        "a firewall lets some ports through and not this one: open ports 10000-32767 between the nodes, or set MASTER_PORT to an open one",
    ),
}


def links(reports: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Links that fail. The node of which the larger share of links fails is the bad one."""
    tried: Counter[int] = Counter()
    failed: Counter[int] = Counter()
    faults: list[tuple[int, int, str, str]] = []
    for node, report in reports.items():
        for link in untrusted.dicts_at(report, "links"):
            peer, fault = link.get("peer"), text_at(link, "fault")
            if not isinstance(peer, int) or peer not in reports:
                continue  # a node that did not answer has an entry already
            tried.update((node, peer))
            if fault in FAULTS:
                failed.update((node, peer))
                faults.append((node, peer, fault, text_at(link, "why")))
    known_bad = verdict.bad_nodes
    grouped: dict[tuple[int, str, str], list[tuple[int, int]]] = {}
    unsure: set[tuple[int, int]] = set()
    for node, peer, fault, why in faults:
        shares = failed[node] / tried[node], failed[peer] / tried[peer]
        if (node in known_bad) != (peer in known_bad):
            bad = node if node in known_bad else peer
        elif shares[0] != shares[1]:
            bad = node if shares[0] > shares[1] else peer
        else:
            bad = max(node, peer)  # the first node is the master: it is accused last
            unsure.add((node, peer))
        grouped.setdefault((bad, fault, why), []).append((node, peer))
    for (bad, fault, why), failing in grouped.items():
        node, peer = failing[0]
        what, fix = FAULTS[fault]
        ways = ", ".join(f"{verdict.host(one)} to {verdict.host(other)}" for one, other in failing[:MANY])
        ways += f" and {len(failing) - MANY} more" if len(failing) > MANY else ""
        if unsure.issuperset(failing):
            ways += "; no other node can tell which of the two is at fault"
        what = f"{verdict.host(node)} {what.format(peer=verdict.host(peer))} ({why}; links that fail: {ways})"
        verdict.add([bad], what, fix, True)


def clocks(reports: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Each node's clock against the median clock, by the links to the first node."""
    ahead = {0: 0.0}  # of the first node's clock
    for node, report in reports.items():
        for link in untrusted.dicts_at(report, "links"):
            if link.get("peer") == 0 and untrusted.is_number(link.get("clock_s")):
                ahead[node] = -float(link["clock_s"])
    middle = median(ahead.values())
    for node, seconds in ahead.items():
        if abs(seconds - middle) > CLOCK_S:
            what = f"its clock is {seconds - middle:+.1f} s off the others'"
            verdict.add([node], what, "check that chronyd or ntpd runs there: chronyc tracking", False)


def speeds(reports: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """The bandwidth of all nodes together, and nodes and pairs of nodes that are well below the others."""
    pairs: dict[tuple[int, int], float] = {}
    for node, report in reports.items():
        for row in untrusted.list_at(report, "bandwidth", "pairs"):
            if _is_pair(row, node, len(verdict.hosts)):
                pairs[row[0], row[1]] = float(row[2])
        if untrusted.is_positive(busbw := value_at(report, "bandwidth", "busbw")):
            verdict.figures["all_reduce_busbw_gb_per_s"] = float(busbw)
    slow = outliers.slow(pairs)
    if pairs:
        verdict.figures["pairs_median_gb_per_s"] = slow.median
    for node, value in slow.nodes.items():
        what = f"its network is slow: {value:.3g} GB/s with others, where the median is {slow.median:.3g}"
        verdict.add([node], what, "ethtool DEV, or ibstat, there: link speed, errors, a cable", True)
    for pair, value in slow.pairs.items():
        what = f"the link between them is slow: {value:.3g} GB/s, where the median is {slow.median:.3g}"
        fix = "a link between their switches, or one of the two: measure again with others"
        verdict.add(sorted(pair), what, fix, False)


def _is_pair(row: object, node: int, count: int) -> bool:
    """Whether it is [this node, another, GB/s]."""
    return (
        isinstance(row, list) and len(row) == 3 and all(type(one) is int and 0 <= one < count for one in row[:2])
        and row[0] == node != row[1] and untrusted.is_positive(row[2])
    )  # fmt: skip


def collectives(reports: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """The bandwidth test of all nodes: a wrong sum; and where it did not end, the nodes that are behind the others."""
    places: dict[int, str] = {}  # that each node reached in the test
    errors: dict[int, str] = {}
    ended: set[int] = set()
    for node, report in reports.items():
        measured = untrusted.dict_at(report, "bandwidth")
        if measured.get("correct") is False:
            fix = "memory or a link corrupts data: leave it out"
            verdict.add([node], "an all_reduce has a wrong sum there", fix, True)
        if measured.get("at"):
            places[node], errors[node] = text_at(measured, "at"), text_at(measured, "error")
        if measured.get("ended") is True:
            ended.add(node)
    if ended.issuperset(places):
        return
    usual, _ = Counter(places.values()).most_common(1)[0]
    behind = [node for node in places if node not in ended and places[node] != usual]
    node = behind[0] if behind else next(node for node in places if node not in ended)
    what = f"the bandwidth test of all nodes stopped at {places[node]} ({errors[node] or 'no error'})"
    fix = "NCCL_DEBUG=INFO python -m recipes.collectives over these nodes shows where; see the notes above"
    verdict.add(behind, what, fix, True)
