"""Every launcher gives the same run as srun: model, optimiser and random states after 20 steps, to
the last bit. On a real Slurm.

accelerate comes with the extra ``test``; Open MPI is the distribution's, and where it is not
installed its tests are skipped, or fail where Slurm is required.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from recipes.core.launch import runs
from recipes.core.run import attempt as attempts
from tests import helpers, states
from tests.slurm import jobs
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(300)

STEPS = 20
KEYS = ("device=cpu", "cpu_threads=1", f"max_steps={STEPS}", "log_every_steps=1")
MODULE = ("-m", "recipes.toy", *KEYS)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
NODES = ("srun", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
PORT = "29417"  # one for all: they come one after another


def state_of(run_dir: Path) -> str:
    return states.at_step(run_dir, STEPS)


def on_nodes(slurm: Cluster, repo: Path, run_dir: Path, *argv: str, **env: str) -> str:
    """What a command said that ran once on each of two nodes; $RUN in it is the run directory, $PY
    this Python.
    """
    named = {"RUN": f"run_dir={run_dir}", "PY": sys.executable, "KEYS": " ".join(KEYS), **env}
    done = slurm.run(*NODES, *argv, cwd=repo, env={**jobs.PYTHON, **named}, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def expected_state(slurm: Cluster, repo: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state under srun, a rank on each of two nodes."""
    run_dir = tmp_path_factory.mktemp("srun")
    said = on_nodes(slurm, repo, run_dir, sys.executable, *MODULE, f"run_dir={run_dir}")
    assert "toy: 2 ranks on 2 nodes, cpu, gloo" in said
    return state_of(run_dir)


def accelerate() -> str:
    return str(Path(sys.executable).with_name("accelerate"))


@pytest.mark.parametrize(
    "command", ["torchrun", "torch.distributed.launch", "accelerate", "mpirun"]
)
@pytest.mark.long
def test_two_ranks_of_one_machine(command: str, expected_state: str, tmp_path: Path) -> None:
    run_dir = f"run_dir={tmp_path}/run"
    environ = {}
    if command == "torchrun":
        argv = [*TORCHRUN, "--standalone", "--nproc-per-node=2", *MODULE]
    elif command == "torch.distributed.launch":
        argv = [
            sys.executable,
            "-m",
            "torch.distributed.launch",
            "--nproc-per-node=2",
            "--master-port",
            PORT,
            *MODULE,
        ]
    elif command == "accelerate":
        argv = [
            accelerate(),
            "launch",
            "--multi_gpu",
            "--num_processes=2",
            "--num_machines=1",
            "--mixed_precision=no",
        ]
        argv += ["--dynamo_backend=no", *MODULE]
    else:
        argv = [jobs.mpirun(), "--oversubscribe", "-np", "2", sys.executable, *MODULE]
        environ = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ended = helpers.run([*argv, run_dir], environ=helpers.clean_environment(**environ))
    assert ended.status == 0, ended.out
    assert "toy: 2 ranks on 1 node, cpu, gloo" in ended.lines, ended.out
    assert state_of(tmp_path / "run") == expected_state


@pytest.mark.long
@pytest.mark.parametrize("family", ["IPv4", "IPv6", "name"])
def test_torchrun_over_two_nodes(
    slurm: Cluster, repo: Path, expected_state: str, tmp_path: Path, family: str
) -> None:
    first = slurm.nodes[0]
    endpoint = {"IPv4": first.address, "IPv6": f"[{first.address6}]", "name": first.name}[family]
    # is_host= names the node that serves the rendezvous. Without it, torchrun looks up the
    # host name of the machine, which has the address 127.0.1.1 on many systems.
    line = (
        "exec $PY -m torch.distributed.run --nnodes=2 --nproc-per-node=1 "
        "--rdzv-id=$SLURM_JOB_ID --rdzv-backend=c10d "
        "--rdzv-endpoint=$ENDPOINT --rdzv-conf=is_host=$((SLURM_NODEID == 0)) -m recipes.toy "
        "$KEYS $RUN"
    )
    said = on_nodes(slurm, repo, tmp_path, "sh", "-c", line, ENDPOINT=f"{endpoint}:{PORT}")
    assert "toy: 2 ranks on 2 nodes, cpu, gloo" in said
    assert state_of(tmp_path) == expected_state


