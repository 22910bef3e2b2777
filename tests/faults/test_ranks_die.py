"""A rank that is killed, stopped, stuck, out of memory or missing: the others end in bounded time,
and the rank is named.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch

from recipes.core.launch import local
from recipes.core.run import positions
from tests import helpers
from tests.faults import conftest
from tests.faults.conftest import ENDLESS, Start, Started
from tests.helpers import Ended

HOST = socket.gethostname()
# by torch's flight recorder, which in 2.10 has no collectives of Gloo
RECORDS = torch.__version__ >= (2, 11)
LAST = r", last collective: \w+ \d+ of group \d+ \(.*, \w+\)" if RECORDS else ""
NOTICED_S = 5.0  # a rank that is gone, by its peers
TIMEOUT_S = 16.0  # which bounds how far apart the ranks may start, too
WATCHED_S = 15.0  # what a watchdog waits beyond timeout_s
ROOM_S = 12.0  # for two slow cores


def finish(process: Started, timeout_s: float = 120) -> Ended:
    ended = helpers.finish(process, timeout_s)
    assert ended.status not in (0, 75), ended.out
    return ended


def assert_named(run_dir: Path, ended: Ended, rank: int, *words: str, status: int = 1) -> None:
    """status.json and the last line name the rank, its host and its end; the last good checkpoint
    is there.
    """
    recorded = helpers.read(run_dir, "status")
    assert recorded["state"] == "failed", recorded
    assert recorded["first_failing_rank"] == rank, recorded
    assert recorded["first_failing_host"] == HOST, recorded
    assert ended.status == status, ended.out
    assert recorded["exit_status"] == status, ended.out
    assert ended.lines[-1].startswith(f"failed: rank {rank} on {HOST} "), ended.out
    for word in words:
        assert word in recorded["reason"], recorded
        assert word in ended.lines[-1], ended.out
    assert conftest.newest(run_dir)


def assert_notices(run_dir: Path, rank: int, within_s: float = NOTICED_S) -> None:
    """Right after a rank is gone, or has stopped: another one says so in time."""
    said = f"rank {rank} on {HOST} lost its peers after step "
    helpers.wait_until(
        lambda: said in conftest.log(run_dir, rank), within_s, f"rank {rank} has noticed"
    )


@pytest.mark.fault(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_reported_immediately(start: Start, tmp_path: Path, rank: int) -> None:
    launcher = start(tmp_path, *ENDLESS)
    conftest.wait_for_step(launcher, tmp_path, 6)
    conftest.wait_for_checkpoint(tmp_path)
    pids = helpers.children(launcher.pid)
    killed = time.time()
    os.kill(pids[rank], signal.SIGKILL)
    assert_notices(tmp_path, 1 - rank)
    ended = finish(launcher)
    assert time.time() - killed < NOTICED_S + ROOM_S
    assert_named(tmp_path, ended, rank, "was killed by SIGKILL", status=137)
    assert "frame #" not in ended.out  # of torch's own C++
    assert not any(helpers.alive(pid) for pid in pids)


@pytest.mark.long
@pytest.mark.fault(2)
def test_a_stopped_rank_ends_the_run_at_the_timeout(start: Start, tmp_path: Path) -> None:
    rank = 1
    launcher = start(tmp_path, *ENDLESS, f"timeout_s={TIMEOUT_S:g}")
    conftest.wait_for_step(launcher, tmp_path, 6)
    conftest.wait_for_checkpoint(tmp_path)
    pids = helpers.children(launcher.pid)
    stopped = time.time()
    os.kill(pids[rank], signal.SIGSTOP)
    assert_notices(tmp_path, 1 - rank, TIMEOUT_S + positions.WAIT_S)
    ended = finish(launcher)
    assert time.time() - stopped < TIMEOUT_S + local.PEERS_GRACE_S + ROOM_S
    status = helpers.read(tmp_path, "status")
    assert status["state"] == "failed", status
    assert status["first_failing_rank"] == rank, status
    assert re.search(rf"rank {rank} on {HOST} ", ended.lines[-1]), ended.out
    assert not any(helpers.alive(pid) for pid in pids)
    assert conftest.newest(tmp_path)


@pytest.mark.fault(2)
def test_waiting_ranks_name_the_missing_rank_and_its_step(start: Start, tmp_path: Path) -> None:
    environ = {"FAULT": "hang", "FAULT_AT": "8", "FAULT_DIR": str(tmp_path)}
    ended = finish(start(tmp_path / "run", *ENDLESS, "timeout_s=4", **environ))
    record = helpers.failure(tmp_path / "run", 0)
    assert record["behind"] == {"rank": 1, "host": HOST, "at": "step 8 (data)"}
    status = helpers.read(tmp_path / "run", "status")
    place = (
        f"rank 1 on {HOST} stayed at step 8 (data), and the other ranks timed out waiting for it"
    )
    assert status["first_failing_rank"] == 1
    assert status["reason"] == place
    assert place in ended.lines[-1], ended.out
    for line in (
        rf"^rank 1 on {HOST}: in hang at \S*broken\.py:\d+ for \d+ s, at step 8 \(data\){LAST}, ",
        rf"^rank 0 on {HOST}: waiting for rank 1 on {HOST}, in \w+ at \S*\.py:\d+ for \d+ s, at "
        rf"step 8 \(\w+\){LAST}, ",
    ):
        assert re.search(line, (tmp_path / "run/logs/hang-0.txt").read_text(), re.MULTILINE)
        assert re.search(line, ended.out, re.MULTILINE), ended.out


@pytest.mark.long
@pytest.mark.fault(3)
def test_the_watchdog_ends_a_single_rank_with_its_interpreter_stuck(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "marks").mkdir()
    environ = {"FAULT": "gil", "FAULT_RANK": "0", "FAULT_AT": "8", "FAULT_DIR": f"{tmp_path}/marks"}
    rank = start(tmp_path / "run", *ENDLESS, "timeout_s=2", ranks=0, **environ)
    stuck = float(conftest.wait_for_file(tmp_path / "marks" / "reached.0"))
    ended = helpers.finish(rank, 2 + WATCHED_S + 30)
    assert time.time() - stuck < 2 + WATCHED_S + ROOM_S
    assert ended.status not in (0, 75), ended.out
    assert "made no progress" in helpers.failure(tmp_path / "run", 0)["error"]
    assert re.search(
        rf"^rank 0 on {HOST}: in gil at \S*broken\.py:\d+ for ", ended.out, re.MULTILINE
    )
    assert "Fatal Python error: Aborted" in conftest.log(tmp_path / "run", 0)
    assert "in gil\n" in conftest.log(tmp_path / "run", 0)
    assert conftest.newest(tmp_path / "run")


@pytest.mark.fault(4)
def test_the_first_exception_is_reported(start: Start, tmp_path: Path) -> None:
    environ = {"FAULT": "fail_later", "FAULT_RANK": "all", "FAULT_RANK_FIRST": "1", "FAULT_AT": "8"}
    ended = finish(start(tmp_path, *ENDLESS, **environ))
    assert_named(tmp_path, ended, 1, "failed first: ValueError: broken on purpose, first, rank 1")
    assert "ValueError: broken on purpose, first" in conftest.log(tmp_path, 1)  # the traceback
    assert f"{conftest.newest(tmp_path)}" in ended.out


@pytest.mark.fault(5)
@pytest.mark.parametrize("rank", ["1", "all"])
def test_a_rank_that_exits_early_with_status_0_is_a_failure(
    start: Start, tmp_path: Path, rank: str
) -> None:
    ended = finish(start(tmp_path, *ENDLESS, FAULT="exit0", FAULT_RANK=rank, FAULT_AT="8"))
    status = helpers.read(tmp_path, "status")
    assert ended.status == 1
    assert ended.lines[-1].startswith(f"{status['state']}: "), ended.out
    if rank == "all":
        assert status["state"] == "incomplete"
        assert status["reason"] == "every rank exited with status 0 before the end of the run"
    else:
        assert status["state"] == "failed", status
        assert status["first_failing_rank"] == int(rank), status
        assert status["reason"] == f"rank {rank} on {HOST} ended with status 0 before the run's end"
        assert status["reason"] in ended.lines[-1]
    assert conftest.newest(tmp_path)


@pytest.mark.fault(6)
def test_out_of_memory_is_reported_in_one_line_with_the_sizes(start: Start, tmp_path: Path) -> None:
    ended = finish(start(tmp_path, *ENDLESS, FAULT="memory", FAULT_AT="8"))
    assert_named(tmp_path, ended, 1, "out of memory")
    reason = helpers.read(tmp_path, "status")["reason"]
    assert re.search(r"\b(8(\.0*)? ?GiB|8589934592|8\.\d+ ?GB)", reason), reason
    assert "Traceback" not in ended.out


@pytest.mark.fault(7)
def test_a_segmentation_fault_leaves_its_trace_in_that_ranks_log(
    start: Start, tmp_path: Path
) -> None:
    ended = finish(start(tmp_path, *ENDLESS, FAULT="segv", FAULT_AT="8"))
    assert_named(tmp_path, ended, 1, "was killed by SIGSEGV", status=139)
    assert re.search(
        r"Fatal Python error: Segmentation fault\n(.*\n)+?.*broken\.py.* in segv\n",
        conftest.log(tmp_path, 1),
    )
    assert "Fatal Python error" not in conftest.log(tmp_path, 0)


IMAGES = (
    "arch=resnet18",
    "px=32",
    "val_px=32",
    "val_resize=36",
    "global_batch_size=16",
    "num_workers=1",
    "lr=0",
)


@pytest.mark.long
@pytest.mark.fault(8)
def test_a_hanging_read_names_the_rank(tmp_path: Path) -> None:
    """A process that reads images is stopped, as if its file system were gone."""
    run_dir = tmp_path / "run"
    words = ["launcher=local", "ranks_per_node=2", "timeout_s=3", "max_steps=100000"]
    keys = ["recipe=imagenet", "dataset=fake", "device=cpu", "cpu_threads=1", *words, *IMAGES]
    launch = [sys.executable, str(helpers.ROOT / "launch.py"), *keys, f"run_dir={run_dir}"]
    process = helpers.fork([*launch, "log_every_steps=1"])
    conftest.wait_for_step(process, run_dir, 2)
    reader = helpers.children(helpers.children(process.pid)[-1])[-1]
    os.kill(reader, signal.SIGSTOP)
    ended = helpers.finish(process).expect(1)
    assert re.search(rf"rank \d on {HOST} stayed at step \d+ \(data\)", ended.out), ended.out


@pytest.mark.fault(8)
def test_a_killed_loader_process_ends_the_run_with_the_fix(tmp_path: Path) -> None:
    keys = [
        "device=cpu",
        "dataset=fake",
        f"run_dir={tmp_path}/run",
        "max_steps=100000",
        "log_every_steps=1",
        *IMAGES,
    ]
    rank = helpers.fork([sys.executable, "-m", "recipes.imagenet", *keys])
    conftest.wait_for_step(rank, tmp_path / "run", 2)
    # the one that was started last: its ID need not be the highest
    os.kill(helpers.children(rank.pid)[-1], signal.SIGKILL)
    ended = helpers.finish(rank).expect(3)
    # torch says "is killed by signal: Killed", or sometimes "exited unexpectedly"
    [line] = [line for line in ended.lines if "DataLoader worker (pid" in line and "--mem" in line]
    assert "num_workers=" in line
    assert "Traceback" not in ended.out


@pytest.mark.fault(9)
def test_no_loader_process_outlives_the_run(start: Start, tmp_path: Path) -> None:
    environ = {"FAULT": "loader", "FAULT_RANK": "all", "FAULT_AT": "8", "FAULT_DIR": str(tmp_path)}
    launcher = start(tmp_path / "run", *ENDLESS, **environ)
    pids = [int(conftest.wait_for_file(tmp_path / f"worker.{rank}")) for rank in (0, 1)]
    ranks = helpers.children(launcher.pid)
    try:
        assert all(helpers.alive(pid) for pid in [*pids, *ranks])
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        helpers.wait_for_the_end_of([*pids, *ranks], 15)
    finally:
        for pid in filter(helpers.alive, pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.fault(40)
def test_a_run_that_is_suspended_for_longer_than_timeout_s_continues(
    start: Start, tmp_path: Path
) -> None:
    """As scontrol suspend and resume do: one process after the other."""
    launcher = start(tmp_path, *ENDLESS, "timeout_s=5", "pace_s=0.02")
    conftest.wait_for_step(launcher, tmp_path, 6)
    ranks = helpers.children(launcher.pid)
    everyone = [launcher.pid, *ranks, *(pid for rank in ranks for pid in helpers.children(rank))]
    for number, then_s in ((signal.SIGSTOP, 8.0), (signal.SIGCONT, 0.0)):
        for pid in everyone:
            os.kill(pid, number)
            time.sleep(0.3)
        time.sleep(then_s)
    resumed = conftest.steps(tmp_path)[-1]
    conftest.wait_for_step(launcher, tmp_path, resumed + 50)
    speeds = [row["samples_per_second"] for row in helpers.rows(tmp_path)]
    assert min(speeds[1:]) > max(speeds) / 100, speeds
