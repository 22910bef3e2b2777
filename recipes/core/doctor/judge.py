"""Judges the reports of all nodes: which nodes are bad, and why. Pure functions.

The time taken is in proportion to the number of reports.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from recipes.core.doctor.reports import NodeReports, Report
from recipes.core.doctor.verdict import Finding, Verdict
from recipes.core.errors import shown

LONG = 300  # characters of a finding in a line
# Facts that must be equal on all nodes, and their names.
ALIKE = {
    "torch": "torch",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "python": "Python",
    "gpu_count": "the number of GPUs",
    "gpu_name": "the kind of GPU",
}
SLOW = 0.6  # a value below this fraction of the median is slow
# By the fault of a link (`reach.probe`): what a node sees of the other one, and the fix.
FAULTS = {
    "connect": (
        "cannot connect to {peer}",
        "check that its name resolves, its interface is up, routes exist in both directions, "
        "and no firewall is between the nodes",
    ),
    "small": (
        "connects to {peer}, but gets no answer",
        "look for a firewall or a link that loses packets between them",
    ),
    "large": (
        "reaches {peer} with small packets, but large ones are lost: "
        "the MTU on the path is smaller than the interface's",
        "give both interfaces, and every switch between them, the same MTU: "
        "ip link set DEV mtu 1500",
    ),
}


def verdict_of(hosts: Sequence[str], reports: NodeReports) -> Verdict:
    """The verdict on the reports, sorted by node_rank, of the nodes that have examined themselves
    (`examine.run`).

    hosts: the host of each node that was started, by node_rank; "" if unknown.
    """
    verdict = Verdict(
        hosts=[host or reports.get(node, {}).get("host", "") for node, host in enumerate(hosts)]
    )
    for check in (
        _missing,
        _own_findings,
        _compare,
        _slow_gpus,
        _slow_copies,
        _links,  # uses what those before it have found
        _speeds,
        _collectives,
    ):
        verdict.entries += check(reports, verdict)
    verdict.entries.sort(key=lambda entry: (not entry.bad, len(entry.nodes), entry.nodes[:1]))
    out = {
        node for entry in verdict.entries if entry.bad and entry.leave_out for node in entry.nodes
    }
    verdict.exclude = [verdict.hosts[node] for node in sorted(out) if verdict.hosts[node]]
    bad = verdict.bad_nodes
    for node, host in enumerate(verdict.hosts):
        row = {"node": host or str(node), "verdict": "BAD" if node in bad else "ok"}
        report = reports.get(node, {"facts": {}})
        verdict.table.append({**row, **_facts(report)})
    return verdict


def _missing(reports: NodeReports, verdict: Verdict) -> Iterator[Finding]:
    """Nodes without a report, and nodes that did not write their final report."""
    count = len(verdict.hosts)
    silent = [node for node in range(count) if node not in reports]
    # If only one of several nodes is seen, the others probably wrote to another folder.
    is_apart = len(silent) == count - 1 > 1
    for node in silent:
        what = "did not answer: it hangs, was never started, or does not see run_dir"
        fix = (
            "log in to the node, or exclude it; "
            "give a run_dir= on a file system that all nodes share"
        )
        yield Finding(what, fix, leave_out=not is_apart, nodes=[node])
    gone = [node for node, report in reports.items() if report.get("early")]
    if gone:
        what = "answered at first, but not after the bandwidth test: it hangs, or has died"
        is_shared = len(gone) == count > 1
        fix = "log in to the node, or exclude it"
        yield Finding(what, fix, leave_out=not is_shared, nodes=gone)


def _own_findings(reports: NodeReports, verdict: Verdict) -> Iterator[Finding]:
    """What the nodes found themselves, the same finding of several nodes as one entry."""
    having: dict[Finding, list[int]] = {}
    for node, report in reports.items():
        for finding in report["findings"]:
            having.setdefault(Finding(**{**finding, "nodes": ()}), []).append(node)
    for finding, nodes in having.items():
        # A fault that all nodes have is not fixed by leaving all of them out.
        is_shared = len(nodes) == len(reports) > 1
        what = shown(finding.what, LONG)
        fix = shown(finding.fix, LONG)
        yield Finding(what, fix, finding.bad, finding.leave_out and not is_shared, nodes)


def _compare(reports: NodeReports, verdict: Verdict) -> Iterator[Finding]:
    """Nodes that differ from most others; without a majority, all nodes."""
    for name, title in ALIKE.items():
        values = {node: report["facts"].get(name) for node, report in reports.items()}
        counted = Counter(value for value in values.values() if value is not None).most_common()
        if len(counted) < 2:
            continue
        usual, often = counted[0]
        is_majority = often > counted[1][1]
        others = "and no value has a majority of the nodes"
        if is_majority:
            others = f"but {shown(usual)} on {often} others"
        fix = "use the same on all nodes: NCCL can fail on nodes that differ"
        for value, _ in counted[is_majority:]:
            nodes = [node for node in values if values[node] == value]
            what = f"{title} is {shown(value)}, {others}"
            yield Finding(what, fix, is_majority, nodes=nodes)


def _gpus(report: Report) -> list[Report]:
    """The GPUs that torch has tested."""
    return [gpu for gpu in report["facts"].get("gpus", []) if "tflops" in gpu]


def _slow_gpus(reports: NodeReports, verdict: Verdict) -> Iterator[Finding]:
    tested = [(node, gpu) for node, report in reports.items() for gpu in _gpus(report)]
    middle = median(gpu["tflops"] for _, gpu in tested) if tested else 0.0
    for node, gpu in tested:
        if gpu["tflops"] < SLOW * middle:
            what = (
                f"GPU {gpu['index']} ({gpu['uuid']}) is slow: {gpu['tflops']:.0f} TFLOP/s; "
                f"the median is {middle:.0f}"
            )
            fix = (
                "run nvidia-smi -q -d PERFORMANCE there: "
                "look for heat, a power cap, or another process"
            )
            yield Finding(what, fix, nodes=[node])


def _slow_copies(reports: NodeReports, verdict: Verdict) -> Iterator[Finding]:
    """GPUs that copy to the next GPU of their node more slowly than the GPU of the same number on
    other nodes. Needs at least three nodes.
    """
    of_index: dict[int, dict[int, float]] = {}
    for node, report in reports.items():
        for gpu in _gpus(report):
            if "to_next" in gpu:
                of_index.setdefault(gpu["index"], {})[node] = gpu["to_next"]
    for index, speeds in of_index.items():
        usual = median(speeds.values())
        slow = [node for node, speed in speeds.items() if len(speeds) > 2 and speed < SLOW * usual]
        for node in slow:
            what = (
                f"copies from its GPU {index} to the next GPU are slow: {speeds[node]:.0f} GB/s; "
                f"the median is {usual:.0f}"
            )
            fix = "run nvidia-smi nvlink -s and nvidia-smi topo -m there"
            yield Finding(what, fix, nodes=[node])


def _links(reports: NodeReports, verdict: Verdict) -> Iterator[Finding]:
    """Links that fail. The bad node of a link is the one with the larger share of failing links; if
    both are equal, the later one.
    """
    tried: Counter[int] = Counter()
    failed: Counter[int] = Counter()
    faults = []
    for node, report in reports.items():
        for link in report["links"]:
            if link["peer"] not in reports:
                continue  # a node that did not answer has an entry already
            tried.update((node, link["peer"]))
            if link["fault"]:
                failed.update((node, link["peer"]))
                faults.append((node, link))
    known_bad = verdict.bad_nodes
    named = set[int]()
    for node, link in faults:
        peer = link["peer"]
        # The first node is the master: it is accused last.
        bad = max((node, peer), key=lambda end: (end in known_bad, failed[end] / tried[end], end))
        if bad in named:
            continue
        named.add(bad)
        what, fix = FAULTS[link["fault"]]
        count = f"{failed[bad]} of {tried[bad]} links of {verdict.host(bad)} fail"
        what = what.format(peer=verdict.host(peer))
        seen = f"{verdict.host(node)} {what} ({link['why']}; {count})"
        yield Finding(seen, fix, nodes=[bad])


def _speeds(reports: NodeReports, verdict: Verdict) -> Iterator[Finding]:
    """The bandwidth of all nodes together, and nodes whose network is slow from one of their GPUs
    at least.

    Each GPU is compared with the GPU of the same number on the other nodes. It is slow if the
    median of its pairs is, since one slow node makes one pair of every other node slow.
    """
    speeds: dict[int, list[float]] = {}
    of_node: dict[tuple[int, int], list[float]] = {}
    for report in reports.values():
        measured = report.get("bandwidth", {})
        if "busbw" in measured:
            verdict.figures["all_reduce_busbw_gb_per_s"] = measured["busbw"]
        for *nodes, gpu, speed in measured.get("pairs", []):
            speeds.setdefault(gpu, []).append(speed)
            for node in nodes:
                of_node.setdefault((node, gpu), []).append(speed)
    if not speeds:
        return
    verdict.figures["pairs_median_gb_per_s"] = median(
        speed for of_gpu in speeds.values() for speed in of_gpu
    )
    for (node, gpu), values in of_node.items():
        usual = median(speeds[gpu])
        if len(values) > 1 and median(values) < SLOW * usual:
            of_which = f" from its GPU {gpu}" if len(speeds) > 1 else ""
            what = (
                f"its network is slow{of_which}: {median(values):.3g} GB/s with other nodes; "
                f"the median is {usual:.3g}"
            )
            fix = "run ethtool DEV or ibstat there: check link speed, errors and cable"
            yield Finding(what, fix, nodes=[node])


def _collectives(reports: NodeReports, verdict: Verdict) -> Iterator[Finding]:
    """Findings of the bandwidth test of all nodes: wrong sums and, if it did not end, the nodes
    that are behind the others.
    """
    measured = {
        node: report["bandwidth"] for node, report in reports.items() if report.get("bandwidth")
    }
    for node, test in measured.items():
        if test.get("correct") is False:
            fix = "exclude the node, whose memory or link corrupts data"
            yield Finding("an all_reduce returned a wrong sum there", fix, nodes=[node])
    cut = [node for node, test in measured.items() if not test.get("ended")]
    if not cut:
        return
    usual, _ = Counter(test["at"] for test in measured.values()).most_common(1)[0]
    behind = [node for node in cut if measured[node]["at"] != usual]
    first = measured[(behind or cut)[0]]
    error = first.get("error") or "no error"
    what = f"the bandwidth test of all nodes stopped after {first['at']} ({error})"
    fix = (
        "run NCCL_DEBUG=INFO python -m recipes.collectives on these nodes to find the fault; "
        "see also the other findings"
    )
    yield Finding(what, fix, nodes=behind)


def _facts(report: Report) -> dict[str, str]:
    """What the table shows of a node."""
    facts = report["facts"]
    gpus = _gpus(report)
    count = len(facts.get("gpus", []))
    return {
        "gpus": f"{sum(gpu['correct'] for gpu in gpus)}/{count}" if count else "-",
        "tflops": f"{median(gpu['tflops'] for gpu in gpus):.0f}" if gpus else "-",
        "torch": facts.get("torch", "-"),
        "network": facts.get("interface", "-"),
    }
