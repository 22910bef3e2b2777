"""The nodes that the doctor found bad. New jobs leave them out for a day. They are in
runs/bad-nodes.json, by cluster.
"""

import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path

from recipes.core import files
from recipes.core.errors import MachineError, shown
from recipes.core.launch.jobs import Job
from recipes.core.slurm import client

FILE = "runs/bad-nodes.json"  # in the repository
KEPT_S = 24 * 3600.0


def known(root: Path, cluster: str) -> dict[str, float]:
    """The time, as time.time(), at which each node of a cluster was found bad, without those of
    more than a day ago.
    """
    times = files.read_json(root / FILE).get(cluster)
    if not isinstance(times, dict):
        return {}
    now = time.time()
    return {
        node: at for node, at in times.items() if isinstance(at, float) and now - KEPT_S < at <= now
    }


def remember(root: Path, cluster: str, nodes: Iterable[str]) -> None:
    """Adds ``nodes``. Raises OSError."""
    _write(root, cluster, {**known(root, cluster), **dict.fromkeys(nodes, time.time())})


def _write(root: Path, cluster: str, nodes: dict[str, float]) -> None:
    files.write_json(root / FILE, {**files.read_json(root / FILE), cluster: nodes})


def forget(root: Path, node: str) -> None:
    """Removes ``node``; ``all`` removes every node of this cluster. Raises MachineError."""
    cluster = client.cluster_name()
    times = {name: at for name, at in known(root, cluster).items() if node not in ("all", name)}
    try:
        _write(root, cluster, times)
    except OSError as error:
        raise MachineError(
            f"forget={node}: cannot write {root / FILE} ({error.strerror}): "
            "check its permissions and the free space"
        ) from None


def exclude(job: Job) -> Job:
    """``job`` without the bad nodes, except those that forget= names. Prints a line that names
    them.
    """
    times = known(job.root, client.cluster_name()) if (job.root / FILE).exists() else {}
    # Slurm refuses to exclude a node that has left the cluster
    nodes = client.nodes() if times else set()
    bad = sorted(node for node in nodes & times.keys() if job.keys.forget not in ("all", node))
    if not bad:
        return job
    excluded = ",".join(filter(None, (job.directives.get("exclude"), *bad)))
    named = ", ".join(
        f"{shown(node)} ({time.strftime('%a %H:%M', time.localtime(times[node]))})" for node in bad
    )
    print(
        f"nodes:  the job excludes {named}, which the doctor found bad; "
        "give forget=NODE to use one again",
        flush=True,
    )
    return dataclasses.replace(job, directives={**job.directives, "exclude": excluded})
