"""launch.py runs, cancel and resume with jobs of a real Slurm, in each of its states."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(400)
KEYS = (
    "recipe=mnist",
    "dataset=fake",
    "device=cpu",
    "cpu_threads=1",
    "epochs=100000",
    "log_every_steps=5",
)


def launch(slurm: Cluster, repo: Path, *words: str) -> str:
    done = slurm.run(sys.executable, "launch.py", *words, cwd=repo, env=jobs.PYTHON, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def state(slurm: Cluster, repo: Path, job: str) -> dict[str, Any]:
    (line,) = launch(slurm, repo, "runs", job, "--json").splitlines()
    return json.loads(line)


def wait_for(slurm: Cluster, repo: Path, job: str, wanted: str, step: int = 0) -> dict[str, Any]:
    def reached() -> dict[str, Any] | None:
        row = state(slurm, repo, job)
        return row if row["state"] == wanted and row["step"] >= step else None

    return helpers.wait_until(reached, 120, f"job {job} is {wanted}")


def submit(slurm: Cluster, repo: Path, *words: str) -> str:
    return jobs.job_of(launch(slurm, repo, *KEYS, "cpus_per_rank=1", *words))


def resume(slurm: Cluster, repo: Path, job: str, *words: str) -> str:
    """Resumes a run; the number of the new job, whose log is named, and which the run's commands
    find at once.
    """
    told, log = launch(slurm, repo, "resume", job, *words).splitlines()
    again = told.rpartition(" ")[2]
    assert log == f"log: tail -F {slurm.jobs(again)[0]['StdOut']}"
    assert state(slurm, repo, job)["job"] == again
    return again


@pytest.mark.long
def test_a_run_is_followed_cancelled_and_resumed_by_its_job(slurm: Cluster, repo: Path) -> None:
    held = submit(slurm, repo, "extra=--hold")
    assert wait_for(slurm, repo, held, "held")["note"] == "JobHeldUser"
    job = submit(slurm, repo, "checkpoint_every_steps=5")
    running = wait_for(slurm, repo, job, "running", 10)
    assert running["nodes"][:4] == "node"
    assert running["starts"] == 1
    assert running["steps"] > 1000
    assert f"job {job} was cancelled" in launch(slurm, repo, "cancel", job)
    stopped = wait_for(slurm, repo, job, "cancelled", 10)
    assert "is not running: cancelled" in launch(slurm, repo, "cancel", job)
    again = resume(slurm, repo, job, "log_every_steps=1")
    resumed = wait_for(slurm, repo, job, "running", stopped["step"] + 1)
    assert resumed["starts"] == 2
    assert resumed["job"] == again
    run_dir = repo / "runs/mnist" / job
    log = (run_dir / "logs/rank0.log").read_text()
    assert f"resumed from {run_dir}/checkpoints" in log
    slurm.run("scontrol", "requeue", again, check=True)
    wait_for(slurm, repo, job, "requeued", stopped["step"])
    for run in (held, job):
        launch(slurm, repo, "cancel", run)
    assert wait_for(slurm, repo, held, "cancelled")["note"] == "before it began"


@pytest.mark.long
def test_only_the_elements_of_a_sweep_that_were_killed_are_resumed(
    slurm: Cluster, repo: Path
) -> None:
    words = ("sweep.seed=1,2,3", "max_steps=40", "checkpoint_every_steps=5")
    job = submit(slurm, repo, *words)
    wait_for(slurm, repo, f"{job}_1", "running", 1)
    slurm.run("scancel", f"{job}_1", check=True)
    wait_for(slurm, repo, f"{job}_0", "done")
    wait_for(slurm, repo, f"{job}_2", "done")
    wait_for(slurm, repo, f"{job}_1", "cancelled")
    lines = launch(slurm, repo, "resume", job).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"runs/mnist/{job}_1", "log"]
    assert wait_for(slurm, repo, f"{job}_1", "done")["step"] == 40


@pytest.mark.long
def test_a_ready_script_is_resumed_with_its_options(slurm: Cluster, repo: Path) -> None:
    options = ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=0", "--mem=1500M")
    log = repo / "ready.out"
    words = [word for word in KEYS if not word.startswith("recipe=")]
    job = jobs.sbatch(slurm, repo, log, *options, "sbatch/mnist_2x8.sh", *words)
    helpers.wait_until((repo / f"runs/mnist/{job}/status.json").exists, 120, "the run begins")
    wait_for(slurm, repo, job, "running", 5)
    launch(slurm, repo, "cancel", job)
    wait_for(slurm, repo, job, "cancelled")
    again = resume(slurm, repo, job)
    wait_for(slurm, repo, job, "running")
    (record,) = slurm.jobs(again)
    assert record["NumNodes"] == "1"
    assert record["MinMemoryNode"] == "1500M"
    launch(slurm, repo, "cancel", job)
