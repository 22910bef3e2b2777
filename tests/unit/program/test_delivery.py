"""Which processes of a program get the signal that asks it to stop. The programs are trees of real
processes.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipes.core.place.proctree import Process
from recipes.core.program import delivery, launchers
from recipes.core.program.delivery import Target
from tests import helpers

USR1 = signal.SIGUSR1
USR2 = signal.SIGUSR2
TERM = signal.SIGTERM
# Catches the signals of its second argument, blocks those of the third, writes its name and process
# ID, and starts the commands of the fourth.
NODE = """
import json, os, signal, subprocess, sys
from signal import SIGTERM as TERM, SIGUSR1 as USR1, SIGUSR2 as USR2
name, caught, blocked, children = sys.argv[1:]
for number in eval(caught):
    signal.signal(number, lambda *received: None)
signal.pthread_sigmask(signal.SIG_BLOCK, eval(blocked))
os.write(1, f"{name} {os.getpid()}\\n".encode())
for command in json.loads(children):
    subprocess.Popen(command)
while True:
    signal.pause()
"""
# Starts a process that catches USR2. The arguments: the start method, and whether the process is
# daemonic.
STARTS = """
import multiprocessing, os, signal, sys

def work():
    signal.signal(signal.SIGUSR2, lambda *received: None)
    os.write(1, f"child {os.getpid()}\\n".encode())
    while True:
        signal.pause()

if __name__ == "__main__":
    os.write(1, f"main {os.getpid()}\\n".encode())
    method, kind = sys.argv[1:]
    multiprocessing.get_context(method).Process(target=work, daemon=kind == "daemon").start()
    while True:
        signal.pause()
"""
Start = Callable[..., dict[str, int]]
Node = Callable[..., list[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a command. Returns the process IDs by the names that ``count`` processes write."""
    programs = []

    def start(command: list[str], count: int, hook: bool = True) -> dict[str, int]:
        environ = {**os.environ, "PYTHONPATH": ""}
        environ = launchers.with_hook(environ) if hook else environ
        program = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        programs.append(program)
        lines = [program.stdout.readline().split() for _ in range(count)]
        return {"root": program.pid, **{name: int(pid) for name, pid in lines}}

    yield start
    for program in programs:
        delivery.end(program.pid, signal.SIGKILL)
        program.communicate()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """The command of a Python process that starts others. caught, blocked: such as "USR1, TERM"."""

    def node(
        name: str,
        caught: str = "",
        *children: list[str],
        blocked: str = "",
        file: str = "train.py",
        options: str = "",
    ) -> list[str]:
        (tmp_path / file).write_text(NODE)
        words = [name, f"[{caught}]", f"[{blocked}]", json.dumps(children)]
        return [sys.executable, *options.split(), str(tmp_path / file), *words]

    return node


def shell(*children: list[str], trap: str) -> list[str]:
    """The command of a shell that catches a signal, writes its name and starts programs."""
    line = f"trap : {trap}; echo shell $$; " + "".join(
        f"{shlex.join(child)} & " for child in children
    )
    return ["bash", "-c", line + "while :; do wait; sleep 0.1; done"]


@pytest.mark.parametrize(
    ("caught", "blocked", "number"),
    [
        ("USR1, TERM", "", USR1),
        ("TERM, USR2, USR1", "", USR2),
        ("USR2, TERM", "USR2", TERM),
        ("TERM", "", TERM),
        ("", "", None),
        ("USR1", "USR1, TERM", None),
    ],
)
def test_a_program_gets_the_preferred_signal_of_those_that_it_catches(
    start: Start, node: Node, caught: str, blocked: str, number: signal.Signals | None
) -> None:
    pids = start(node("a", caught, blocked=blocked), 1)
    assert delivery.targets(pids["a"]) == ([Target(pids["a"], number, True)] if number else [])


def test_stop_signal_may_name_a_signal_that_is_not_the_preferred_one(
    start: Start, node: Node
) -> None:
    pids = start(node("a", "USR2, TERM"), 1)
    assert delivery.targets(pids["a"], (TERM,)) == [Target(pids["a"], TERM, True)]
    assert delivery.targets(pids["a"], (USR1,)) == []


def test_shells_and_launchers_are_skipped_if_a_program_in_python_catches_a_signal(
    start: Start, node: Node
) -> None:
    """torchrun catches SIGTERM, and ends its ranks. Each rank gets the signal that it catches."""
    ranks = node("rank0", "USR1"), node("rank1", "TERM")
    launcher = node("torchrun", "USR2, TERM", *ranks, file="torchrun")
    pids = start(shell(shell(launcher, trap="USR1"), trap="USR2"), 5)
    expected = {Target(pids["rank0"], USR1, True), Target(pids["rank1"], TERM, True)}
    assert set(delivery.targets(pids["root"])) == expected
    assert delivery.rank_launcher(pids["root"]) == "torchrun"


