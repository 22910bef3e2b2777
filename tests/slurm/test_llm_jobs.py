"""The recipe llm on two real nodes, with a divided model: requeued, cancelled and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import states
from tests.helpers import rows
from tests.slurm import jobs
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import TWO_BY_ONE

STEPS = 40
WORDS = (
    "sbatch/llm_1x8.sh",
    "device=cpu",
    "dataset=made",
    "strategy=fsdp",
    f"max_steps={STEPS}",
    "log_every_steps=1",
    "cpu_threads=1",
)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_that_is_requeued_and_cancelled_ends_with_the_bits_of_one_that_is_not(
    slurm: Cluster, repo: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    run_dir = tmp_path / "run"
    job = jobs.sbatch(slurm, repo, log, *TWO_BY_ONE, *WORDS, f"run_dir={run_dir}")
    jobs.wait_for_training(slurm, job, run_dir, step=5)
    slurm.run("scontrol", "requeue", job, check=True)
    jobs.wait_requeued(slurm, job, log, 60)
    jobs.start_again(slurm, job)
    jobs.wait_for_training(slurm, job, run_dir, attempt=1, step=15)
    slurm.run("scancel", job, check=True)
    jobs.ended(slurm, job, log)

    again = jobs.sbatch(slurm, repo, log, *TWO_BY_ONE, *WORDS, f"run_dir={run_dir}")
    assert jobs.ended(slurm, again, log)[0] == "COMPLETED", jobs.tail(log)
    steps = [row["step"] for row in rows(run_dir) if row["attempt"] == 2]
    assert 15 < steps[0] < STEPS

    whole = tmp_path / "whole"
    job = jobs.sbatch(slurm, repo, log, *TWO_BY_ONE, *WORDS, f"run_dir={whole}")
    assert jobs.ended(slurm, job, log)[0] == "COMPLETED", jobs.tail(log)
    assert len(rows(whole)) == STEPS
    assert states.at_step(run_dir, STEPS) == states.at_step(whole, STEPS)
