"""The start-up hook of a program's processes: DataLoader workers outlive signals to all processes,
and a site's own hook is loaded.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.core.place import proctree
from recipes.core.program import launchers

STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Starts a process, which writes its ID. A line on stdin ends a daemonic one. Writes its exit code.
PARENT = """
import multiprocessing, os, sys, time

def work():
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(60)

if __name__ == "__main__":
    method, kind = sys.argv[1:]
    process = multiprocessing.get_context(method).Process(target=work, daemon=kind == "daemon")
    process.start()
    sys.stdin.readline()
    if kind == "daemon":
        process.terminate()
    process.join(20)
    print(process.exitcode)
"""
# A daemonic process starts a program, and ends it. The main process does the same.
STARTS = """
import multiprocessing, subprocess

def work():
    program = subprocess.Popen(["sleep", "60"])
    program.terminate()
    print(program.wait(10), flush=True)

process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
process.start()
process.join()
work()
"""
# Ends in the middle of an epoch, while the workers of its DataLoader run.
LOADER = """
import sys
from torch.utils.data import DataLoader

if __name__ == "__main__":
    batches = iter(DataLoader(range(1000), batch_size=4, num_workers=2, persistent_workers=True))
    print(next(batches).tolist(), flush=True)
    sys.exit(3)
"""
# Prints the folder of the sitecustomize that was loaded last, and whether sys.path has the folder
# of the hook.
FACTS = """
import os, sitecustomize, sys
has_hook = any(os.path.exists(f"{folder}/bin/scontrol") for folder in sys.path)
print(os.path.dirname(sitecustomize.__file__), has_hook)
"""


def start(
    folder: Path, program: str, *args: str, options: str = "", others: str = ""
) -> subprocess.Popen[str]:
    """Starts a program in Python with the hook. options: of Python. others: in PYTHONPATH."""
    (folder / "program.py").write_text(program)
    return subprocess.Popen(
        [sys.executable, *options.split(), str(folder / "program.py"), *args],
        env=launchers.with_hook({**os.environ, "PYTHONPATH": others}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    """The output of a program, after a line on its stdin."""
    return process.communicate("\n", timeout=60)[0]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("daemon", signal.SIGKILL),
        ("rank", signal.SIGUSR2),
    ],
)
def test_only_daemonic_processes_outlive_a_signal_to_all(
    tmp_path: Path, method: str, kind: str, ends: signal.Signals
) -> None:
    """``terminate()`` still ends them, although they block SIGTERM."""
    parent = start(tmp_path, PARENT, method, kind)
    child = int(parent.stdout.readline())
    for number in STOPS if kind == "daemon" else (signal.SIGUSR2,):
        os.kill(child, number)
    assert output(parent) == f"{-ends}\n"


def test_a_program_that_a_daemonic_process_starts_can_be_terminated(tmp_path: Path) -> None:
    """It inherits the blocked signals."""
    assert output(start(tmp_path, STARTS)) == f"{-signal.SIGKILL}\n{-signal.SIGTERM}\n"


def test_a_fork_server_and_its_tracker_outlive_a_signal_to_all(tmp_path: Path) -> None:
    parent = start(tmp_path, PARENT, "forkserver", "rank")
    rank = int(parent.stdout.readline())
    others = set(proctree.descendants(parent.pid)) - {parent.pid, rank}
    assert len(others) == 2
    for pid in others:
        status = Path(f"/proc/{pid}/status").read_text()
        protected = proctree.signal_set(status, "SigBlk") | proctree.signal_set(status, "SigIgn")
        assert set(STOPS) <= protected
    os.kill(rank, signal.SIGUSR1)
    assert output(parent) == f"{-signal.SIGUSR1}\n"


def test_the_next_sitecustomize_is_loaded_and_the_hook_leaves_sys_path(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(f"print('site: {name}')")
    others = os.pathsep.join([str(tmp_path / "first"), str(tmp_path / "second")])
    assert output(start(tmp_path, FACTS, others=others)) == f"site: first\n{tmp_path}/first False\n"


def test_a_program_without_another_sitecustomize_starts_without_output(tmp_path: Path) -> None:
    assert output(start(tmp_path, "print('started')")) == "started\n"


def test_a_program_that_ends_in_the_middle_of_an_epoch_reports_no_killed_worker(
    tmp_path: Path,
) -> None:
    """torch's handler of SIGCHLD would print an error, since workers are ended with SIGKILL."""
    process = start(tmp_path, LOADER)
    assert output(process) == "[0, 1, 2, 3]\n"
    assert process.returncode == 3
