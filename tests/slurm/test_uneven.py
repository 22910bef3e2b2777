"""Three ranks over a node of two GPUs and one of one, as Slurm places them. The GPUs are names
only; the ranks train on the CPU.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.core.run import attempt as attempts
from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster, ClusterOptions, missing, running_cluster

pytestmark = pytest.mark.timeout(300)

KEYS = ("device=cpu", "cpu_threads=1", "max_steps=4")
UNEVEN = {"node1": 2, "node2": 1}


@pytest.fixture(scope="module")
def uneven() -> Iterator[Cluster]:
    helpers.need(missing())
    with running_cluster(ClusterOptions(gpus=tuple(UNEVEN.values()))) as cluster:
        yield cluster


def placed(run_dir: Path) -> dict[str, int]:
    """How many ranks each node had, of a run that is done."""
    summary = jobs.read(run_dir / "summary.json")
    assert summary["world_size"] == 3
    assert summary["num_nodes"] == 2
    assert summary["steps"] == 4
    hosts = attempts.facts(run_dir)["hosts"]
    return {host: hosts.count(host) for host in dict.fromkeys(hosts)}


def run_job(slurm: Cluster, repo: Path, folder: Path, script: str, *words: str) -> None:
    """Submits a job and waits until it has completed."""
    (folder / "job.sh").write_text(script)
    job = jobs.sbatch(slurm, repo, folder / "log", str(folder / "job.sh"), *words)
    assert jobs.ended(slurm, job, folder / "log") == ("COMPLETED", "0:0"), jobs.tail(folder / "log")


@pytest.mark.long
def test_gpus_are_taken_from_uneven_nodes(uneven: Cluster, repo: Path, tmp_path: Path) -> None:
    words = ("recipe=toy", "gpus=3", "cpus_per_rank=1", "launcher=print")
    done = uneven.run(sys.executable, "launch.py", *words, cwd=repo, env=jobs.PYTHON, check=True)
    run_job(uneven, repo, tmp_path, done.stdout, f"run_dir={tmp_path}/run", *KEYS)
    assert placed(tmp_path / "run") == UNEVEN


@pytest.mark.long
def test_the_doctor_sees_all_gpus_of_its_node(uneven: Cluster, repo: Path, tmp_path: Path) -> None:
    """The doctor's step has one task per node. Slurm would give it only the one GPU per task of the
    job.
    """
    words = (
        "recipe=toy",
        "gpus=3",
        "cpus_per_rank=1",
        "doctor=true",
        "wait=true",
        f"run_dir={tmp_path}/run",
    )
    done = uneven.run(sys.executable, "launch.py", *words, cwd=repo, env=jobs.PYTHON, timeout=150)
    assert done.returncode == 3, done.stdout + done.stderr
    gpus = dict(
        re.findall(
            r"(node\d): (?:Slurm granted|CUDA_VISIBLE_DEVICES names) (\d) GPUs and torch sees 0",
            done.stdout,
        )
    )
    assert gpus == {name: str(count) for name, count in UNEVEN.items()}, done.stdout


@pytest.mark.parametrize("order", ["in turn", "mixed"])
@pytest.mark.long
def test_a_host_file(uneven: Cluster, repo: Path, tmp_path: Path, order: str) -> None:
    hosts = ["node1", "node1", "node2"] if order == "in turn" else ["node1", "node2", "node1"]
    (tmp_path / "hosts").write_text("\n".join(hosts) + "\n")
    recipe = f"{sys.executable} -m recipes.toy {' '.join(KEYS)} run_dir={tmp_path}/run"
    script = (
        "#!/bin/sh\n#SBATCH --nodes=2 --ntasks=3 --cpus-per-task=1\n"
        f"export SLURM_HOSTFILE={tmp_path}/hosts MASTER_ADDR=node1\nexec srun "
        f"--distribution=arbitrary {recipe}\n"
    )
    run_job(uneven, repo, tmp_path, script)
    assert placed(tmp_path / "run") == UNEVEN
    assert attempts.facts(tmp_path / "run")["hosts"] == hosts
