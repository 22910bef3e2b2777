"""Judges the network by the reports of all nodes: links that fail, clocks, bandwidth, and addresses that are not unique."""

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any
from recipes.core import outliers
from recipes.core.doctor import untrusted
from recipes.core.errors import shown
from recipes.core.doctor.verdict import Entry
from recipes.core.doctor.verdict import Verdict


CLOCK_S = 2.0  # between two nodes, more than which spoils time stamps and makefiles
LOCAL_ONLY = ("127.", "::1", "fe80:", "169.254.")  # addresses that are a machine's own
FAULTS = {
    "name": "cannot resolve it",
    "silent": "never heard where it listens",
    "connect": "cannot connect to it",
    "small": "connects to it, and nothing comes back",
    "large": "reaches it with small packets, and large ones are lost: the MTU on the way is smaller than the interface's",
    "foreign": "reaches somebody else at its address",
    "master": "reaches it, but not its master port",
}
FIXES = {
    "name": "add the name to DNS, or to /etc/hosts on each node",
    "silent": "is run_dir seen on both nodes?",
    "connect": "is its interface up, and is there a route both ways? a firewall must let the nodes of a job through",
    "small": "look for a firewall, or a link that loses packets, between them",
    "large": "give both interfaces, and every switch between them, the same MTU: ip link set DEV mtu 1500",
    "foreign": "two nodes have this address, or a name points to the wrong one: compare ip -br address on both with DNS",
    "master": "a firewall lets some ports through and not this one: open ports 10000-32767 between the nodes, or set MASTER_PORT to an open one",
}


