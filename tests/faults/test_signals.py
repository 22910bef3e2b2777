"""Signals at bad moments: during a save, the start, an evaluation, while a rank waits for another; several of them; Ctrl-C."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.core.run import directory, signals
from recipes.core.train import checkpoint
from tests import helpers
from tests.faults import conftest
from tests.faults.conftest import ENDLESS, Recorded, Start
from tests.helpers import Ended

HOST = socket.gethostname()
SAVED_S = 5.0  # from the signal to a checkpoint on the disk, for a model as small as this
AT_ONCE_S = 5.0  # for what is only to be noted


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


def go(marks: Path) -> None:
    (marks / "go").touch()


def noted(run_dir: Path, name: str, ends: str = "saves at the next step") -> Callable[[], bool]:
    """Whether rank 0 has said that it has got a signal; on each node the first rank speaks."""
    return lambda: f"rank 0 on {HOST}: {name}: {ends}" in conftest.log(run_dir, 0)


def assert_saved(run_dir: Path, ended: Ended, attempt: int = 0, reason: str = "SIGTERM") -> int:
    """All ranks have stopped at one step, saved it once, and nothing is half done. Gives the step."""
    assert ended.status == 75, ended.out
    status = helpers.read(run_dir, "status")
    assert (status["state"], status["attempt"], status["reason"]) == ("preempted", attempt, reason), status
    newest = conftest.newest(run_dir)
    assert newest.name == f"step-{status['step']:08d}.pt"
    assert not [path.name for path in run_dir.rglob(".*")]
    assert len([line for line in ended.lines if line == f"checkpoint {newest}"]) == 1, ended.out
    assert "Traceback" not in ended.out
    steps = conftest.steps(run_dir, attempt)
    assert steps == sorted(set(steps))
    assert steps[-1] == status["step"]
    return int(status["step"])


def assert_resumes(start: Start, run_dir: Path, step: int, attempt: int = 1, ranks: int = 2) -> None:
    """A run that was saved at ``step`` ends as it should."""
    ended = helpers.finish(start(run_dir, *ENDLESS, f"max_steps={step + 3}", ranks=ranks))
    assert ended.status == 0, ended.out
    assert f"resumed from {run_dir}/checkpoints/step-{step:08d}.pt, step {step}" in ended.lines
    assert conftest.steps(run_dir, attempt) == [step + 1, step + 2, step + 3]


@pytest.mark.fault(23)
def test_a_signal_during_a_save_causes_one_more_save(start: Start, tmp_path: Path, marks: Path) -> None:
    run_dir = tmp_path / "run"
    environ = {"FAULT": "hold_save", "FAULT_AT": "2", "FAULT_RANK": "0", "FAULT_DIR": str(marks)}
    launcher = start(run_dir, *ENDLESS, **environ)
    conftest.wait_for_file(marks / "reached.0")  # the checkpoint of step 5 is on its way
    launcher.terminate()
    helpers.wait_until(noted(run_dir, "SIGTERM"), AT_ONCE_S + 5, "the signal's line")
    assert checkpoint.candidates(run_dir / "checkpoints") == []
    go(marks)
    ended = helpers.finish(launcher)
    step = assert_saved(run_dir, ended)
    assert (run_dir / "checkpoints" / "step-00000005.pt").exists()
    assert_resumes(start, run_dir, step)


@pytest.mark.fault(23)
def test_a_signal_during_the_last_save_changes_nothing(start: Start, tmp_path: Path, marks: Path) -> None:
    """The run has finished its steps, so it is done in spite of the signal."""
    run_dir = tmp_path / "run"
    environ = {"FAULT": "hold_save", "FAULT_AT": "2", "FAULT_RANK": "0", "FAULT_DIR": str(marks)}
    rank = start(run_dir, "max_steps=4", ranks=0, **environ)
    conftest.wait_for_file(marks / "reached.0")
    rank.terminate()
    helpers.wait_until(noted(run_dir, "SIGTERM"), AT_ONCE_S + 5, "the signal's line")
    go(marks)
    ended = helpers.finish(rank)
    assert ended.status == 0, ended.out
    assert helpers.read(run_dir, "status")["state"] == "done"
    assert conftest.newest(run_dir).name == "step-00000004.pt"
    assert "Traceback" not in ended.out


@pytest.mark.fault(23)
@pytest.mark.parametrize("where", ["start", "evaluate"])
def test_a_signal_during_the_start_saves_at_the_next_step_and_during_an_evaluation_at_the_current(
    start: Start, tmp_path: Path, marks: Path, where: str
) -> None:
    run_dir = tmp_path / "run"
    environ = {"FAULT": "wait", "FAULT_AT": where, "FAULT_RANK": "1", "FAULT_DIR": str(marks)}
    launcher = start(run_dir, *ENDLESS, **environ)
    conftest.wait_for_file(marks / "reached.1")
    launcher.terminate()
    helpers.wait_until(noted(run_dir, "SIGTERM"), AT_ONCE_S + 5, "the signal's line")
    go(marks)
    step = assert_saved(run_dir, helpers.finish(launcher))
    assert step == (1 if where == "start" else 10)  # an epoch has ten
    if where == "evaluate":
        assert "val_top1" not in helpers.rows(run_dir)[-1]  # not a part of it
    assert_resumes(start, run_dir, step)
    if where == "evaluate":  # it is done anew, before the next step
        assert 0.0 <= helpers.rows(run_dir)[9]["val_top1"] <= 1.0
        assert [row["step"] for row in helpers.rows(run_dir)] == list(range(1, 14))


@pytest.mark.fault(23)
@pytest.mark.parametrize("of", ["the last step", "evaluate=true"])
@pytest.mark.long
def test_a_stopped_evaluation_is_repeated(start: Start, tmp_path: Path, marks: Path, of: str) -> None:
    run_dir, words = tmp_path / "run", ("max_steps=4",)
    if of == "evaluate=true":
        first = helpers.finish(start(run_dir, *words, ranks=0))
        assert first.status == 0, first.out
        words = ("max_steps=4", "evaluate=true")
    environ = {"FAULT": "wait", "FAULT_AT": "evaluate", "FAULT_RANK": "0", "FAULT_DIR": str(marks)}
    process = start(run_dir, *words, ranks=0, **environ)
    conftest.wait_for_file(marks / "reached.0")
    process.terminate()
    folder = run_dir / directory.EVALUATION if of == "evaluate=true" else run_dir
    ends = "stops" if of == "evaluate=true" else "saves at the next step"
    helpers.wait_until(noted(folder, "SIGTERM", ends), AT_ONCE_S + 5, "the signal's line")
    go(marks)
    ended = helpers.finish(process)
    assert ended.status == 75, ended.out
    status = helpers.read(folder, "status")
    assert (status["state"], status["step"], status["reason"]) == ("preempted", 4, "SIGTERM")
    assert not (folder / "summary.json").exists()
    assert conftest.newest(run_dir).name == "step-00000004.pt"
    again = helpers.finish(start(run_dir, *words, ranks=0))
    assert again.status == 0, again.out
    assert helpers.read(folder, "status")["state"] == "done"
    assert helpers.read(folder, "summary")["val_samples"] == 320


@pytest.mark.fault(23)
@pytest.mark.parametrize("rank", [helpers.long(0), 1])
def test_a_signal_to_one_rank_interrupts_the_evaluation_of_all(start: Start, tmp_path: Path, rank: int) -> None:
    """For example, only rank 0 watches the time limit. An evaluation here takes 60 s."""
    launcher = start(tmp_path, *ENDLESS, "evaluate_s=60")
    conftest.wait_for_step(launcher, tmp_path, 9)
    helpers.wait_until(lambda: (tmp_path / "evaluating.1").exists(), 30, "the evaluation")
    begin = time.monotonic()
    os.kill(helpers.children(launcher.pid)[rank], signal.SIGTERM)
    ended = helpers.finish(launcher)
    assert time.monotonic() - begin < 20
    assert assert_saved(tmp_path, ended) == 10


@pytest.mark.fault(24)
def test_several_signals_cause_one_save(start: Start, tmp_path: Path, marks: Path) -> None:
    """As a batch system may send them to all ranks: USR2, then TERM, then TERM again, while the ranks are inside a step."""
    run_dir = tmp_path / "run"
    environ = {"FAULT": "wait", "FAULT_AT": "8", "FAULT_DIR": str(marks)}
    launcher = start(run_dir, *ENDLESS, **environ)
    conftest.wait_for_file(marks / "reached.1")
    pids = helpers.children(launcher.pid)
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM):
        for pid in pids:
            os.kill(pid, number)
        helpers.wait_until(noted(run_dir, "SIGUSR2"), AT_ONCE_S + 5, "the signal's line")
    go(marks)
    ended = helpers.finish(launcher)
    step = assert_saved(run_dir, ended, reason="SIGUSR2")
    assert step == 8  # the step in which rank 0 got the signal
    assert conftest.log(run_dir, 0).count("saves at the next step") == 1  # the first one's alone
    assert_resumes(start, run_dir, step)


@pytest.mark.fault(23)
@pytest.mark.parametrize("name", [pytest.param("SIGTERM", marks=pytest.mark.long), "SIGUSR2"])
def test_a_checkpoint_is_on_the_disk_soon_after_the_signal(
    start: Start, tmp_path: Path, name: str, record_property: Recorded
) -> None:
    launcher = start(tmp_path, "epochs=1000000")
    conftest.wait_for_step(launcher, tmp_path)
    begin = time.time()
    launcher.send_signal(signal.Signals[name])
    ended = helpers.finish(launcher)
    assert_saved(tmp_path, ended)
    assert conftest.newest(tmp_path).stat().st_mtime - begin < SAVED_S
    took_s = (tmp_path / "checkpoints" / "latest").stat().st_mtime - begin
    assert took_s < SAVED_S
    record_property(f"s from {name} to a checkpoint on the disk", round(took_s, 2))


@pytest.mark.fault(23)
def test_a_signal_blocked_by_the_parent_process_still_works(start: Start, tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        launcher = start(tmp_path, "epochs=1000000")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    conftest.wait_for_step(launcher, tmp_path)
    launcher.send_signal(signal.SIGUSR2)
    assert_saved(tmp_path, helpers.finish(launcher))


# Ctrl-C, from a terminal.


class Terminal:
    """A terminal with a process in its foreground."""

    def __init__(self, argv: list[str], cwd: Path, environ: dict[str, str]) -> None:
        self.said, self._own = "", -1
        pid, own = os.forkpty()
        if pid == 0:
            os.chdir(cwd)
            os.execve(argv[0], argv, environ)
        self.pid, self._own = pid, own
        self.status: int | None = None

    def press_ctrl_c(self) -> None:
        os.write(self._own, b"\x03")

    def hang_up(self) -> None:
        """As a connection that drops."""
        os.close(self._own)
        self._own = -1

    def read(self, timeout_s: float) -> None:
        """Takes what was said meanwhile."""
        if self._own < 0:
            time.sleep(timeout_s)
        elif select.select([self._own], [], [], timeout_s)[0]:
            try:
                self.said += os.read(self._own, 65536).decode(errors="replace")
            except OSError:  # nobody has it open any more
                time.sleep(0.02)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.read(0.05)
            assert time.monotonic() < deadline, f"{what}: {self.said}"

    def wait_for_steps(self, run_dir: Path) -> None:
        self.wait_until(lambda: max(conftest.steps(run_dir), default=0) >= 3 or self.ended(), helpers.START_S, "step 3")

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def close(self) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        if self._own >= 0:
            os.close(self._own)


COMMANDS = {
    "launcher": ["launch.py", "recipe=broken", "launcher=local", "ranks_per_node=2"],
    "one process": ["-m", "recipes.broken"],
}


@pytest.mark.fault(24)
@pytest.mark.parametrize(
    ("command", "how", "reason"),
    [
        pytest.param("launcher", "press_ctrl_c", "SIGTERM", marks=pytest.mark.long),  # the launcher's to its ranks
        ("one process", "press_ctrl_c", "SIGINT"),
        pytest.param("launcher", "hang_up", "SIGTERM", marks=pytest.mark.long),
        pytest.param("one process", "hang_up", "SIGHUP", marks=pytest.mark.long),
    ],
)
def test_ctrl_c_and_a_closed_terminal_save(repo: Path, tmp_path: Path, command: str, how: str, reason: str) -> None:
    argv = [sys.executable, *COMMANDS[command], "device=cpu", f"run_dir={tmp_path}", *ENDLESS]
    terminal = Terminal(argv, repo, helpers.clean_environment())
    try:
        terminal.wait_for_steps(tmp_path)
        getattr(terminal, how)()
        terminal.wait_until(terminal.ended, 60, "its end")
    finally:
        terminal.close()
    assert terminal.status == 75, terminal.said
    status = helpers.read(tmp_path, "status")
    assert (status["state"], status["reason"]) == ("preempted", reason)
    assert conftest.newest(tmp_path).name == f"step-{status['step']:08d}.pt"
    assert "Traceback" not in terminal.said + conftest.log(tmp_path, 0)


@pytest.mark.fault(24)
@pytest.mark.parametrize("command", [pytest.param("launcher", marks=pytest.mark.long), "one process"])
def test_ctrl_c_twice_does_not_wait(repo: Path, tmp_path: Path, marks: Path, command: str) -> None:
    run_dir = tmp_path / "run"
    argv = [sys.executable, *COMMANDS[command], "device=cpu", f"run_dir={run_dir}", *ENDLESS]
    fault = {"FAULT": "hang", "FAULT_RANK": "0", "FAULT_AT": "8", "FAULT_DIR": str(marks)}
    terminal = Terminal(argv, repo, helpers.clean_environment(**fault))
    try:
        terminal.wait_until(lambda: (marks / "reached.0").exists() or terminal.ended(), helpers.START_S, "step 8")
        pids = helpers.children(terminal.pid) if command == "launcher" else [terminal.pid]
        terminal.press_ctrl_c()
        terminal.wait_until(noted(run_dir, "SIGTERM" if command == "launcher" else "SIGINT"), 30, "the first is noted")
        time.sleep(2 * signals.TOGETHER_S)
        assert not terminal.ended()
        second = time.monotonic()
        terminal.press_ctrl_c()
        terminal.wait_until(terminal.ended, 30, "its end")
        assert time.monotonic() - second < 15
        helpers.wait_for_the_end_of(pids, 15)
    finally:
        terminal.close()
    assert terminal.status not in (0, 75), terminal.said
    assert terminal.said, "nothing was read from the terminal"
    assert helpers.read(run_dir, "status")["state"] == "failed"
    assert conftest.newest(run_dir).name == "step-00000005.pt"
    assert "Traceback" not in terminal.said


@pytest.mark.fault(12)
def test_ctrl_c_ends_a_rank_that_waits_for_others(repo: Path, tmp_path: Path) -> None:
    """The other rank is never started. The rank waits inside torch, where no Python handler runs."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    port = helpers.free_port()
    environ = helpers.clean_environment(**place, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
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
