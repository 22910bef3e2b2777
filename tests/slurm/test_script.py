"""A program of the user on two real nodes: it is signalled once, requeued and continues; a rank of
it that is killed is named.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import TWO_BY_ONE, ended, log_lines, read

PROGRAM = """
import os, pathlib, signal, socket, sys, time
import torch, torch.distributed as dist
run_dir = pathlib.Path(os.environ["RECIPES_RUN_DIR"])
stopped = []
def stop(number, frame):
    print("got", number, flush=True)
    stopped.append(1)
signal.signal(signal.SIGUSR1, stop)
dist.init_process_group("gloo")
step = int((run_dir / "saved").read_text()) if (run_dir / "saved").exists() else 0
place = ["rank", dist.get_rank(), "on", socket.gethostname()]
print(sys.argv[1:], *place, "from", bool(step), flush=True)
for _ in range(10 if step else 100_000):
    stop = torch.tensor([len(stopped)])
    dist.all_reduce(stop)
    step += 1
    if stop:
        (run_dir / "saved").write_text(str(step)) if dist.get_rank() == 0 else time.sleep(1)
        break
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def repo(repo: Path) -> Path:
    (repo / "program.py").write_text(PROGRAM)
    return repo


def submit(slurm: Cluster, repo: Path, run_dir: Path) -> tuple[str, Path]:
    """The job and its log, when both ranks have met."""
    log = run_dir.parent / "log"
    keys = ["script=program.py", "device=cpu", f"run_dir={run_dir}", "--", "--lr", "cluster=a"]
    job = jobs.sbatch(slurm, repo, log, *TWO_BY_ONE, "sbatch/script_2x8.sh", *keys)
    logs = [run_dir / f"logs/rank{rank}.log" for rank in range(2)]
    helpers.wait_until(
        lambda: all(path.exists() and " from " in path.read_text() for path in logs),
        helpers.START_S,
        "the ranks",
    )
    return job, log


@pytest.mark.long
def test_a_program_is_stopped_requeued_and_continues(
    slurm: Cluster, repo: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job, log = submit(slurm, repo, run_dir)
    try:
        look = [sys.executable, "launch.py", "look", str(run_dir), "--json"]
        told = json.loads(slurm.run(*look, cwd=repo, env=jobs.PYTHON).stdout)
        places = {answer["rank"]: answer["host"] for answer in told["ranks"]}
        assert places == {0: "node1", 1: "node2"}, told
        assert all("program.py" in line for line in told["lines"] if "rank" in line), told
        slurm.run("scancel", "--signal=USR1", job, check=True)
        jobs.wait_requeued(slurm, job, log, 60)
        status = read(run_dir / "status.json")
        assert status["state"] == "preempted"
        assert status["reason"] == "SIGUSR1"
        jobs.start_again(slurm, job)
        assert ended(slurm, job, log, 90) == ("COMPLETED", "0:0"), log.read_text()
    finally:
        jobs.leave_no_job(slurm)
    for rank in range(2):
        lines = log_lines(run_dir / f"logs/rank{rank}.log")
        printed = [line for line in lines if line.startswith(("['", "got"))]
        greeting = f"['--lr', 'cluster=a'] rank {rank} on node{rank + 1} from"
        assert printed == [f"{greeting} False", "got 10", f"{greeting} True"]
    assert (
        f"script: stopped; requeued (restart 1 of at most 20); run directory {run_dir}"
        in log_lines(log)
    )
    assert log_lines(log)[-1] == f"script: done; run directory {run_dir}"
    status = read(run_dir / "status.json")
    assert status["state"] == "done"
    assert status["attempt"] == 1


@pytest.mark.long
def test_a_program_that_does_not_end_at_the_time_limit_is_requeued(
    slurm: Cluster, repo: Path, tmp_path: Path
) -> None:
    """Slurm would kill the job script with it, so that nobody could requeue the job."""
    (repo / "ignores.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, print)\nwhile True: time.sleep(0.1)\n"
    )
    log = tmp_path / "log"
    run_dir = tmp_path / "run"
    keys = ["script=ignores.py", "device=cpu", f"run_dir={run_dir}"]
    job = jobs.sbatch(slurm, repo, log, *TWO_BY_ONE, "--time=1", "sbatch/script_2x8.sh", *keys)
    try:
        jobs.wait_requeued(slurm, job, log, 150)
    finally:
        jobs.leave_no_job(slurm)
    ends = [line for line in log_lines(log) if line.startswith("script: stopped")]
    assert ends == [
        "script: stopped by SIGUSR2; the program of rank 0 had not ended in time, and was killed",
        f"script: stopped; requeued (restart 1 of at most 20); run directory {run_dir}",
    ]


KILLED = {  # what is killed: (its node, words of its command, how the last line begins)
    "program": (
        "node2",
        "-u /",
        (
            "rank 1 on node2 failed first: the program was killed by signal 9 (Killed; often the "
            "memory was used up)"
        ),
    ),
    # rank 0 may have ended before it could say that it lost rank 1
    "wrapper": ("node2", "-m recipes.script", "the wrapper of rank 1 on node2 was killed"),
    "srun": ("node1", "srun ", "srun, or the wrapper of every rank, was killed"),
}


@pytest.mark.parametrize(
    "victim",
    [
        "program",
        pytest.param("wrapper", marks=pytest.mark.long),
        pytest.param("srun", marks=pytest.mark.long),
    ],
)
def test_what_is_killed_is_named(slurm: Cluster, repo: Path, tmp_path: Path, victim: str) -> None:
    """The log, status.json, explain and Slurm agree."""
    node, command, reason = KILLED[victim]
    run_dir = tmp_path / "run"
    job, log = submit(slurm, repo, run_dir)
    try:
        processes = slurm.processes(job_id=job, node=node, command=command)
        killed = []
        for process in processes:
            is_of_job = process.command.startswith(("srun", sys.executable))
            if is_of_job and "--lr" in process.command:
                killed.append(process.pid)
        assert killed, processes
        for pid in killed[: 1 if victim == "srun" else None]:
            os.kill(pid, signal.SIGKILL)
        assert ended(slurm, job, log, 60)[0] == "FAILED", log.read_text()
    finally:
        jobs.leave_no_job(slurm)
    assert log_lines(log)[-1].startswith(f"script: failed: {reason}")
    status = read(run_dir / "status.json")
    assert status["state"] == "failed"
    assert status["reason"].startswith(reason)
    explained = jobs.explain(slurm, repo, run_dir)
    assert explained.startswith(reason), explained
