"""How the ranks find rank 0."""

import itertools
import time
from pathlib import Path

import pytest
import torch

from recipes.core import files
from recipes.core.errors import MachineError
from recipes.core.place.ranks import RankInfo
from recipes.core.run import attempt as attempts
from recipes.core.run.watchdog import RunningClock
from recipes.core.train import rendezvous
from tests import helpers


def test_a_suspension_of_the_job_does_not_count_while_rank_0_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = helpers.attempt(tmp_path, step=None)
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.node")
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    monkeypatch.setenv(attempts.VARIABLE, str(attempt.folder))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(time, "monotonic", itertools.count(0.0, 1000.0).__next__)
    note = attempt.folder / "rank0-3.json"
    monkeypatch.setattr(time, "sleep", lambda s: files.write_json(note, {"host": "b"}))
    info = RankInfo(1, 0, 0, 2, 1, num_nodes=2, nodes=("a", "b"), master_addr="a")
    assert rendezvous._host_of_rank_0(info, 60.0, RunningClock()) == "b"


@pytest.mark.parametrize(
    ("rank", "node_rank", "environ", "master_addr", "expected"),
    [
        (0, 0, {}, "a", "a"),
        (1, 1, {}, "a", "a"),
        (0, 1, {}, "a", None),
        (0, 1, {}, "mine", "mine"),
        (0, 1, {"MASTER_ADDR": "a"}, "a", "a"),
        (0, 1, {"SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, "a", "a"),
    ],
)
def test_without_a_batch_script_rank_0_must_be_on_the_first_node(
    rank: int,
    node_rank: int,
    environ: dict[str, str],
    master_addr: str,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MASTER_ADDR", attempts.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node", **environ}.items():
        monkeypatch.setenv(name, value)
    nodes = ("a", "b")
    info = RankInfo(rank, 0, node_rank, 4, 2, num_nodes=2, nodes=nodes, master_addr=master_addr)
    if expected:
        assert rendezvous._host_of_rank_0(info, 60.0, RunningClock()) == expected
        return
    line = r"^b: has rank 0, but is not the first node .* -m plane=2, or set MASTER_ADDR=b$"
    with pytest.raises(MachineError, match=line):
        rendezvous._host_of_rank_0(info, 60.0, RunningClock())


def test_eight_of_the_ranks_that_do_not_arrive_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", itertools.count(0.0, 0.4).__next__)
    store = torch.distributed.HashStore()
    info = RankInfo(1, 0, 0, 10, 1, num_nodes=1, nodes=(), master_addr="a")
    late = "rank 0, 2, 3, 4, 5, 6, 7, 8 and 1 more of 10 did not connect within 1 s"
    with pytest.raises(MachineError, match=late):
        rendezvous._exchange_hosts(store, info, 1.0, RunningClock())
