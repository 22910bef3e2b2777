"""Judges the reports of all nodes: which nodes are bad, and why. Pure functions.

A report comes from a node that may be broken, so each value in it is checked before use (`untrusted`). The time taken is in
proportion to the number of reports.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any
from recipes.core.doctor import judge_network, untrusted
from recipes.core.errors import shown
from recipes.core.doctor.verdict import Entry
from recipes.core.doctor.verdict import Verdict


SHORT = 40  # characters of a value in a line
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


@dataclass(frozen=True)
class Expected:
    """What was started. hosts: of each node by node_rank, "" where it is not known; ranks: how many."""

    hosts: tuple[str, ...]
    ranks: int


def verdict_of(expected: Expected, reports: Iterable[object]) -> Verdict:
    """The verdict on the reports that came, of what was `Expected`; each is what JSON gave, whatever that is."""
    verdict = Verdict(hosts=list(expected.hosts))
    nodes = _of_nodes(expected, reports, verdict)
    for node, report in nodes.items():
        verdict.hosts[node] = verdict.hosts[node] or untrusted.text(report.get("host"))
    _missing(expected, nodes, verdict)
    _ended_early(nodes, verdict)
    own: dict[tuple[str, str, bool, bool], list[int]] = {}
    for node, report in nodes.items():
        for finding in _findings(report):
            own.setdefault(finding, []).append(node)
    verdict.entries += [
        # What all nodes have alike is not mended by leaving all of them out.
        Entry(sorted(set(where)), what, fix, bad, leave_out and (len(set(where)) < len(nodes) or len(nodes) == 1))
        for (what, fix, bad, leave_out), where in own.items()
    ]
    _compare(nodes, verdict)
    judge_network.decoys(nodes, verdict)
    judge_network.links(nodes, verdict)
    judge_network.clocks(nodes, verdict)
    judge_network.speeds(nodes, verdict)
    judge_network.together(nodes, verdict)
    verdict.entries.sort(key=lambda entry: (not entry.bad, len(entry.nodes), entry.nodes[:1]))
    accused = {node for entry in verdict.entries if entry.bad for node in entry.nodes}
    out = {node for entry in verdict.entries if entry.bad and entry.leave_out for node in entry.nodes}
    verdict.exclude = [verdict.hosts[node] for node in sorted(out) if verdict.hosts[node]]
    verdict.table = [_row(node, verdict, nodes.get(node, {}), node in accused) for node in range(len(verdict.hosts))]
    return verdict


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
        named = untrusted.text(report.get("host"))
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
        seen = [
            untrusted.as_dict(untrusted.as_dict(one.get("facts")).get("gpus")).get("gpus")
            for one in (first, *first["more"])
        ]
        there = [gpu for part in seen for gpu in untrusted.as_list(part) if isinstance(gpu, dict)]
        unique = {
            untrusted.text(gpu.get("uuid")) or str(number): gpu for number, gpu in reversed(list(enumerate(there)))
        }
        first["gpus"] = list(reversed(unique.values()))
    return nodes


def _missing(expected: Expected, nodes: Mapping[int, Any], verdict: Verdict) -> None:
    silent = [node for node in range(len(expected.hosts)) if node not in nodes or nodes[node].get("partial")]
    # Where one node of several is alone with what it wrote, the others wrote it elsewhere.
    elsewhere = len(silent) == len(expected.hosts) - 1 > 1
    for node in silent:
        fix = "log in there, or leave it out; where no file system is shared, run each node's own doctor alone"
        if elsewhere:
            fix = "is run_dir on a file system that all nodes share? if not, give one that is"
        what = "did not answer: it hangs, was never started, or does not see run_dir"
        verdict.entries.append(Entry([node], what, fix, True, leave_out=not elsewhere))
    came = {node: 1 + len(report["more"]) for node, report in nodes.items() if not report["partial"]}
    short = [
        node
        for node, count in came.items()
        if untrusted.is_positive(wanted := nodes[node].get("local_world_size")) and count < wanted
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
    for one in (report, *untrusted.as_list(report.get("more"))):
        for found in untrusted.as_list(one.get("findings") if isinstance(one, dict) else None):
            if isinstance(found, dict) and found.get("what"):
                yield (
                    untrusted.text(found["what"]),
                    untrusted.text(found.get("fix")),
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
            most = f", {shown(usual, SHORT)} on {often} others" if alike else ", and others have others"
            verdict.entries.append(
                Entry(where, f"{called} is {shown(value, SHORT)}{most}", "the same on all nodes is what is tested, and NCCL wants", bad and alike)
            )  # fmt: skip


def _as_many_as_wanted(report: Mapping[str, Any]) -> bool:
    """Whether a node has the GPUs that it was granted, or one for each of its ranks: nodes may differ in that (8 and 2, say)."""
    facts = untrusted.as_dict(untrusted.as_dict(report.get("facts")).get("gpus"))
    return bool(report["gpus"]) and len(report["gpus"]) in (facts.get("granted"), facts.get("ranks"))


def _fact(report: Mapping[str, Any], part: str, name: str) -> Any:
    """What is compared of a report: a text or number, None where it has none."""
    facts = untrusted.as_dict(untrusted.as_dict(report.get("facts")).get(part))
    if part == "gpus":
        value: Any = len(report["gpus"]) if name == "count" and "gpus" in facts else None
        if name == "name" and report["gpus"]:
            value = report["gpus"][0].get("name")
    elif name == "mtu":
        chosen = untrusted.as_dict(facts.get("chosen")).get("interface")
        value = untrusted.as_dict(untrusted.as_dict(facts.get("interfaces")).get(untrusted.text(chosen))).get("mtu")
    else:
        value = facts.get(name)
    return value if isinstance(value, (str, int)) and value != "" else None


def _row(node: int, verdict: Verdict, report: Mapping[str, Any], bad: bool) -> dict[str, Any]:
    facts = untrusted.as_dict(report.get("facts"))
    gpus = report.get("gpus", [])
    nets = untrusted.as_dict(facts.get("interfaces"))
    chosen = untrusted.text(untrusted.as_dict(nets.get("chosen")).get("interface"))
    mbit = untrusted.as_dict(untrusted.as_dict(nets.get("interfaces")).get(chosen)).get("mbit")
    family = " IPv6" if ":" in untrusted.text(untrusted.as_dict(nets.get("chosen")).get("address")) else ""
    trips = [
        link["round_trip_s"]
        for link in untrusted.as_list(report.get("links"))
        if isinstance(link, dict) and untrusted.is_positive(link.get("round_trip_s"))
    ]
    tflops = [gpu["tflops"] for gpu in gpus if untrusted.is_positive(gpu.get("tflops"))]
    return {
        "node": verdict.hosts[node] or str(node),
        "verdict": "BAD" if bad else "ok",
        "gpus": f"{sum(gpu.get('right') is True for gpu in gpus)}/{len(gpus)}" if gpus else "-",
        "tflops": f"{median(tflops):.0f}" if tflops else "-",
        "cpus": shown(untrusted.as_dict(facts.get("cpus")).get("allowed", "-"), SHORT),
        "driver": shown(untrusted.as_dict(facts.get("system")).get("driver", "-"), SHORT),
        "torch": shown(untrusted.as_dict(facts.get("torch")).get("torch", "-"), SHORT),
        "network": f"{chosen}{f' {mbit // 1000}G' if isinstance(mbit, int) and mbit >= 1000 else ''}{family}" or "-",
        "trip": f"{1e6 * median(trips):.0f} us" if trips else "-",
    }
