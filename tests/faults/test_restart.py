"""Ranks that fail are started again in their allocation, on a real Slurm: without bad nodes, and
without a requeue.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.core.run import ledger, record
from recipes.core.run.attempt import Attempt
from recipes.core.slurm import client
from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster, ClusterOptions, running_cluster
from tests.slurm.jobs import read

pytestmark = pytest.mark.timeout(560)

KEYS = ("device=cpu", "cpus_per_rank=1", "cpu_threads=1")
TIMEOUT_S = 5.0
STEPS = 80
TRAINING = (
    "recipe=toy",
    "nodes=2",
    "checkpoint_every_steps=20",
    "log_every_steps=1",
    f"timeout_s={TIMEOUT_S:g}",
    f"max_steps={STEPS}",
    "epochs=99",
)
EPOCH = 16  # steps
SAMPLES = 2048
FOUND_S = 150.0  # from the fault to the next attempt, on a machine that runs other tests too
# From the fault to the first step, and without the examination and the time limits of ranks and
# nodes that do not answer, if a start of the ranks takes START_S: it is longer on a machine that
# runs other tests too.
FIRST_STEP_S = 30.0
UNEXAMINED_S = 15.0
START_S = 6.0
# Slurm repeats the end of a job on a node every two minutes until the node answers
RELEASE_S = 150.0


@pytest.fixture(scope="module")
def five() -> Iterator[Cluster]:
    """Slurm notices the loss of a node only after five minutes, as at most sites."""
    with running_cluster(ClusterOptions(nodes=5, gpus=0, slurmd_timeout_s=300)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone whose toy takes 0.1 s a step, so that a test can hit one, and notes its samples."""
    repo = jobs.copy_repository(tmp_path_factory.mktemp("restart") / "clone")
    toy = repo / "recipes/toy.py"
    step = "        optimizer.step()\n"
    text = toy.read_text()
    assert step in text
    more = f"""{step}        __import__('time').sleep(0.1)
        with open(run.dir / f"used-{{run.attempt.number}}-{{world.rank}}", "a") as file:
            print(run.step, *map(int, step.part.indices), file=file)
"""
    toy.write_text(text.replace(step, more))
    return repo


@pytest.fixture(scope="module")
def whole(five: Cluster, repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has broken."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    job, log = start(five, repo, *TRAINING, f"run_dir={run_dir}")
    check_end(five, job, log, run_dir, attempt=0)
    return run_dir


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
    check_done(run_dir, attempt)
    if attempt:
        parts = ledger.recovery(Attempt(run_dir, attempt))
        assert tuple(parts) == ledger.PARTS  # all are known
        assert f"first step {sum(parts.values()):.1f} s after the failure" in log.read_text()


def check_done(run_dir: Path, attempt: int) -> None:
    """The run is done, has used each sample once per epoch, and its ledger adds up."""
    status = read(run_dir / "status.json")
    assert status["state"] == "done"
    assert status["attempt"] == attempt
    assert status["step"] == STEPS
    used = samples(run_dir)
    for first in range(0, STEPS, EPOCH):
        of_epoch = [sample for step in range(first, first + EPOCH) for sample in used[step]]
        assert sorted(of_epoch) == [*range(SAMPLES)]
    of_run = ledger.of_run(record.read(run_dir))
    assert sum(of_run["seconds"].values()) == pytest.approx(of_run["wall_s"], abs=0.01)
    opened = read(run_dir / "attempts/0000/opened.json")
    passed = status["updated"] - opened["submitted"]
    assert of_run["wall_s"] == pytest.approx(passed, rel=0.02)


def samples(run_dir: Path) -> dict[int, list[int]]:
    """The samples of each step over all ranks, of the last attempt that has done it."""
    used: dict[int, tuple[int, list[int]]] = {}
    for path in run_dir.glob("used-*"):
        attempt = int(path.name.split("-")[1])
        for line in path.read_text().splitlines():
            step, *indices = map(int, line.split())
            newest, before = used.get(step, (attempt, []))
            if newest == attempt:
                used[step] = (attempt, sorted(before + indices))
            elif newest < attempt:
                used[step] = (attempt, sorted(indices))
    return {step: indices for step, (_, indices) in used.items()}


def check_same_end(run_dir: Path, whole: Path) -> None:
    """The end state and the losses are those of the unbroken run, to the bit."""
    states: list[Any] = []
    for folder in (run_dir, whole):
        content = torch.load(folder / f"checkpoints/step-{STEPS:08d}.pt", weights_only=True)
        states.append((content["model"], content["optimizer"]["state"]))
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert losses(run_dir) == losses(whole)
    assert samples(run_dir) == samples(whole)


def losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in helpers.rows(run_dir)}


