"""What all nodes' reports together say: which nodes are bad, and what is to be done. A pure function. Standard library only.

A report comes from a node that may be broken: nothing in it is believed to be there, or of the right kind.
Takes time in proportion to the number of reports.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from recipes.core import outliers

CLOCK_S = 2.0  # between two nodes, more than which spoils time stamps and makefiles
MANY = 8  # names in a line
LONGEST = 300  # of what a node says
# What has to be alike on all nodes, where it is and what it is called; and whether a node with another one is to be left out.
ALIKE = (
    (("torch", "torch"), "torch", True),
    (("torch", "cuda"), "CUDA", True),
    (("torch", "nccl"), "NCCL", True),
    (("system", "python"), "Python", True),
    (("system", "project"), "these recipes' commit", True),
    (("system", "driver"), "the NVIDIA driver", False),
    (("system", "kernel"), "the kernel", False),
    (("gpus", "count"), "the number of GPUs", True),
    (("gpus", "name"), "the kind of GPU", True),
    (("interfaces", "mtu"), "the MTU of the interface", False),
)
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
MENDS = {
    "name": "add the name to DNS, or to /etc/hosts on each node",
    "silent": "is run_dir seen on both nodes?",
    "connect": "is its interface up, and is there a route both ways? a firewall must let the nodes of a job through",
    "small": "look for a firewall, or a link that loses packets, between them",
    "large": "give both interfaces, and every switch between them, the same MTU: ip link set DEV mtu 1500",
    "foreign": "two nodes have this address, or a name points to the wrong one: compare ip -br address on both with DNS",
    "master": "a firewall lets some ports through and not this one: open ports 10000-32767 between the nodes, or set MASTER_PORT to an open one",
}


@dataclass(frozen=True)
class Expected:
    """What was started. hosts: of each node by node_rank, "" where it is not known; ranks: how many."""

    hosts: tuple[str, ...]
    ranks: int


@dataclass
class Entry:
    """One thing that is wrong, of one node or several. leave_out: that it does without them."""

    nodes: list[int]
    what: str
    mend: str
    bad: bool
    leave_out: bool = True


@dataclass
class Verdict:
    """entries: what is wrong, the worst first. exclude: hosts of the nodes that are not to be used. table: a row of each node."""

    entries: list[Entry] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    table: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        return not any(entry.bad for entry in self.entries)


def judge(expected: Expected, reports: Iterable[object]) -> Verdict:
    """The verdict on the reports that came, of what was `Expected`; each is what JSON gave, whatever that is."""
    verdict = Verdict(hosts=list(expected.hosts))
    nodes = _of_nodes(expected, reports, verdict)
    for node, report in nodes.items():
        verdict.hosts[node] = verdict.hosts[node] or _text(report.get("host"))
    _missing(expected, nodes, verdict)
    _ended_early(nodes, verdict)
    own: dict[tuple[str, str, bool, bool], list[int]] = {}
    for node, report in nodes.items():
        for finding in _findings(report):
            own.setdefault(finding, []).append(node)
    verdict.entries += [
        # What all nodes have alike is not mended by leaving all of them out.
        Entry(sorted(set(where)), what, mend, bad, leave_out and (len(set(where)) < len(nodes) or len(nodes) == 1))
        for (what, mend, bad, leave_out), where in own.items()
    ]
    _compare(nodes, verdict)
    _decoys(nodes, verdict)
    _links(nodes, verdict)
    _clocks(nodes, verdict)
    _speeds(nodes, verdict)
    _together(nodes, verdict)
    verdict.entries.sort(key=lambda entry: (not entry.bad, len(entry.nodes), entry.nodes[:1]))
    accused = {node for entry in verdict.entries if entry.bad for node in entry.nodes}
    out = {node for entry in verdict.entries if entry.bad and entry.leave_out for node in entry.nodes}
    verdict.exclude = [verdict.hosts[node] for node in sorted(out) if verdict.hosts[node]]
    verdict.table = [_row(node, verdict, nodes.get(node, {}), node in accused) for node in range(len(verdict.hosts))]
    return verdict


def as_json(verdict: Verdict) -> dict[str, Any]:
    return {**asdict(verdict), "healthy": verdict.healthy}


def lines(verdict: Verdict) -> list[str]:
    """The verdict as a person reads it: the table, a line for each finding and its mend, and what to type."""
    found = _table(verdict.table)
    for entry in verdict.entries:
        found.append(f"{'BAD ' if entry.bad else 'note'}  {_names(entry.nodes, verdict)}: {entry.what}: {entry.mend}")
    named = {"all_reduce_busbw_gb_per_s": "all_reduce busbw", "pairs_median_gb_per_s": "pairs of nodes, median"}
    if verdict.figures:
        found.append("; ".join(f"{named[name]} {value:.3g} GB/s" for name, value in verdict.figures.items()))
    count = len(verdict.hosts)
    if verdict.healthy:
        found.append(f"healthy: {count} node{'s' if count > 1 else ''}")
    else:
        bad = len({node for entry in verdict.entries if entry.bad for node in entry.nodes})
        options = f"sbatch --exclude={','.join(verdict.exclude)}" if verdict.exclude else ""
        if bad == count > 1:
            other = f"; {options} selects other nodes, if the cluster has enough" if options else ""
            found.append(f"all {count} nodes are bad: fix them as the lines above say{other}")
        else:
            what = f"{bad} of {count} nodes bad" if bad else "not healthy, and no single node is to blame"
            found.append(what + (f": {options} keeps off them" if options else ""))
    return found


def _of_nodes(expected: Expected, reports: Iterable[object], verdict: Verdict) -> dict[int, dict[str, Any]]:
    """Each node's first rank's report, with the findings of its other ranks; what makes no sense is an entry."""
    nodes: dict[int, dict[str, Any]] = {}
    others: list[dict[str, Any]] = []
    by_host: dict[str, int] = {}
    for report in reports:
        node = report.get("node_rank") if isinstance(report, dict) else None
        if not isinstance(report, dict) or not isinstance(node, int) or not 0 <= node < len(expected.hosts):
            verdict.entries.append(
                Entry([], "a report makes no sense, and is not counted", "look into the folder of reports", False)
            )
            continue
        named = _text(report.get("host"))
        want = expected.hosts[node]
        if want and named and named.split(".")[0] != want.split(".")[0]:
            verdict.entries.append(
                Entry(
                    [node],
                    f"says that it is {named}",
                    "two machines have one name, or its name was never set: hostname there",
                    False,
                )
            )
        if by_host.setdefault(named, node) != node:
            verdict.entries.append(
                Entry(
                    [by_host[named], node],
                    f"both say that they are {named}",
                    "give each machine its own host name",
                    False,
                )
            )
        if report.get("local_rank") == 0:
            nodes.setdefault(node, {**report, "more": [], "partial": False})
        else:
            others.append(report)
    for report in others:
        first = nodes.setdefault(report["node_rank"], {"host": report.get("host"), "more": [], "partial": True})
        first["more"].append(report)
    for first in nodes.values():  # where each rank is shown a GPU of its own, a node's are all of theirs
        seen = [_dict(_dict(one.get("facts")).get("gpus")).get("gpus") for one in (first, *first["more"])]
        there = [gpu for part in seen for gpu in _list(part) if isinstance(gpu, dict)]
        unique = {_text(gpu.get("uuid")) or str(number): gpu for number, gpu in reversed(list(enumerate(there)))}
        first["gpus"] = list(reversed(unique.values()))
    return nodes


def _missing(expected: Expected, nodes: Mapping[int, Any], verdict: Verdict) -> None:
    silent = [node for node in range(len(expected.hosts)) if node not in nodes or nodes[node].get("partial")]
    # Where one node of several is alone with what it wrote, the others wrote it elsewhere.
    elsewhere = len(silent) == len(expected.hosts) - 1 > 1
    for node in silent:
        mend = "log in there, or leave it out; where no file system is shared, run each node's own doctor alone"
        if elsewhere:
            mend = "is run_dir on a file system that all nodes share? if not, give one that is"
        what = "did not answer: it hangs, was never started, or does not see run_dir"
        verdict.entries.append(Entry([node], what, mend, True, leave_out=not elsewhere))
    came = {node: 1 + len(report["more"]) for node, report in nodes.items() if not report["partial"]}
    short = [
        node
        for node, count in came.items()
        if _positive(wanted := nodes[node].get("local_world_size")) and count < wanted
    ]
    if short or (len(came) == len(expected.hosts) and sum(came.values()) < expected.ranks):
        what = "not all of its ranks answered: they hang, or have ended" if short else "not all ranks answered"
        verdict.entries.append(
            Entry(short, what, "the lines above may say why; else log in there, or leave it out", True)
        )


def _ended_early(nodes: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Nodes of which a rank gave its first report and not its last."""
    gone = [
        node for node, report in nodes.items() if any(one.get("early") is True for one in (report, *report["more"]))
    ]
    if gone:
        what = "answered at first, and then no more: it hangs, or has died, in an all_reduce with the others"
        alike = len(gone) == len(verdict.hosts) > 1
        verdict.entries.append(Entry(gone, what, "log in there, or leave it out", True, leave_out=not alike))


