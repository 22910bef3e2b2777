"""Faults of jobs on a real Slurm: how each job must end, and within which time.

Time limits, preemption, requeues, dead nodes and daemons. Jobs run the recipe broken.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipes.core.run import attempt as attempts
from recipes.core.run import directory
from tests import helpers
from tests.faults import conftest
from tests.helpers import rows, wait_until
from tests.slurm import jobs
from tests.slurm.cluster import Cluster, ClusterOptions, running_cluster
from tests.slurm.jobs import ONE_BY_TWO, PYTHON, TWO_BY_ONE, log_lines

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

KEYS = (
    "device=cpu",
    "epochs=1000000",
    "pace_s=0.02",
    "timeout_s=120",
    *os.environ.get("FAULT_KEYS", "").split(),
)
SCRIPT = "sbatch/broken_2x8.sh"
SILENT = "sbatch/silent.sh"
# for a job whose rank has failed to be over, on a busy machine; Slurm's own part is a few seconds
END_S = 45
ORPHAN_S = 15  # nothing of a job is left then


@dataclass(frozen=True)
class Job:
    slurm: Cluster
    id: str
    run_dir: Path
    log: Path

    def fields(self) -> dict[str, str]:
        return self.slurm.jobs(self.id)[0]

    def status(self) -> dict[str, Any]:
        return directory.read_status(self.run_dir) or {"state": "not begun"}

    def tail(self) -> str:
        return jobs.tail(self.log)


@pytest.fixture(scope="module")
def clone(repo: Path) -> Path:
    """The repository with two ready scripts of the recipe broken. SILENT has no --signal."""
    script = (repo / "sbatch/mnist_2x8.sh").read_text().replace("mnist", "broken")
    (repo / SCRIPT).write_text(script)
    (repo / SILENT).write_text(re.sub(r"^#SBATCH --signal.*\n", "", script, flags=re.MULTILINE))
    return repo


@pytest.fixture(params=["cgroup", "linuxproc"])
def slurm(request: pytest.FixtureRequest, slurm: Cluster) -> Iterator[Cluster]:
    """Clusters with both ways to track processes. With cgroup, Slurm's signals reach only the first
    process of each task.
    """
    cluster = slurm if request.param == "cgroup" else request.getfixturevalue("linuxproc")
    yield cluster
    jobs.leave_no_job(cluster)


@pytest.fixture(scope="module")
def mortal() -> Iterator[Cluster]:
    """A cluster that finds out within seconds that a node or its daemon is dead."""
    options = ClusterOptions(slurmd_timeout_s=6, extra_conf="MessageTimeout=6")
    with running_cluster(options) as cluster:
        yield cluster


# --- helpers
# ----------------------------------------------------------------------------------------------


def submit(
    slurm: Cluster,
    clone: Path,
    folder: Path,
    *words: str,
    options: tuple[str, ...] = TWO_BY_ONE,
    script: str = SCRIPT,
    **environ: str,
) -> Job:
    """A job of the recipe broken, its run directory and log in ``folder``. environ: variables,
    $FAULT among them.
    """
    run_dir = folder / "run"
    log = folder / "log"
    job = jobs.sbatch(
        slurm, clone, log, *options, script, *KEYS, f"run_dir={run_dir}", *words, env=environ
    )
    return Job(slurm, job, run_dir, log)


def trains(job: Job, attempt: int = 0, step: int = 3) -> None:
    jobs.wait_for_training(job.slurm, job.id, job.run_dir, attempt, step)


def ended(job: Job, timeout_s: float = END_S) -> tuple[str, str]:
    """State and exit status, waited for; nothing of the job is left."""
    result = jobs.ended(job.slurm, job.id, job.log, timeout_s)
    wait_until(lambda: not job.slurm.processes(job_id=job.id), ORPHAN_S, "the end of all processes")
    return result


def wait_requeued(job: Job, timeout_s: float, restarts: int = 1) -> None:
    jobs.wait_requeued(job.slurm, job.id, job.log, timeout_s, restarts)


def resumes(job: Job, step: int, attempt: int = 1) -> None:
    """The requeued job starts, and its first step is the one after ``step``."""
    jobs.start_again(job.slurm, job.id)
    trains(job, attempt, step + 3)
    assert conftest.steps(job.run_dir, attempt)[0] == step + 1


def saved_at(job: Job, reason: str, attempt: int = 0) -> int:
    """The step at which the run was saved, as its status says, and its newest checkpoint, which is
    whole.
    """
    status = job.status()
    assert status["state"] == "preempted", status
    assert status["reason"] == reason, status
    assert status["attempt"] == attempt, status
    assert newest(job.run_dir) == status["step"]
    return int(status["step"])


def newest(run_dir: Path) -> int:
    return int(conftest.newest(run_dir).stem.partition("-")[2])


def last_row(run_dir: Path) -> int:
    return int(rows(run_dir)[-1]["step"])


# --- Slurm stops the job
# ---------------------------------------------------------------------------------------------


@pytest.mark.fault(17)
def test_before_the_time_limit_a_job_saves_and_is_requeued(
    slurm: Cluster, clone: Path, tmp_path: Path
) -> None:
    """The script has no --signal: the ranks know the end of their job."""
    job = submit(slurm, clone, tmp_path, options=(*TWO_BY_ONE, "--time=1"), script=SILENT)
    slurm.wait_running(job.id)
    start = time.mktime(time.strptime(job.fields()["StartTime"], "%Y-%m-%dT%H:%M:%S"))
    wait_requeued(job, 90)
    step = saved_at(job, "the time limit")
    line = f"broken: saved at step {step}; requeued (restart 1 of at most 20)"
    assert line in job.log.read_text()
    # a quarter of the minute ahead of its end, at most
    assert 30 < job.status()["updated"] - start < 60
    slurm.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=10", check=True)
    resumes(job, step)


@pytest.mark.fault(39)
def test_sigusr1_to_the_batch_shell_alone_saves_and_requeues(
    slurm: Cluster, clone: Path, tmp_path: Path
) -> None:
    """Both are conventions of sites: `--signal=USR1@60` and `--signal=B:USR1@60`."""
    job = submit(slurm, clone, tmp_path)
    for attempt, options in enumerate((["--batch", "--signal=USR1"], ["--signal=USR1"])):
        trains(job, attempt)
        slurm.run("scancel", *options, job.id, check=True)
        wait_requeued(job, 20, restarts=attempt + 1)
        step = saved_at(job, "SIGUSR1", attempt)
        resumes(job, step, attempt + 1)


@pytest.mark.fault(18)
def test_a_preempted_job_saves_immediately_and_resumes(
    slurm: Cluster, clone: Path, tmp_path: Path
) -> None:
    """Slurm sends SIGCONT and SIGTERM at once, and kills after KillWait."""
    job = submit(slurm, clone, tmp_path, options=(*TWO_BY_ONE, "--exclusive"))
    trains(job)
    words = ("--partition=high", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=sleep 1")
    high = slurm.submit(*words)
    wait_requeued(job, slurm.options.kill_wait_s + 15)
    step = saved_at(job, "SIGTERM")
    assert slurm.wait_job(high) == "COMPLETED"
    assert job.fields()["Restarts"] == "1"  # by Slurm or by the job itself, not by both
    resumes(job, step)


@pytest.mark.fault(19)
def test_a_cancelled_job_saves_in_kill_wait_and_stays_cancelled(
    slurm: Cluster, clone: Path, tmp_path: Path
) -> None:
    job = submit(slurm, clone, tmp_path)
    trains(job)
    slurm.run("scancel", job.id, check=True)
    wait_until(
        lambda: not slurm.processes(job_id=job.id),
        slurm.options.kill_wait_s + 10,
        "the end of all processes",
    )
    saved_at(job, "SIGTERM")
    slurm.wait_idle()
    fields = job.fields()
    assert fields["JobState"] == "CANCELLED"
    assert fields["Restarts"] == "0"


@pytest.mark.fault(26)
def test_only_the_stopped_task_of_an_array_is_requeued(
    slurm: Cluster, clone: Path, tmp_path: Path
) -> None:
    options = (
        "--array=0-1",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--gpus-per-node=0",
        "--cpus-per-task=1",
    )
    array = slurm.submit(f"--output={tmp_path}/%a", *options, SCRIPT, *KEYS, cwd=clone, env=PYTHON)
    task = []
    for number in (0, 1):
        name = f"{array}_{number}"
        run_dir = clone / f"runs/broken/{name}"
        task.append(Job(slurm, name, run_dir, tmp_path / str(number)))
    for each in task:
        trains(each)
    slurm.run("scancel", "--signal=USR2", task[1].id, check=True)
    wait_requeued(task[1], 20)
    step = saved_at(task[1], "SIGUSR2")
    before = last_row(task[0].run_dir)
    resumes(task[1], step)
    fields = task[0].fields()
    assert fields["JobState"] == "RUNNING"
    assert fields["Restarts"] == "0"
    assert task[0].status()["attempt"] == 0
    assert last_row(task[0].run_dir) > before


@pytest.mark.fault(4)
def test_under_pmix_a_failing_rank_is_a_failure_not_a_preemption(
    clone: Path, tmp_path: Path
) -> None:
    """Slurm's PMIx plugin sends SIGTERM to the peers of a failing task. On one node, since its
    servers' files would collide here.
    """
    libraries = list(Path("/usr/lib").glob("*/libpmix.so"))
    helpers.need("" if libraries else "no libpmix.so: apt-get install libpmix-dev")
    with running_cluster(ClusterOptions(nodes=1, extra_conf="MpiDefault=pmix")) as cluster:
        job = submit(cluster, clone, tmp_path, options=ONE_BY_TWO, FAULT="fail", FAULT_AT="20")
        assert ended(job) == ("FAILED", "1:0"), job.tail()
        status = job.status()
        assert status["state"] == "failed", status
        assert status["kind"] == "error", status
        assert status["first_failing_rank"] == 1, status
        assert job.fields()["Restarts"] == "0"


@pytest.mark.fault(6)
@pytest.mark.parametrize("slurm", ["cgroup"], indirect=True)
@pytest.mark.parametrize("size", [TWO_BY_ONE, ONE_BY_TWO], ids=["two nodes", "one node"])
def test_a_rank_that_exceeds_the_memory_of_its_job_is_named(
    slurm: Cluster, clone: Path, tmp_path: Path, size: tuple[str, ...]
) -> None:
    """With two ranks on a node, the sizes of both are shown: the killed one need not be the one
    that used the most.
    """
    job = submit(
        slurm, clone, tmp_path, options=(*size, "--mem=1500"), FAULT="exceed", FAULT_AT="8"
    )
    assert ended(job)[0] == "FAILED", job.tail()
    status = job.status()
    assert status["kind"] == "out-of-memory", status
    assert status["first_failing_rank"] == 1, status
    assert status["exit_status"] == 137, status
    host = "node2" if size == TWO_BY_ONE else "node1"
    reason = (
        f"rank 1 on {host} failed first: was killed since its limit of 1572.9 MB was used up; "
        "peak memory: rank 1 "
    )
    assert status["reason"].startswith(reason)
    assert ("rank 0" in status["reason"]) == (size == ONE_BY_TWO)
    assert log_lines(job.log)[-1].startswith(f"broken: failed: {reason}")


# --- a job must not be requeued without end
# ------------------------------------------------------------------------------


@pytest.mark.fault(22)
def test_an_attempt_without_progress_is_not_requeued(
    slurm: Cluster, clone: Path, tmp_path: Path
) -> None:
    """A job that is preempted during each start would otherwise be requeued up to the limit."""
    fault = {
        "FAULT": "start_slowly",
        "FAULT_AT": "start",
        "FAULT_RANK": "all",
        "FAULT_ATTEMPT": "1",
    }
    job = submit(slurm, clone, tmp_path, **fault, FAULT_DIR=str(tmp_path))
    trains(job)
    slurm.run("scancel", "--signal=USR2", job.id, check=True)
    wait_requeued(job, 20)
    step = saved_at(job, "SIGUSR2")
    jobs.start_again(slurm, job.id)
    for rank in (0, 1):
        wait_until((tmp_path / f"reached.{rank}").exists, helpers.START_S, "the second attempt")
    slurm.run("scancel", "--signal=USR2", job.id, check=True)
    assert ended(job) == ("FAILED", "75:0"), job.tail()
    assert saved_at(job, "SIGUSR2", attempt=1) == step
    assert log_lines(job.log)[-1].startswith(
        f"broken: saved at step {step}; not requeued, since its last start completed no step"
    )
    assert job.fields()["Restarts"] == "1"


@pytest.mark.fault(25)
def test_without_scontrol_the_run_saves_and_reports_it(
    slurm: Cluster, clone: Path, tmp_path: Path
) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho no controller today >&2\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    job = submit(slurm, clone, tmp_path, PATH=f"{tmp_path}:{PYTHON['PATH']}")
    trains(job)
    slurm.run("scancel", "--signal=USR2", job.id, check=True)
    assert ended(job) == ("FAILED", "75:0"), job.tail()
    step = saved_at(job, "SIGUSR2")
    why = "Slurm's controller does not answer: no controller today"
    assert log_lines(job.log)[-1].startswith(f"broken: saved at step {step}; not requeued ({why}")
    assert job.fields()["Restarts"] == "0"


# --- a node or its daemon dies
# ----------------------------------------------------------------------------------------


@pytest.fixture
def restarted(mortal: Cluster) -> Iterator[Cluster]:
    yield mortal
    mortal.run("scancel", "--user=root")
    for node in mortal.nodes:
        mortal.restart_slurmd(node.name)


@pytest.mark.fault(20)
def test_a_job_whose_node_dies_is_requeued_and_resumes(
    restarted: Cluster, clone: Path, tmp_path: Path
) -> None:
    node = "node1"  # with the batch script and rank 0
    job = submit(restarted, clone, tmp_path, "checkpoint_every_steps=10")
    trains(job, step=12)
    restarted.kill_node(node)
    # where srun is gone, the other node's step tries for half a minute to tell it of its end
    wait_requeued(job, 90)
    wait_until(
        lambda: not restarted.processes(job_id=job.id),
        restarted.options.kill_wait_s + 10,
        "the end of all processes",
    )
    step = newest(job.run_dir)
    assert step >= max(10, last_row(job.run_dir) - 10)  # an interval is lost at most
    restarted.restart_slurmd(node)
    resumes(job, step)


@pytest.mark.fault(21)
def test_an_attempt_that_outlives_its_requeue_cannot_write(
    restarted: Cluster, clone: Path, tmp_path: Path
) -> None:
    """Only the daemon dies. Slurm considers the node dead and starts the job on the other one,
    while the first ranks continue to train.
    """
    job = submit(restarted, clone, tmp_path, "checkpoint_every_steps=300", options=ONE_BY_TWO)
    trains(job)
    node = job.fields()["BatchHost"]
    old = [process.pid for process, _ in jobs.ranks(job.slurm, job.id, "broken").values()]
    assert len(old) == 2
    restarted.kill_slurmd(node)
    wait_requeued(job, 90)  # Slurm finds out by its pings, of which it makes several
    jobs.start_again(job.slurm, job.id)

    def taken_over() -> bool:
        outlived = all(helpers.alive(pid) for pid in old)
        has_begun = attempts.facts(job.run_dir)["attempt"] == 1
        assert outlived or has_begun, "the fault was not there: the first ranks are dead already"
        return has_begun

    wait_until(taken_over, helpers.START_S, "the second attempt")
    wait_until(lambda: job.status()["attempt"] == 1, helpers.START_S, "the second attempt's status")

    def fenced() -> bool:
        assert job.status()["attempt"] == 1
        return not any(helpers.alive(pid) for pid in old)

    wait_until(fenced, 25, "the end of the first attempt")  # it looks every 10 s
    # not in the job's log: the first srun has ended with the daemon
    log = (job.run_dir / "logs/rank0.log").read_text()
    assert re.search(r"a later attempt .*writes to this run directory", log)
    last = max(row["step"] for row in rows(job.run_dir))
    trains(job, attempt=1, step=last + 3)
    first = conftest.steps(job.run_dir, 1)[0]
    assert first > 1
    # What counts is the last row of a step, and from its first step on each of those is the second
    # attempt's.
    counts = {row["step"]: row["attempt"] for row in rows(job.run_dir)}
    assert {counts[step] for step in range(first, last + 3)} == {1}
    fields = job.fields()
    assert fields["JobState"] == "RUNNING"
    assert fields["Restarts"] == "1"
    assert fields["BatchHost"] != node
