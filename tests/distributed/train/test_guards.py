"""The guards of a run while it trains: the watchdog, the fence of the run directory, the umask; and
a crash after its end.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from recipes.core.run import attempt as attempts
from recipes.core.run import watchdog
from tests import forked, helpers

HELD = """
from recipes.core.run import entry; from recipes.core.train import failure, session
failure.FENCE_S = 0.1
START = entry.begin("broken")
from recipes import broken
session.run(broken.main, START)
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[list[forked.Process]]:
    """Two ranks: rank 1 has stopped inside step 8, and rank 0 waits for it below Python."""
    marks = tmp_path / "marks"
    marks.mkdir()
    words = [
        "device=cpu",
        "cpu_threads=1",
        "pace_s=0",
        "checkpoint_every_steps=5",
        "umask=027",
        f"run_dir={tmp_path}/run",
    ]
    fault = {"FAULT": "wait", "FAULT_AT": "8", "FAULT_DIR": str(marks)}
    ranks = helpers.fork_ranks([sys.executable, "-c", HELD, *words], 2, **fault)
    try:
        helpers.wait_until((marks / "reached.1").exists, helpers.START_S, "step 8")
        # The checkpoint of step 5 is written, and the status tells it.
        helpers.wait_until(
            lambda: helpers.read(tmp_path / "run", "status")["step"] == 5, 30, "a checkpoint"
        )
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


