"""Every way to submit a recipe, on a real Slurm: the command, and its results.

Jobs run in a copy of the repository, so that nothing of theirs stays in runs/. Each starts as few
ranks as it can.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import helpers
from tests.helpers import ROOT, rows
from tests.slurm import jobs
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import (
    ENDLESS,
    TWO_BY_ONE,
    TWO_BY_TWO,
    ended,
    log_lines,
    read,
    sbatch,
    wait_for_training,
)

MINI = ("device=cpu", "dataset=digits")
# What an outer allocation's shell may hand down; each would spoil the job (srun takes them for
# options).
HOSTILE = {
    "SLURM_CPU_BIND": "map_cpu:99",
    "SLURM_CPU_BIND_TYPE": "map_cpu:",
    "SLURM_CPU_BIND_LIST": "99",
    "SRUN_CPUS_PER_TASK": "64",
    "SRUN_EXPORT_ENV": "NONE",
    # Of which sbatch replaces those that this job asks for, and no other.
    "SLURM_MEM_PER_CPU": "1000000",
    "SLURM_MEM_PER_NODE": "999999999",
    "SLURM_GPUS": "99",
    "SLURM_GPUS_PER_TASK": "9",
    "SLURM_NTASKS_PER_GPU": "1",
    "SLURM_GPU_BIND": "single:1",
    "SLURM_TRES_BIND": "gres/gpu:single:1",
}


@pytest.fixture(autouse=True)
def _no_job_left(slurm: Cluster) -> Iterator[None]:
    yield
    jobs.leave_no_job(slurm)


# --- runs that succeed
# -----------------------------------------------------------------------------------------------


def test_a_ready_script_trains_on_two_nodes(slurm: Cluster, repo: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    keys = [*MINI, "epochs=2", f"run_dir={run_dir}", "global_batch_size=127"]
    two_and_one = (*TWO_BY_TWO, "--ntasks=3")
    job = sbatch(slurm, repo, log, *two_and_one, "sbatch/mnist_2x8.sh", *keys, env=HOSTILE)
    assert ended(slurm, job, log) == ("COMPLETED", "0:0"), log.read_text()

    assert read(run_dir / "status.json")["state"] == "done"
    summary = read(run_dir / "summary.json")
    assert summary["world_size"] == 3
    assert summary["num_nodes"] == 2
    assert summary["val_samples"] == 359

    text = log.read_text()
    assert "mnist: 3 ranks on 2 nodes, cpu, gloo" in text
    # docker0 has the same address on both nodes, and a node's own name is 127.0.1.1: only the route
    # tells
    node2 = slurm.node("node2")
    addresses = (node2.address, node2.address6)
    routes = {f"network: eth0 (route to node2 ({address}))" for address in addresses}
    assert len(routes.intersection(log_lines(log))) == 1, text
    assert "cpu binding" not in text  # what srun says of HOSTILE's
    logs = sorted(file.name for file in (run_dir / "logs").iterdir())
    assert logs == [f"rank{rank}.log" for rank in range(3)]
    assert "mnist: 3 ranks on 2 nodes" in (run_dir / "logs/rank0.log").read_text()
    result = f"val_top1 {summary['val_top1']:.4f}"
    assert log_lines(log)[-1] == f"mnist: done; {result}; run directory {run_dir}"


def test_each_rank_sees_all_gpus_of_the_job_on_its_node(
    slurm: Cluster, repo: Path, tmp_path: Path
) -> None:
    """Variables of the shell that submits change nothing. The test cluster's GPUs do not exist:
    each rank reports how many it misses.
    """
    log = tmp_path / "log"
    size = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1")
    words = (*size, "sbatch/mnist_2x8.sh", "dataset=digits", f"run_dir={tmp_path}/run")
    job = sbatch(slurm, repo, log, *words, env=HOSTILE)
    assert ended(slurm, job, log) == ("FAILED", "3:0"), log.read_text()
    lines = {line for line in log_lines(log) if line.startswith("mnist: ")}
    assert len(lines) == 1, log.read_text()  # the ranks', and at the end the batch script's
    assert re.search(r"node[12]: .* names 2 GPUs and torch sees 0", lines.pop())
    assert "Traceback" not in log.read_text()


@pytest.mark.long
def test_real_mnist_is_learnt_over_two_nodes(slurm: Cluster, repo: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    data_dir = helpers.real_data("mnist").parent
    keys = ["device=cpu", f"data_dir={data_dir}", "epochs=3", f"run_dir={tmp_path}/run"]
    job = sbatch(slurm, repo, log, *TWO_BY_ONE, "sbatch/mnist_2x8.sh", *keys)
    assert ended(slurm, job, log) == ("COMPLETED", "0:0"), log.read_text()
    summary = read(tmp_path / "run/summary.json")
    assert summary["world_size"] == 2
    assert summary["num_nodes"] == 2
    assert summary["val_samples"] == 10_000
    assert summary["val_top1"] >= 0.992


# --- runs that fail
# --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_directory_on_the_nodes_own_disks_is_refused(
    slurm: Cluster, repo: Path, tmp_path: Path
) -> None:
    """A requeued job that starts on other nodes would not find its checkpoints there, and train
    from the beginning.
    """
    log = tmp_path / "log"
    run_dir = f"/dev/shm/{tmp_path.name}"
    keys = [*MINI, "timeout_s=10", f"run_dir={run_dir}"]
    job = sbatch(slurm, repo, log, *TWO_BY_TWO, "sbatch/mnist_2x8.sh", *keys)
    assert ended(slurm, job, log, 90) == ("FAILED", "3:0"), log.read_text()
    unseen = "this node does not see the files that rank 0 on node1 writes"
    line = f"node2: run_dir={run_dir}: {unseen}: give a folder that all nodes share"
    lines = [text for text in log_lines(log) if unseen in text]
    assert lines[0] == f"mnist: {line}", log.read_text()
    assert lines[-1] == f"mnist: {line}", log.read_text()
    assert not [text for text in log_lines(log) if text.startswith("epoch")]


def test_a_failure_on_one_node_names_that_node(slurm: Cluster, repo: Path, tmp_path: Path) -> None:
    """Data that was staged to one node's own memory, and not to the other's."""
    log = tmp_path / "log"
    run_dir = tmp_path / "run"
    data_dir = Path("/dev/shm/staged")
    helpers.write_mnist(tmp_path / "MNIST/raw")
    slurm.on_node("node1", "mkdir", data_dir)
    slurm.on_node("node1", "cp", "-r", tmp_path / "MNIST", data_dir)
    keys = ["device=cpu", f"data_dir={data_dir}", f"run_dir={run_dir}"]
    job = sbatch(slurm, repo, log, *TWO_BY_ONE, "sbatch/mnist_2x8.sh", *keys)
    state = ended(slurm, job, log, 45)
    assert state == ("FAILED", "2:0"), log.read_text()
    status = read(run_dir / "status.json")
    assert status["state"] == "failed"
    assert status["first_failing_rank"] == 1
    assert status["first_failing_host"] == "node2"
    assert log_lines(log)[-1].startswith("mnist: failed: rank 1 on node2 failed first: "), (
        log.read_text()
    )
    assert f"python -m recipes.prepare mnist data_dir={data_dir}" in log_lines(log)[-1]
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def image_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cifar10/, packed, and train/ and val/ of files: two classes, 13 images to evaluate, which no
    number of ranks divides.
    """
    folder = tmp_path_factory.mktemp("images")
    helpers.write_images(folder / "train", 2, 16, 40)
    helpers.write_images(folder / "val", 2, 7, 40, seed=1)
    (folder / "val" / "class1" / "6.JPEG").unlink()
    (folder / "test").symlink_to(folder / "val")
    words = ["cifar10", f"source={folder}", f"data_dir={folder}"]
    ended = helpers.run([sys.executable, "-m", "recipes.prepare", *words])
    assert ended.status == 0, ended.out
    return folder


