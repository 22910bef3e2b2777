"""Rank 0 is found where a topology plugin orders the tasks: Slurm 26.05 gives rank 0 to another
node than the first of its list.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.core.run import attempt as attempts
from tests.slurm import jobs
from tests.slurm.cluster import Cluster, ClusterOptions, running_cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

TREE = """SwitchName=s1 Nodes=node[3-4]
SwitchName=s2 Nodes=node[1-2]
SwitchName=top Switches=s[1-2]
"""


@pytest.fixture(scope="module")
def by_topology() -> Iterator[Cluster]:
    options = ClusterOptions(nodes=4, topology=TREE, extra_conf="TopologyPlugin=topology/tree")
    with running_cluster(options) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "size",
    [("--nodes=4", "--ntasks-per-node=1"), ("--nodes=4", "--ntasks=6")],
    ids=["equal nodes", "uneven nodes"],
)
def test_all_ranks_meet_at_rank_0(
    by_topology: Cluster, tmp_path: Path, size: tuple[str, ...]
) -> None:
    repo = jobs.copy_repository(tmp_path / "clone")
    log = tmp_path / "log"
    run_dir = tmp_path / "run"
    words = (*size, "--gpus-per-node=0", "--cpus-per-task=1", "sbatch/mnist_2x8.sh")
    keys = ("device=cpu", "dataset=digits", "max_steps=3", "timeout_s=60", f"run_dir={run_dir}")
    job = jobs.sbatch(by_topology, repo, log, *words, *keys)
    assert jobs.ended(by_topology, job, log) == ("COMPLETED", "0:0"), jobs.tail(log)
    hosts = attempts.facts(run_dir)["hosts"]
    assert set(hosts) == {f"node{n}" for n in range(1, 5)}
