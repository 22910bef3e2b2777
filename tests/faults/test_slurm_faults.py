"""Faults of jobs on a real Slurm: how each job must end, and within which time.

Time limits, preemption, requeues, dead nodes and daemons, ranks that are killed, stop or leave. Jobs run the recipe broken.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipes.core.run import attempt as attempts
from recipes.core.run import directory
from recipes.core.train import checkpoint
from tests import helpers
from tests.faults.conftest import Recorded
from tests.helpers import rows, wait_until
from tests.slurm import jobs
from tests.slurm.cluster import Cluster, ClusterOptions, running_cluster
from tests.slurm.jobs import PYTHON, TWO_BY_ONE, log_lines, read

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

KEYS = ("device=cpu", "epochs=1000000", "pace_s=0.02", "timeout_s=120")
SCRIPT = "sbatch/broken_2x8.sh"
END_S = 45  # for a job whose rank has failed to be over, on a busy machine; Slurm's own part is a few seconds
ORPHAN_S = 15  # nothing of a job is left then


START_SLOWLY = '''
def start_slowly(run: Run) -> float:
    """From the second attempt on, as where a node is brought gigabytes of data first: it ends when it is told to stop."""
    from recipes.core.errors import Stopped

    reach(run) if run.attempt.number else None
    deadline = time.monotonic() + WAIT_S
    while run.attempt.number and not run.stop:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if run.attempt.number:
        raise Stopped(run.stop.reason)
    return 1.0


'''


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

    def log_text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def tail(self) -> str:
        return jobs.tail(self.log)


@pytest.fixture(scope="module")
def clone(repo: Path) -> Path:
    """The repository with a ready script of the recipe broken, as `make sbatch` would make it, and one fault more."""
    text = (repo / "sbatch/mnist_2x8.sh").read_text()
    (repo / SCRIPT).write_text(text.replace("mnist", "broken"))
    recipe = repo / "recipes/broken.py"
    before, main, after = recipe.read_text().partition("def main(")
    recipe.write_text(before + START_SLOWLY + main + after)
    return repo


@pytest.fixture(autouse=True)
def _no_job_left(slurm: Cluster) -> Iterator[None]:
    yield
    jobs.leave_no_job(slurm)


@pytest.fixture(scope="module")
def mortal() -> Iterator[Cluster]:
    """A cluster that finds out within seconds that a node or its daemon is dead."""
    options = ClusterOptions(slurmd_timeout_s=6, extra_conf="MessageTimeout=6")
    with running_cluster(options) as cluster:
        yield cluster


# --- helpers ----------------------------------------------------------------------------------------------


def submit(
    slurm: Cluster, clone: Path, folder: Path, *words: str, options: tuple[str, ...] = TWO_BY_ONE, script: str = SCRIPT,
    **environ: str,
) -> Job:  # fmt: skip
    """A job of the recipe broken, its run directory and log in ``folder``. environ: variables, $FAULT among them."""
    run_dir, log = folder / "run", folder / "log"
    job = jobs.sbatch(slurm, clone, log, *options, script, *KEYS, f"run_dir={run_dir}", *words, env=environ)
    return Job(slurm, job, run_dir, log)


def trains(job: Job, attempt: int = 0, step: int = 3) -> None:
    jobs.wait_for_training(job.slurm, job.id, job.run_dir, attempt, step)


def rank_pids(job: Job) -> dict[int, int]:
    return {rank: process.pid for rank, (process, _) in jobs.ranks(job.slurm, job.id, "broken").items()}


def ended(job: Job, timeout_s: float = END_S) -> tuple[str, str]:
    """State and exit status, waited for; nothing of the job is left."""
    found = jobs.ended(job.slurm, job.id, job.log, timeout_s)
    wait_until(lambda: not job.slurm.processes(job_id=job.id), ORPHAN_S, "the end of all processes")
    return found


def wait_requeued(job: Job, timeout_s: float, restarts: int = 1) -> None:
    jobs.wait_requeued(job.slurm, job.id, job.log, timeout_s, restarts)


def resumes(job: Job, step: int, attempt: int = 1) -> None:
    """The requeued job starts, and its first step is the one after ``step``."""
    jobs.start_again(job.slurm, job.id)
    trains(job, attempt, step + 3)
    assert next(row["step"] for row in rows(job.run_dir) if row["attempt"] == attempt) == step + 1


def saved_at(job: Job, reason: str, attempt: int = 0) -> int:
    """The step at which the run was saved, as its status says, and its newest checkpoint, which is whole."""
    status = job.status()
    assert (status["state"], status["reason"], status["attempt"]) == ("preempted", reason, attempt), status
    assert newest(job.run_dir) == status["step"]
    return int(status["step"])


def newest(run_dir: Path) -> int:
    path = checkpoint.candidates(run_dir / "checkpoints")[0]
    return int(checkpoint.read(path)["meta"]["step"])


def last_row(run_dir: Path) -> int:
    return int(rows(run_dir)[-1]["step"])


# --- Slurm stops the job ---------------------------------------------------------------------------------------------


@pytest.mark.fault(17)
def test_before_the_time_limit_jobs_save_and_are_requeued(slurm: Cluster, clone: Path, tmp_path: Path) -> None:
    """First a job that Slurm signals, up to 30 s early. Then a job without a signal."""
    silent = clone / "sbatch/silent.sh"
    lines = (clone / SCRIPT).read_text().splitlines(keepends=True)
    silent.write_text("".join(line for line in lines if not line.startswith("#SBATCH --signal")))
    minute = (*TWO_BY_ONE, "--time=1")
    with_signal, without = tmp_path / "with", tmp_path / "without"
    with_signal.mkdir()
    without.mkdir()

    def back_in_the_queue(job: Job, reason: str) -> None:
        wait_requeued(job, 90)
        step = saved_at(job, reason)
        assert f"broken: saved at step {step}; requeued (restart 1 of at most 20)" in job.log_text()

    def with_more_time(job: Job) -> None:
        slurm.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=10", check=True)
        resumes(job, job.status()["step"])
        jobs.leave_no_job(slurm)

    # One after the other: each has to import torch and train within its minute.
    job = submit(slurm, clone, with_signal, "stop_before_s=0", options=(*minute, "--signal=USR2@10"))
    back_in_the_queue(job, "SIGUSR2")
    with_more_time(job)
    other = submit(slurm, clone, without, options=minute, script="sbatch/silent.sh")
    slurm.wait_running(other.id)
    start = time.mktime(time.strptime(other.fields()["StartTime"], "%Y-%m-%dT%H:%M:%S"))
    back_in_the_queue(other, "the time limit")
    assert 30 < other.status()["updated"] - start < 60  # a quarter of the minute ahead of its end, at most
    with_more_time(other)


@pytest.mark.fault(39)
def test_sigusr1_saves_and_requeues_even_if_only_the_batch_shell_gets_it(
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
@pytest.mark.parametrize("grace_s", [0, 8])
def test_a_preempted_job_saves_immediately_and_resumes(
    slurm: Cluster, clone: Path, tmp_path: Path, grace_s: int
) -> None:
    """Slurm sends SIGCONT and SIGTERM at once, and kills after KillWait, or GraceTime and KillWait."""
    slurm.run("scontrol", "update", "PartitionName=main", f"GraceTime={grace_s}", check=True)
    try:
        job = submit(slurm, clone, tmp_path, options=(*TWO_BY_ONE, "--exclusive"))
        trains(job)
        words = ("--partition=high", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=sleep 1")
        high = slurm.submit(*words)
        wait_requeued(job, slurm.options.kill_wait_s + grace_s + 15)
        step = saved_at(job, "SIGTERM")
        assert slurm.wait_job(high) == "COMPLETED"
        assert job.fields()["Restarts"] == "1"  # by Slurm or by the job itself, not by both
        resumes(job, step)
    finally:
        slurm.run("scontrol", "update", "PartitionName=main", "GraceTime=0", check=True)


@pytest.mark.fault(19)
def test_a_job_requeued_by_an_operator_saves_and_resumes(slurm: Cluster, clone: Path, tmp_path: Path) -> None:
    job = submit(slurm, clone, tmp_path)
    trains(job)
    slurm.run("scontrol", "requeue", job.id, check=True)
    wait_requeued(job, slurm.options.kill_wait_s + 15)
    resumes(job, saved_at(job, "SIGTERM"))
    assert job.fields()["Restarts"] == "1"


@pytest.mark.fault(19)
def test_a_step_longer_than_kill_wait_loses_one_checkpoint_interval(
    slurm: Cluster, clone: Path, tmp_path: Path
) -> None:
    fault = {"FAULT": "hang", "FAULT_AT": "23", "FAULT_ATTEMPT": "0"}
    job = submit(slurm, clone, tmp_path, "checkpoint_every_steps=10", **fault)
    trains(job, step=22)
    slurm.run("scontrol", "requeue", job.id, check=True)
    wait_requeued(job, slurm.options.kill_wait_s + 15)
    status = job.status()
    if status["state"] != "running":  # the batch shell was left, and knows no more
        assert (status["state"], status["step"]) == ("failed", 20)
        assert status["reason"].startswith("all ranks exited without an error record (killed from outside")
    assert newest(job.run_dir) == 20
    resumes(job, 20)


@pytest.mark.fault(19)
def test_a_cancelled_job_is_saved_within_kill_wait_and_stays_cancelled(
    slurm: Cluster, clone: Path, tmp_path: Path
) -> None:
    job = submit(slurm, clone, tmp_path)
    trains(job)
    slurm.run("scancel", job.id, check=True)
    wait_until(lambda: not slurm.processes(job_id=job.id), slurm.options.kill_wait_s + 10, "the end of all processes")
    saved_at(job, "SIGTERM")
    slurm.wait_idle()
    found = job.fields()
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0")


@pytest.mark.fault(26)
def test_only_the_stopped_task_of_an_array_is_requeued(slurm: Cluster, clone: Path, tmp_path: Path) -> None:
    options = ("--array=0-1", "--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1")
    array = slurm.submit(f"--output={tmp_path}/%a", *options, SCRIPT, *KEYS, cwd=clone, env=PYTHON)
    task = [Job(slurm, f"{array}_{n}", clone / f"runs/broken/{array}_{n}", tmp_path / str(n)) for n in (0, 1)]
    for each in task:
        trains(each)
    slurm.run("scancel", "--signal=USR2", task[1].id, check=True)
    wait_requeued(task[1], 20)
    step = saved_at(task[1], "SIGUSR2")
    before = last_row(task[0].run_dir)
    resumes(task[1], step)
    assert (task[0].fields()["JobState"], task[0].fields()["Restarts"]) == ("RUNNING", "0")
    assert task[0].status()["attempt"] == 0
    assert last_row(task[0].run_dir) > before


@pytest.mark.fault(17, 19)
@pytest.mark.parametrize("stop", ["USR2", "requeue"])
def test_under_submitit_a_stop_saves_and_the_launcher_waits_for_the_resumed_run(
    slurm: Cluster, clone: Path, tmp_path: Path, stop: str
) -> None:
    """submitit's own handler would treat USR2 as its time limit, and ignore SIGTERM."""
    run_dir, log = tmp_path / "run", tmp_path / "said"
    words = [*KEYS, "max_steps=250", "nodes=2", "ranks_per_node=1", f"run_dir={run_dir}"]
    with jobs.launched(slurm, clone, log, *words, recipe="broken") as (process, job_id):
        job = Job(slurm, job_id, run_dir, log)
        trains(job)
        command = ("scancel", "--signal=USR2") if stop == "USR2" else ("scontrol", "requeue")
        slurm.run(*command, job.id, check=True)
        wait_requeued(job, slurm.options.kill_wait_s + 15)
        step = saved_at(job, "SIGUSR2" if stop == "USR2" else "SIGTERM")
        resumes(job, step)
        assert process.wait(60) == 0, job.tail()
    assert log_lines(log)[-1] == f"job {job.id}: completed; run directory {run_dir}"
    assert [row["step"] for row in rows(run_dir)] == list(range(1, 251))
    summary = read(run_dir / "summary.json")
    assert (summary["resumed_from_step"], summary["restarts"]) == (step, 1)
    text = "".join(path.read_text() for path in (clone / "runs/submitit").glob(f"{job.id}_*.out"))
    assert "broken: 2 ranks on 2 nodes, cpu, gloo, attempt 2" in text
    assert "timed out. Ran" not in text  # submitit's own handler of signals
    assert "submitit WARNING" not in text


