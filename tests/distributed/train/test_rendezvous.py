"""How the ranks find rank 0."""

import itertools
import time
from pathlib import Path

import pytest

from recipes.core import files
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
