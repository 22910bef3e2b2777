"""``launch.py check`` asks the real controller, and leaves no job."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster

CHECK = (sys.executable, "launch.py", "check", "device=cpu", "cpus_per_rank=1")


def test_check_asks_the_controller_and_submits_no_job(slurm: Cluster, tmp_path: Path) -> None:
    repo = jobs.copy_repository(tmp_path / "clone")
    before = jobs.queue(slurm)
    done = slurm.run(*CHECK, "recipe=toy", "nodes=2", "ranks_per_node=2", cwd=repo, env=jobs.PYTHON, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "keys:   ok: toy, 4 ranks"
    assert lines[1].startswith("recipe: ok: 2,048 training samples, ")
    assert lines[2].startswith("disk:   ok: 5 checkpoints of ")
    assert any(line.startswith("slurm:  ok: to start at ") for line in lines)
    assert lines[-1] == "nothing was submitted"
    done = slurm.run(*CHECK, "recipe=doctor", "partition=nosuch", cwd=repo, env=jobs.PYTHON, timeout=120)
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr.startswith("slurm:  failed: Slurm refuses this job: ")
    assert "nvalid partition" in done.stderr
    assert jobs.queue(slurm) == before
    assert list((repo / "runs").iterdir()) == []


def test_a_missing_module_command_is_reported_by_explain(slurm: Cluster, tmp_path: Path) -> None:
    """The batch script ends before it starts Python."""
    repo = jobs.copy_repository(tmp_path / "clone")
    (repo / "env/clusters/here.yaml").write_text("modules:\n  - gcc/12\n")
    words = ("recipe=doctor", "device=cpu", "cpus_per_rank=1", "cluster=here", "run_dir=run")
    done = slurm.run(sys.executable, "launch.py", *words, "wait=true", cwd=repo, env=jobs.PYTHON, timeout=120)
    assert done.returncode != 0
    done = slurm.run(sys.executable, "-m", "recipes.doctor", "explain", "run", cwd=repo, env=jobs.PYTHON)
    assert "cluster=here: node" in done.stdout, done.stdout
    assert " has no command module" in done.stdout


def test_a_job_whose_data_is_missing_is_not_submitted(slurm: Cluster, tmp_path: Path) -> None:
    repo, before = jobs.copy_repository(tmp_path / "clone"), jobs.queue(slurm)
    (tmp_path / "empty").mkdir()

    def launch(*words: str, **environ: str) -> tuple[int, str]:
        argv = (sys.executable, "launch.py", "device=cpu", "cpus_per_rank=1", *words)
        done = slurm.run(*argv, cwd=repo, env=jobs.PYTHON | environ, timeout=120)
        return done.returncode, done.stderr

    for words, environ, named in (
        (("recipe=mnist",), {}, f"data_dir='{repo}/data' lacks train-images-idx3-ubyte, "),
        (
            ("recipe=cifar",),
            {"RECIPES_DATA": f"{tmp_path}/empty"},
            f"data_dir='{tmp_path}/empty' lacks train-images-idx4-ubyte, ",
        ),
        (("recipe=imagenet", "data_dir=../empty"), {}, f"data_dir='{tmp_path}/empty' has neither train/<class>/*.JPEG"),
    ):
        status, stderr = launch(*words, **environ)
        assert (status, len(stderr.splitlines())) == (2, 1), stderr
        assert stderr.startswith(f"launch.py: {named}")
        assert "python -m recipes.prepare " in stderr
    assert jobs.queue(slurm) == before
    for words, environ, named in (
        ((f"data_dir={tmp_path}/node-local",), {}, f"data_dir={tmp_path}/node-local"),
        ((), {"RECIPES_DATA": f"{tmp_path}/node-local"}, f"RECIPES_DATA={tmp_path}/node-local"),
    ):
        status, stderr = launch("recipe=imagenet", "extra=--begin=now+1hour", *words, **environ)
        assert (status, len(stderr.splitlines())) == (0, 1), stderr
        assert f"launch.py: {named} does not exist on this machine" in stderr
    jobs.leave_no_job(slurm)


def test_a_full_disk_for_the_job_files_is_reported_in_one_line(slurm: Cluster, tmp_path: Path) -> None:
    repo = jobs.copy_repository(tmp_path / "clone")
    before = jobs.queue(slurm)
    with helpers.small_disk(repo / "runs/submitit", "64k") as folder:
        folder.chmod(0o700)
        (folder / "full").write_bytes(bytes(64 << 10))
        launch = (sys.executable, "launch.py", "recipe=doctor", "device=cpu", "cpus_per_rank=1")
        done = slurm.run(*launch, cwd=repo, env=jobs.PYTHON, timeout=120)
        assert done.returncode == 3, done.stdout + done.stderr
        assert done.stderr.startswith(f"launch.py: {folder}"), done.stderr
        assert "No space left on device" in done.stderr
        assert "free space" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert jobs.queue(slurm) == before
