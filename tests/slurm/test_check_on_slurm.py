"""``launch.py check`` asks the real controller, and leaves no job."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster

CHECK = (
    sys.executable,
    "launch.py",
    "check",
    "recipe=toy",
    "device=cpu",
    "nodes=2",
    "ranks_per_node=2",
    "cpus_per_rank=1",
)


def test_slurm_is_asked_and_no_job_is_left(slurm: Cluster, tmp_path: Path) -> None:
    repo = jobs.copy_repository(tmp_path / "clone")
    before = jobs.queue(slurm)
    for words, status, said in (
        ((), 0, "slurm:  right: to start at "),
        (("partition=nosuch",), 3, "slurm:  wrong: Slurm refuses this job: "),
    ):
        done = slurm.run(*CHECK, *words, cwd=repo, env=jobs.PYTHON, timeout=120)
        assert done.returncode == status, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        assert lines[0] == "keys:   right: toy, 4 ranks"
        assert lines[1].startswith("code:   right: ")
        assert lines[2].startswith("recipe: right: 2,048 training samples, ")
        assert lines[3].startswith("disk:   right: 5 checkpoints of ")
        assert lines[-1] == "nothing was submitted"
        [line] = [line for line in (*lines, *done.stderr.splitlines()) if line.startswith("slurm:")]
        assert line.startswith(said)
    assert "nvalid partition" in line
    assert jobs.queue(slurm) == before
    assert list((repo / "runs").iterdir()) == []


def test_a_full_disk_for_the_job_files_is_one_line_in_check_and_in_launch(slurm: Cluster, tmp_path: Path) -> None:
    repo = jobs.copy_repository(tmp_path / "clone")
    before = jobs.queue(slurm)
    with helpers.small_disk(repo / "runs/submitit", "64k") as folder:
        folder.chmod(0o700)
        (folder / "full").write_bytes(bytes(64 << 10))
        launch = (sys.executable, "launch.py", "recipe=doctor", "device=cpu", "cpus_per_rank=1")
        for argv, begin in ((CHECK, "slurm:  wrong: runs/submitit: "), (launch, "launch.py: ")):
            done = slurm.run(*argv, cwd=repo, env=jobs.PYTHON, timeout=120)
            assert done.returncode == 3, done.stdout + done.stderr
            assert done.stderr.startswith(f"{begin}{folder}"), done.stderr
            assert "No space left on device" in done.stderr
            assert "free space" in done.stderr
            assert len(done.stderr.splitlines()) == 1
    assert jobs.queue(slurm) == before