# --- the job is not to go round for ever ------------------------------------------------------------------------------


@pytest.mark.fault(22)
def test_a_job_is_requeued_at_most_max_requeues_times(slurm: Cluster, clone: Path, tmp_path: Path) -> None:
    job = submit(slurm, clone, tmp_path, "max_requeues=1")
    for attempt in (0, 1):
        trains(job, attempt, 3)
        slurm.run("scancel", "--signal=USR2", job.id, check=True)
        if attempt == 0:
            wait_requeued(job, 20)
            jobs.start_again(job.slurm, job.id)
    assert ended(job) == ("FAILED", "75:0")
    step = saved_at(job, "SIGUSR2", attempt=1)
    assert log_lines(job.log)[-1].startswith(
        f"broken: saved at step {step}; not requeued, since max_requeues= is reached"
    )


@pytest.mark.fault(22)
def test_an_attempt_without_progress_is_not_requeued(slurm: Cluster, clone: Path, tmp_path: Path) -> None:
    """A job that is preempted during each start would otherwise be requeued up to the limit."""
    marks = str(tmp_path)
    job = submit(slurm, clone, tmp_path, FAULT="start_slowly", FAULT_AT="start", FAULT_RANK="all", FAULT_DIR=marks)
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


@pytest.mark.fault(22)
def test_a_job_that_fails_at_its_start_is_not_requeued(slurm: Cluster, clone: Path, tmp_path: Path) -> None:
    job = submit(slurm, clone, tmp_path, FAULT="fail", FAULT_AT="start", FAULT_RANK="all")
    assert ended(job, 60) == ("FAILED", "1:0"), job.tail()
    assert job.fields()["Restarts"] == "0"
    assert re.search(r"rank \d on node\d failed first: ValueError: broken on purpose", log_lines(job.log)[-1])


