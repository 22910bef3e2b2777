"""doctor=true: a job examines its nodes first, and is requeued without the bad ones. On a real
Slurm.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.core.run import record
from tests.slurm import jobs
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

KEYS = ("recipe=mnist", "dataset=digits", "device=cpu", "max_steps=5", "nodes=1", "doctor=true")


@pytest.fixture
def bad_node(slurm: Cluster, repo: Path) -> Iterator[str]:
    """A node whose shared memory is that of a container with the default size; Slurm takes it
    first.
    """
    assert slurm.on_node("node1", "mount", "-o", "remount,size=32m", "/dev/shm").returncode == 0
    yield "node1"
    (repo / "runs/bad-nodes.json").unlink(missing_ok=True)
    assert slurm.on_node("node1", "mount", "-o", "remount,size=8g", "/dev/shm").returncode == 0
    jobs.leave_no_job(slurm)


def launched(slurm: Cluster, repo: Path, *words: str) -> tuple[str, Path]:
    done = slurm.run(sys.executable, "launch.py", *KEYS, *words, cwd=repo, env=jobs.PYTHON)
    announced = re.search(r"^job (\d+): .*\n.*\nlog: tail -F (.*)$", done.stdout, re.MULTILINE)
    assert announced, done.stdout + done.stderr
    return announced[1], Path(announced[2])


def printed(slurm: Cluster, repo: Path, folder: Path, *typed: str) -> tuple[str, Path]:
    """The job of a script of launcher=print, and its log. typed: options of sbatch."""
    done = slurm.run(
        sys.executable, "launch.py", *KEYS, "launcher=print", cwd=repo, env=jobs.PYTHON
    )
    (folder / "job.sh").write_text(done.stdout)
    words = (*typed, str(folder / "job.sh"), f"run_dir={folder}/run")
    return jobs.sbatch(slurm, repo, folder / "log", *words), folder / "log"


def without(bad: str, slurm: Cluster, job: str, log: Path) -> None:
    """Waits until the job has completed on the other node, after one requeue."""
    jobs.wait_requeued(slurm, job, log, 60)
    jobs.start_again(slurm, job)
    assert jobs.ended(slurm, job, log) == ("COMPLETED", "0:0"), jobs.tail(log)
    assert (
        f"mnist: bad nodes: {bad}; requeued without them (requeues left: 1)"
        in log.read_text().splitlines()
    )
    assert log.read_text().index("bad nodes: 1 of 1") < log.read_text().index("healthy: 1 node")
    assert slurm.jobs(job)[0]["ExcNodeList"] == bad
    assert slurm.jobs(job)[0]["NodeList"] == "node2"


def test_a_job_is_requeued_without_the_bad_node(slurm: Cluster, repo: Path, bad_node: str) -> None:
    """A job that depends on it waits for the second start."""
    job, log = launched(slurm, repo)
    second = slurm.submit("--output=/dev/null", f"--dependency=afterok:{job}", "--wrap=true")
    without(bad_node, slurm, job, log)
    assert re.search(r"^BAD   node1: /dev/shm has 33\.\d MB free", log.read_text(), re.MULTILINE)
    assert jobs.read(repo / "runs/mnist" / job / "summary.json")["steps"] == 5
    assert slurm.wait_job(second) == "COMPLETED"


def test_a_task_of_an_array_with_a_printed_script(
    slurm: Cluster, repo: Path, bad_node: str, tmp_path: Path
) -> None:
    job, log = printed(slurm, repo, tmp_path, "--array=3", "--time=7", "--mem=2000", "--exclusive")
    without(bad_node, slurm, f"{job}_3", log)
    assert jobs.read(tmp_path / "run/job.yaml")["job_id"] == f"{job}_3"


def test_without_enough_good_nodes_the_job_is_not_requeued(
    slurm: Cluster, repo: Path, bad_node: str
) -> None:
    words = [word for word in KEYS if word != "nodes=1"]
    done = slurm.run(
        sys.executable,
        "launch.py",
        *words,
        "nodes=2",
        "wait=true",
        cwd=repo,
        env=jobs.PYTHON,
        timeout=200,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    job = done.stdout.split(":", 1)[0].removeprefix("job ")
    reported = re.search(
        (
            r"^mnist: (bad nodes: node1; a requeue that excludes them failed \(.+\): submit the "
            r"job with exclude=node1 .+)$"
        ),
        done.stdout,
        re.MULTILINE,
    )
    assert reported, done.stdout + done.stderr
    assert record.read(repo / "runs/mnist" / job).refused == reported[1]
    assert "Traceback" not in done.stdout + done.stderr