def test_each_rank_has_a_watchdog_and_umask_lets_the_group_read(
    held: list[forked.Process], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    opened = run_dir / "attempts/0000/opened.json"
    os.utime(opened, (0, 0))
    helpers.wait_until(
        lambda: opened.stat().st_mtime > 0, 30, "a heartbeat, by which other jobs know that it runs"
    )
    for rank in held:
        commands = []
        for pid in helpers.children(rank.pid):
            commands.append(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
        [watcher] = [command for command in commands if "recipes.core.run.watchdog" in command]
        at = watcher.index("recipes.core.run.watchdog")
        assert watcher[at + 1] == str(rank.pid)
        assert watcher[at + 3] == str(600.0 + watchdog.MARGIN_S)
    modes = {
        p.relative_to(run_dir): stat.S_IMODE(p.stat().st_mode)
        for p in run_dir.rglob("*")
        if p.is_file()
    }
    assert {
        Path("checkpoints/step-00000005.pt"),
        Path("logs/rank1.log"),
        Path("metrics.jsonl"),
    } <= modes.keys()
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o137} == {}
    assert stat.S_IMODE((run_dir / "checkpoints").stat().st_mode) == 0o750
    status = helpers.read(run_dir, "status")
    assert status["state"] == "running"
    assert status["attempt"] == 0
    assert status["step"] == 5


def test_an_attempt_ends_during_a_wait_if_its_run_is_taken_over(
    held: list[forked.Process], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    before = (run_dir / "status.json").read_bytes()
    helpers.attempt(run_dir, launch="other", step=5)
    ended = helpers.finish(held[0], timeout_s=30).expect(3)
    line = (
        f"broken: {run_dir}: a later attempt (other) writes to this run directory, so this "
        "attempt ends"
    )
    assert ended.lines[-1] == line
    assert (run_dir / "status.json").read_bytes() == before


def test_the_guard_of_the_run_directory_survives_an_error_of_its_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run would send no more heartbeats, and another job could take its directory."""
    from recipes.core.train import failure

    attempt = helpers.attempt(tmp_path)
    answers = iter([errno.ESTALE, 0])
    exists = Path.exists

    def slow(path: Path) -> bool:
        number = next(answers, 0) if path.name == "begun.json" else 0
        if number:
            raise OSError(number, os.strerror(number))
        return exists(path)

    monkeypatch.setattr(Path, "exists", slow)
    os.utime(attempt.folder / "opened.json", (0, 0))
    run: Any = SimpleNamespace(attempt=attempt)
    rounds = iter([False, False, True])
    over: Any = SimpleNamespace(wait=lambda seconds: next(rounds))
    failure.watch_owner(run, over)
    assert attempts.newest_heartbeat(attempt) > 0


OTHER_KEYS = """
import os, sys
if os.environ["RANK"] == "1":
    sys.argv += ["lr=0.5", "checkpoint_every_steps=7", "keep_every_steps=7", "keep_best=false"]
    sys.argv += ["data_dir=/of/this/node"]  # paths may differ
"""


OTHER_DATA = """
from recipes.core.data import sampling
sampling.GlobalBatches.order = property(lambda batches: {"data": os.environ["RANK"]})
session.run("""


def test_ranks_with_different_keys_or_data_are_refused(tmp_path: Path) -> None:
    code = OTHER_KEYS + HELD.replace("session.run(", OTHER_DATA)
    ended = helpers.run_ranks(
        code, ["device=cpu", "cpu_threads=1", "max_steps=2", f"run_dir={tmp_path}/run"], 2
    )
    assert ended.status == 2, ended.out
    host = socket.gethostname()
    every = [
        f"{name}=7 here, {name}=0 there" for name in ("checkpoint_every_steps", "keep_every_steps")
    ]
    saves = "; ".join([*every, "keep_best=False here, keep_best=True there"])
    words = (
        f"{host}: its keys differ from those of rank 0 on {host} (lr=0.5 here, lr=0.01 there; "
        f"data=1 here, data=0 there; {saves}): use the same keys and data on all ranks"
    )
    assert f"broken: {words}" in ended.lines


def test_a_suspended_job_does_not_count_as_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog is suspended with the job. The time of the suspension does not count, the time
    after it does.
    """
    now = 0.0
    polls = 0
    ends = []

    def sleep(seconds: float) -> None:
        nonlocal now, polls
        now = now + (1000.0 if polls == 3 else seconds)
        polls = polls + 1

    pulse = watchdog.Pulse()
    pulse.beat(watchdog.FORWARD, 5)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(watchdog.signal, "sigtimedwait", lambda numbers, seconds: sleep(seconds))
    monkeypatch.setattr(watchdog, "watch_memory", lambda *of: None)  # its thread would never end
    monkeypatch.setattr(watchdog, "_end", lambda *of: ends.append(polls))
    watchdog.watch(os.getppid(), pulse, 10.0)
    assert ends == [21]  # polls of 0.5 s, and the suspended one counts as that too


# A library that crashes when the interpreter takes itself apart, and what is done before that.
CRASHES = """
import atexit, os
from recipes.core.run import entry
entry.begin("toy")
import sys
class Library:
    abort = staticmethod(os.abort)
    def __del__(self):
        self.abort()
library = Library()
atexit.register(print, "at exit")
entry.end(0)
"""


@pytest.mark.parametrize(
    ("looked_into", "status"), [({}, 0), ({"LD_PRELOAD": ""}, -signal.SIGABRT)]
)
def test_a_crash_after_the_end_does_not_fail_the_run(
    looked_into: dict[str, str], status: int, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-c",
        CRASHES,
        "device=cpu",
        "max_steps=1",
        f"run_dir={tmp_path}/run",
    ]
    ended = helpers.run(command, environ=helpers.clean_environment(**looked_into)).expect(status)
    assert "at exit" in ended.lines


def test_idle_gpus_are_a_warning_each_time_that_the_limit_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of one rank takes two looks; loading data takes four, the evaluation as many."""
    from recipes.core.train import failure

    looks = iter(
        [
            *[(step, watchdog.DATA) for step in (0, 0, 1, 1)],
            *[(1, watchdog.DATA)] * 4,
            *[(1, watchdog.EVALUATION)] * 4,
            *[(1, watchdog.OUTSIDE)] * 6,
        ]
    )
    pulse = SimpleNamespace(read=lambda: (0, *next(looks)))
    times = itertools.count()
    clock = SimpleNamespace(now=lambda: next(times))
    warnings: list[str] = []
    run: Any = SimpleNamespace(
        world=SimpleNamespace(pulse=pulse, clock=clock),
        keys=SimpleNamespace(idle_warn_s=3.0),
        warn=warnings.append,
    )
    with pytest.raises(StopIteration):
        failure.watch_idle(run, cast(Any, SimpleNamespace(wait=lambda seconds: False)))
    line = "no GPU has computed for 3 s (idle_warn_s) at {}: many sites cancel such jobs"
    assert warnings[0] == line.format("step 2 (data)")
    assert line.format("step 1 (outside the steps)") in warnings
    assert len(warnings) == 2


@pytest.mark.parametrize(
    ("silent", "place", "restarts", "in_slurm", "attempt", "is_requeued"),
    [
        ({"node1"}, (1, 0), 1, True, "/run/attempts/0000", True),
        ({"node1"}, (2, 0), 1, True, "/run/attempts/0000", False),
        ({"node1"}, (1, 1), 1, True, "/run/attempts/0000", False),  # another rank of the node
        ({"node1"}, (1, 0), 0, True, "/run/attempts/0000", False),
        ({"node1"}, (1, 0), 1, False, "/run/attempts/0000", False),
        ({"node1"}, (1, 0), 1, True, "", False),  # no batch script that would begin again
        (set(), (1, 0), 1, True, "/run/attempts/0000", False),
        # this node's own network is the cause
        ({"node1", "node2"}, (1, 0), 1, True, "/run/attempts/0000", False),
    ],
)
def test_a_rank_of_the_second_node_requeues_a_job_whose_first_node_is_gone(
    monkeypatch: pytest.MonkeyPatch,
    silent: set[str],
    place: tuple[int, int],
    restarts: int,
    in_slurm: bool,
    attempt: str,
    is_requeued: bool,
) -> None:
    from recipes.core.train import failure

    nodes = ("node1", "node2", "node3")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("RECIPES_ATTEMPT", attempt)
    requeued: list[tuple[str, str]] = []
    monkeypatch.setattr(failure.client, "silent_nodes", silent.intersection)

    def requeue(environ: Mapping[str, str]) -> None:
        requeued.append((environ["SLURM_JOB_ID"], environ["SLURM_RESTART_COUNT"]))

    monkeypatch.setattr(failure.client, "requeue", requeue)
    node_rank, local_rank = place
    ranks = SimpleNamespace(
        node_rank=node_rank, local_rank=local_rank, in_slurm=in_slurm, nodes=nodes
    )
    run: Any = SimpleNamespace(
        world=SimpleNamespace(ranks=ranks), keys=SimpleNamespace(restarts=restarts)
    )
    failure._requeue_without_first_node(run)
    assert requeued == [("7", "2")] * is_requeued
