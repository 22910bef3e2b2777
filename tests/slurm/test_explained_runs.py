"""`doctor explain` for a folder of runs of real jobs: one section for each run, with the state of
its job.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.slurm import jobs
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ENDLESS, ONE_BY_ONE, PYTHON, read

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

RESUME = "to resume, start the run again with the same run_dir="


def explained(slurm: Cluster, repo: Path, *paths: str) -> dict[str, list[str]]:
    """What `doctor explain` says of each run, by the run's id."""
    sections: dict[str, list[str]] = {}
    run = ""
    for line in jobs.explain(slurm, repo, *paths).splitlines():
        if line.startswith("  "):
            sections[run].append(line.strip())
        else:
            run = line.removesuffix(":").rpartition("/")[2]
            sections[run] = []
    return sections


def test_each_run_is_explained_from_its_records_and_the_state_of_its_job(
    slurm: Cluster, repo: Path
) -> None:
    def submit(*words: str) -> str:
        return slurm.submit(
            *ONE_BY_ONE, "sbatch/mnist_1x1.sh", *ENDLESS, *words, cwd=repo, env=PYTHON
        )

    runs = repo / "runs" / "mnist"
    try:
        stopped = submit()
        running = submit()
        done = submit("max_steps=3")
        failed = submit("lr=1e20")
        waits = jobs.job_of(jobs.launch(slurm, repo, *ENDLESS, "extra=--hold").stdout)
        for job in (stopped, running):
            jobs.wait_for_training(slurm, job, runs / job)
        for job in (done, failed):
            slurm.wait_job(job, 150)
        slurm.run("scancel", "--signal=USR2", stopped, check=True)
        jobs.wait_requeued(slurm, stopped, repo / f"mnist-{stopped}.out", 30)

        sections = explained(slurm, repo, "runs")
        assert set(sections) == {stopped, running, done, failed, waits}
        step = read(runs / stopped / "status.json")["step"]
        saved = f"stopped by SIGUSR2, saved at step {step}"
        assert sections[stopped][0].startswith(
            f"{saved}; job {stopped} is pending (BeginTime), expected to start at 20"
        )
        assert len(sections[stopped]) == 1
        [line] = sections[running]
        assert line.startswith("it is running, at step ")
        assert line.endswith(f" ago; job {running} is running")
        assert sections[done] == ["status.json says done: nothing failed"]
        assert sections[failed][0].startswith("rank 0 on node")
        assert " failed first: the loss at step " in sections[failed][0]
        for other in (stopped, running, done):
            assert other not in "".join(sections[failed])
        release = f"scontrol release {waits} lets it start"
        expected = f"it has not begun: job {waits} is held (JobHeldUser): {release}"
        assert sections[waits] == [expected]
        status = read(runs / stopped / "status.json")
        assert status["kind"] == "stopped"
        assert status["next"] == "requeued"
        assert read(runs / failed / "status.json")["kind"] == "run-error"

        slurm.run("scontrol", "hold", stopped, check=True)
        slurm.run("scancel", running, check=True)
        slurm.wait_job(running)
        sections = explained(slurm, repo, f"runs/mnist/{stopped}", f"runs/mnist/{running}")
        held = f"job {stopped} is held (JobHeldAdmin: an administrator holds it)"
        release = f"scontrol release {stopped} lets it start"
        assert sections[stopped] == [f"{saved}; {held}: {release}"]
        assert sections[running][0].endswith(
            f"; job {running} is cancelled; the job was cancelled: {RESUME}"
        )
        assert read(runs / running / "status.json")["next"] == "cancelled"
        assert f"; the job was cancelled: {RESUME};" in (repo / f"mnist-{running}.out").read_text()

    finally:
        jobs.leave_no_job(slurm)


def test_messages_of_srun_in_the_batch_log_explain_a_killed_rank(
    slurm: Cluster, repo: Path, tmp_path: Path
) -> None:
    """A rank that is killed leaves no record, and no line in its own log."""
    try:
        log = tmp_path / "a log"
        run_dir = tmp_path / "run"
        job = jobs.sbatch(
            slurm,
            repo,
            log,
            *jobs.TWO_BY_ONE,
            "sbatch/mnist_2x8.sh",
            *ENDLESS,
            "timeout_s=20",
            f"run_dir={run_dir}",
        )
        jobs.wait_for_training(slurm, job, run_dir)
        rank, _ = jobs.ranks(slurm, job)[1]
        os.kill(rank.pid, signal.SIGKILL)
        slurm.wait_job(job, 90)
        explanation = jobs.explain(slurm, repo, run_dir)
        assert explanation.startswith("rank 1 on node2 exited without an error record"), explanation
        assert "killed (1 file)" in explanation, explanation
        assert f"{log}:" in explanation
        assert read(run_dir / "status.json")["kind"] == "killed"
        # for when Slurm no longer knows the job
        assert read(run_dir / "job.yaml")["log"] == str(log)
    finally:
        jobs.leave_no_job(slurm)
