"""Collectives that do not match, a rendezvous that is disturbed, and a loss that is not finite on
one rank.
"""

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


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("shape", marks=pytest.mark.fault(10)),
        pytest.param("operation", marks=[pytest.mark.fault(11), pytest.mark.long]),
    ],
)
def test_mismatched_collectives_are_reported_in_debug_mode(
    start: Start, tmp_path: Path, fault: str
) -> None:
    environ = {"FAULT": fault, "FAULT_RANK": "all", "FAULT_AT": "8"}
    # A command, not a fork: torch reads the mode when it is imported.
    ended = helpers.finish(
        start(tmp_path, *ENDLESS, "debug=true", "timeout_s=60", before=("env",), **environ)
    )
    assert ended.status == 1, ended.out
    status = helpers.read(tmp_path, "status")
    assert status["state"] == "failed"
    assert "mismatch between collectives" in status["reason"], status
    assert re.search(r"rank \d on ", status["reason"])
    names = {"shape": ["ALLREDUCE", "[3]", "[4]"], "operation": ["ALLREDUCE", "BROADCAST"]}[fault]
    for name in names:
        assert name in ended.out, ended.out
    assert conftest.newest(tmp_path)


@pytest.mark.parametrize(
    ("rank", "address", "is_taken", "expected"),
    [
        pytest.param(
            0,
            "127.0.0.1",
            False,
            r"rank 1 of 2 did not connect within 3 s \(timeout_s\)",
            marks=pytest.mark.fault(12),
        ),
        pytest.param(
            1,
            "127.0.0.1",
            False,
            r"rank 1 cannot reach rank 0 at 127\.0\.0\.1:\d+ \(",
            marks=pytest.mark.fault(12),
        ),
        pytest.param(
            1, "no-such.invalid", False, r".*no-such\.invalid", marks=pytest.mark.fault(13)
        ),
        pytest.param(
            0,
            "127.0.0.1",
            True,
            r"port \d+ is in use; set MASTER_PORT to another for all ranks$",
            marks=pytest.mark.fault(14),
        ),
    ],
)
def test_a_rendezvous_that_is_impossible_is_reported_in_time(
    start: Start, tmp_path: Path, rank: int, address: str, is_taken: bool, expected: str
) -> None:
    """The other rank never starts; or the address is invalid; or the port is taken."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1] if is_taken else helpers.free_port()
        place = helpers.place(rank, 2, port, address)
        ended = helpers.finish(
            start(tmp_path / "run", "timeout_s=3", "max_steps=1", ranks=0, **place), 60
        )
    assert ended.status == 3, ended.out
    [line] = [line for line in ended.lines if line.startswith("broken: ")]
    assert re.match(f"broken: {re.escape(HOST)}: {expected}", line), line
    assert "Traceback" not in ended.out
    assert not (tmp_path / "run").exists()


@contextlib.contextmanager
def garbage(port: int) -> Iterator[list[int]]:
    """Sends what is no rendezvous to a port, again and again; gives how many bytes were taken, by
    connection.
    """
    taken: list[int] = []
    over = threading.Event()
    tls = b"\x16\x03\x01\x02\x00\x01" + os.urandom(512)
    texts = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", tls, os.urandom(4096), b"\0" * 64, b""]

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
    port = helpers.free_port()
    words = ("max_steps=40", "checkpoint_every_steps=20")
    with garbage(port) as taken:
        ranks = [
            start(tmp_path, *words, ranks=0, **helpers.place(rank, 2, port)) for rank in (0, 1)
        ]
        for rank in ranks:
            helpers.finish(rank).expect(0)
    assert len(taken) > 10
    assert conftest.steps(tmp_path) == list(range(1, 41))


@pytest.mark.fault(16)
def test_a_non_finite_loss_on_one_rank_ends_all_ranks_the_same_way(
    start: Start, tmp_path: Path
) -> None:
    ended = helpers.finish(start(tmp_path, *ENDLESS, FAULT="nan", FAULT_AT="8")).expect(1)
    assert "Traceback" not in ended.out
    status = helpers.read(tmp_path, "status")
    assert status["state"] == "failed"
    assert "the loss at step 8 is nan" in status["reason"], status
    records = [helpers.failure(tmp_path, r) for r in (0, 1)]
    assert [(r["kind"], "the loss at step 8" in r["error"]) for r in records] == [
        ("run-error", True)
    ] * 2
    assert max(conftest.steps(tmp_path)) <= 8
    for row in helpers.rows(tmp_path):
        assert row["loss"] == row["loss"]
    assert conftest.newest(tmp_path).name == "step-00000005.pt"
