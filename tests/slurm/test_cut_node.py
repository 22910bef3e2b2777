"""A node that loses its network and its view of the run directory: the program on it ends, though
nothing can tell it to.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster, ClusterOptions, Process, running_cluster
from tests.slurm.jobs import TWO_BY_ONE, read

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

PROGRAM = """
import time
while True:  # it needs no connection, so it does not notice that its node is cut off
    time.sleep(0.1)
"""
TIMEOUT_S = 20


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with running_cluster(ClusterOptions(nodes=3, gpus=0)) as cluster:
        yield cluster


def cut(slurm: Cluster, folder: Path, timeout_s: int) -> tuple[str, Process]:
    """A job on two nodes, of which node2 is cut off. The job, and its program on node2. folder:
    hidden from node2.
    """
    repo = jobs.copy_repository(folder / "clone")
    (repo / "program.py").write_text(PROGRAM)
    shared = folder / "shared"
    shared.mkdir()
    keys = ("script=program.py", "device=cpu", f"run_dir={shared}/run", f"timeout_s={timeout_s}")
    job = jobs.sbatch(slurm, repo, folder / "log", *TWO_BY_ONE, "sbatch/script_2x8.sh", *keys)
    old = helpers.wait_until(
        lambda: slurm.processes(job_id=job, node="node2", command="-u /"),
        helpers.START_S,
        "the program on node2",
    )
    slurm.cut_network("node2")
    slurm.on_node("node2", "mount", "-t", "tmpfs", "hidden", str(shared), check=True)
    return job, next(process for process in old if "program.py" in process.command.split()[-1])


def test_it_ends_when_it_cannot_read_the_run_directory_for_timeout_s(
    three: Cluster, tmp_path: Path
) -> None:
    _, old = cut(three, tmp_path, TIMEOUT_S)
    try:
        began = time.monotonic()
        helpers.wait_for_the_end_of([old.pid], TIMEOUT_S + 10)
        assert time.monotonic() - began > TIMEOUT_S - 10
    finally:
        three.on_node("node2", "umount", f"{tmp_path}/shared")
        three.join_network("node2")
        jobs.leave_no_job(three)


def test_it_ends_when_it_sees_that_the_next_attempt_has_begun(
    three: Cluster, tmp_path: Path
) -> None:
    """The node returns with its view of the run directory; Slurm reaches it only later."""
    job, old = cut(three, tmp_path, 600)
    log = tmp_path / "log"
    try:
        jobs.wait_requeued(three, job, log, 120)
        jobs.start_again(three, job)
        status = tmp_path / "shared/run/status.json"
        helpers.wait_until(
            lambda: read(status)["attempt"] == 1, helpers.START_S, "the second attempt"
        )
        assert helpers.alive(old.pid)
        three.on_node("node2", "umount", f"{tmp_path}/shared", check=True)
        helpers.wait_for_the_end_of([old.pid], 10)
        assert read(status)["state"] == "running"
    finally:
        three.run("scancel", job)  # the last test of this cluster: Slurm has set node2 down