def decoys(nodes: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Addresses that several nodes have alike: who takes an interface by its name alone sends to itself."""
    having: dict[tuple[str, str], list[int]] = {}
    for node, report in nodes.items():
        there = untrusted.as_dict(
            untrusted.as_dict(untrusted.as_dict(report.get("facts")).get("interfaces")).get("interfaces")
        )
        for name, one in there.items():
            for address in untrusted.as_list(untrusted.as_dict(one).get("addresses")):
                if not untrusted.text(address).startswith(LOCAL_ONLY):
                    having.setdefault((untrusted.text(name), untrusted.text(address)), []).append(node)
    for (name, address), where in having.items():
        if len(where) > 1:
            what = f"{name} has one and the same address there, {address}"
            fix = "never for NCCL_SOCKET_IFNAME; the recipes take the interface by its route"
            verdict.entries.append(Entry(where, what, fix, False))


def links(nodes: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Ways that fail. Where most ways of a node fail, and those of the nodes at their other ends do not, it is that node."""
    asked: Counter[int] = Counter()
    failed: Counter[int] = Counter()
    faults: list[tuple[int, int, str, str]] = []
    for node, report in nodes.items():
        for link in untrusted.as_list(report.get("links")):
            peer = link.get("peer") if isinstance(link, dict) else None
            if (
                not isinstance(peer, int)
                or not 0 <= peer < len(verdict.hosts)
                or peer not in nodes
                or nodes[peer].get("partial")
            ):
                continue  # a node that did not answer is told of already
            asked.update((node, peer))
            if untrusted.text(link.get("fault")) in FAULTS:
                failed.update((node, peer))
                faults.append((node, peer, link["fault"], untrusted.text(link.get("why"))))
    accused_already = {node for entry in verdict.entries if entry.bad for node in entry.nodes}

    def share(node: int) -> float:
        return failed[node] / asked[node]

    grouped: dict[tuple[int, str, str], list[tuple[int, int]]] = {}
    either: set[tuple[int, int]] = set()
    for node, peer, fault, why in faults:
        first, second = (node, peer)
        if node in accused_already and peer not in accused_already:
            guilty = node
        elif peer in accused_already and node not in accused_already:
            guilty = peer
        elif share(first) != share(second):
            guilty = first if share(first) > share(second) else second
        else:
            guilty = max(first, second)  # the first node is the last to be given up: it is the master
            either.add((node, peer))
        grouped.setdefault((guilty, fault, why), []).append((node, peer))
    for (guilty, fault, why), ways in grouped.items():
        told = ", ".join(f"{verdict.hosts[a] or a} to {verdict.hosts[b] or b}" for a, b in ways[:4])
        more = f" and {len(ways) - 4} more" if len(ways) > 4 else ""
        node, peer = ways[0]
        more += "; which of the two it is, no other node can tell" if either.issuperset(ways) else ""
        verdict.entries.append(
            Entry([guilty], f"{verdict.hosts[node] or node} {FAULTS[fault].replace(' it', f' {verdict.hosts[peer] or peer}', 1)} ({why}; ways that fail: {told}{more})",
                  FIXES[fault], True)
        )  # fmt: skip


def clocks(nodes: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Each node's clock against the first node's, as it was asked."""
    off = {}
    for node, report in nodes.items():
        for link in untrusted.as_list(report.get("links")):
            if isinstance(link, dict) and link.get("peer") == 0 and untrusted.is_number(link.get("clock_s")):
                off[node] = -float(link["clock_s"])
    if not off:
        return
    middle = median([0.0, *off.values()])
    late = {node: value - middle for node, value in {0: 0.0, **off}.items() if abs(value - middle) > CLOCK_S}
    for node, value in late.items():
        verdict.entries.append(
            Entry(
                [node],
                f"its clock is {value:+.1f} s off the others'",
                "is chronyd or ntpd running there? chronyc tracking",
                False,
            )
        )


def speeds(nodes: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Pairs of nodes, GPUs and rounds trips well below the rest."""
    pairs: dict[tuple[int, int], float] = {}
    gpus: dict[tuple[int, int], tuple[str, float]] = {}
    for node, report in nodes.items():
        measured = untrusted.as_dict(report.get("bandwidth"))
        for row in untrusted.as_list(measured.get("pairs")):
            if _is_pair(row, node, len(verdict.hosts)):
                pairs[row[0], row[1]] = float(row[2])
        for number, gpu in enumerate(report["gpus"]):
            if untrusted.is_positive(gpu.get("tflops")):
                gpus[node, number] = (
                    f"{shown(gpu.get('index'), 40)} ({shown(gpu.get('uuid'), 40)})",
                    float(gpu["tflops"]),
                )
        if untrusted.is_positive(measured.get("busbw")):
            verdict.figures["all_reduce_busbw_gb_per_s"] = float(measured["busbw"])
    slow = outliers.slow(pairs)
    if pairs:
        verdict.figures["pairs_median_gb_per_s"] = slow.median
    for node, value in slow.nodes.items():
        what = f"its network is slow: {value:.3g} GB/s with others, where the median is {slow.median:.3g}"
        verdict.entries.append(Entry([node], what, "ethtool DEV, or ibstat, there: link speed, errors, a cable", True))
    for pair, value in slow.pairs.items():
        what = f"the way between them is slow: {value:.3g} GB/s, where the median is {slow.median:.3g}"
        fix = "a link between their switches, or one of the two: measure again with others"
        verdict.entries.append(Entry(sorted(pair), what, fix, False))
    if gpus:
        middle = median(value for _, value in gpus.values())
        for (node, _), (name, value) in gpus.items():
            if value < outliers.SLOW * middle:
                verdict.entries.append(Entry([node], f"GPU {name} is slow: {value:.0f} TFLOP/s, where the median is {middle:.0f}",
                                             "nvidia-smi -q -d PERFORMANCE there: heat, a power cap, or another process", True))  # fmt: skip


def _is_pair(row: object, node: int, count: int) -> bool:
    """Whether it is [this node, another, GB/s]."""
    return (
        isinstance(row, list) and len(row) == 3 and all(type(one) is int and 0 <= one < count for one in row[:2])
        and row[0] == node != row[1] and untrusted.is_positive(row[2])
    )  # fmt: skip


def together(nodes: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """The all_reduce of all: a wrong sum, or who came less far than the others when it did not end."""
    came: dict[int, tuple[str, str]] = {}
    for node, report in nodes.items():
        measured = untrusted.as_dict(report.get("bandwidth"))
        if any(untrusted.as_dict(one.get("bandwidth")).get("right") is False for one in (report, *report["more"])):
            verdict.entries.append(
                Entry(
                    [node], "an all_reduce has a wrong sum there", "memory or a link corrupts data: leave it out", True
                )
            )
        if measured.get("at"):
            came[node] = untrusted.text(measured["at"]), untrusted.text(measured.get("error"))
    ended = [node for node, (place, _) in came.items() if place == "the end"]
    if len(ended) == len(came):
        return
    most, _ = Counter(place for place, _ in came.values()).most_common(1)[0]
    stuck = [node for node, (place, _) in came.items() if place not in ("the end", most)]
    place, error = came[stuck[0]] if stuck else next(word for word in came.values() if word[0] != "the end")
    verdict.entries.append(
        Entry(stuck, f"an all_reduce and pairs over all nodes came no further than {place} ({error or 'no word'})",
              "NCCL_DEBUG=INFO python -m recipes.collectives over these nodes shows where; look at the notes above", True)
    )  # fmt: skip