@pytest.mark.fault(25)
@pytest.mark.parametrize("stub", ["missing", "failing"])
def test_without_scontrol_the_run_saves_and_reports_it(slurm: Cluster, clone: Path, tmp_path: Path, stub: str) -> None:
    job = submit(slurm, clone, tmp_path, PATH=path_where_scontrol_is(stub, tmp_path / "bin"))
    trains(job)
    slurm.run("scancel", "--signal=USR2", job.id, check=True)
    assert ended(job) == ("FAILED", "75:0"), job.tail()
    step = saved_at(job, "SIGUSR2")
    why = (
        "scontrol is not on the PATH"
        if stub == "missing"
        else "Slurm's controller does not answer: no controller today"
    )
    last = f"broken: saved at step {step}; not requeued ({why}"
    assert log_lines(job.log)[-1].startswith(last)
    assert job.fields()["Restarts"] == "0"


def path_where_scontrol_is(stub: str, folder: Path) -> str:
    """A $PATH on which the first scontrol fails, or there is none."""
    folder.mkdir()
    if stub == "failing":
        (folder / "scontrol").write_text("#!/bin/sh\necho no controller today >&2\nexit 1\n")
        (folder / "scontrol").chmod(0o755)
        return f"{folder}:{PYTHON['PATH']}"
    places = [Path(place) for place in PYTHON["PATH"].split(":") if Path(place).is_dir()]
    for place in places:
        if not (place / "scontrol").exists():
            continue
        for program in place.iterdir():
            with contextlib.suppress(FileExistsError):
                if program.name != "scontrol":
                    (folder / program.name).symlink_to(program)
    path = ":".join([*(str(place) for place in places if not (place / "scontrol").exists()), str(folder)])
    assert shutil.which("srun", path=path)
    assert not shutil.which("scontrol", path=path)
    return path


