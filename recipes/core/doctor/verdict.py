"""The verdict on the nodes of an allocation, and how it is shown."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


MANY = 8  # names in a line


@dataclass
class Entry:
    """One thing that is wrong, of one node or several. leave_out: that it does without them."""

    nodes: list[int]
    what: str
    fix: str
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


def as_json(verdict: Verdict) -> dict[str, Any]:
    return {**asdict(verdict), "healthy": verdict.healthy}


def lines(verdict: Verdict) -> list[str]:
    """The verdict as a person reads it: the table, a line for each finding and its fix, and what to type."""
    found = _table(verdict.table)
    for entry in verdict.entries:
        found.append(f"{'BAD ' if entry.bad else 'note'}  {_names(entry.nodes, verdict)}: {entry.what}: {entry.fix}")
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
