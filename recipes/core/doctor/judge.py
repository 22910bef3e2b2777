"""Judges the reports of all nodes: which nodes are bad, and why. Pure functions.

The time taken is in proportion to the number of reports.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from recipes.core.doctor import judge_network
from recipes.core.doctor.verdict import Verdict
from recipes.core.errors import shown

SHORT, LONG = 40, 300  # characters of a value, and of a finding, in a line
# Facts that all nodes must have alike: where a fact is in a report, its name, and whether a node that differs is bad.
ALIKE = (
    ("torch", "torch", "torch", True),
    ("torch", "cuda", "CUDA", True),
    ("torch", "nccl", "NCCL", True),
    ("torch", "python", "Python", True),
    ("gpus", "count", "the number of GPUs", True),
    ("gpus", "name", "the kind of GPU", True),
    ("interfaces", "mtu", "the MTU of the interface", False),
)


def verdict_of(hosts: Sequence[str], reports: Mapping[int, Mapping[str, Any]]) -> Verdict:
    """The verdict on the reports, sorted by node_rank, of the nodes that have examined themselves (`examine.run`).

    hosts: of each node that was started, by node_rank, "" where unknown.
    """
    verdict = Verdict(hosts=[host or reports.get(node, {}).get("host", "") for node, host in enumerate(hosts)])
    _missing(reports, verdict)
    _ended_early(reports, verdict)
    _own_findings(reports, verdict)
    _compare(reports, verdict)
    _slow_gpus(reports, verdict)
    judge_network.links(reports, verdict)
    judge_network.speeds(reports, verdict)
    judge_network.collectives(reports, verdict)
    verdict.entries.sort(key=lambda entry: (not entry.bad, len(entry.nodes), entry.nodes[:1]))
    out = {node for entry in verdict.entries if entry.bad and entry.leave_out for node in entry.nodes}
    verdict.exclude = [verdict.hosts[node] for node in sorted(out) if verdict.hosts[node]]
    bad = verdict.bad_nodes
    for node, host in enumerate(verdict.hosts):
        row = {"node": host or str(node), "verdict": "BAD" if node in bad else "ok"}
        verdict.table.append({**row, **_facts(reports.get(node, {"facts": {}}))})
    return verdict


def _missing(reports: Mapping[int, object], verdict: Verdict) -> None:
    silent = [node for node in range(len(verdict.hosts)) if node not in reports]
    # If only one of several nodes is seen, the others probably wrote to a folder of their own.
    is_shared = not len(silent) == len(verdict.hosts) - 1 > 1
    for node in silent:
        fix = "log in there, or leave it out; give a run_dir= on a file system that all nodes share"
        what = "did not answer: it hangs, was never started, or does not see run_dir"
        verdict.add([node], what, fix, True, leave_out=is_shared)


def _ended_early(reports: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Nodes that did not write their final report."""
    gone = [node for node, report in reports.items() if report.get("early")]
    if gone:
        what = "answered at first, but not after the bandwidth test: it hangs, or has died"
        all_gone = len(gone) == len(verdict.hosts) > 1
        verdict.add(gone, what, "log in there, or leave it out", True, leave_out=not all_gone)


def _own_findings(reports: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """What the nodes found themselves, the same finding of several nodes as one entry."""
    found: dict[tuple[str, str, bool, bool], list[int]] = {}
    for node, report in reports.items():
        for one in report["findings"]:
            found.setdefault((one["what"], one["fix"], one["bad"], one["leave_out"]), []).append(node)
    for (what, fix, bad, leave_out), nodes in found.items():
        # A fault that all nodes have is not fixed by leaving all of them out.
        is_shared = len(nodes) == len(reports) > 1
        verdict.add(nodes, shown(what, LONG), shown(fix, LONG), bad, leave_out and not is_shared)


def _compare(reports: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    """Nodes that differ from most others; without a majority, all nodes."""
    for part, name, title, bad in ALIKE:
        values = {node: report["facts"].get(part, {}).get(name) for node, report in reports.items()}
        counted = Counter(value for value in values.values() if value is not None).most_common()
        if len(counted) < 2:
            continue
        usual, often = counted[0]
        is_majority = often > counted[1][1]
        others = f"{shown(usual, SHORT)} on {often} others" if is_majority else "and the nodes have no majority"
        fix = "use the same on all nodes: NCCL requires it, and nothing else is tested"
        for value, _ in counted[is_majority:]:
            nodes = [node for node, one in values.items() if one == value]
            verdict.add(nodes, f"{title} is {shown(value, SHORT)}, {others}", fix, bad and is_majority)


def _gpus(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The GPUs that torch has tested."""
    return [gpu for gpu in report["facts"].get("gpus", {}).get("gpus", []) if "tflops" in gpu]


def _slow_gpus(reports: Mapping[int, Mapping[str, Any]], verdict: Verdict) -> None:
    tested = [(node, gpu) for node, report in reports.items() for gpu in _gpus(report)]
    middle = median(gpu["tflops"] for _, gpu in tested) if tested else 0.0
    for node, gpu in tested:
        if gpu["tflops"] < judge_network.SLOW * middle:
            what = f"GPU {gpu['index']} ({gpu['uuid']}) is slow: {gpu['tflops']:.0f} TFLOP/s, where the median is {middle:.0f}"
            fix = "nvidia-smi -q -d PERFORMANCE there: heat, a power cap, or another process"
            verdict.add([node], what, fix, True)


def _facts(report: Mapping[str, Any]) -> dict[str, str]:
    """What the table shows of a node."""
    facts, gpus = report["facts"], _gpus(report)
    count = len(facts.get("gpus", {}).get("gpus", []))
    return {
        "gpus": f"{sum(gpu['correct'] for gpu in gpus)}/{count}" if count else "-",
        "tflops": f"{median(gpu['tflops'] for gpu in gpus):.0f}" if gpus else "-",
        "torch": facts.get("torch", {}).get("torch", "-"),
        "network": facts.get("interfaces", {}).get("interface", "-"),
    }