# --- a node or its daemon dies ----------------------------------------------------------------------------------------


@pytest.fixture
def mended(mortal: Cluster) -> Iterator[Cluster]:
    yield mortal
    mortal.run("scancel", "--user=root")
    for node in mortal.nodes:
        mortal.restart_slurmd(node.name)


@pytest.mark.fault(20)
@pytest.mark.parametrize("node", ["node1", "node2"])  # with the batch script and rank 0, and the other
def test_a_job_whose_node_dies_is_requeued_and_resumes(mended: Cluster, clone: Path, tmp_path: Path, node: str) -> None:
    job = submit(mended, clone, tmp_path, "checkpoint_every_steps=10")
    trains(job, step=12)
    mended.kill_node(node)
    wait_requeued(job, 90)  # where srun is gone, the other node's step tries for half a minute to tell it of its end
    wait_until(lambda: not mended.processes(job_id=job.id), mended.options.kill_wait_s + 10, "the end of all processes")
    step = newest(job.run_dir)
    assert step >= max(10, last_row(job.run_dir) - 10)  # an interval is lost at most
    mended.restart_slurmd(node)
    resumes(job, step)


@pytest.mark.fault(21)
def test_an_attempt_that_outlives_its_requeue_cannot_write_to_the_run(
    mended: Cluster, clone: Path, tmp_path: Path
) -> None:
    """Only the daemon dies. Slurm considers the node dead and starts the job on the other one, while the first ranks continue to train."""
    options = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1")
    job = submit(mended, clone, tmp_path, "checkpoint_every_steps=300", options=options)
    trains(job)
    node = job.fields()["BatchHost"]
    old = rank_pids(job)
    assert len(old) == 2
    mended.kill_slurmd(node)
    wait_requeued(job, 90)  # Slurm finds out by its pings, of which it makes several
    jobs.start_again(job.slurm, job.id)

    def taken_over() -> bool:
        outlived = all(helpers.alive(pid) for pid in old.values())
        number = attempts.facts(job.run_dir)["attempt"]
        assert outlived or number == 1, "the fault was not there: the first attempt's ranks are dead already"
        return bool(number == 1)

    wait_until(taken_over, helpers.START_S, "the second attempt")
    wait_until(lambda: job.status()["attempt"] == 1, helpers.START_S, "the second attempt's status")

    def fenced() -> bool:
        assert job.status()["attempt"] == 1
        return not any(helpers.alive(pid) for pid in old.values())

    wait_until(fenced, 25, "the end of the first attempt")  # it looks every 10 s
    # not in the job's log: the first srun has ended with the daemon
    assert "a later attempt writes here" in (job.run_dir / "logs/rank0.log").read_text()
    last = max(row["step"] for row in rows(job.run_dir))
    trains(job, attempt=1, step=last + 3)
    first = next(row["step"] for row in rows(job.run_dir) if row["attempt"] == 1)
    assert first > 1
    # What counts is the last row of a step, and from its first step on each of those is the second attempt's.
    counts = {row["step"]: row["attempt"] for row in rows(job.run_dir)}
    assert {counts[step] for step in range(first, last + 3)} == {1}
    found = job.fields()
    assert (found["JobState"], found["Restarts"], found["BatchHost"] != node) == ("RUNNING", "1", True)