def _findings(report: Mapping[str, Any]) -> Iterable[tuple[str, str, bool, bool]]:
    for one in (report, *_list(report.get("more"))):
        for found in _list(one.get("findings") if isinstance(one, dict) else None):
            if isinstance(found, dict) and found.get("what"):
                yield (
                    _text(found["what"]),
                    _text(found.get("mend")),
                    found.get("bad") is True,
                    found.get("leave_out") is not False,
                )


def _compare(nodes: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """A node that differs from most others; where there is no most, all are told."""
    of_all: list[dict[int, Any]] = [{} for _ in ALIKE]
    # A report at a time: where there are thousands, none stays in the processor's cache to the next fact.
    for node, report in nodes.items():
        for values, ((part, name), _, _) in zip(of_all, ALIKE, strict=True):
            if (value := _fact(report, part, name)) is not None:
                values[node] = value
    for values, ((_, name), called, bad) in zip(of_all, ALIKE, strict=True):
        counted = Counter(values.values()).most_common()
        if len(counted) < 2:
            continue
        usual, often = counted[0]
        alike = often > counted[1][1]
        odd: dict[Any, list[int]] = {}
        for node, value in values.items():
            if (value != usual or not alike) and not (name == "count" and _as_many_as_wanted(nodes[node])):
                odd.setdefault(value, []).append(node)
        for value, where in odd.items():
            most = f", {_show(usual)} on {often} others" if alike else ", and others have others"
            verdict.entries.append(
                Entry(where, f"{called} is {_show(value)}{most}", "the same on all nodes is what is tested, and NCCL wants", bad and alike)
            )  # fmt: skip


def _as_many_as_wanted(report: Mapping[str, Any]) -> bool:
    """Whether a node has the GPUs that it was granted, or one for each of its ranks: nodes may differ in that (8 and 2, say)."""
    facts = _dict(_dict(report.get("facts")).get("gpus"))
    return bool(report["gpus"]) and len(report["gpus"]) in (facts.get("granted"), facts.get("ranks"))


def _fact(report: Mapping[str, Any], part: str, name: str) -> Any:
    """What is compared of a report: a text or number, None where it has none."""
    facts = _dict(_dict(report.get("facts")).get(part))
    if part == "gpus":
        value: Any = len(report["gpus"]) if name == "count" and "gpus" in facts else None
        if name == "name" and report["gpus"]:
            value = report["gpus"][0].get("name")
    elif name == "mtu":
        chosen = _dict(facts.get("chosen")).get("interface")
        value = _dict(_dict(facts.get("interfaces")).get(_text(chosen))).get("mtu")
    else:
        value = facts.get(name)
    return value if isinstance(value, (str, int)) and value != "" else None


def _decoys(nodes: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Addresses that several nodes have alike: who takes an interface by its name alone sends to itself."""
    having: dict[tuple[str, str], list[int]] = {}
    for node, report in nodes.items():
        there = _dict(_dict(_dict(report.get("facts")).get("interfaces")).get("interfaces"))
        for name, one in there.items():
            for address in _list(_dict(one).get("addresses")):
                if not _text(address).startswith(LOCAL_ONLY):
                    having.setdefault((_text(name), _text(address)), []).append(node)
    for (name, address), where in having.items():
        if len(where) > 1:
            what = f"{name} has one and the same address there, {address}"
            mend = "never for NCCL_SOCKET_IFNAME; the recipes take the interface by its route"
            verdict.entries.append(Entry(where, what, mend, False))


def _links(nodes: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Ways that fail. Where most ways of a node fail, and those of the nodes at their other ends do not, it is that node."""
    asked: Counter[int] = Counter()
    failed: Counter[int] = Counter()
    faults: list[tuple[int, int, str, str]] = []
    for node, report in nodes.items():
        for link in _list(report.get("links")):
            peer = link.get("peer") if isinstance(link, dict) else None
            if (
                not isinstance(peer, int)
                or not 0 <= peer < len(verdict.hosts)
                or peer not in nodes
                or nodes[peer].get("partial")
            ):
                continue  # a node that did not answer is told of already
            asked.update((node, peer))
            if _text(link.get("fault")) in FAULTS:
                failed.update((node, peer))
                faults.append((node, peer, link["fault"], _text(link.get("why"))))
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
                  MENDS[fault], True)
        )  # fmt: skip


