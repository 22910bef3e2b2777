"""A second job on the run directory of a job that is running or suspended. On a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ONE_BY_ONE

pytestmark = pytest.mark.timeout(400)

SCRIPT = "sbatch/script_2x8.sh"
# Without torch, which takes seconds to start.
PROGRAM = """
import os, pathlib, time
beats = pathlib.Path(os.environ["RECIPES_RUN_DIR"], "beats")
while True:
    with beats.open("a") as file:
        file.write(".")
    time.sleep(0.1)
"""


def test_a_second_job_is_refused_until_the_first_ends(
    slurm: Cluster, repo: Path, tmp_path: Path
) -> None:
    (repo / "program.py").write_text(PROGRAM)
    run_dir = tmp_path / "run"
    beats = run_dir / "beats"
    words = (*ONE_BY_ONE, SCRIPT, "script=program.py", "device=cpu", f"run_dir={run_dir}")

    def refused(state: str) -> str:
        """The last line of a second job, while the first one is in this state."""
        log = tmp_path / state
        job = jobs.sbatch(slurm, repo, log, *words)
        assert jobs.ended(slurm, job, log, 60) == ("FAILED", "2:0"), jobs.tail(log)
        return jobs.log_lines(log)[-1]

    first = jobs.sbatch(slurm, repo, tmp_path / "log", *words)
    try:
        helpers.wait_until(beats.exists, helpers.START_S, "the program of the first job")
        used = f"run_dir={run_dir}: job {first} (running) uses it: cancel it (scancel {first})"
        assert refused("running").startswith(f"script: {used}")
        slurm.run("scontrol", "suspend", first, check=True)
        assert f"job {first} (suspended) uses it" in refused("suspended")
        slurm.run("scontrol", "resume", first, check=True)
        size = beats.stat().st_size
        helpers.wait_until(lambda: beats.stat().st_size > size, 60, "the first job to continue")
    finally:
        jobs.leave_no_job(slurm)
