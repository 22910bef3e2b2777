"""What the fault tests share: a copy of the repository with a recipe that misbehaves, and runs that
leave nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipes.core.train import checkpoint
from tests import forked, helpers
from tests.slurm.jobs import copy_repository

HERE = Path(__file__).parent
Started = subprocess.Popen[str] | forked.Process
Start = Callable[..., Started]  # see `start`
ENDLESS = ("epochs=1000000", "checkpoint_every_steps=5")


@pytest.fixture(scope="session")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone has, with the recipe broken (broken.py) beside the others."""
    folder = copy_repository(tmp_path_factory.mktemp("repo") / "clone")
    shutil.copy(HERE / "broken.py", folder / "recipes")
    shutil.copy(HERE / "broken_conf.py", folder / "recipes" / "conf" / "broken.py")
    return folder


@pytest.fixture
def start(repo: Path) -> Iterator[Start]:
    """Starts the recipe broken (another one with ``recipe=``); what is still there at a test's end
    is killed.

    ranks: under launch.py, so many; 0: one process by itself. before: a command that becomes the
    process, such as prlimit's; without one the processes are forks (tests/forked.py). environ:
    variables, $FAULT among them.
    """
    started: list[Started] = []

    def start(
        run_dir: Path, *words: str, ranks: int = 2, before: tuple[str, ...] = (), **environ: str
    ) -> Started:
        launcher = [
            str(repo / "launch.py"),
            "recipe=broken",
            "launcher=local",
            f"ranks_per_node={ranks}",
        ]
        program = launcher if ranks else ["-m", "recipes.broken"]
        # Tests make runs shorter and longer: force=true.
        words = (*words, *os.environ.get("FAULT_KEYS", "").split())
        command = [
            *before,
            sys.executable,
            *program,
            "device=cpu",
            f"run_dir={run_dir}",
            "force=true",
            *words,
        ]
        process = (helpers.start if before else helpers.fork)(
            command, cwd=repo, environ=helpers.clean_environment(**environ)
        )
        started.append(process)
        return process

    yield start
    for process in started:
        end(process)


def end(process: Started) -> None:
    """Kills a process and its children, if they are still there."""
    if process.poll() is None:
        pids = helpers.children(process.pid)
        process.kill()
        process.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if process.stdout and not process.stdout.closed:
        with contextlib.suppress(ValueError):
            process.stdout.read()
        process.stdout.close()


def steps(run_dir: Path, attempt: int = 0) -> list[int]:
    """The steps that have a row, of one attempt."""
    return [row["step"] for row in helpers.rows(run_dir) if row["attempt"] == attempt]


def wait_for_step(process: Started, run_dir: Path, step: int = 3, attempt: int = 0) -> None:
    """Until that step has its row. Raises AssertionError with what the process has said where it
    ends before that.
    """

    def there() -> bool:
        done = max(steps(run_dir, attempt), default=0) >= step
        if not done and process.poll() is not None:
            raise AssertionError(
                f"ended with {process.returncode}: {process.stdout and process.stdout.read()}"
            )
        return done

    helpers.wait_until(there, helpers.START_S, f"step {step} of attempt {attempt}")


def wait_for_checkpoint(run_dir: Path) -> None:
    helpers.wait_until(lambda: checkpoint.candidates(run_dir / "checkpoints"), 30, "a checkpoint")


def wait_for_file(path: Path, timeout_s: float = helpers.START_S) -> str:
    helpers.wait_until(path.exists, timeout_s, str(path))
    return path.read_text()


def log(run_dir: Path, rank: int) -> str:
    path = run_dir / "logs" / f"rank{rank}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def newest(run_dir: Path) -> Path:
    """The newest checkpoint, which is whole."""
    candidates = checkpoint.candidates(run_dir / "checkpoints")
    assert candidates, "no checkpoint"
    assert checkpoint.read(candidates[0])["meta"]["step"] == int(
        candidates[0].stem.partition("-")[2]
    )
    return candidates[0]
