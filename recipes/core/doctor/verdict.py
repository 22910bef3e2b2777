"""What is wrong with the nodes of an allocation, the verdict on them, and how it is printed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from recipes.core.errors import shown
from recipes.core.run import table

LONGEST = 2000  # characters of a line
MANY = 8  # hosts that are named in a line
FIGURES = {
    "all_reduce_busbw_gb_per_s": "all_reduce busbw",
    "pairs_median_gb_per_s": "pairs of nodes, median",
}


@dataclass(frozen=True)
class Finding:
    """A fault of one node or several. what: one line that can stand after a host name. fix: what to
    type or do.

    bad: training cannot work, or not well. leave_out: leaving out the nodes fixes it; false if the
    job itself is at fault. With both, a job is requeued without these nodes. nodes: those that have
    it, by node_rank; none in the report of a node, and if no single node is to blame.
    """

    what: str
    fix: str
    bad: bool = True
    leave_out: bool = True
    nodes: Sequence[int] = ()


@dataclass
class Verdict:
    """entries: the findings, bad ones first. exclude: hosts of the nodes to leave out. hosts: of
    all nodes. table: a row per node.
    """

    entries: list[Finding] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    table: list[dict[str, str]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        return not any(entry.bad for entry in self.entries)

    @property
    def bad_nodes(self) -> set[int]:
        return {node for entry in self.entries if entry.bad for node in entry.nodes}

    def host(self, node: int) -> str:
        return self.hosts[node] or f"node {node}"


def lines(verdict: Verdict) -> list[str]:
    """The verdict as text: a table of all nodes (of many, only the bad ones), a line for each
    finding and its fix, and the option to type.
    """
    rows = verdict.table
    if len(rows) > 2 * MANY:
        rows = [rows[node] for node in sorted(verdict.bad_nodes)]
    text = table.aligned([list(verdict.table[0]), *(list(row.values()) for row in rows)])
    for entry in verdict.entries:
        mark = "BAD " if entry.bad else "note"
        text.append(f"{mark}  {_names(entry.nodes, verdict)}: {entry.what}: {entry.fix}")
    speeds = [f"{FIGURES[name]} {speed:.3g} GB/s" for name, speed in verdict.figures.items()]
    if speeds:
        text.append("; ".join(speeds))
    return [shown(line, LONGEST) for line in (*text, _summary(verdict))]


def _summary(verdict: Verdict) -> str:
    count = len(verdict.hosts)
    bad = len(verdict.bad_nodes)
    if verdict.healthy:
        return f"healthy: {count} node{'s' if count > 1 else ''}"
    text = (
        f"bad nodes: {bad} of {count}" if bad else "not healthy, and the cause is not a single node"
    )
    if verdict.exclude:
        text += f"; to exclude: sbatch --exclude={','.join(verdict.exclude)}"
    return text


def _names(nodes: Sequence[int], verdict: Verdict) -> str:
    if len(nodes) == len(verdict.hosts) and len(nodes) > 1:
        return f"all {len(nodes)} nodes"
    if not nodes:
        return "the nodes together"
    more = f" and {len(nodes) - MANY} more" if len(nodes) > MANY else ""
    return ", ".join(map(verdict.host, nodes[:MANY])) + more