KEYS_OF = {
    "mnist": ["dataset=digits", "max_steps=2"],
    "cifar": ["arch=airbench94", "max_steps=2", "global_batch_size=16"],
    "imagenet": [
        "arch=resnet18",
        "px=32",
        "val_px=32",
        "val_resize=36",
        "max_steps=2",
        "global_batch_size=16",
        "num_workers=1",
    ],
    "finetune": ["dataset=fake", "max_steps=2"],
    "gpt": ["dataset=bytes", "max_steps=2", "sample=0"],
    "llm": ["dataset=made", "max_steps=2"],
}
VAL_SAMPLES = {"mnist": 359, "cifar": 13, "imagenet": 13, "finetune": 12}


READY = [path.name for path in sorted((ROOT / "sbatch").glob("[!s]*x*.sh"))]  # not script


@pytest.mark.parametrize("script", READY)
@pytest.mark.long
def test_each_ready_script_trains(
    slurm: Cluster, repo: Path, tmp_path: Path, script: str, image_folders: Path
) -> None:
    recipe = script.split("_")[0]
    log = tmp_path / "log"
    keys = ["device=cpu", *KEYS_OF[recipe], f"data_dir={image_folders}", f"run_dir={tmp_path}/run"]
    job = sbatch(slurm, repo, log, *TWO_BY_ONE, f"sbatch/{script}", *keys)
    assert slurm.wait_job(job, 60) == "COMPLETED", log.read_text()
    summary = read(tmp_path / "run" / "summary.json")
    assert summary["recipe"] == recipe
    assert summary["world_size"] == 2
    assert summary["num_nodes"] == 2
    assert summary["steps"] == 2
    assert summary.get("val_samples") == VAL_SAMPLES.get(recipe)


# --- runs that are stopped
# -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_job_of_a_few_minutes_is_not_stopped_at_its_start(
    slurm: Cluster, repo: Path, tmp_path: Path
) -> None:
    """The signal of the script, 120 s before the limit, would come immediately."""
    log = tmp_path / "log"
    run_dir = tmp_path / "run"
    words = ("--time=5", "sbatch/mnist_2x8.sh", *ENDLESS, f"run_dir={run_dir}")
    job = sbatch(slurm, repo, log, *TWO_BY_ONE, *words)
    wait_for_training(slurm, job, run_dir)
    slurm.run("scancel", "--signal=USR2", job)
    wait_for_training(slurm, job, run_dir, step=rows(run_dir)[-1]["step"] + 20)
    ignored = "mnist: this job has only a few minutes: it ignores SIGUSR2"
    assert [line for line in log_lines(log) if line.startswith(ignored)]
    assert slurm.jobs(job)[0]["Restarts"] == "0"
    slurm.run("scancel", job)
    ended(slurm, job, log)