def _clocks(nodes: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Each node's clock against the first node's, as it was asked."""
    off = {}
    for node, report in nodes.items():
        for link in _list(report.get("links")):
            if isinstance(link, dict) and link.get("peer") == 0 and _number(link.get("clock_s")):
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


def _speeds(nodes: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Pairs of nodes, GPUs and rounds trips well below the rest."""
    pairs: dict[tuple[int, int], float] = {}
    gpus: dict[tuple[int, int], tuple[str, float]] = {}
    for node, report in nodes.items():
        measured = _dict(report.get("bandwidth"))
        for row in _list(measured.get("pairs")):
            if _is_pair(row, node, len(verdict.hosts)):
                pairs[row[0], row[1]] = float(row[2])
        for number, gpu in enumerate(report["gpus"]):
            if _positive(gpu.get("tflops")):
                gpus[node, number] = f"{_show(gpu.get('index'))} ({_show(gpu.get('uuid'))})", float(gpu["tflops"])
        if _positive(measured.get("busbw")):
            verdict.figures["all_reduce_busbw_gb_per_s"] = float(measured["busbw"])
    slow = outliers.slow(pairs)
    if pairs:
        verdict.figures["pairs_median_gb_per_s"] = slow.median
    for node, value in slow.nodes.items():
        what = f"its network is slow: {value:.3g} GB/s with others, where the median is {slow.median:.3g}"
        verdict.entries.append(Entry([node], what, "ethtool DEV, or ibstat, there: link speed, errors, a cable", True))
    for pair, value in slow.pairs.items():
        what = f"the way between them is slow: {value:.3g} GB/s, where the median is {slow.median:.3g}"
        mend = "a link between their switches, or one of the two: measure again with others"
        verdict.entries.append(Entry(sorted(pair), what, mend, False))
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
        and row[0] == node != row[1] and _positive(row[2])
    )  # fmt: skip


