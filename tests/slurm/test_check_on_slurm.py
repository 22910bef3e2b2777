"""``launch.py check`` asks the real controller, and leaves no job."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.slurm import jobs
from tests.slurm.cluster import Cluster

CHECK = (sys.executable, "launch.py", "check", "device=cpu", "cpus_per_rank=1")


def test_check_asks_the_controller_and_submits_no_job(slurm: Cluster, tmp_path: Path) -> None:
    repo = jobs.copy_repository(tmp_path / "clone")
    before = jobs.queue(slurm)
    done = slurm.run(
        *CHECK, "recipe=toy", "nodes=2", "ranks_per_node=2", cwd=repo, env=jobs.PYTHON, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "keys:   ok: toy, 4 ranks"
    assert lines[1].startswith("recipe: ok: 2,048 training samples, ")
    assert lines[2].startswith("disk:   ok: 5 checkpoints of ")
    assert any(line.startswith("slurm:  ok: to start at ") for line in lines)
    assert lines[-1] == "nothing was submitted"
    done = slurm.run(
        *CHECK, "recipe=doctor", "partition=nosuch", cwd=repo, env=jobs.PYTHON, timeout=120
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr.startswith("slurm:  failed: Slurm refuses this job: ")
    assert "nvalid partition" in done.stderr
    assert jobs.queue(slurm) == before
    assert list((repo / "runs").iterdir()) == []
