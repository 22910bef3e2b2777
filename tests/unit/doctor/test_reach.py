"""Probes of servers that answer or fail."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest

from recipes.core.doctor import reach


def served(answer: Callable[[socket.socket], object], connections: int = 1) -> int:
    """A port at which these connections get this answer."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            for _ in range(connections):
                connection, _ = listener.accept()
                with connection:
                    answer(connection)

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def test_a_node_probes_the_first_the_next_and_one_half_way_round() -> None:
    assert [reach.peers(node, 7) for node in (0, 1, 5)] == [[1, 3], [0, 2, 4], [0, 1, 6]]
    assert [reach.peers(node, 2) for node in (0, 1)] == [[1], [0]]
    assert reach.peers(0, 1) == []


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]
)
def test_a_node_that_answers(host: str) -> None:
    assert reach.probe(host, reach.serve(), 5) == ("", "")


def test_silent_connections_of_others_do_not_stop_it() -> None:
    port = reach.serve()
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(reach.MOST + 2):
            held.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 5)))
        assert held[1].recv(1) == b""  # the server has closed the oldest
        assert reach.probe("127.0.0.1", port, 5) == ("", "")
        held[-1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            held[-1].recv(1)


def test_a_port_that_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    assert reach.probe("127.0.0.1", port, 5) == ("connect", "Connection refused")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda connection: time.sleep(3), "timed out"),
        (lambda connection: connection.recv(9), "the connection was closed"),
    ],
)
def test_a_connection_without_an_answer(
    answer: Callable[[socket.socket], object], why: str
) -> None:
    begin = time.monotonic()
    assert reach.probe("127.0.0.1", served(answer), 0.5) == ("small", why)
    assert time.monotonic() - begin < 2


def test_lost_large_packets_are_distinguished_from_a_firewall() -> None:
    """As from a path with a smaller MTU: a byte passes, and of large messages nothing arrives."""

    def answer(connection: socket.socket) -> None:
        data = connection.recv(9)
        if len(data) == 1:
            connection.sendall(data)
        else:
            time.sleep(3)

    assert reach.probe("127.0.0.1", served(answer, 2), 0.5) == ("large", "timed out")
    assert reach.LARGE > 65_536  # more than any MTU


@pytest.mark.parametrize("count", [2, 3, 16, 255])
def test_a_node_probes_at_most_three_others_and_each_is_probed(count: int) -> None:
    probed = [reach.peers(node, count) for node in range(count)]
    assert max(map(len, probed)) <= 3
    assert all(node not in others for node, others in enumerate(probed))
    assert {peer for others in probed for peer in others} == set(range(count))
