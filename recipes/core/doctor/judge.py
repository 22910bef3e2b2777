"""Judges the reports of all nodes: which nodes are bad, and why. Pure functions.

A report comes from a node that may be broken, so each value in it is checked before use (`untrusted`). The time taken is in
proportion to the number of reports.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from recipes.core import outliers
from recipes.core.doctor import judge_network, untrusted
from recipes.core.doctor.untrusted import dict_at, text_at, value_at
from recipes.core.doctor.verdict import Verdict
from recipes.core.errors import shown

SHORT = 40  # characters of a value in a line
# Facts that all nodes must have alike: where a fact is in a report, its name, and whether a node that differs is bad.
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


def verdict_of(hosts: Sequence[str], reports: Mapping[int, dict[str, Any]]) -> Verdict:
    """The verdict on the report of each node, which can hold any JSON values.

    hosts: of each node that was started, by node_rank, "" where unknown.
    """
    verdict = Verdict(hosts=[host or text_at(reports.get(node), "host") for node, host in enumerate(hosts)])
    _missing(reports, verdict)
    _ended_early(reports, verdict)
    _own_findings(reports, verdict)
    gpus = {node: untrusted.dicts_at(report, "facts", "gpus", "gpus") for node, report in reports.items()}
    _compare(reports, gpus, verdict)
    _slow_gpus(gpus, verdict)
    judge_network.links(reports, verdict)
    judge_network.clocks(reports, verdict)
    judge_network.speeds(reports, verdict)
    judge_network.collectives(reports, verdict)
    verdict.entries.sort(key=lambda entry: (not entry.bad, len(entry.nodes), entry.nodes[:1]))
    out = {node for entry in verdict.entries if entry.bad and entry.leave_out for node in entry.nodes}
    verdict.exclude = [verdict.hosts[node] for node in sorted(out) if verdict.hosts[node]]
    bad = verdict.bad_nodes
    for node in range(len(verdict.hosts)):
        verdict.table.append(_row(node, verdict, reports.get(node, {}), gpus.get(node, []), node in bad))
    return verdict


def _missing(reports: Mapping[int, object], verdict: Verdict) -> None:
    silent = [node for node in range(len(verdict.hosts)) if node not in reports]
    # If only one of several nodes is seen, the others probably wrote to a folder of their own.
    not_shared = len(silent) == len(verdict.hosts) - 1 > 1
    for node in silent:
        fix = "log in there, or leave it out; without a shared file system, run the doctor on each node alone"
        if not_shared:
            fix = "give a run_dir= on a file system that all nodes share"
        what = "did not answer: it hangs, was never started, or does not see run_dir"
        verdict.add([node], what, fix, True, leave_out=not not_shared)


def _ended_early(reports: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Nodes that did not write their final report."""
    gone = [node for node, report in reports.items() if report.get("early") is True]
    if gone:
        what = "answered at first, but not after the bandwidth test: it hangs, or has died"
        all_gone = len(gone) == len(verdict.hosts) > 1
        verdict.add(gone, what, "log in there, or leave it out", True, leave_out=not all_gone)


