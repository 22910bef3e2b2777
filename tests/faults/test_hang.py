"""A program of the user that hangs is ended after ``silent_s=``, the log says which rank the others
wait for, and the program is started again with ``restart_on_hang=true``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import helpers
from tests.faults import conftest
from tests.slurm import jobs
from tests.slurm.cluster import Cluster

# In its first start, rank 1 hangs while rank 0 waits for it.
PROGRAM = """
import os, pathlib, time
import torch.distributed as dist
def hang():
    time.sleep(600)
dist.init_process_group("gloo")
rank = dist.get_rank()
begun = pathlib.Path(os.environ["RECIPES_RUN_DIR"], f"begun.{rank}")
dist.barrier()
if not begun.exists():
    begun.write_text(str(os.getpid()))
    if rank == 1:
        hang()
dist.barrier()
"""
# In place of torch, whose import takes seconds without output on a busy machine.
BARRIER = """
import os, pathlib, time
begun = 0
def init_process_group(backend): ...
def get_rank(): return int(os.environ["RANK"])
def barrier():
    global begun
    begun += 1
    folder = pathlib.Path(os.environ["RECIPES_RUN_DIR"])
    (folder / f"barrier{begun}.{get_rank()}").touch()
    while len(list(folder.glob(f"barrier{begun}.*"))) < 2:
        time.sleep(0.1)
"""
WAITS = r"rank 0 on \S+: waiting for rank 1 on \S+, in barrier at \S*program\.py:\d+, \d\.\d CPUs"


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Two ranks on this machine, with a stand-in for torch."""
    (folder / "program.py").write_text(PROGRAM)
    library = folder / "lib/python3/torch"
    (library / "distributed").mkdir(parents=True)
    (library / "__init__.py").touch()
    (library / "distributed/__init__.py").write_text(BARRIER)
    keys = ["script=program.py", "device=cpu", "run_dir=run", *words]
    launcher = [str(helpers.ROOT / "launch.py"), "launcher=local", "ranks_per_node=2"]
    environ = helpers.clean_environment(PYTHONPATH=str(library.parent))
    return helpers.start([sys.executable, *launcher, *keys], cwd=folder, environ=environ)


def check(run_dir: Path, out: str, place: str) -> None:
    """The run has failed, and its log, its state and its report name rank 1."""
    status = helpers.read(run_dir, "status")
    assert status["state"] == "failed"
    assert status["kind"] == "hang"
    assert status["first_failing_rank"] == 1
    assert re.search(
        rf"rank 1 on \S+ failed first: no output and no new file for \d s \(silent_s=\); {place}",
        status["reason"],
    )
    assert re.search(WAITS, status["reason"]), status["reason"]
    assert status["reason"] in out
    stacks = (run_dir / "logs/hang-0.txt").read_text()
    assert re.search(rf"^{WAITS} per rank$", stacks, re.MULTILINE), stacks
    assert re.search(r"^  File .* in <module>$", stacks, re.MULTILINE), stacks


@pytest.mark.fault(45)
def test_a_program_that_hangs_fails_and_its_ranks_are_named(tmp_path: Path) -> None:
    process = start(tmp_path, "silent_s=3")
    ended = helpers.finish(process).expect(1)
    check(tmp_path / "run", ended.out, r"rank 1 on \S+: in hang at program\.py:\d+, \d\.\d CPUs")


@pytest.mark.long
@pytest.mark.fault(46)
def test_a_rank_of_a_program_that_is_stopped_is_named(tmp_path: Path) -> None:
    process = start(tmp_path, "silent_s=3")
    pid = int(conftest.wait_for_file(tmp_path / "run/begun.1"))
    os.kill(pid, signal.SIGSTOP)
    ended = helpers.finish(process).expect(1)
    check(tmp_path / "run", ended.out, r"rank 1 on \S+: stopped by a signal, \d\.\d CPUs")
    assert not helpers.alive(pid)


@pytest.mark.long
@pytest.mark.fault(45)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["requeued", "restarted"])
def test_a_program_that_hangs_starts_again(slurm: Cluster, tmp_path: Path, how: str) -> None:
    repo = jobs.copy_repository(tmp_path / "clone")
    (repo / "program.py").write_text(PROGRAM)
    log = tmp_path / "log"
    run_dir = tmp_path / "run"
    keys = ["device=cpu", "silent_s=20", "restart_on_hang=true", f"run_dir={run_dir}"]
    keys += ["restarts=1"] if how == "restarted" else []
    job = jobs.sbatch(
        slurm, repo, log, *jobs.TWO_BY_ONE, "sbatch/script_2x8.sh", "script=program.py", *keys
    )
    if how == "requeued":
        jobs.wait_requeued(slurm, job, log, 120)
        status = helpers.read(run_dir, "status")
        assert (status["state"], status["kind"], status["next"]) == ("failed", "hang", "requeued")
        jobs.start_again(slurm, job)
    assert jobs.ended(slurm, job, log) == ("COMPLETED", "0:0"), log.read_text()
    assert re.search(WAITS, log.read_text()), log.read_text()
    again = "requeued (restart 1 of at most 2" if how == "requeued" else "started again (restart 1"
    assert again in log.read_text()
    assert helpers.read(run_dir, "status")["attempt"] == 1
