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


# Plain torch on two ranks: the same mistakes without debug=true.
@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [pytest.param("shape", marks=pytest.mark.fault(10)), pytest.param("operation", marks=pytest.mark.fault(11))],
)
def test_mismatched_collectives_are_reported_in_debug_mode(start: Start, tmp_path: Path, fault: str) -> None:
    environ = {"FAULT": fault, "FAULT_RANK": "all", "FAULT_AT": "8"}
    # A command, not a fork: torch reads the mode when it is imported.
    ended = helpers.finish(start(tmp_path, *ENDLESS, "debug=true", "timeout_s=60", before=("env",), **environ))
    begun = (
        (tmp_path / "attempts/0000/begun.json").stat().st_mtime
    )  # a start alone can take half a minute on a busy machine
    assert conftest.failure_time(tmp_path, 0) - begun < 45
    assert ended.status == 1, ended.out
    status = helpers.read(tmp_path, "status")
    assert status["state"] == "failed"
    assert "mismatch between collectives" in status["reason"], status
    assert re.search(r"rank \d on ", status["reason"])
    names = {"shape": ["ALLREDUCE", "[3]", "[4]"], "operation": ["ALLREDUCE", "BROADCAST"]}[fault]
    assert all(name in ended.out for name in names), ended.out
    assert conftest.newest(tmp_path)


@pytest.mark.fault(13)
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.long
def test_a_bad_master_address_is_reported_in_time(start: Start, tmp_path: Path, rank: str) -> None:
    port = helpers.free_port()
    place = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
    process = start(
        tmp_path / "run", "timeout_s=3", "max_steps=1", ranks=0, MASTER_ADDR="no-such.invalid", MASTER_PORT=str(port), **place
    )  # fmt: skip
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
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        process = start(
            tmp_path / "run", "timeout_s=60", "max_steps=1", ranks=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **place
        )  # fmt: skip
        ended = helpers.finish(process, 55)
    assert ended.status == 3, ended.out
    [line] = [line for line in ended.lines if line.startswith("broken: ")]
    assert line == f"broken: {HOST}: port {port} is in use; set MASTER_PORT to another for all ranks"


@pytest.mark.fault(14)
@pytest.mark.long
def test_runs_on_one_machine_never_choose_the_same_port(start: Start, tmp_path: Path) -> None:
    """Without master=, the launcher has the port before any rank begins."""
    # Commands, not forks: a fork's environment is not in /proc.
    runs = [start(tmp_path / str(i), "max_steps=3", "epochs=1000", before=("env",)) for i in range(3)]
    ports = set()
    for run in runs:
        helpers.wait_until(lambda: helpers.children(run.pid), helpers.START_S, "ranks")  # noqa: B023
        ports.add(port_of(run.pid))
    for run in runs:
        ended = helpers.finish(run)
        assert ended.status == 0, ended.out
    assert len(ports) == 3


def port_of(launcher: int) -> int:
    """The port at which a launcher's ranks meet, from the environment of the first."""
    environ: dict[str, str] = {}

    def there() -> bool:  # before a child has become the rank it has the launcher's environment
        try:
            text = Path(f"/proc/{helpers.children(launcher)[0]}/environ").read_text()
        except OSError:  # that process has ended: it was not the rank
            return False
        environ.update(entry.partition("=")[::2] for entry in text.split("\0") if "=" in entry)
        return "MASTER_PORT" in environ

    helpers.wait_until(there, helpers.START_S, "the rank's environment")
    return int(environ["MASTER_PORT"])


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
@pytest.mark.long
def test_garbage_on_the_rendezvous_port_does_no_harm(start: Start, tmp_path: Path) -> None:
    launcher = start(tmp_path, "max_steps=40", "checkpoint_every_steps=20", before=("env",))
    helpers.wait_until(lambda: helpers.children(launcher.pid), helpers.START_S, "ranks")
    with garbage(port_of(launcher.pid)) as taken:
        ended = helpers.finish(launcher)
    assert ended.status == 0, ended.out
    assert len(taken) > 10
    assert conftest.steps(tmp_path) == list(range(1, 41))
    assert helpers.read(tmp_path, "status")["state"] == "done"


@pytest.mark.fault(16)
@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_a_non_finite_loss_on_one_rank_ends_all_ranks_the_same_way(start: Start, tmp_path: Path, rank: str) -> None:
    ended = helpers.finish(start(tmp_path, *ENDLESS, FAULT="nan", FAULT_RANK=rank, FAULT_AT="8"))
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
