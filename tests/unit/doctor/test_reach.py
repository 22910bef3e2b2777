"""Probes of servers that answer, fail, or belong to another program."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from recipes.core.doctor import reach
from recipes.core.doctor.reach import Server


@pytest.fixture
def server() -> Server:
    return Server(3, "this run")


def served(answer: Callable[[socket.socket], None]) -> int:
    """A port of somebody who speaks in another way."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with listener, connection:
            answer(connection)

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def test_a_node_that_answers(server: Server) -> None:
    port, master = server.listen(), server.listen()
    link = reach.probe(3, "localhost", port, "this run", 5, master)
    assert link.fault == ""
    assert link.clock_s is not None
    assert abs(link.clock_s) < 0.5


def test_both_families(server: Server) -> None:
    port = server.listen()
    for address in ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]:
        assert reach.probe(3, address, port, "this run", 5).fault == ""


def test_a_master_port_that_is_closed(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()[1]
    link = reach.probe(3, "127.0.0.1", server.listen(), "this run", 5, closed)
    assert (link.fault, link.why) == ("master", "Connection refused")


def test_a_closed_port_is_a_failed_connection(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()[1]
    link = reach.probe(3, "127.0.0.1", closed, "this run", 5)
    assert (link.fault, link.why) == ("connect", "Connection refused")
    assert reach.probe(3, "no-such-host.invalid", 1, "this run", 20).fault == "name"
    assert reach.probe(3, "a" * 300, 1, "this run", 5).fault == "name"


def test_another_node_or_another_run_answers(server: Server) -> None:
    port = server.listen()
    assert reach.probe(4, "127.0.0.1", port, "this run", 5).fault == "foreign"
    assert reach.probe(3, "127.0.0.1", port, "that run", 5).fault == "foreign"


def drips(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(struct.pack("!I", 1000))
        for _ in range(100):
            connection.sendall(b".")
            time.sleep(0.2)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (lambda connection: time.sleep(5), "small"),  # it accepts, and never says a word
        (lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "small"),
        (lambda connection: connection.sendall(struct.pack("!I", 2) + b"{}"), "foreign"),
        (lambda connection: connection.sendall(struct.pack("!I", 1 << 31)), "small"),
        (drips, "small"),
        (lambda connection: None, "small"),
    ],
    ids=["silence", "HTTP", "other JSON", "too long", "a byte now and then", "closed"],
)
def test_another_program_is_detected_in_bounded_time(answer: Callable[[socket.socket], None], fault: str) -> None:
    begin = time.monotonic()
    assert reach.probe(3, "127.0.0.1", served(answer), "this run", 0.5).fault == fault
    assert time.monotonic() - begin < reach.STEPS * 0.5 + 1.5


def test_lost_large_packets_are_distinguished_from_a_firewall() -> None:
    def answer(connection: socket.socket) -> None:
        (length,) = reach.LENGTH.unpack(connection.recv(4, socket.MSG_WAITALL))
        connection.recv(length, socket.MSG_WAITALL)
        data = json.dumps({"node_rank": 3, "nonce": "this run", "time": 0.0}).encode()
        connection.sendall(reach.LENGTH.pack(len(data)) + data)
        connection.recv(4 + reach.LARGE, socket.MSG_WAITALL)  # and no answer

    link = reach.probe(3, "127.0.0.1", served(answer), "this run", 1)
    assert (link.fault, link.why) == ("large", "the connection was closed")


def test_the_clock_is_read_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    trips = iter([4.0, 1.0])  # the first one asks who it is, the second one is large
    now, sizes = [1000.0], []

    def echo(connection: object, end: object, data: bytes) -> bytes:
        sizes.append(len(data))
        middle = now[0] + (trip := next(trips)) / 2
        now[0] += trip
        return json.dumps({"node_rank": 3, "nonce": "this run", "time": middle + 7.5}).encode()

    monkeypatch.setattr(reach, "_echo", echo)
    monkeypatch.setattr(reach, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    link = reach._talk(None, lambda: 1.0, 3, "this run")  # type: ignore[arg-type]
    assert (link.fault, link.clock_s, sizes) == ("", 7.5, [3, reach.LARGE])
    assert reach.LARGE > 65_536  # more than any MTU


def test_of_several_addresses_the_one_that_answers_counts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = server.listen(0, listener.fileno())
        monkeypatch.setattr(reach, "resolve", lambda host, timeout_s: ["127.0.0.2", "127.0.0.1"])
        assert reach.probe(3, "node3", port, "this run", 5).fault == ""
        monkeypatch.setattr(reach, "resolve", lambda host, timeout_s: ["127.0.0.2", "127.0.0.3"])
        link = reach.probe(3, "node3", port, "this run", 5)
        assert (link.fault, link.why) == ("connect", "Connection refused")


def test_garbage_does_not_stop_the_server(server: Server) -> None:
    port = server.listen()
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", struct.pack("!I", 1 << 31), b"\0", b"", struct.pack("!I", 5) + b"ab"):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(garbage)
    assert reach.probe(3, "127.0.0.1", port, "this run", 5).fault == ""


def test_a_port_that_is_taken_in_one_family_is_taken(server: Server) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other, pytest.raises(OSError, match="in use"):
        server.listen(other.getsockname()[1])
