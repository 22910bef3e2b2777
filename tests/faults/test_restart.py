"""Ranks that fail are started again in their allocation, on a real Slurm: without bad nodes, and
without a requeue.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.core.run import ledger
from recipes.core.run.attempt import Attempt
from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster, ClusterOptions, running_cluster
from tests.slurm.jobs import read

pytestmark = pytest.mark.timeout(400)

KEYS = ("device=cpu", "cpus_per_rank=1", "cpu_threads=1")
TRAINING = ("recipe=toy", "checkpoint_every_steps=20", "timeout_s=20", "max_steps=80", "epochs=99")
FOUND_S = 120.0  # from the fault to the next attempt, on a machine that runs other tests too


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """Slurm notices the loss of a node only after five minutes, as at most sites."""
    with running_cluster(ClusterOptions(nodes=3, gpus=0, slurmd_timeout_s=300)) as cluster:
        yield cluster


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A clone whose toy takes 0.1 s a step, so that a test can hit one."""
    repo = jobs.copy_repository(tmp_path / "clone")
    toy = repo / "recipes/toy.py"
    step = "        optimizer.step()\n"
    text = toy.read_text()
    assert step in text
    toy.write_text(text.replace(step, f"{step}        __import__('time').sleep(0.1)\n"))
    return repo


def start(slurm: Cluster, repo: Path, *words: str) -> tuple[str, Path]:
    """A job of launch.py, and its log."""
    argv = (sys.executable, "launch.py", *KEYS, *words)
    done = slurm.run(*argv, cwd=repo, env=jobs.PYTHON, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("log: ")]
    return done.stdout.split("job ")[1].split(":")[0], Path(line.split()[-1])


def check_end(slurm: Cluster, job: str, log: Path, run_dir: Path, attempt: int) -> None:
    """The job has completed in this attempt, and was never requeued."""
    assert jobs.ended(slurm, job, log) == ("COMPLETED", "0:0"), log.read_text()
    assert slurm.jobs(job)[0]["Restarts"] == "0"
    status = read(run_dir / "status.json")
    assert status["state"] == "done"
    assert status["attempt"] == attempt
    assert status["step"] == 80
    if attempt:
        parts = ledger.recovery(Attempt(run_dir, attempt))
        assert tuple(parts) == ledger.PARTS  # all are known
        assert f"first step {sum(parts.values()):.1f} s after the failure" in log.read_text()


def broken_run(slurm: Cluster, repo: Path, run_dir: Path) -> float:
    """A run of which a rank is killed at a step after 30. Returns its last val_loss."""
    job, log = start(slurm, repo, *TRAINING, "nodes=2", "restarts=2", f"run_dir={run_dir}")
    jobs.wait_for_training(slurm, job, run_dir, step=30)
    rank, _ = jobs.ranks(slurm, job, "toy")[1]
    os.kill(rank.pid, signal.SIGKILL)
    check_end(slurm, job, log, run_dir, attempt=1)
    return read(run_dir / "summary.json")["val_loss"]


@pytest.mark.long
@pytest.mark.fault(41)
def test_a_killed_rank_is_replaced_in_the_same_job(
    three: Cluster, repo: Path, tmp_path: Path
) -> None:
    assert broken_run(three, repo, tmp_path / "run") < 1.0


@pytest.mark.long
@pytest.mark.fault(41)
def test_the_end_after_a_restart_is_that_of_an_unbroken_run(
    three: Cluster, repo: Path, tmp_path: Path
) -> None:
    job, log = start(three, repo, *TRAINING, "nodes=2", f"run_dir={tmp_path}/whole")
    check_end(three, job, log, tmp_path / "whole", attempt=0)
    whole = read(tmp_path / "whole/summary.json")["val_loss"]
    assert broken_run(three, repo, tmp_path / "broken") == whole


@pytest.mark.long
@pytest.mark.fault(42)
def test_a_spare_node_replaces_one_that_has_died(
    three: Cluster, repo: Path, tmp_path: Path
) -> None:
    """Its network first: the other ranks time out, and srun waits for it."""
    run_dir = tmp_path / "run"
    job, log = start(
        three, repo, *TRAINING, "nodes=2", "spare=1", "restarts=2", f"run_dir={run_dir}"
    )
    try:
        jobs.wait_for_training(three, job, run_dir, step=30)
        three.kill_node("node2")
        helpers.wait_until(
            lambda: read(run_dir / "status.json")["attempt"] == 1, FOUND_S, "the second attempt"
        )
        helpers.wait_until(lambda: read(run_dir / "status.json")["state"] == "done", 90, "the end")
        three.restart_slurmd("node2")
        check_end(three, job, log, run_dir, attempt=1)
        assert "started again without node2 (restart 1 of at most 2)" in log.read_text()
        assert read(run_dir / "attempts/0001/opened.json")["hosts"] == ["node1", "node3"]
    finally:
        three.restart_slurmd("node2")


@pytest.mark.long
@pytest.mark.fault(43)
def test_a_program_that_always_fails_ends_after_two_restarts(
    three: Cluster, repo: Path, tmp_path: Path
) -> None:
    program = tmp_path / "fails.py"
    program.write_text("raise SystemExit(7)\n")
    job, log = start(three, repo, f"script={program}", "restarts=9", f"run_dir={tmp_path}/run")
    assert jobs.ended(three, job, log) == ("FAILED", "7:0"), log.read_text()
    text = log.read_text()
    assert "(restart 2 of at most 9)" in text
    assert "restart 3" not in text
    assert "not started again, since 2 restarts gained no step" in text


@pytest.mark.long
@pytest.mark.fault(35)
def test_bad_input_is_not_started_again(three: Cluster, repo: Path, tmp_path: Path) -> None:
    helpers.write_mnist(tmp_path / "MNIST/raw")
    (tmp_path / "MNIST/raw/train-labels-idx1-ubyte").write_bytes(b"damaged")
    words = ("restarts=2", f"data_dir={tmp_path}", f"run_dir={tmp_path}/run")
    job, log = start(three, repo, "recipe=mnist", *words)
    assert jobs.ended(three, job, log) == ("FAILED", "2:0"), log.read_text()
    assert not (tmp_path / "run/attempts/0001").exists()
