"""A second job on the run directory of a job that is running, suspended or pending. On a real Slurm."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(400)

ONE = ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1")
SCRIPT = "sbatch/mnist_1x1.sh"


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.copy_repository(tmp_path_factory.mktemp("clone"))


def test_a_second_job_is_refused_while_the_first_is_alive_unless_it_takes_over(
    slurm: Cluster, repo: Path, tmp_path: Path
) -> None:
    run_dir, log, second, third = tmp_path / "run", tmp_path / "log", tmp_path / "second", tmp_path / "third"
    first = jobs.sbatch(slurm, repo, log, *ONE, SCRIPT, *jobs.ENDLESS, f"run_dir={run_dir}")

    def submit(*words: str) -> tuple[int, str]:
        argv = [sys.executable, "launch.py", "recipe=mnist", f"run_dir={run_dir}", *words]
        done = slurm.run(*argv, cwd=repo, env=jobs.PYTHON)
        return done.returncode, done.stdout + done.stderr

    try:
        jobs.wait_for_training(slurm, first, run_dir)
        used = f"run_dir={run_dir}: job {first} (running) uses it: cancel it (scancel {first})"
        job = jobs.sbatch(slurm, repo, second, *ONE, SCRIPT, f"run_dir={run_dir}")
        assert jobs.ended(slurm, job, second) == ("FAILED", "2:0"), jobs.tail(second)
        assert jobs.said(second)[-1].startswith(f"mnist: {used}"), jobs.tail(second)
        status, out = submit()
        assert (status, used in out) == (2, True), out
        assert submit("check")[0] == 2
        slurm.run("scontrol", "suspend", first, check=True)
        assert f"job {first} (suspended) uses it" in submit()[1]
        slurm.run("scontrol", "resume", first, check=True)
        status, out = submit(f"dependency=afterany:{first}")  # it starts when the first has ended
        assert status == 0, out
        later = re.search(r"^job (\d+): ", out, re.MULTILINE)
        assert later, out
        assert f"job {later[1]}, which is pending, will use it" in submit()[1]
        slurm.run("scancel", later[1], check=True)
        step = helpers.rows(run_dir)[-1]["step"]
        helpers.wait_until(lambda: helpers.rows(run_dir)[-1]["step"] > step, 60, "the first job to continue")

        job = jobs.sbatch(slurm, repo, third, *ONE, SCRIPT, f"run_dir={run_dir}", "takeover=true")
        assert jobs.ended(slurm, first, log) == ("FAILED", "3:0"), jobs.tail(log)
        assert jobs.said(log)[-1] == f"mnist: {run_dir} was taken over by {job}.0; this job is not queued again"
        jobs.wait_for_training(slurm, job, run_dir, attempt=1, step=1)
        slurm.run("scontrol", "requeuehold", job, check=True)
        helpers.wait_until(lambda: slurm.jobs(job)[0]["JobState"] == "PENDING", 60, "the requeue")
        assert f"job {job}, which was requeued and is pending, will use it" in submit()[1]
        slurm.run("scontrol", "release", job, check=True)
        jobs.start_again(slurm, job)
        jobs.wait_for_training(slurm, job, run_dir, attempt=2, step=1)  # the same job, though it has takeover=true
        slurm.run("scancel", job, check=True)
        slurm.wait_job(job, 60)
        status, out = submit("dependency=singleton", "device=cpu")
        assert status == 0, out
    finally:
        jobs.leave_no_job(slurm)


@pytest.mark.long
def test_elements_of_an_array_on_one_run_directory_are_refused(slurm: Cluster, repo: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keys = ("device=cpu", "dataset=fake", "max_steps=2", "takeover=true")
    job = jobs.sbatch(slurm, repo, Path(f"{tmp_path}/log-%a"), "--array=0-1", *ONE, SCRIPT, *keys, f"run_dir={run_dir}")
    try:
        for number in range(2):
            jobs.ended(slurm, f"{job}_{number}", tmp_path / f"log-{number}", 120)
        logs = [(tmp_path / f"log-{number}").read_text() for number in range(2)]
        refused = [f"element {job}_{1 - number} of this job array uses it" in log for number, log in enumerate(logs)]
        assert sorted(refused) == [False, True], logs
    finally:
        jobs.leave_no_job(slurm)
