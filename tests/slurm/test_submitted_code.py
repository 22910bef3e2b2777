"""A job runs the code of its submission: from inside another allocation, from another folder, with
the source edited afterwards. On a real Slurm.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import PYTHON

pytestmark = pytest.mark.timeout(300)

KEYS = ("device=cpu", "cpu_threads=1", "max_steps=3")
BROKEN = "raise RuntimeError('edited after it was submitted')\n"
# Notes which program parses a command line. The rest of a job's processes read what `begin` has
# resolved.
NOTED = """
_settings = settings


def settings(words, recipe, *rest):
    import os, sys
    step = os.environ.get("SLURM_STEP_ID", "")
    program = os.path.basename(sys.argv[0])
    with open({notes!r}, "a") as notes:
        notes.write("rank\\n" if step.isdecimal() else f"{{program}}\\n")
    return _settings(words, recipe, *rest)
"""


def git(repo: Path, *words: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", *named, *words], cwd=repo, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A clone with one change that is not committed."""
    repo = jobs.copy_repository(tmp_path / "clone")
    (repo / ".gitignore").write_text("runs/\n__pycache__/\n*.out\n")
    git(repo, "init", "--quiet")
    git(repo, "add", ".")
    git(repo, "commit", "--quiet", "--message=all")
    recipe = repo / "recipes" / "toy.py"
    text = recipe.read_text()
    recipe.write_text(text.replace("nn.Linear(64, 64)", "nn.Linear(64, 64, bias=True)"))
    return repo


def break_all(repo: Path) -> None:
    """Ends any job that still reads the code of the repository."""
    for path in repo.glob("recipes/**/*.py"):
        path.write_text(BROKEN)
    for path in repo.glob("env/*.env"):
        path.write_text("nonsense\n")


def check_origin(repo: Path, run_dir: Path) -> None:
    assert jobs.read(run_dir / "status.json")["state"] == "done"
    commit = jobs.read(run_dir / "summary.json")["git_commit"]
    assert commit == git(repo, "rev-parse", "HEAD") + "-dirty"
    difference = (run_dir / "code.diff").read_text()
    assert "+" in difference
    assert "bias=True" in difference
    code = Path(jobs.read(run_dir / "job.yaml")["code"])
    assert code.parent == repo / "runs" / "code"
    assert "bias=True" in (code / "recipes" / "toy.py").read_text()


def test_a_job_runs_the_code_of_its_submission_after_an_edit(
    slurm: Cluster, repo: Path, tmp_path: Path
) -> None:
    """Its command line is parsed when it is submitted and when it begins."""
    parser = repo / "recipes/core/config/parser.py"
    notes = tmp_path / "parsed"
    parser.write_text(parser.read_text() + NOTED.format(notes=str(notes)))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    inner = f"{sys.executable} ../clone/launch.py recipe=toy nodes=2 {' '.join(KEYS)} run_dir=mine"
    # Holds both nodes while it submits, so that the new job waits until its source is broken.
    hold = f"{inner} && touch submitted && while [ -e submitted ]; do sleep 0.1; done"
    argv = ["salloc", "--nodes=2", "--exclusive", "sh", "-c", hold]
    outer = helpers.start(argv, cwd=elsewhere, environ=os.environ | PYTHON | slurm.env)
    try:
        helpers.wait_until(
            lambda: (elsewhere / "submitted").exists() or outer.poll() is not None,
            60,
            "the submission",
        )
        break_all(repo)
        assert git(repo, "status", "--porcelain")
    finally:
        (elsewhere / "submitted").unlink(missing_ok=True)
        said = helpers.finish(outer, 60).out
    job = jobs.job_of(said)
    assert job, said
    assert slurm.wait_job(job, 120) == "COMPLETED", said
    check_origin(repo, elsewhere / "mine")
    assert jobs.read(elsewhere / "mine/summary.json")["world_size"] == 2
    assert notes.read_text().split() == ["launch.py", "batch.py"]


@pytest.mark.long
def test_a_job_never_runs_the_code_of_another_clone(
    slurm: Cluster, repo: Path, tmp_path: Path
) -> None:
    """PYTHONPATH names another clone, as if it were installed, and Python does not search the
    working directory.
    """
    break_all(jobs.copy_repository(tmp_path / "other"))
    elsewhere = {**PYTHON, "PYTHONSAFEPATH": "1", "PYTHONPATH": f"{tmp_path}/other"}
    script = (repo / "sbatch" / "mnist_1x1.sh").read_text()
    (repo / "sbatch" / "toy.sh").write_text(script.replace("mnist", "toy"))
    log = tmp_path / "log"
    options = ("--gpus-per-node=0", "--cpus-per-task=1", "sbatch/toy.sh")
    job = jobs.sbatch(slurm, repo, log, *options, *KEYS, "run_dir=ready", env=elsewhere)
    argv = (sys.executable, "launch.py", "recipe=toy", "cpus_per_rank=1", *KEYS)
    done = slurm.run(*argv, "wait=true", "run_dir=launched", cwd=repo, env=elsewhere, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert jobs.ended(slurm, job, log) == ("COMPLETED", "0:0"), log.read_text()
    done = slurm.run(*argv, "launcher=local", "run_dir=here", cwd=repo, env=elsewhere, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("ready", "launched", "here"):
        assert jobs.read(repo / name / "status.json")["state"] == "done"
