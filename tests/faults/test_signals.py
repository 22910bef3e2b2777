"""Signals at bad moments: during a save, the start, an evaluation, while a rank waits for another;
several of them; Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from recipes.core.train import checkpoint
from tests import helpers
from tests.faults import conftest
from tests.faults.conftest import ENDLESS, Start, Started
from tests.helpers import Ended

HOST = socket.gethostname()
AT_ONCE_S = 5.0  # for what is only to be noted


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


def await_line(run_dir: Path, name: str) -> None:
    """Until rank 0 has said that it has got a signal; on each node the first rank speaks."""
    line = f"rank 0 on {HOST}: {name}: the run saves at one of the next steps"
    helpers.wait_until(lambda: line in conftest.log(run_dir, 0), AT_ONCE_S + 5, "the signal's line")


def assert_saved(run_dir: Path, ended: Ended, attempt: int = 0, reason: str = "SIGTERM") -> int:
    """All ranks have stopped at one step, saved it once, and nothing is half done. Gives the
    step.
    """
    assert ended.status == 75, ended.out
    status = helpers.read(run_dir, "status")
    assert status["state"] == "preempted", status
    assert status["attempt"] == attempt, status
    assert status["reason"] == reason, status
    newest = conftest.newest(run_dir)
    assert newest.name == f"step-{status['step']:08d}.pt"
    assert not [path.name for path in run_dir.rglob(".*")]
    assert len([line for line in ended.lines if line == f"checkpoint {newest}"]) == 1, ended.out
    assert "Traceback" not in ended.out
    steps = conftest.steps(run_dir, attempt)
    assert steps == sorted(set(steps))
    assert steps[-1] == status["step"]
    return int(status["step"])


def assert_resumes(
    start: Start, run_dir: Path, step: int, attempt: int = 1, ranks: int = 2
) -> None:
    """A run that was saved at ``step`` ends as it should."""
    ended = helpers.finish(start(run_dir, *ENDLESS, f"max_steps={step + 3}", ranks=ranks)).expect(0)
    assert f"resumed from {run_dir}/checkpoints/step-{step:08d}.pt, step {step}" in ended.lines
    assert conftest.steps(run_dir, attempt) == [step + 1, step + 2, step + 3]


@pytest.mark.fault(23)
def test_a_signal_during_a_save_causes_one_more_save(
    start: Start, tmp_path: Path, marks: Path
) -> None:
    run_dir = tmp_path / "run"
    environ = {"FAULT": "hold_save", "FAULT_AT": "2", "FAULT_RANK": "0", "FAULT_DIR": str(marks)}
    launcher = start(run_dir, *ENDLESS, **environ)
    conftest.wait_for_file(marks / "reached.0")  # the checkpoint of step 5 is on its way
    launcher.terminate()
    await_line(run_dir, "SIGTERM")
    assert checkpoint.candidates(run_dir / "checkpoints") == []
    (marks / "go").touch()
    step = assert_saved(run_dir, helpers.finish(launcher))
    assert (run_dir / "checkpoints" / "step-00000005.pt").exists()
    assert_resumes(start, run_dir, step)


@pytest.mark.fault(23)
def test_a_signal_during_the_start_saves_at_the_next_step(
    start: Start, tmp_path: Path, marks: Path
) -> None:
    run_dir = tmp_path / "run"
    environ = {"FAULT": "wait", "FAULT_AT": "start", "FAULT_RANK": "1", "FAULT_DIR": str(marks)}
    launcher = start(run_dir, *ENDLESS, **environ)
    conftest.wait_for_file(marks / "reached.1")
    launcher.terminate()
    await_line(run_dir, "SIGTERM")
    (marks / "go").touch()
    step = assert_saved(run_dir, helpers.finish(launcher))
    assert step == 1
    assert_resumes(start, run_dir, step)


@pytest.mark.fault(23)
def test_a_signal_to_one_rank_interrupts_the_evaluation_of_all(
    start: Start, tmp_path: Path
) -> None:
    """For example, only rank 0 watches the time limit. An evaluation here takes 60 s."""
    launcher = start(tmp_path, *ENDLESS, "evaluate_s=60")
    conftest.wait_for_step(launcher, tmp_path, 9)
    helpers.wait_until(lambda: (tmp_path / "evaluating.1").exists(), 30, "the evaluation")
    begin = time.monotonic()
    os.kill(helpers.children(launcher.pid)[1], signal.SIGTERM)
    ended = helpers.finish(launcher)
    assert time.monotonic() - begin < 20
    assert assert_saved(tmp_path, ended) == 10
    assert "val_top1" not in helpers.rows(tmp_path)[-1]  # not a part of it


@pytest.mark.fault(24)
def test_several_signals_cause_one_save(start: Start, tmp_path: Path, marks: Path) -> None:
    """As a batch system may send them to all ranks: USR2, then TERM, then TERM again, while the
    ranks are inside a step.
    """
    run_dir = tmp_path / "run"
    environ = {"FAULT": "wait", "FAULT_AT": "8", "FAULT_DIR": str(marks)}
    launcher = start(run_dir, *ENDLESS, **environ)
    conftest.wait_for_file(marks / "reached.1")
    pids = helpers.children(launcher.pid)
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM):
        for pid in pids:
            os.kill(pid, number)
        await_line(run_dir, "SIGUSR2")
    (marks / "go").touch()
    step = assert_saved(run_dir, helpers.finish(launcher), reason="SIGUSR2")
    assert step == 8  # the step in which rank 0 got the signal
    # the first one's alone
    assert conftest.log(run_dir, 0).count("saves at one of the next steps") == 1
    assert_resumes(start, run_dir, step)


@pytest.mark.fault(8)
@pytest.mark.parametrize(
    "method",
    ["fork", *(pytest.param(method, marks=pytest.mark.long) for method in ("spawn", "forkserver"))],
)
def test_a_signal_to_each_process_of_a_rank_does_not_end_its_loader(
    start: Start, tmp_path: Path, method: str
) -> None:
    """Slurm signals all processes of a step. The start method forkserver is the default of Python
    3.14.
    """
    rank = start(
        tmp_path,
        *ENDLESS,
        f"workers={method}",
        "samples=100000",
        "pace_s=0.05",
        ranks=0,
        before=("env",),
    )
    conftest.wait_for_step(rank, tmp_path)
    loading = [
        pid for child in helpers.children(rank.pid) for pid in (child, *helpers.children(child))
    ]
    assert len(loading) >= 2
    for pid in (*loading, rank.pid):
        for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM):
            os.kill(pid, number)
    ended = helpers.finish(rank)
    assert_saved(tmp_path, ended, reason=helpers.read(tmp_path, "status")["reason"])
    helpers.wait_for_the_end_of(loading, 20)


@pytest.mark.fault(8)
def test_a_loader_process_that_dies_while_the_run_is_to_stop_does_not_fail_it(
    start: Start, tmp_path: Path
) -> None:
    environ = {"FAULT": "loader", "FAULT_RANK": "1", "FAULT_AT": "8", "FAULT_DIR": str(tmp_path)}
    launcher = start(tmp_path / "run", *ENDLESS, **environ)
    loading = int(conftest.wait_for_file(tmp_path / "worker.1"))
    launcher.send_signal(signal.SIGTERM)
    helpers.wait_until(
        lambda: "SIGTERM" in conftest.log(tmp_path / "run", 0),
        helpers.START_S,
        "the signal at rank 0",
    )
    time.sleep(0.5)  # and at rank 1
    os.kill(loading, signal.SIGKILL)
    ended = helpers.finish(launcher)
    status = helpers.read(tmp_path / "run", "status")
    assert ended.status == 75, ended.out
    assert status["state"] == "preempted", ended.out
    assert status["step"] == 5, ended.out
    assert status["reason"].startswith("SIGTERM, which ended a worker")


@pytest.mark.fault(12)
def test_ctrl_c_ends_a_rank_that_waits_for_others(repo: Path, tmp_path: Path) -> None:
    """The other rank is never started. The rank waits inside torch, where no Python handler
    runs.
    """
    port = helpers.free_port()
    environ = helpers.clean_environment(**helpers.place(0, 2, port))
    argv = [sys.executable, "-m", "recipes.broken", "device=cpu", f"run_dir={tmp_path}/run"]
    rank = helpers.fork(argv, cwd=repo, environ=environ)
    try:

        def listens() -> bool:
            with socket.socket() as other:
                return other.connect_ex(("127.0.0.1", port)) == 0

        helpers.wait_until(listens, helpers.START_S, "rank 0 at its port")
        time.sleep(1.0)
        rank.send_signal(signal.SIGINT)
        assert rank.wait(AT_ONCE_S) == -signal.SIGINT
        helpers.finish(rank)  # its watchdog may not have begun to watch
    finally:
        conftest.end(rank)


@pytest.mark.long
@pytest.mark.fault(53)
def test_a_signal_after_a_failure_does_not_make_it_a_stop(
    start: Start, tmp_path: Path, marks: Path
) -> None:
    """Slurm 26.05 sends CONT and TERM to the peers of a failed task before it kills them."""
    environ = {"FAULT": "fail", "FAULT_AT": "6"}
    process = start(tmp_path / "run", *ENDLESS, **environ)
    [peer] = end_peers(tmp_path / "run", process, failing=1)
    ended = helpers.finish(process).expect(1)
    status = helpers.read(tmp_path / "run", "status")
    assert (status["state"], status["first_failing_rank"]) == ("failed", 1), ended.out
    assert "ValueError: broken on purpose, rank 1" in status["reason"]
    assert not helpers.alive(peer)


@pytest.mark.fault(53)
@pytest.mark.parametrize("caught", ["", "signal.signal(signal.SIGTERM, lambda *of: sys.exit(0))"])
def test_a_signal_after_a_failure_of_a_program_does_not_make_it_a_stop(
    tmp_path: Path, caught: str
) -> None:
    """Neither if the program catches the signal, and its end looks like one after a save."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, signal, sys, time\n{caught}\nprint('ready', flush=True)\n"
        "time.sleep(1 if os.environ['RANK'] == '1' else 60)\nsys.exit(7)\n"
    )
    words = [f"script={program}", "launcher=local", "ranks_per_node=2", "device=cpu"]
    launcher = [sys.executable, str(helpers.ROOT / "launch.py")]
    process = helpers.start([*launcher, *words, f"run_dir={tmp_path}/run"])
    end_peers(tmp_path / "run", process, failing=1)
    ended = helpers.finish(process).expect(7)
    status = helpers.read(tmp_path / "run", "status")
    assert (status["state"], status["first_failing_rank"]) == ("failed", 1), ended.out
    stop = helpers.read(tmp_path / "run/attempts/0000/failed", "stop0000")
    assert stop["kind"] == "stopped"  # the signal came, and was recorded


def end_peers(run_dir: Path, process: Started, failing: int) -> list[int]:
    """Sends CONT and TERM to the other ranks as soon as one has recorded its failure."""
    record = run_dir / f"attempts/0000/failed/rank{failing:04d}.json"
    helpers.wait_until(record.exists, helpers.START_S, "the failure")
    ranks = helpers.children(process.pid)
    peers = [pid for number, pid in enumerate(ranks) if number != failing]
    for number in (signal.SIGCONT, signal.SIGTERM):
        for pid in peers:
            os.kill(pid, number)
    return peers