def _together(nodes: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """The all_reduce of all: a wrong sum, or who came less far than the others when it did not end."""
    came: dict[int, tuple[str, str]] = {}
    for node, report in nodes.items():
        measured = _dict(report.get("bandwidth"))
        if any(_dict(one.get("bandwidth")).get("right") is False for one in (report, *report["more"])):
            verdict.entries.append(
                Entry(
                    [node], "an all_reduce has a wrong sum there", "memory or a link corrupts data: leave it out", True
                )
            )
        if measured.get("at"):
            came[node] = _text(measured["at"]), _text(measured.get("error"))
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


def _row(node: int, verdict: Verdict, report: Mapping[str, Any], bad: bool) -> dict[str, Any]:
    facts = _dict(report.get("facts"))
    gpus = report.get("gpus", [])
    nets = _dict(facts.get("interfaces"))
    chosen = _text(_dict(nets.get("chosen")).get("interface"))
    mbit = _dict(_dict(nets.get("interfaces")).get(chosen)).get("mbit")
    family = " IPv6" if ":" in _text(_dict(nets.get("chosen")).get("address")) else ""
    trips = [
        link["round_trip_s"]
        for link in _list(report.get("links"))
        if isinstance(link, dict) and _positive(link.get("round_trip_s"))
    ]
    tflops = [gpu["tflops"] for gpu in gpus if _positive(gpu.get("tflops"))]
    return {
        "node": verdict.hosts[node] or str(node),
        "verdict": "BAD" if bad else "ok",
        "gpus": f"{sum(gpu.get('right') is True for gpu in gpus)}/{len(gpus)}" if gpus else "-",
        "tflops": f"{median(tflops):.0f}" if tflops else "-",
        "cpus": _show(_dict(facts.get("cpus")).get("allowed", "-")),
        "driver": _show(_dict(facts.get("system")).get("driver", "-")),
        "torch": _show(_dict(facts.get("torch")).get("torch", "-")),
        "network": f"{chosen}{f' {mbit // 1000}G' if isinstance(mbit, int) and mbit >= 1000 else ''}{family}" or "-",
        "trip": f"{1e6 * median(trips):.0f} us" if trips else "-",
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    shown = [{name: name for name in rows[0]}, *rows]
    if len(rows) > 2 * MANY:  # the bad ones are what is looked for
        shown = [shown[0], *(row for row in rows if row["verdict"] == "BAD")]
    widths = {name: max(len(str(row[name])) for row in shown) for name in rows[0]}
    return ["  ".join(f"{row[name]!s:<{widths[name]}}" for name in widths).rstrip() for row in shown]


def _names(nodes: Sequence[int], verdict: Verdict) -> str:
    if len(nodes) == len(verdict.hosts) and len(nodes) > 1:
        return f"all {len(nodes)} nodes"
    named = ", ".join(verdict.hosts[node] or f"node {node}" for node in nodes[:MANY])
    return (named + (f" and {len(nodes) - MANY} more" if len(nodes) > MANY else "")) or "the nodes together"


def _text(value: object) -> str:
    """What a node says, as it may stand in a line."""
    text = value if isinstance(value, str) else "" if value is None else str(value)[:LONGEST]
    return "".join(c if c.isprintable() else "?" for c in text[:LONGEST])


def _show(value: object) -> str:
    return _text(value)[:40]


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: object) -> bool:
    """Whether it is one that can be counted with: JSON has whole ones without an end, too."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def _positive(value: object) -> bool:
    return _number(value) and value > 0  # type: ignore[operator]