def _own_findings(reports: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """What the nodes found themselves, the same finding of several nodes as one entry."""
    found: dict[tuple[str, str, bool, bool], set[int]] = {}
    for node, report in reports.items():
        for one in untrusted.dicts_at(report, "findings"):
            bad, leave_out = one.get("bad") is True, one.get("leave_out") is not False
            found.setdefault((text_at(one, "what"), text_at(one, "fix"), bad, leave_out), set()).add(node)
    for (what, fix, bad, leave_out), where in found.items():
        # A fault that all nodes have is not fixed by leaving all of them out.
        is_shared = len(where) == len(reports) > 1
        verdict.add(sorted(where), what, fix, bad, leave_out and not is_shared)


def _compare(reports: Mapping[int, dict[str, Any]], gpus: Mapping[int, list[dict[str, Any]]], verdict: Verdict) -> None:
    """Nodes that differ from most others; without a majority, all nodes."""
    values: list[dict[int, Any]] = [{} for _ in ALIKE]
    for (
        node,
        report,
    ) in reports.items():  # one report after another, since all facts of thousands do not fit into a cache
        for of_fact, ((part, name), _, _) in zip(values, ALIKE, strict=True):
            if (value := _fact(report, gpus[node], part, name)) is not None:
                of_fact[node] = value
    for of_fact, ((_, name), title, bad) in zip(values, ALIKE, strict=True):
        counted = Counter(of_fact.values()).most_common()
        if len(counted) < 2:
            continue
        usual, often = counted[0]
        is_majority = often > counted[1][1]
        odd: dict[Any, list[int]] = {}
        for node, value in of_fact.items():
            as_granted = name == "count" and value == value_at(
                reports[node], "facts", "gpus", "granted"
            )  # nodes may differ
            if (value != usual or not is_majority) and not as_granted:
                odd.setdefault(value, []).append(node)
        for value, where in odd.items():
            others = f"{shown(usual, SHORT)} on {often} others" if is_majority else "and the nodes have no majority"
            fix = "use the same on all nodes: NCCL requires it, and nothing else is tested"
            verdict.add(where, f"{title} is {shown(value, SHORT)}, {others}", fix, bad and is_majority)


def _fact(report: Mapping[str, Any], gpus: list[dict[str, Any]], part: str, name: str) -> str | int | None:
    """A value of a report to compare; None where it is missing."""
    facts = dict_at(report, "facts", part)
    if part == "gpus":
        value: Any = len(gpus) if name == "count" and "gpus" in facts else None
        if name == "name" and gpus:
            value = gpus[0].get("name")
    elif name == "mtu":
        value = value_at(facts, "interfaces", text_at(facts, "chosen", "interface"), "mtu")
    else:
        value = facts.get(name)
    return value if isinstance(value, (str, int)) and value != "" else None


def _slow_gpus(gpus: Mapping[int, list[dict[str, Any]]], verdict: Verdict) -> None:
    fast = [
        (node, gpu) for node, of_node in gpus.items() for gpu in of_node if untrusted.is_positive(gpu.get("tflops"))
    ]
    middle = median(gpu["tflops"] for _, gpu in fast) if fast else 0.0
    for node, gpu in fast:
        if gpu["tflops"] < outliers.SLOW * middle:
            name = f"{text_at(gpu, 'index', limit=SHORT)} ({text_at(gpu, 'uuid', limit=SHORT)})"
            what = f"GPU {name} is slow: {gpu['tflops']:.0f} TFLOP/s, where the median is {middle:.0f}"
            fix = "nvidia-smi -q -d PERFORMANCE there: heat, a power cap, or another process"
            verdict.add([node], what, fix, True)


def _row(
    node: int, verdict: Verdict, report: Mapping[str, Any], gpus: list[dict[str, Any]], is_bad: bool
) -> dict[str, str]:
    facts = dict_at(report, "facts")
    interface = text_at(facts, "interfaces", "chosen", "interface")
    mbit = value_at(facts, "interfaces", "interfaces", interface, "mbit")
    speed = f" {mbit // 1000}G" if isinstance(mbit, int) and mbit >= 1000 else ""
    family = " IPv6" if ":" in text_at(facts, "interfaces", "chosen", "address") else ""
    tflops = [gpu["tflops"] for gpu in gpus if untrusted.is_positive(gpu.get("tflops"))]
    return {
        "node": verdict.hosts[node] or str(node),
        "verdict": "BAD" if is_bad else "ok",
        "gpus": f"{sum(gpu.get('correct') is True for gpu in gpus)}/{len(gpus)}" if gpus else "-",
        "tflops": f"{median(tflops):.0f}" if tflops else "-",
        "torch": text_at(facts, "torch", "torch", limit=SHORT) or "-",
        "network": f"{interface}{speed}{family}" or "-",
    }
