"""A sweep is one job array: a limited number of runs at a time, a run directory each, a table of
their results. On a real Slurm.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(400)

KEYS = ("recipe=toy", "device=cpu", "cpu_threads=1", "cpus_per_rank=1", "max_steps=3")


@pytest.mark.long
def test_a_sweep_with_one_failing_run(slurm: Cluster, repo: Path) -> None:
    rates = ("0.01", "1e20", "0.02")
    words = (f"sweep.lr={','.join(rates)}", "parallel=2", "wait=true")
    done = slurm.run(
        sys.executable, "launch.py", *KEYS, *words, cwd=repo, env=jobs.PYTHON, timeout=300
    )
    assert done.returncode == 1, done.stdout + done.stderr
    job = jobs.job_of(done.stdout)
    assert job, done.stdout
    for number, rate in enumerate(rates):
        assert f"{job}_{number}: lr={rate}" in done.stdout.splitlines()
        run_dir = repo / "runs/toy" / f"{job}_{number}"
        status = jobs.read(run_dir / "status.json")
        assert status["state"] == ("failed" if rate == "1e20" else "done"), status
        config = yaml.safe_load((run_dir / "config.yaml").read_text())
        assert float(config["lr"]) == float(rate)
        assert (run_dir / "job.sh").exists()
        assert f"lr={rate}" in jobs.read(run_dir / "job.yaml")["arguments"]
    for record in slurm.jobs(job):
        assert record["ArrayTaskThrottle"] == "2"
    [offer] = re.findall(r"^table of the runs: python (.*)", done.stdout, re.MULTILINE)
    table = helpers.run(["sh", "-c", f"{sys.executable} {offer}"], cwd=repo).lines
    assert table[0].split() == [
        "run",
        "state",
        "step",
        "lr",
        "val_loss",
        "loss",
        "samples_per_second",
        "note",
    ]
    assert [line.split()[1] for line in table[1:]] == ["done", "failed", "done"]
    assert "the loss at step " in table[2]
