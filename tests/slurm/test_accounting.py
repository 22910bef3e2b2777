"""What ``sacct`` shows for the jobs of recipes and programs, on a Slurm with accounting (slurmdbd
and MariaDB).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import helpers
from tests.helpers import ROOT
from tests.slurm import jobs
from tests.slurm.cluster import (
    Cluster,
    ClusterOptions,
    accounting_missing,
    cgroups_missing,
    running_cluster,
)
from tests.slurm.jobs import TWO_BY_ONE

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

PROGRAM = ROOT / "tests/programs/plain_ddp.py"


@pytest.fixture(scope="module")
def accounted() -> Iterator[Cluster]:
    helpers.need(accounting_missing())
    with running_cluster(ClusterOptions(gpus=0, kill_wait_s=10, accounting=True)) as cluster:
        yield cluster


def states(slurm: Cluster, job: str, count: int) -> list[tuple[str, str]]:
    """State and exit status of ``count`` starts of a job, when the database has them all and none
    runs.
    """

    def recorded() -> list[tuple[str, str]] | None:
        done = slurm.run("sacct", "-X", "-n", "-P", "-D", "-j", job, "-o", "State,ExitCode")
        rows = []
        for line in done.stdout.splitlines():
            state, status = line.split("|")
            rows.append((state.split()[0], status))
        unfinished = {"RUNNING", "PENDING"} & {state for state, _ in rows}
        return rows if len(rows) == count and not unfinished else None

    return helpers.wait_until(recorded, 60, f"{count} starts of job {job} in sacct")


def test_each_start_of_a_run_that_is_waited_for_is_accounted(
    accounted: Cluster, repo: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    run_dir = tmp_path / "run"
    words = ("nodes=1", "ranks_per_node=1", *jobs.ENDLESS, f"run_dir={run_dir}")
    with jobs.launched(accounted, repo, log, *words) as (launcher, job):
        jobs.wait_for_training(accounted, job, run_dir)
        accounted.run("scontrol", "requeue", job, check=True)
        jobs.wait_requeued(accounted, job, log, 60)
        jobs.start_again(accounted, job)
        jobs.wait_for_training(accounted, job, run_dir, attempt=1)
        accounted.run("scancel", job, check=True)
        launcher.wait(120)
    assert [state for state, _ in states(accounted, job, 2)] == ["REQUEUED", "CANCELLED"]
    assert launcher.returncode == 75, log.read_text()
    assert jobs.log_lines(log)[-1].startswith(f"job {job}: cancelled: SIGTERM"), log.read_text()


@pytest.mark.parametrize(
    ("fault", "status"),
    [("raise", "1:0"), ("kill", "9:0"), ("memory", "9:0")],
)
def test_a_failed_program_has_its_own_status(
    accounted: Cluster, repo: Path, tmp_path: Path, fault: str, status: str
) -> None:
    """sacct subtracts 128 from a status above it, so it shows 137 as 9."""
    if fault == "memory":
        helpers.need(cgroups_missing())
    log = tmp_path / "log"
    run_dir = tmp_path / "run"
    keys = [f"script={PROGRAM}", "device=cpu", f"run_dir={run_dir}", "--", "--fault", fault]
    job = jobs.sbatch(
        accounted, repo, log, *TWO_BY_ONE, "--mem=2000", "sbatch/script_2x8.sh", *keys
    )
    assert states(accounted, job, 1) == [("FAILED", status)], log.read_text()
    explained = jobs.explain(accounted, repo, run_dir)
    assert explained.startswith("rank 1 on node2 failed first: the program "), explained
