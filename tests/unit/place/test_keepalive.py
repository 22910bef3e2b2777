"""Connections between nodes, on two network namespaces: which end is noticed, and which is a lost
node.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from recipes.core.place import keepalive
from recipes.core.place.keepalive import NodeLinks
from tests import helpers, namespaces

ADDRESS = "10.84.0.1"
# Prints the port, and then the ranks that are lost, whenever that changes.
RANK_0 = """
import time
from recipes.core.place import keepalive
keepalive.IDLE_S = keepalive.PROBE_S = 1
keepalive.PROBES = 2
links = keepalive.NodeLinks()
print(links.listen(3), flush=True)
known = set()
while True:
    time.sleep(0.05)
    if known != links.lost:
        known = set(links.lost)
        print(*known, flush=True)
"""
OTHER = RANK_0.replace("print(links.listen(3), flush=True)", f"links.connect('{ADDRESS}', PORT, 2)")


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    helpers.need(namespaces.missing())
    with namespaces.joined(
        (f"{ADDRESS}/24", "fd84::1/64"), ("10.84.0.2/24", "fd84::2/64")
    ) as names:
        yield names


@pytest.fixture
def ends(machines: tuple[str, str]) -> Iterator[tuple[subprocess.Popen[str], ...]]:
    """Rank 0, and rank 2 on the other machine, which are connected."""
    first = start(machines[0], RANK_0)
    assert first.stdout
    port = int(first.stdout.readline())
    second = start(machines[1], OTHER.replace("PORT", str(port)))
    helpers.wait_until(lambda: connections(machines[0]) or None, 20, "the connection")
    yield first, second
    for process in (first, second):
        process.kill()
        process.wait()


def start(machine: str, code: str) -> subprocess.Popen[str]:
    command = ["nsenter", f"--net=/run/netns/{machine}", sys.executable, "-c", code]
    return subprocess.Popen(command, cwd=helpers.ROOT, stdout=subprocess.PIPE, text=True)


def connections(machine: str) -> str:
    """The connections of a machine that the kernel keeps alive."""
    words = ["ip", "netns", "exec", machine, "ss", "-Htno", "state", "established"]
    listed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return "\n".join(line for line in listed.splitlines() if "keepalive" in line)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def test_both_ends_notice_a_node_without_network_and_its_return(
    machines: tuple[str, str], ends: tuple[subprocess.Popen[str], ...]
) -> None:
    namespaces.ip("-n", machines[1], "link", "set", "eth0", "down")
    assert read_line(ends[0]) == "2"
    assert read_line(ends[1]) == "0"
    namespaces.ip("-n", machines[1], "link", "set", "eth0", "up")
    assert read_line(ends[0]) == ""
    assert read_line(ends[1]) == ""


def test_a_rank_that_is_stopped_or_ends_is_not_a_lost_node(
    machines: tuple[str, str], ends: tuple[subprocess.Popen[str], ...]
) -> None:
    first, second = ends
    second.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(5)  # longer than a lost node takes
    assert connections(machines[0])
    second.send_signal(signal.SIGKILL)
    helpers.wait_until(lambda: not connections(machines[0]) or None, 20, "its end")
    first.kill()
    assert read_line(first) == ""


def test_strangers_are_ignored() -> None:
    links = NodeLinks()
    port = links.listen(3)
    for text in (b"7", b"3", b"0", b"-1", b"rank", b"1" * 16):
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            stranger.sendall(text)
            assert stranger.recv(1) == b""
    rank = socket.create_connection(("127.0.0.1", port), 5)
    with rank:
        rank.sendall(b"2")
        rank.settimeout(0.5)
        with pytest.raises(TimeoutError):
            rank.recv(1)
    assert links.lost == set()


def test_strangers_take_no_place_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "PROBE_S", 1)
    port = NodeLinks().listen(2)

    def connected() -> socket.socket:
        return stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))

    with contextlib.ExitStack() as stack:
        strangers = [connected() for _ in range(keepalive.UNKNOWN + 1)]
        rank = connected()
        rank.sendall(b"1")
        assert strangers[0].recv(1) == b""
        rank.settimeout(0.5)
        with pytest.raises(TimeoutError):
            rank.recv(1)

        NodeLinks().connect("127.0.0.1", port, 1)
        rank.settimeout(5)
        assert rank.recv(1) == b""
        stranger = connected()
        stranger.sendall(b"1")  # takes the rank, until its node connects again
        assert stranger.recv(1) == b""