@pytest.mark.long
def test_mpirun_over_two_nodes(
    slurm: Cluster, repo: Path, expected_state: str, tmp_path: Path
) -> None:
    script = (
        "#!/bin/sh\n#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=0 --cpus-per-task=1\n"
        f"export MASTER_ADDR=$(hostname)\nexec {jobs.mpirun()} -x MASTER_ADDR "
        f"{sys.executable} {' '.join(MODULE)} run_dir={tmp_path}/run\n"
    )
    (tmp_path / "job.sh").write_text(script)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    job = jobs.sbatch(slurm, repo, tmp_path / "log", str(tmp_path / "job.sh"), env=as_root)
    assert jobs.ended(slurm, job, tmp_path / "log") == ("COMPLETED", "0:0"), jobs.tail(
        tmp_path / "log"
    )
    assert "toy: 2 ranks on 2 nodes, cpu, gloo" in (tmp_path / "log").read_text()
    assert state_of(tmp_path / "run") == expected_state


@pytest.mark.long
def test_a_plain_process(slurm: Cluster, repo: Path, tmp_path: Path) -> None:
    """Its job is known, also without a batch script and outside the folder of all runs."""
    ended = helpers.run([sys.executable, *MODULE, f"run_dir={tmp_path}/plain"])
    assert ended.status == 0, ended.out
    argv = ("srun", "--nodes=1", "--ntasks=1", sys.executable, *MODULE, f"run_dir={tmp_path}/srun")
    done = slurm.run(*argv, cwd=repo, env=jobs.PYTHON, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert state_of(tmp_path / "plain") == state_of(tmp_path / "srun")
    assert runs.find([attempts.facts(tmp_path / "srun")["job"]], repo) == [tmp_path / "srun"]


@pytest.mark.long
def test_a_restart_by_torchrun_resumes_from_the_last_checkpoint(
    expected_state: str, tmp_path: Path
) -> None:
    """A rank is killed. torchrun restarts all ranks, and they resume in the same run directory, to
    the same bits.
    """
    # Checkpoints are slow, so that the kill comes between the second and the last step.
    slow = (
        "import time\nfrom recipes.core.train import checkpoint\nwrite = checkpoint.write\n"
        "def slowly(*args, **kwargs):\n    path = write(*args, **kwargs)\n    "
        "time.sleep(0.5)\n    return path\ncheckpoint.write = slowly\n"
        "import runpy, sys\nsys.argv[0] = 'toy'\nrunpy.run_module('recipes.toy', "
        "run_name='__main__')\n"
    )
    (tmp_path / "slow.py").write_text(slow)
    argv = [
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        str(tmp_path / "slow.py"),
        *KEYS,
    ]
    environ = helpers.clean_environment(PYTHONPATH=str(helpers.ROOT))
    process = helpers.start(
        [*argv, "checkpoint_every_steps=2", f"run_dir={tmp_path}/run"], environ=environ
    )
    try:
        latest = tmp_path / "run/checkpoints/latest"
        helpers.wait_until(
            lambda: latest.exists() and latest.read_text() >= "step-00000004",
            helpers.START_S,
            "step 4",
        )
        ranks = []
        for pid in helpers.children(process.pid):
            if b"slow.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                ranks.append(pid)
        os.kill(ranks[1], 9)
        ended = helpers.finish(process)
    finally:
        process.kill()
    assert ended.status == 0, ended.out
    summary = helpers.read(tmp_path / "run", "summary")
    assert summary["restarts"] == 1
    assert 4 <= summary["resumed_from_step"] < STEPS
    assert state_of(tmp_path / "run") == expected_state
