"""doctor=true: a job examines its nodes first, and is submitted again without the bad ones. On a real Slurm."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.core.run import judge
from tests.slurm import jobs
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

KEYS = ("recipe=mnist", "dataset=digits", "device=cpu", "max_steps=5", "nodes=1", "doctor=true")


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.copy_repository(tmp_path_factory.mktemp("clone"))


@pytest.fixture
def bad_node(slurm: Cluster) -> Iterator[str]:
    """A node whose shared memory is that of a container with the default size; Slurm takes it first."""
    assert slurm.on_node("node1", "mount", "-o", "remount,size=32m", "/dev/shm").returncode == 0
    yield "node1"
    assert slurm.on_node("node1", "mount", "-o", "remount,size=8g", "/dev/shm").returncode == 0
    jobs.leave_no_job(slurm)


def launched(slurm: Cluster, repo: Path, *words: str) -> tuple[str, Path]:
    done = slurm.run(sys.executable, "launch.py", *KEYS, *words, cwd=repo, env=jobs.PYTHON)
    found = re.search(r"^job (\d+): .*\n.*\nlog: tail -F (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return found[1], Path(found[2])


def again(log: Path) -> str:
    """The job that was submitted in the place of the one with this log."""
    found = re.search(
        r"^mnist: bad nodes: node1; submitted again without them, as job (\d+) \(1 more at most\)$",
        log.read_text(),
        re.MULTILINE,
    )
    assert found, jobs.tail(log)
    return found[1]


def test_a_job_is_submitted_again_without_the_bad_node(slurm: Cluster, repo: Path, bad_node: str) -> None:
    job, log = launched(slurm, repo)
    assert jobs.ended(slurm, job, log) == ("FAILED", "3:0"), jobs.tail(log)
    assert "BAD   node1: /dev/shm has 32 MB free" in log.read_text()
    assert "1 of 1 nodes bad: sbatch --exclude=node1 leaves them out" in log.read_text()
    second = again(log)
    second_log = log.with_name(log.name.replace(job, second))
    assert jobs.ended(slurm, second, second_log) == ("COMPLETED", "0:0"), jobs.tail(second_log)
    assert "healthy: 1 node" in second_log.read_text()
    assert jobs.read(repo / "runs/mnist" / second / "summary.json")["steps"] == 5
    assert slurm.jobs(second)[0]["ExcNodeList"] == "node1"
    assert slurm.jobs(second)[0]["NodeList"] == "node2"


def test_a_printed_script_is_submitted_again_too(slurm: Cluster, repo: Path, bad_node: str, tmp_path: Path) -> None:
    done = slurm.run(sys.executable, "launch.py", *KEYS, "launcher=print", cwd=repo, env=jobs.PYTHON)
    (tmp_path / "job.sh").write_text(done.stdout)
    log = tmp_path / "log"
    job = jobs.sbatch(
        slurm,
        repo,
        log,
        "--time=7",
        "--cpus-per-task=2",
        "--mem=100",
        "--gres=gpu:2",
        "--exclusive",
        "--nice=7",
        f"--error={tmp_path}/%j.err",
        str(tmp_path / "job.sh"),
        f"run_dir={tmp_path}/run",
    )
    assert jobs.ended(slurm, job, log) == ("FAILED", "3:0"), jobs.tail(log)
    second = again(tmp_path / f"{job}.err")
    assert jobs.ended(slurm, second, log) == ("COMPLETED", "0:0"), jobs.tail(log)
    # The second job's words stand behind the first's.
    assert log.read_text().index("1 of 1 nodes bad") < log.read_text().index("healthy: 1 node")
    assert jobs.read(tmp_path / "run/summary.json")["steps"] == 5
    typed = slurm.jobs(second)[0]
    assert (typed["TimeLimit"], typed["CPUs/Task"], typed["MinMemoryNode"]) == ("00:07:00", "2", "100M")
    assert re.fullmatch("gres[:/]gpu:2", typed["TresPerNode"])
    assert (typed.get("Exclusive", "NODE"), typed["OverSubscribe"], typed["Nice"]) == ("NODE", "NO", "7")
    assert (typed["StdOut"], typed["StdErr"]) == (str(log), f"{tmp_path}/{second}.err")


def test_without_enough_good_nodes_the_job_is_not_submitted_again(slurm: Cluster, repo: Path, bad_node: str) -> None:
    words = [word for word in KEYS if word != "nodes=1"]
    done = slurm.run(
        sys.executable, "launch.py", *words, "nodes=2", "wait=true", cwd=repo, env=jobs.PYTHON, timeout=200
    )
    assert done.returncode == 3, done.stdout + done.stderr
    job = done.stdout.split(":", 1)[0].removeprefix("job ")
    reported = re.search(
        r"^mnist: (bad nodes: node1; not submitted again \(Slurm refuses this job: .+\): submit it with exclude=node1)$",
        done.stdout,
        re.MULTILINE,
    )
    assert reported, done.stdout + done.stderr
    assert judge.refusal(repo / "runs/mnist" / job) == reported[1]
    assert "Traceback" not in done.stdout + done.stderr


def test_max_resubmits_limits_the_submissions(slurm: Cluster, repo: Path, bad_node: str) -> None:
    before = jobs.queue(slurm)
    job, log = launched(slurm, repo, "max_resubmits=0")
    assert jobs.ended(slurm, job, log) == ("FAILED", "3:0"), jobs.tail(log)
    assert "bad nodes: node1; not submitted again, since max_resubmits is used up" in log.read_text()
    assert jobs.queue(slurm) - before == {job}


def test_a_finding_that_exclusion_does_not_fix_submits_nothing(slurm: Cluster, repo: Path) -> None:
    before = jobs.queue(slurm)
    done = slurm.run(
        sys.executable,
        "launch.py",
        *KEYS,
        "wait=true",
        cwd=repo,
        env={**jobs.PYTHON, "NCCL_NET": ""},
        timeout=120,
    )
    jobs.leave_no_job(slurm)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "BAD   node1: NCCL_NET: " in done.stdout
    assert "mnist: not healthy, but excluding nodes would not fix it" in done.stdout
    assert len(jobs.queue(slurm) - before) == 1
