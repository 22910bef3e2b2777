"""A job that is suspended for longer than timeout_s continues when it is resumed, and ends with the same state, to the last bit."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.core.train import checkpoint
from tests import helpers, states
from tests.slurm import jobs
from tests.slurm.cluster import Cluster, ClusterOptions, running_cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TIMEOUT_S = 25.0  # which bounds how far apart the ranks may start, too
SUSPENDED_S = TIMEOUT_S + 5
STEPS = 300
KEYS = (
    "device=cpu", "cpu_threads=1", "global_batch_size=8", "epochs=1000", f"max_steps={STEPS}", "pace_s=0.05", f"timeout_s={TIMEOUT_S:g}",
)  # fmt: skip
# As sites set it up whose urgent jobs displace others without ending them.
GANG = """
PreemptType=preempt/partition_prio
PreemptMode=SUSPEND,GANG
PartitionName=displaced Nodes=ALL PriorityTier=1 PreemptMode=SUSPEND OverSubscribe=FORCE:1
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF OverSubscribe=FORCE:1
"""


@pytest.fixture(scope="module")
def gang() -> Iterator[Cluster]:
    with running_cluster(ClusterOptions(extra_conf=GANG)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def clone(repo: Path) -> Path:
    (repo / "sbatch/broken_2x8.sh").write_text((repo / "sbatch/mnist_2x8.sh").read_text().replace("mnist", "broken"))
    return repo


def begin(slurm: Cluster, clone: Path, folder: Path) -> str:
    folder.mkdir()
    options = (*jobs.TWO_BY_ONE, "--partition=displaced")
    words = ("sbatch/broken_2x8.sh", *KEYS, f"run_dir={folder}/run")
    return jobs.sbatch(slurm, clone, folder / "log", *options, *words)


def wait_for_step(slurm: Cluster, job: str, folder: Path, step: int) -> None:
    jobs.wait_for_training(slurm, job, folder / "run", step=step)


def state(slurm: Cluster, job: str) -> str:
    return slurm.jobs(job)[0]["JobState"]


@pytest.mark.fault(40)
def test_a_job_that_is_suspended_longer_than_its_timeout_continues(gang: Cluster, clone: Path, tmp_path: Path) -> None:
    """By a job of a partition that preempts, then by scontrol: gang scheduling forgets a job that scontrol has suspended."""
    folder = tmp_path / "suspended"
    job = begin(gang, clone, folder)
    wait_for_step(gang, job, folder, 5)
    words = (
        "--partition=urgent",
        "--nodes=2",
        "--ntasks-per-node=64",
        "--output=/dev/null",
        f"--wrap=sleep {SUSPENDED_S:g}",
    )
    urgent = gang.submit(*words)
    helpers.wait_until(lambda: state(gang, job) == "SUSPENDED", 20, "the preemption")
    assert gang.wait_job(urgent, SUSPENDED_S + 30) == "COMPLETED"
    step = helpers.rows(folder / "run")[-1]["step"]
    wait_for_step(gang, job, folder, step + 20)

    gang.run("scontrol", "suspend", job, check=True)
    helpers.wait_until(lambda: state(gang, job) == "SUSPENDED", 10, "the suspension")
    time.sleep(SUSPENDED_S)
    gang.run("scontrol", "resume", job, check=True)

    assert jobs.ended(gang, job, folder / "log") == ("COMPLETED", "0:0"), jobs.tail(folder / "log")

    said = (folder / "log").read_text()
    assert len(re.findall(r"rank 0 on \S+: the job was suspended for \d+ s; the run continues", said)) == 2, said
    summary = helpers.read(folder / "run", "summary")
    trained_s = 8 * STEPS / summary["samples_per_second"]
    assert trained_s < summary["wall_seconds"] - 2 * (SUSPENDED_S - 5), summary

    other = begin(gang, clone, tmp_path / "undisturbed")
    assert jobs.ended(gang, other, tmp_path / "undisturbed/log") == ("COMPLETED", "0:0")
    found = [checkpoint.candidates(tmp_path / name / "run/checkpoints")[0] for name in ("suspended", "undisturbed")]
    assert len({states.digest(checkpoint.read(path)) for path in found}) == 1
