"""The recipe toy: what it learns and writes, and the processes that it spawns."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests import helpers

TOY = (sys.executable, "-m", "recipes.toy", "device=cpu", "cpu_threads=1")
LAUNCHED = (*helpers.LOCAL[:2], "recipe=toy", "launcher=local", "device=cpu", "cpu_threads=1")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of one rank's whole run."""
    run_dir = tmp_path_factory.mktemp("alone")
    ended = helpers.run_fork([*TOY, "checkpoint_every_steps=0", "keep_checkpoints=0", f"run_dir={run_dir}"])
    assert ended.status == 0, ended.out
    return run_dir


def test_it_learns_and_writes_the_usual_files(alone: Path, tmp_path: Path) -> None:
    shutil.copytree(alone, tmp_path, dirs_exist_ok=True)
    rows = helpers.rows(tmp_path)
    assert (rows[0]["step"], rows[-1]["step"]) == (1, 320)
    assert rows[-1]["loss"] < 0.02 < 0.2 < rows[0]["loss"]
    summary = helpers.read(tmp_path, "summary")
    assert (summary["recipe"], summary["steps"], summary["world_size"]) == ("toy", 320, 1)
    assert summary["loss"] < 0.01
    evaluated = helpers.run_fork([*TOY, "evaluate=true", f"run_dir={tmp_path}"])
    assert evaluated.status == 0, evaluated.out
    assert helpers.read(tmp_path / "evaluation", "summary")["loss"] == summary["loss"]


def test_spawned_in_a_job_it_gives_the_same_result_and_leaves_no_files_on_the_node(alone: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    environ = helpers.clean_environment(SLURM_JOB_ID="7", TMPDIR=str(disk))
    words = ["spawn=2", "device=cpu", "max_steps=20", f"run_dir={tmp_path}/run"]
    ended = helpers.run_fork([*TOY[:3], *words], environ=environ)
    assert ended.status == 0, ended.out
    assert "toy: 2 ranks on 1 node, cpu, gloo" in ended.lines
    assert not any(disk.iterdir())
    ours, theirs = ([row["loss"] for row in helpers.rows(folder)[:2]] for folder in (tmp_path / "run", alone))
    assert ours == pytest.approx(theirs, rel=1e-4)  # steps 1 and 16; another order of the same sums
    assert helpers.read(tmp_path / "run", "summary")["world_size"] == 2


def test_launch_starts_the_ranks_itself(tmp_path: Path) -> None:
    ended = helpers.run([*LAUNCHED, "spawn=2", f"run_dir={tmp_path}/run"])
    assert (ended.status, len(ended.lines)) == (2, 1), ended.out
    assert ended.lines[0].startswith("launch.py: spawn=2: launch.py starts the ranks itself")


def test_spawn_under_another_launcher_is_refused_in_one_line(tmp_path: Path) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    environ = helpers.clean_environment(**place, MASTER_ADDR="127.0.0.1")
    ended = helpers.run_fork([*TOY, "spawn=2", f"run_dir={tmp_path}/run"], environ=environ)
    assert ended.status == 2, ended.out
    line = (
        "toy: spawn=2: a launcher has already started this process as rank 0 of 2: omit spawn=, or start plain python"
    )
    assert ended.lines == [line]
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="requires two CPUs")
def test_a_rank_bound_to_too_few_cpus_warns(tmp_path: Path) -> None:
    """As Slurm binds it with TaskPlugin=task/affinity if srun has no --cpus-per-task."""
    cpu = str(min(os.sched_getaffinity(0)))
    words = ("device=cpu", "cpu_threads=2", "max_steps=1", f"run_dir={tmp_path}")
    ended = helpers.run(["taskset", "--cpu-list", cpu, sys.executable, "-m", "recipes.toy", *words])
    assert ended.status == 0, ended.out
    warning = (
        "warning: cpu_threads= or num_workers= requires 2 CPUs, and rank 0 has 1: give srun or sbatch --cpus-per-task=2"
    )
    assert warning in ended.lines