def check_time(run_dir: Path, attempt: int, fault_at: float, is_of_node: bool = False) -> None:
    """The first step of the attempt came soon after the fault."""
    first = Attempt(run_dir, 0).facts()
    row = next(row for row in helpers.rows(run_dir) if row["attempt"] == attempt)
    parts = ledger.recovery(Attempt(run_dir, attempt))
    slowness = max(START_S, first["begun_at"] - first["time"], parts["start"]) / START_S
    took = row["time"] - fault_at
    print(f"slowness {slowness:.1f}, first step after {took:.1f} s: {ledger.text(parts)}")
    assert took <= slowness * FIRST_STEP_S
    limits_s = TIMEOUT_S + client.ANSWER_OF_NODE_S if is_of_node else 0.0
    assert took - parts["examination"] - limits_s <= slowness * UNEXAMINED_S
    assert sum(parts.values()) == pytest.approx(took, abs=2.0)


def kill_rank(slurm: Cluster, job: str) -> float:
    """Kills rank 1. Returns when."""
    rank, _ = jobs.ranks(slurm, job, "toy")[1]
    os.kill(rank.pid, signal.SIGKILL)
    return time.time()


def wait_for_step(run_dir: Path, attempt: int, step: int) -> None:
    helpers.wait_until(
        lambda: any(
            row["attempt"] == attempt and row["step"] >= step for row in helpers.rows(run_dir)
        ),
        FOUND_S,
        f"step {step} of attempt {attempt}",
    )


