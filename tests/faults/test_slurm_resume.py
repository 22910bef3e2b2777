"""A job that is stopped within an epoch and requeued ends with the state of an unbroken run, to the last bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from recipes.core.train import checkpoint
from tests import helpers, states
from tests.slurm import jobs
from tests.slurm.cluster import Cluster

KEYS = (
    "device=cpu",
    "cpu_threads=1",
    "log_every_steps=1",
    "max_steps=130",
    "pace_s=0",
    "global_batch_size=4",
    "samples=400",
)


@pytest.mark.fault(17)
def test_a_signalled_job_is_requeued_and_ends_with_the_state_of_an_unbroken_run(
    slurm: Cluster, repo: Path, tmp_path: Path
) -> None:
    """Rank 1 waits within step 14 until both ranks have the signal, so that they stop in the middle of an epoch."""
    log, script, run_dir, marks = tmp_path / "log", repo / "sbatch/broken_2x8.sh", tmp_path / "run", tmp_path / "marks"
    script.write_text((repo / "sbatch/mnist_2x8.sh").read_text().replace("mnist", "broken"))
    marks.mkdir()
    fault = {"FAULT": "wait", "FAULT_AT": "14", "FAULT_ATTEMPT": "0", "FAULT_DIR": str(marks)}
    words = (*KEYS, f"run_dir={run_dir}", "stop_before_s=0")
    job = jobs.sbatch(slurm, repo, log, *jobs.TWO_BY_ONE, str(script), *words, env=fault)
    helpers.wait_until((marks / "reached.1").exists, helpers.START_S, "step 14")
    slurm.run("scancel", "--signal=USR2", job, check=True)
    local = ("launch.py", "recipe=broken", "launcher=local", "ranks_per_node=2", *KEYS, f"run_dir={tmp_path}/whole")
    ended = helpers.run_fork([sys.executable, *local], cwd=repo)
    assert ended.status == 0, ended.out
    signalled = "SIGUSR2: saves at the next step"
    helpers.wait_until(lambda: log.read_text().count(signalled) == 2, 60, "Slurm's signal")
    (marks / "go").touch()
    jobs.wait_requeued(slurm, job, log, 30)
    status = helpers.read(run_dir, "status")
    assert (status["state"], status["reason"], status["step"]) == ("preempted", "SIGUSR2", 14), status
    jobs.start_again(slurm, job)
    assert jobs.ended(slurm, job, log, 300) == ("COMPLETED", "0:0"), jobs.tail(log)
    summary = helpers.read(run_dir, "summary")
    assert (summary["restarts"], summary["resumed_from_step"], summary["steps"]) == (1, 14, 130)
    losses = [[row["loss"] for row in helpers.rows(folder)] for folder in (tmp_path / "whole", run_dir)]
    assert losses[1] == losses[0]
    newest = [checkpoint.candidates(folder / "checkpoints")[0] for folder in (tmp_path / "whole", run_dir)]
    assert len({states.digest(checkpoint.read(path)) for path in newest}) == 1
