"""Helpers for tests of jobs: submit a recipe in a copy of the repository, find its ranks, read its
rows, wait for its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.core.data import datasets
from tests.helpers import ROOT, START_S, need, rows, wait_until
from tests.slurm.cluster import Cluster, ClusterError, Process

PYTHON = {
    "VIRTUAL_ENV": sys.prefix,
    "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}:/usr/sbin:/sbin",
}
ONE_BY_ONE = ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1")
ONE_BY_TWO = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1")
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1")
TWO_BY_ONE = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1")
ENDLESS = (
    "device=cpu",
    "dataset=fake",
    "epochs=100000",
    "global_batch_size=64",
    "log_every_steps=1",
)


def copy_repository(folder: Path) -> Path:
    """What a clone has, in ``folder``: the files that jobs need, and an empty runs/."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("recipes", "env", "sbatch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "launch.py", folder)
    (folder / "runs").mkdir()
    return folder


def know(source: Path, folder: Path) -> None:
    """Puts the sizes and hashes of the files in ``folder`` into a clone in place of those of
    MNIST.
    """
    text = source.read_text()
    for file in datasets.MNIST_FILES:
        content = (folder / file.name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        for old, new in ((str(file.size), str(len(content))), (file.sha256, digest)):
            assert text.count(old) == 1
            text = text.replace(old, new)
    source.write_text(text)


def mpirun() -> str:
    """The path of Open MPI's mpirun, for a test that wants it."""
    path = shutil.which("mpirun")
    need("" if path else "Open MPI is not installed: apt-get install openmpi-bin")
    return str(path)


def leave_no_job(slurm: Cluster) -> None:
    """Cancels what there is and waits until the nodes are idle, so that the next test finds them
    so.
    """
    slurm.run("scancel", "--user=root")
    slurm.wait_idle()


def sbatch(
    slurm: Cluster, repo: Path, log: Path, *words: str, env: dict[str, str] | None = None
) -> str:
    """The id of a job from a ready script; words: sbatch's options, the script, the recipe's
    keys.
    """
    return slurm.submit(f"--output={log}", *words, cwd=repo, env=PYTHON | (env or {}))


def launch(
    slurm: Cluster, repo: Path, *words: str, **kwargs: Any
) -> subprocess.CompletedProcess[str]:
    """launch.py, typed in the folder above the clone's."""
    argv = [sys.executable, f"{repo.name}/launch.py", "recipe=mnist", *words]
    return slurm.run(*argv, cwd=repo.parent, env=PYTHON, **kwargs)


@contextlib.contextmanager
def launched(
    slurm: Cluster,
    repo: Path,
    log: Path,
    *words: str,
    recipe: str = "mnist",
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A launch.py that waits, its output in ``log``, and its job."""
    argv = [sys.executable, "launch.py", f"recipe={recipe}", "wait=true", *words]
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SRUN_", "SBATCH_"))
    }
    environ = {**clean, **PYTHON, **slurm.env, **(env or {})}
    with log.open("wb") as out:
        process = subprocess.Popen(argv, cwd=repo, env=environ, stdout=out, stderr=out)
    try:
        job = wait_until(lambda: job_of(log.read_text()), START_S, "the job's id")
        yield process, job
    finally:
        process.kill()
        process.wait()


def job_of(output: str) -> str:
    """The ID of the job that launch.py has submitted; "" if its output names none."""
    named = re.search(r"^job (\d+): ", output, re.MULTILINE)
    return named[1] if named else ""


def explain(slurm: Cluster, repo: Path, *paths: Path | str) -> str:
    """What `doctor explain` says of these runs."""
    argv = [sys.executable, "-m", "recipes.doctor", "explain", *map(str, paths)]
    done = slurm.run(*argv, cwd=repo, env=PYTHON)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def wait_for_training(
    slurm: Cluster, job: str, run_dir: Path, attempt: int = 0, step: int = 3
) -> None:
    """Until this attempt has done a step as high as ``step``; fails with the job's state where it
    ends before that.
    """

    def trains() -> bool:
        state = slurm.jobs(job)[0]["JobState"]
        assert state in ("PENDING", "RUNNING", "COMPLETING"), f"job {job} is {state}"
        return any(row["attempt"] == attempt and row["step"] >= step for row in rows(run_dir))

    wait_until(trains, START_S, f"step {step} of job {job}")


def ranks(
    slurm: Cluster, job: str, recipe: str = "mnist"
) -> dict[int, tuple[Process, dict[str, str]]]:
    """The processes of a job that are ranks of the recipe, with their environments, by rank."""
    ranks_of_job = {}
    for process in slurm.processes(job_id=job, command=f"-m recipes.{recipe}"):
        with contextlib.suppress(OSError):
            content = Path(f"/proc/{process.pid}/environ").read_bytes()
            pairs = content.decode(errors="replace").split("\0")
            environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            # srun itself has none, or with Slurm 26.05 the batch script's -5
            if environ.get("SLURM_STEP_ID", "").isdecimal():
                ranks_of_job[int(environ["SLURM_PROCID"])] = (process, environ)
    return ranks_of_job


def queue(slurm: Cluster) -> set[str]:
    """All jobs that Slurm remembers."""
    return set(slurm.run("squeue", "-h", "-t", "all", "-o", "%i").stdout.split())


def ended(slurm: Cluster, job: str, log: Path, timeout_s: float = 280) -> tuple[str, str]:
    """(state, exit status) of a job, waited for."""
    try:
        state = slurm.wait_job(job, timeout_s)
    except ClusterError as error:
        raise AssertionError(f"{error}\n{tail(log)}") from None
    return state, slurm.jobs(job)[0]["ExitCode"]


def wait_requeued(slurm: Cluster, job: str, log: Path, timeout_s: float, restarts: int = 1) -> None:
    """Until the job is back in the queue, so many times."""

    def queued() -> bool:
        record = slurm.jobs(job)[0]
        return record["Restarts"] == str(restarts) and record["JobState"] == "PENDING"

    try:
        wait_until(queued, timeout_s, f"restart {restarts} of job {job}")
    except AssertionError as error:
        raise AssertionError(
            f"{error}: it is {slurm.jobs(job)[0]['JobState']}\n{tail(log)}"
        ) from None


def start_again(slurm: Cluster, job: str) -> None:
    """Starts a job that is back in the queue: it would wait there for two minutes.

    Within a second, though, Slurm still has the first start's credential revoked.
    """
    done = slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")
    assert done.returncode == 0, done.stderr


def tail(log: Path) -> str:
    """What a message about a job shows of its log."""
    return "\n".join(log_lines(log)[-30:]) if log.exists() else "no log"


def log_lines(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.strip()]
