"""A run that a signal stops in the middle of an epoch and that is resumed ends with the same state, to the last bit.

Each recipe under one way to launch it, on two ranks; and on another number of ranks the same batches, each sample once.
"""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.core.train import checkpoint
from tests import helpers, states
from tests.faults.conftest import Recorded
from tests.slurm import jobs
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(900)

PATIENCE_S = 300  # for a run on a busy machine
# Steps of an epoch and of the run. A signal sent behind the fourth comes in time, since the larger a model the slower its steps.
STEPS = {"mnist": (180, 360), "cifar": (25, 40), "imagenet": (13, 20), "toy": (100, 200)}
KEYS = {
    "mnist": ["dataset=digits", "global_batch_size=8"],
    "cifar": ["arch=resnet9", "small_px=8", "ema=0.9", "cutout=4", "global_batch_size=8"],
    "imagenet": [
        "arch=resnet18", "px=32", "val_px=32", "val_resize=36", "ema=0.9", "optimizer=lars", "mixup=0.2", "num_workers=2",
        "lr_batch_size=0", "lr=1", "global_batch_size=16",
    ],
    "broken": ["global_batch_size=4", "samples=400"],  # dropout, batch normalisation, averaged weights
    "toy": ["global_batch_size=16", "samples=1600"],
}  # fmt: skip
FOR_ALL = ("device=cpu", "cpu_threads=1", "epochs=2", "log_every_steps=1")
# So small a rate that what rounding makes of it does not grow: any other batch would show in the loss.
SIZE_KEYS = (
    "dataset=digits", "global_batch_size=64", "variant=sgd", "lr=0.0001", "device=cpu", "cpu_threads=1", "epochs=6",
    "log_every_steps=1",
)  # fmt: skip
ROUNDING = 2e-6  # of float32, in another order of sums; measured: 3e-7


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.image_sets(tmp_path_factory.mktemp("images"))


def words(recipe: str, images: Path, run_dir: Path) -> list[str]:
    data = [f"data_dir={images}"] if recipe in ("cifar", "imagenet") else []
    return [*FOR_ALL, *KEYS[recipe], *data, f"max_steps={STEPS[recipe][1]}", f"run_dir={run_dir}"]


def here(repo: Path, recipe: str, ranks: int = 2) -> list[str]:
    return [sys.executable, str(repo / "launch.py"), f"recipe={recipe}", "launcher=local", f"ranks_per_node={ranks}"]


def run(command: list[str], repo: Path) -> helpers.Ended:
    return helpers.finish(helpers.start(command, cwd=repo), PATIENCE_S)