# --- a rank dies, stops, leaves or never comes -------------------------------------------------------------------------


@pytest.mark.fault(1)
def test_a_killed_rank_ends_the_job_and_the_run_can_be_resumed(slurm: Cluster, clone: Path, tmp_path: Path) -> None:
    job = submit(slurm, clone, tmp_path, "checkpoint_every_steps=10")
    trains(job, step=12)
    os.kill(rank_pids(job)[1], signal.SIGKILL)
    state, code = ended(job)
    assert (state, code != "0:0") == ("FAILED", True)
    status = job.status()
    assert (status["state"], status["first_failing_rank"], status["first_failing_host"]) == ("failed", 1, "node2")
    assert log_lines(job.log)[-1] == f"broken: failed: {status['reason']}; logs in {job.run_dir}/logs"
    step = newest(job.run_dir)
    assert step >= last_row(job.run_dir) - 10
    job = submit(slurm, clone, tmp_path, f"max_steps={step + 5}", "force=true")
    assert ended(job, 60) == ("COMPLETED", "0:0"), job.tail()
    assert read(job.run_dir / "summary.json")["resumed_from_step"] == step


@pytest.mark.fault(9)
def test_no_orphan_is_left_15_s_after_scancel(
    slurm: Cluster, clone: Path, tmp_path: Path, record_property: Recorded
) -> None:
    """A loader process sleeps over a sample, and its rank waits for it."""
    job = submit(slurm, clone, tmp_path, FAULT="loader", FAULT_DIR=str(tmp_path))
    wait_until((tmp_path / "worker.1").exists, helpers.START_S, "the loader's process")
    there = slurm.processes(job_id=job.id)
    assert len({process.node for process in there}) == 2
    slurm.run("scancel", job.id, check=True)
    begin = time.monotonic()
    wait_until(  # one that is ending has no environment any longer, by which slurm.processes knows it
        lambda: not slurm.processes(job_id=job.id) and not any(helpers.alive(process.pid) for process in there),
        ORPHAN_S,
        "the end of all processes",
    )
    record_property("s from scancel to no process left", round(time.monotonic() - begin, 2))