@pytest.mark.long
@pytest.mark.fault(41)
def test_a_killed_rank_is_replaced_in_the_same_job(
    five: Cluster, repo: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job, log = start(five, repo, *TRAINING, "restarts=2", f"run_dir={run_dir}")
    jobs.wait_for_training(five, job, run_dir, step=30)
    killed_at = kill_rank(five, job)
    check_end(five, job, log, run_dir, attempt=1)
    check_same_end(run_dir, whole)
    check_time(run_dir, 1, killed_at)


def replace_node(
    five: Cluster, repo: Path, run_dir: Path, whole: Path, fault: str, *words: str
) -> tuple[str, float]:
    """Loses node2 in a job with a node in reserve, and checks that the job ends as the unbroken
    run. Returns its log, and when the node was lost.
    """
    job, log = start(five, repo, *words, "spare=1", "restarts=2", f"run_dir={run_dir}")
    try:
        jobs.wait_for_training(five, job, run_dir, step=30)
        fault_at = time.time()
        getattr(five, fault)("node2")
        wait_for_step(run_dir, 1, STEPS)
        five.restart_slurmd("node2", RELEASE_S)
        check_end(five, job, log, run_dir, attempt=1)
    finally:
        jobs.leave_no_job(five)
    check_same_end(run_dir, whole)
    text = log.read_text()
    assert "started again without node2 (restart 1 of at most 2)" in text
    assert read(run_dir / "attempts/0001/opened.json")["hosts"] == ["node1", "node3"]
    return text, fault_at


@pytest.mark.long
@pytest.mark.fault(42, 47)
@pytest.mark.parametrize("fault", ["kill_node", "cut_network"])
def test_a_spare_node_replaces_one_that_has_died_or_lost_its_network(
    five: Cluster, repo: Path, whole: Path, tmp_path: Path, fault: str
) -> None:
    """The other ranks time out, and srun waits for the node."""
    run_dir = tmp_path / "run"
    _, fault_at = replace_node(five, repo, run_dir, whole, fault, *TRAINING)
    check_time(run_dir, 1, fault_at, is_of_node=True)


@pytest.mark.long
@pytest.mark.fault(47)
def test_a_node_without_network_is_noticed_long_before_timeout_s(
    five: Cluster, repo: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = [word for word in TRAINING if not word.startswith("timeout_s=")]
    log, _ = replace_node(five, repo, run_dir, whole, "cut_network", *words)
    assert "Timed out waiting for node2: it has died or lost its network" in log
    print(ledger.text(ledger.recovery(Attempt(run_dir, 1))))


@pytest.mark.long
@pytest.mark.fault(48)
def test_a_second_dead_node_leaves_fewer_ranks(
    five: Cluster, repo: Path, whole: Path, tmp_path: Path
) -> None:
    """No node is left in reserve. With one rank, the samples of each step are those of two."""
    run_dir = tmp_path / "run"
    words = ("spare=1", "min_nodes=1", "restarts=3", f"run_dir={run_dir}")
    job, log = start(five, repo, *TRAINING, *words)
    try:
        jobs.wait_for_training(five, job, run_dir, step=30)
        five.kill_node("node2")
        wait_for_step(run_dir, 1, 45)
        five.kill_node("node3")
        wait_for_step(run_dir, 2, STEPS)
        for node in ("node2", "node3"):
            five.restart_slurmd(node, RELEASE_S)
        check_end(five, job, log, run_dir, attempt=2)
        assert samples(run_dir) == samples(whole)
        assert read(run_dir / "attempts/0002/opened.json")["hosts"] == ["node1"]
    finally:
        jobs.leave_no_job(five)


@pytest.mark.long
@pytest.mark.fault(49)
def test_a_second_dead_node_requeues_a_job_that_needs_its_size(
    five: Cluster, repo: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = ("spare=1", "restarts=3", f"run_dir={run_dir}")
    job, log = start(five, repo, *TRAINING, *words)
    try:
        jobs.wait_for_training(five, job, run_dir, step=30)
        five.kill_node("node2")
        wait_for_step(run_dir, 1, 45)
        five.kill_node("node3")
        line = "too few nodes are left without node2,node3; requeued without them"
        helpers.wait_until(lambda: line in log.read_text(), FOUND_S, line)
        for node in ("node2", "node3"):  # else the job completes only after SlurmdTimeout
            five.restart_slurmd(node, RELEASE_S)
        jobs.wait_requeued(five, job, log, 120)
        jobs.start_again(five, job)
        assert jobs.ended(five, job, log) == ("COMPLETED", "0:0"), log.read_text()
        check_done(run_dir, attempt=2)
        check_same_end(run_dir, whole)
        assert read(run_dir / "attempts/0002/opened.json")["hosts"] == ["node1", "node4"]
    finally:
        jobs.leave_no_job(five)


@pytest.mark.long
@pytest.mark.fault(50)
def test_the_death_of_the_first_node_requeues_the_job(
    five: Cluster, repo: Path, whole: Path, tmp_path: Path
) -> None:
    """The batch script dies with it, so a rank of the second node requeues the job. The time until
    then is in the ledger.
    """
    run_dir = tmp_path / "run"
    words = ("spare=1", "restarts=3", f"run_dir={run_dir}")
    job, log = start(five, repo, *TRAINING, *words)
    try:
        jobs.wait_for_training(five, job, run_dir, step=30)
        died_at = time.time()
        five.kill_node("node1")
        helpers.wait_until(
            lambda: five.jobs(job)[0]["JobState"] != "RUNNING", FOUND_S, "the requeue"
        )
        # as Slurm does after SlurmdTimeout; until then, the job completes
        five.run("scontrol", "update", "NodeName=node1", "State=down", "Reason=dead", check=True)
        jobs.wait_requeued(five, job, log, 120)
        queued_at = time.time()
        jobs.start_again(five, job)
        assert jobs.ended(five, job, log) == ("COMPLETED", "0:0"), log.read_text()
        check_done(run_dir, attempt=1)
        check_same_end(run_dir, whole)
        assert read(run_dir / "attempts/0001/opened.json")["hosts"] == ["node2", "node3"]
        hang_s = ledger.of_run(record.read(run_dir))["seconds"]["hang"]
        assert hang_s == pytest.approx(queued_at - died_at, abs=3.0)
    finally:
        five.run("scontrol", "update", "NodeName=node1", "State=resume")
        five.restart_slurmd("node1", RELEASE_S)
        jobs.leave_no_job(five)


@pytest.mark.long
@pytest.mark.fault(51)
def test_ranks_of_a_node_that_was_cut_off_change_nothing_when_they_return(
    five: Cluster, repo: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job, log = start(five, repo, *TRAINING, "spare=1", "restarts=2", f"run_dir={run_dir}")
    try:
        jobs.wait_for_training(five, job, run_dir, step=30)
        old = five.processes(job_id=job, node="node2", command="-m recipes.")
        for process in old:  # with their watchdogs, which would end them
            os.kill(process.pid, signal.SIGSTOP)
        five.cut_network("node2")
        wait_for_step(run_dir, 1, 50)
        five.join_network("node2")
        for process in old:
            os.kill(process.pid, signal.SIGCONT)
        helpers.wait_for_the_end_of([process.pid for process in old], 60)
        check_end(five, job, log, run_dir, attempt=1)
        check_same_end(run_dir, whole)
    finally:
        five.join_network("node2")
        jobs.leave_no_job(five)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.fault(52)
def test_ten_failures_at_random_moments_lose_only_the_steps_since_a_checkpoint(
    five: Cluster, repo: Path, whole: Path, tmp_path: Path
) -> None:
    """Without the doctor, whose examination other tests have."""
    clone = jobs.copy_repository(tmp_path / "clone")
    (clone / "recipes/toy.py").write_text((repo / "recipes/toy.py").read_text())
    file = clone / "recipes/core/launch/restart.py"
    call = 'examination.examine_nodes(spec, attempt.run_dir / "doctor", rest, environ)'
    assert call in file.read_text()
    file.write_text(file.read_text().replace(call, "{}"))
    run_dir = tmp_path / "run"
    words = [word for word in TRAINING if not word.startswith("checkpoint_every_steps")]
    words += ["checkpoint_every_steps=5", "restarts=10", f"run_dir={run_dir}"]
    job, log = start(five, clone, *words)
    moments = random.Random(0)
    began = 0
    expected = dict.fromkeys(("repeated", "down"), 0.0)
    jobs.wait_for_training(five, job, run_dir, step=1)
    for attempt in range(10):
        wait_for_step(run_dir, attempt, began + 6)  # a restart must gain a checkpoint
        time.sleep(moments.uniform(0.0, 0.2))
        killed_at = kill_rank(five, job)
        wait_for_step(run_dir, attempt + 1, 1)
        rows = helpers.rows(run_dir)
        began = read(run_dir / f"attempts/{attempt + 1:04d}/begun.json")["step"]
        assert began >= max(row["step"] for row in rows if row["attempt"] == attempt) - 6
        kept = next(r for r in rows if (r["attempt"], r["step"]) == (attempt, began))
        first = next(row for row in rows if row["attempt"] == attempt + 1)
        expected["repeated"] += killed_at - kept["time"]
        expected["down"] += first["time"] - killed_at
        check_time(run_dir, attempt + 1, killed_at)
    check_end(five, job, log, run_dir, attempt=10)
    check_same_end(run_dir, whole)
    of_run = ledger.of_run(record.read(run_dir))
    seconds = of_run["seconds"]
    down_s = seconds["hang"] + seconds["restart"]
    within = 0.02 * of_run["wall_s"]
    assert seconds["repeated"] == pytest.approx(expected["repeated"], abs=within)
    assert down_s == pytest.approx(expected["down"], abs=within)
    assert seconds["training"] >= 0.1 * STEPS


@pytest.mark.long
@pytest.mark.fault(43)
def test_a_program_that_always_fails_ends_after_two_restarts(
    five: Cluster, repo: Path, tmp_path: Path
) -> None:
    program = tmp_path / "fails.py"
    program.write_text("raise SystemExit(7)\n")
    job, log = start(five, repo, f"script={program}", "restarts=9", f"run_dir={tmp_path}/run")
    assert jobs.ended(five, job, log) == ("FAILED", "7:0"), log.read_text()
    text = log.read_text()
    assert "(restart 2 of at most 9)" in text
    assert "restart 3" not in text
    assert "not started again, since 2 restarts in a row made no progress" in text


@pytest.mark.long
@pytest.mark.fault(35)
def test_bad_input_is_not_started_again(five: Cluster, repo: Path, tmp_path: Path) -> None:
    helpers.write_mnist(tmp_path / "MNIST/raw")
    (tmp_path / "MNIST/raw/train-labels-idx1-ubyte").write_bytes(b"damaged")
    words = ("restarts=2", f"data_dir={tmp_path}", f"run_dir={tmp_path}/run")
    job, log = start(five, repo, "recipe=mnist", *words)
    assert jobs.ended(five, job, log) == ("FAILED", "2:0"), log.read_text()
    assert not (tmp_path / "run/attempts/0001").exists()