@pytest.fixture(scope="module")
def whole(repo: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run directory of a recipe's run that was never stopped, on two ranks; each is made once."""

    @functools.cache
    def whole(recipe: str) -> Path:
        run_dir = tmp_path_factory.mktemp("whole") / recipe
        ended = run([*here(repo, recipe), *words(recipe, images, run_dir)], repo)
        assert ended.status == 0, ended.out
        return run_dir

    return whole


def digest(run_dir: Path) -> str:
    """Of the whole training state in the newest checkpoint."""
    return states.digest(checkpoint.read(checkpoint.candidates(run_dir / "checkpoints")[0]))


def wait_for_steps(run_dir: Path) -> None:
    helpers.wait_until(lambda: len(helpers.rows(run_dir)) >= 4, PATIENCE_S, "four steps")


# The launchers: each starts the run, stops it by a signal, and resumes it to its end.


def stopped_here(command: list[str], repo: Path, run_dir: Path) -> None:
    process = helpers.start(command, cwd=repo)
    try:
        wait_for_steps(run_dir)
        process.send_signal(signal.SIGTERM)
        ended = helpers.finish(process, PATIENCE_S)
    finally:
        process.kill()
    assert helpers.read(run_dir, "status")["state"] == "preempted", ended.out
    ended = run(command, repo)
    assert ended.status == 0, ended.out


def stopped_job(slurm: Cluster, job: str, log: Path, run_dir: Path) -> None:
    wait_for_steps(run_dir)
    slurm.run("scancel", "--signal=USR2", job, check=True)
    jobs.wait_requeued(slurm, job, log, 30)
    assert helpers.read(run_dir, "status")["state"] == "preempted", jobs.tail(log)
    jobs.start_again(slurm, job)
    assert jobs.ended(slurm, job, log, PATIENCE_S) == ("COMPLETED", "0:0"), jobs.tail(log)


@pytest.mark.fault(17)
@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "recipe"), [("local", "cifar"), ("torchrun", "imagenet"), ("sbatch", "mnist"), ("submitit", "toy")]
)
def test_a_stopped_and_resumed_run_ends_with_the_state_of_an_unbroken_run(
    request: pytest.FixtureRequest, launcher: str, recipe: str, repo: Path, images: Path, whole: Callable[[str], Path],
    tmp_path: Path, record_property: Recorded,
) -> None:  # fmt: skip
    run_dir = tmp_path / "run"
    keys = words(recipe, images, run_dir)
    if launcher == "local":
        stopped_here([*here(repo, recipe), *keys], repo, run_dir)
    elif launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        stopped_here([*torchrun, "-m", f"recipes.{recipe}", *keys], repo, run_dir)
    else:
        slurm: Cluster = request.getfixturevalue("slurm")
        if launcher == "sbatch":
            script, log = repo / f"sbatch/{recipe}_of_two.sh", tmp_path / "log"
            script.write_text((repo / "sbatch/mnist_2x8.sh").read_text().replace("mnist", recipe))
            job = jobs.sbatch(slurm, repo, log, *jobs.TWO_BY_ONE, str(script), *keys)
        else:
            argv = [sys.executable, "launch.py", f"recipe={recipe}", "nodes=2", "ranks_per_node=1", *keys]
            done = slurm.run(*argv, cwd=repo, env=jobs.PYTHON)
            found = re.search(r"^job (\d+): .*\n.*\nlog: tail -F (.*)$", done.stdout, re.MULTILINE)
            assert found, done.stdout + done.stderr
            job, log = found[1], Path(found[2])
        try:
            stopped_job(slurm, job, log, run_dir)
        finally:
            jobs.leave_no_job(slurm)

    summary = helpers.read(run_dir, "summary")
    stopped_at = summary["resumed_from_step"]
    an_epoch, total = STEPS[recipe]
    assert (summary["restarts"], summary["steps"], summary["world_size"]) == (1, total, 2)
    assert 4 <= stopped_at < total
    assert stopped_at % an_epoch, "it was stopped at an epoch's end, which shows less"
    unbroken = whole(recipe)
    losses = [{row["step"]: row["loss"] for row in helpers.rows(folder)} for folder in (unbroken, run_dir)]
    assert losses[1] == losses[0]
    assert digest(run_dir) == digest(unbroken)
    record_property(
        f"SHA-256 of {recipe}'s state, stopped under {launcher} at step {stopped_at} of {total}, equal",
        digest(run_dir)[:12],
    )