def test_a_shell_gets_its_signal_if_no_program_in_python_catches_one(
    start: Start, node: Node
) -> None:
    pids = start(shell(node("conda", "TERM", node("a"), file="conda"), trap="USR1"), 3)
    assert delivery.targets(pids["root"]) == [Target(pids["shell"], USR1, True)]
    assert delivery.rank_launcher(pids["root"]) == ""  # conda starts one program


def test_a_program_below_a_process_whose_executable_is_hidden_is_found(
    start: Start, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executable of a process with the setuid bit, such as that of Apptainer, is hidden from
    its user.
    """
    pids = start(shell(node("a", "TERM"), trap="USR1"), 2)
    readlink = os.readlink

    def hidden(path: Path) -> str:
        if f"/{pids['shell']}/" in str(path):
            raise PermissionError
        return readlink(path)

    monkeypatch.setattr(os, "readlink", hidden)
    assert delivery.targets(pids["root"]) == [Target(pids["a"], TERM, True)]


def test_only_the_topmost_program_gets_a_signal(start: Start, node: Node) -> None:
    pids = start(node("main", "TERM", node("child", "USR2", file="child.py")), 2)
    assert delivery.targets(pids["root"]) == [Target(pids["main"], TERM, True)]


def test_of_the_processes_that_a_program_starts_only_those_in_python_count(
    start: Start, node: Node
) -> None:
    pids = start(node("main", "", shell(trap="USR2"), node("rank", "TERM", file="rank.py")), 3)
    assert delivery.targets(pids["root"]) == [Target(pids["rank"], TERM, True)]
    os.kill(pids["rank"], signal.SIGKILL)
    helpers.wait_until(lambda: not helpers.alive(pids["rank"]), 10, "the end of the rank")
    assert delivery.targets(pids["root"]) == []


def test_a_program_that_a_program_starts_through_a_shell_counts(start: Start, node: Node) -> None:
    pids = start(node("main", "", shell(node("inner", "TERM", file="inner.py"), trap="WINCH")), 3)
    assert delivery.targets(pids["root"]) == [Target(pids["inner"], TERM, True)]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("kind", ["daemon", "rank"])
def test_ranks_of_multiprocessing_count_and_workers_do_not(
    start: Start, tmp_path: Path, method: str, kind: str
) -> None:
    (tmp_path / "main.py").write_text(STARTS)
    pids = start([sys.executable, str(tmp_path / "main.py"), method, kind], 2)
    expected = [] if kind == "daemon" else [Target(pids["child"], USR2, True)]
    assert delivery.targets(pids["root"]) == expected


def test_a_forked_worker_does_not_count_without_the_hook(start: Start, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(STARTS)
    pids = start([sys.executable, str(tmp_path / "main.py"), "fork", "daemon"], 2, hook=False)
    assert delivery.targets(pids["root"]) == []


@pytest.mark.parametrize(
    ("options", "protects"),
    [
        ("-I", False),
        ("-E", False),
        ("-S", False),
        ("-s -u", True),
    ],
)
def test_a_program_that_python_isolates_does_not_protect_its_workers(
    start: Start, node: Node, options: str, protects: bool
) -> None:
    pids = start(node("a", "USR1", options=options), 1)
    assert delivery.targets(pids["a"]) == [Target(pids["a"], USR1, protects)]


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("python -u /env/bin/torchrun --nproc-per-node 2 a.py", "torchrun"),
        ("python -um accelerate.commands.launch a.py", "accelerate.commands.launch"),
        ("python -X faulthandler -W ignore /env/bin/deepspeed a.py", "deepspeed"),
        ("python -Wignore -m recipes.script program=a.py", "recipes.script"),
        ("python a.py torchrun", None),
        ("python -m torchrun.x torchrun", None),
        ("python -c 'import x' torchrun", None),
        ("python", None),
    ],
)
def test_a_launcher_is_known_by_its_file_or_module(command: str, launcher: str | None) -> None:
    process = Process(1, tuple(shlex.split(command)), "python3.12", frozenset())
    assert delivery.launched_by(process) == launcher


def test_a_signal_to_a_process_that_has_ended_is_no_error() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    delivery.end(process.pid, TERM)


def test_the_end_of_a_program_reaches_its_whole_tree(start: Start, node: Node) -> None:
    pids = start(shell(node("child", "TERM", node("grandchild")), trap="TERM"), 3)
    delivery.end(pids["root"], signal.SIGKILL)
    helpers.wait_for_the_end_of(pids.values(), 10)
