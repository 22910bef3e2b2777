"""Collectives that do not match, a rendezvous that is disturbed, and a loss that is not finite on one rank."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import helpers
from tests.faults import conftest
from tests.faults.conftest import ENDLESS, Start

HOST = socket.gethostname()


def place(rank: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """The variables of one of two ranks."""
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    return {**own, "MASTER_ADDR": address, "MASTER_PORT": str(port)}


@pytest.mark.parametrize(
    "fault",
    [pytest.param("shape", marks=pytest.mark.fault(10)), pytest.param("operation", marks=pytest.mark.fault(11))],
)
def test_mismatched_collectives_are_reported_in_debug_mode(start: Start, tmp_path: Path, fault: str) -> None:
    environ = {"FAULT": fault, "FAULT_RANK": "all", "FAULT_AT": "8"}
    # A command, not a fork: torch reads the mode when it is imported.
    ended = helpers.finish(start(tmp_path, *ENDLESS, "debug=true", "timeout_s=60", before=("env",), **environ))
    assert ended.status == 1, ended.out
    status = helpers.read(tmp_path, "status")
    assert status["state"] == "failed"
    assert "mismatch between collectives" in status["reason"], status
    assert re.search(r"rank \d on ", status["reason"])
    names = {"shape": ["ALLREDUCE", "[3]", "[4]"], "operation": ["ALLREDUCE", "BROADCAST"]}[fault]
    assert all(name in ended.out for name in names), ended.out
    assert conftest.newest(tmp_path)


@pytest.mark.fault(13)
def test_a_bad_master_address_is_reported_in_time(start: Start, tmp_path: Path) -> None:
    words = ("timeout_s=3", "max_steps=1")
    process = start(tmp_path / "run", *words, ranks=0, **place(1, helpers.free_port(), "no-such.invalid"))
    ended = helpers.finish(process, 3 + 57)  # torch's import is in it
    assert ended.status == 3, ended.out
    [line] = [line for line in ended.lines if line.startswith("broken: ")]
    assert line.startswith(f"broken: {HOST}: ")
    assert "no-such.invalid" in line, line
    assert "Traceback" not in ended.out


@pytest.mark.fault(14)
def test_a_port_in_use_is_reported(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(tmp_path / "run", "timeout_s=60", "max_steps=1", ranks=0, **place(0, port))
        ended = helpers.finish(process, 55)
    assert ended.status == 3, ended.out
    [line] = [line for line in ended.lines if line.startswith("broken: ")]
    assert line == f"broken: {HOST}: port {port} is in use; set MASTER_PORT to another for all ranks"


@contextlib.contextmanager
def garbage(port: int) -> Iterator[list[int]]:
    """Sends what is no rendezvous to a port, again and again; gives how many bytes were taken, by connection."""
    taken: list[int] = []
    over = threading.Event()
    texts = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01" + os.urandom(512),
        os.urandom(4096),
        b"\0" * 64,
        b"",
    ]

    def send() -> None:
        idle = []
        while not over.is_set():
            for text in texts:
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(("127.0.0.1", port), timeout=2)
                    connection.sendall(text)
                    taken.append(len(text))
                    idle.append(connection)  # kept open, so that it is not noticed by its end
            over.wait(0.05)
        for connection in idle:
            connection.close()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        thread.join()


@pytest.mark.fault(15)
def test_garbage_on_the_rendezvous_port_does_no_harm(start: Start, tmp_path: Path) -> None:
    port, words = helpers.free_port(), ("max_steps=40", "checkpoint_every_steps=20")
    with garbage(port) as taken:
        ranks = [start(tmp_path, *words, ranks=0, **place(rank, port)) for rank in (0, 1)]
        for ended in [helpers.finish(rank) for rank in ranks]:
            assert ended.status == 0, ended.out
    assert len(taken) > 10
    assert conftest.steps(tmp_path) == list(range(1, 41))


@pytest.mark.fault(16)
def test_a_non_finite_loss_on_one_rank_ends_all_ranks_the_same_way(start: Start, tmp_path: Path) -> None:
    ended = helpers.finish(start(tmp_path, *ENDLESS, FAULT="nan", FAULT_AT="8"))
    assert ended.status == 1, ended.out
    assert "Traceback" not in ended.out
    status = helpers.read(tmp_path, "status")
    assert status["state"] == "failed"
    assert "the loss at step 8 is nan" in status["reason"], status
    records = [helpers.failure(tmp_path, r) for r in (0, 1)]
    assert [(r["kind"], "the loss at step 8" in r["error"]) for r in records] == [("error", True)] * 2
    assert max(conftest.steps(tmp_path)) <= 8
    assert all(row["loss"] == row["loss"] for row in helpers.rows(tmp_path))
    assert conftest.newest(tmp_path).name == "step-00000005.pt"