@pytest.mark.fault(17)
@pytest.mark.parametrize("sender", ["scancel", helpers.long("Slurm, near the time limit")])
def test_a_signalled_job_is_requeued_and_ends_with_the_state_of_an_unbroken_run(
    slurm: Cluster, repo: Path, tmp_path: Path, sender: str
) -> None:
    """Rank 1 waits within step 14 until both ranks have the signal, so that they stop in the middle of an epoch."""
    log, script, run_dir, marks = tmp_path / "log", repo / "sbatch/broken_2x8.sh", tmp_path / "run", tmp_path / "marks"
    script.write_text((repo / "sbatch/mnist_2x8.sh").read_text().replace("mnist", "broken"))
    marks.mkdir()
    fault = {"FAULT": "wait", "FAULT_AT": "14", "FAULT_ATTEMPT": "0", "FAULT_DIR": str(marks)}
    keys = [*FOR_ALL, *KEYS["broken"], "max_steps=130", "pace_s=0"]
    job = jobs.sbatch(
        slurm, repo, log, *jobs.TWO_BY_ONE, str(script), *keys, f"run_dir={run_dir}", "stop_before_s=0", env=fault
    )
    helpers.wait_until((marks / "reached.1").exists, helpers.START_S, "step 14")
    if sender == "scancel":
        slurm.run("scancel", "--signal=USR2", job, check=True)
    else:  # the script has --signal=USR2@120
        slurm.run("scontrol", "update", f"JobId={job}", "EndTime=now+140", check=True)
    ended = helpers.run_fork([*here(repo, "broken"), *keys, f"run_dir={tmp_path}/whole"], cwd=repo)
    assert ended.status == 0, ended.out
    signalled = "SIGUSR2: saves at the next step"
    helpers.wait_until(lambda: log.read_text().count(signalled) == 2, 60, "Slurm's signal")  # Slurm looks every 30 s
    (marks / "go").touch()
    jobs.wait_requeued(slurm, job, log, 30)
    status = helpers.read(run_dir, "status")
    assert (status["state"], status["reason"], status["step"]) == ("preempted", "SIGUSR2", 14), status
    jobs.start_again(slurm, job)
    assert jobs.ended(slurm, job, log, PATIENCE_S) == ("COMPLETED", "0:0"), jobs.tail(log)
    summary = helpers.read(run_dir, "summary")
    assert (summary["restarts"], summary["resumed_from_step"], summary["steps"]) == (1, 14, 130)
    losses = [[row["loss"] for row in helpers.rows(folder)] for folder in (tmp_path / "whole", run_dir)]
    assert losses[1] == losses[0]
    assert digest(run_dir) == digest(tmp_path / "whole")


@pytest.fixture(scope="module")
def of_two(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of two ranks that was never stopped, and its like, stopped in the middle of an epoch."""
    folder = tmp_path_factory.mktemp("sizes")
    command = [*here(repo, "mnist"), *SIZE_KEYS]
    ended = run([*command, f"run_dir={folder}/whole"], repo)
    assert ended.status == 0, ended.out
    process = helpers.start([*command, f"run_dir={folder}/stopped"], cwd=repo)
    try:
        wait_for_steps(folder / "stopped")
        process.send_signal(signal.SIGTERM)
        ended = helpers.finish(process, PATIENCE_S)
    finally:
        process.kill()
    assert ended.status == 75, ended.out
    return folder / "whole", folder / "stopped"


@pytest.mark.fault(17)
@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_resumed_on_another_number_of_ranks_has_the_same_batches(
    of_two: tuple[Path, Path], ranks: int, repo: Path, tmp_path: Path
) -> None:
    whole, stopped = of_two
    run_dir = shutil.copytree(stopped, tmp_path / "run")
    command = [*here(repo, "mnist", ranks), *SIZE_KEYS, f"run_dir={run_dir}"]
    ended = run(command, repo)
    assert ended.status == 0, ended.out
    expected, found = helpers.rows(whole), helpers.rows(run_dir)
    steps = 6 * 23  # 1,438 digits in batches of 64
    assert [row["step"] for row in found] == [row["step"] for row in expected] == list(range(1, steps + 1))
    stopped_at = helpers.read(run_dir, "summary")["resumed_from_step"]
    assert 4 <= stopped_at < steps - 10
    assert [row["attempt"] for row in found] == [0] * stopped_at + [1] * (steps - stopped_at)
    losses, others = [row["loss"] for row in expected], [row["loss"] for row in found]
    assert others == pytest.approx(losses, rel=ROUNDING)
    assert others[:stopped_at] == losses[:stopped_at]
    assert all(one != pytest.approx(next_one, rel=ROUNDING) for one, next_one in itertools.pairwise(losses))
