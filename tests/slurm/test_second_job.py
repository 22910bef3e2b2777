"""A second job on the run directory of a job that is running, suspended or pending. On a real
Slurm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ONE_BY_ONE

pytestmark = pytest.mark.timeout(400)

SCRIPT = "sbatch/mnist_1x1.sh"


@dataclass(frozen=True)
class First:
    """A job that trains without end, and whose run directory other jobs ask for."""

    slurm: Cluster
    repo: Path
    job: str
    run_dir: Path
    log: Path


@pytest.fixture
def first(slurm: Cluster, repo: Path, tmp_path: Path) -> Iterator[First]:
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    job = jobs.sbatch(slurm, repo, log, *ONE_BY_ONE, SCRIPT, *jobs.ENDLESS, f"run_dir={run_dir}")
    try:
        jobs.wait_for_training(slurm, job, run_dir, step=1)
        yield First(slurm, repo, job, run_dir, log)
    finally:
        jobs.leave_no_job(slurm)


def test_a_second_job_is_refused_until_the_first_ends(
    slurm: Cluster, repo: Path, first: First, tmp_path: Path
) -> None:
    used = (
        f"run_dir={first.run_dir}: job {first.job} (running) uses it: cancel it (scancel "
        f"{first.job})"
    )
    log = tmp_path / "second"
    job = jobs.sbatch(slurm, repo, log, *ONE_BY_ONE, SCRIPT, f"run_dir={first.run_dir}")
    assert jobs.ended(slurm, job, log) == ("FAILED", "2:0"), jobs.tail(log)
    assert jobs.log_lines(log)[-1].startswith(f"mnist: {used}"), jobs.tail(log)
    slurm.run("scontrol", "suspend", first.job, check=True)
    job = jobs.sbatch(slurm, repo, log, *ONE_BY_ONE, SCRIPT, f"run_dir={first.run_dir}")
    assert jobs.ended(slurm, job, log) == ("FAILED", "2:0"), jobs.tail(log)
    assert f"job {first.job} (suspended) uses it" in jobs.log_lines(log)[-1]
    slurm.run("scontrol", "resume", first.job, check=True)
    step = helpers.rows(first.run_dir)[-1]["step"]
    helpers.wait_until(
        lambda: helpers.rows(first.run_dir)[-1]["step"] > step, 60, "the first job to continue"
    )
