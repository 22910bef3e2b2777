"""The processes of this machine as /proc shows them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from recipes.core.place import proctree
from tests import helpers


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A child of a thread of this process that still runs."""
    children: list[subprocess.Popen[bytes]] = []
    started = threading.Event()
    ends = threading.Event()

    def start() -> None:
        children.append(subprocess.Popen(["sleep", "60"]))
        started.set()
        ends.wait()

    thread = threading.Thread(target=start)
    thread.start()
    started.wait()
    yield children[0]
    children[0].kill()
    children[0].wait()
    ends.set()
    thread.join()


def test_the_children_of_each_thread_are_found(child: subprocess.Popen[bytes]) -> None:
    assert child.pid in proctree.children(os.getpid())
    assert child.pid in set(proctree.descendants(os.getppid()))


def test_a_process_that_has_ended_is_none(child: subprocess.Popen[bytes]) -> None:
    helpers.wait_until(lambda: proctree.read(child.pid).command == ("sleep", "60"), 10, "the child")
    child.kill()
    helpers.wait_until(lambda: not helpers.alive(child.pid), 10, "the end of the child")
    assert proctree.read(child.pid) is None  # a zombie
    child.wait()
    assert proctree.read(child.pid) is None
    assert proctree.children(child.pid) == []


def test_signals_that_glibc_blocks_for_a_moment_count_as_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It blocks all of them while it starts a thread. A program blocks some, as the worker of a
    DataLoader does.
    """
    all_blocked = "fffffffe7ffbfeff"
    one_blocked = "0000000000000200"
    texts = iter(
        [
            f"SigBlk:\t{blocked}\nSigCgt:\t0000000000004a00\n"
            for blocked in (all_blocked, one_blocked)
        ]
    )
    monkeypatch.setattr(proctree.Path, "read_text", lambda path: next(texts))
    assert proctree.read(os.getpid()).caught == {12, 15}


def test_a_process_that_blocks_all_signals_catches_none(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "SigBlk:\tfffffffe7ffbfeff\nSigCgt:\t0000000000004a00\n"
    monkeypatch.setattr(proctree.Path, "read_text", lambda path: text)
    assert proctree.read(os.getpid()).caught == set()


def test_orphans_of_a_program_are_adopted_and_reaped() -> None:
    program = """
import os, subprocess, time
from recipes.core.place import proctree
proctree.adopt_orphans()
kept = subprocess.Popen(["true"])
pid = int(subprocess.check_output(["bash", "-c", "sleep 0.1 >/dev/null & echo $!"]))
assert pid in proctree.children(os.getpid())
while pid in proctree.children(os.getpid()):
    proctree.reap({kept.pid})
print(kept.pid in proctree.children(os.getpid()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=helpers.ROOT, capture_output=True, text=True
    )
    assert done.stdout == "True\n"
    assert done.stderr == ""
