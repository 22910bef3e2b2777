"""Checks whether this node reaches others over TCP, as the ranks will: a small server on each node, and probes of it.

Standard library only. A node probes a fixed number of others (`peers`), so its cost is the same in a job of any size.
"""

import contextlib
import errno
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

LENGTH = struct.Struct("!I")
LARGEST = 1 << 20  # bytes of a message; a longer one comes from another program
LARGE = 256 << 10  # bytes: many full packets
STEPS = 4  # timeouts that probing one node takes at most
QUIET_S = 20.0  # after which the server closes a silent connection


@dataclass(frozen=True)
class Link:
    """What one node found on the way to another. clock_s is None where the probe ended earlier. why: the reason of the fault.

    fault: "" for none; name (it does not resolve), connect, small (no answer), large (small messages pass and large ones do not),
    foreign (another program or node answers), master (only its master port does not answer), silent (its port is not known).
    """

    peer: int  # node_rank
    fault: str = ""
    why: str = ""
    clock_s: float | None = None  # the peer's clock minus this node's


def peers(node_rank: int, num_nodes: int) -> list[int]:
    """The nodes that a node probes: the first, the next, and the one half of all nodes further. Each node is probed by some."""
    chosen = (0, (node_rank + 1) % num_nodes, (node_rank + num_nodes // 2) % num_nodes)
    return sorted(set(chosen) - {node_rank})


class Server:
    """Answers on its ports until the process ends: to b"who" with its identity, to other messages with the same bytes.

    nonce: distinguishes this examination from others.
    """

    def __init__(self, node_rank: int, nonce: str) -> None:
        self._hello = {"node_rank": node_rank, "nonce": nonce, "host": socket.gethostname()}

    def listen(self, port: int = 0, descriptor: int = -1) -> int:
        """Listens on all addresses, IPv6 and IPv4, on ``port`` (0: any free one). Returns the port. Raises OSError.

        descriptor: of a listening socket, in place of a port.
        """
        listening = socket.socket(fileno=os.dup(descriptor)) if descriptor >= 0 else listener(port)
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()
        return int(listening.getsockname()[1])

    def _accept(self, listening: socket.socket) -> None:
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the other side is gone, or is another program
            while True:
                data = _receive(connection, time.monotonic() + QUIET_S)
                if data == b"who":
                    data = json.dumps({**self._hello, "time": time.time()}).encode()
                connection.sendall(LENGTH.pack(len(data)) + data)


def listener(port: int) -> socket.socket:
    """A listening socket for IPv6 and IPv4 where the machine has both, as TCPStore's is. Raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def probe(peer: int, host: str, port: int, nonce: str, timeout_s: float, master_port: int = 0) -> Link:
    """Probes the server of node ``peer`` on ``host``.

    timeout_s: of each step; all steps together take at most `STEPS` times as long. master_port: probed as well, unless it is 0.
    """
    end = time.monotonic() + STEPS * timeout_s

    def step() -> float:
        return min(time.monotonic() + timeout_s, end)

    try:
        found = resolve(host, timeout_s)
    except OSError as error:
        return Link(peer, "name", error.strerror or str(error))
    why = "no address"
    for address in found:
        try:
            with socket.create_connection((address, port), _left(step())) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link = _talk(connection, step, peer, nonce)
        except OSError as error:
            why = words(error)
            continue
        if not link.fault and master_port:
            try:
                socket.create_connection((address, master_port), _left(step())).close()
            except OSError as error:
                return replace(link, fault="master", why=words(error))
        return link
    return Link(peer, "connect", why)


def resolve(host: str, timeout_s: float) -> list[str]:
    """The addresses of a name, in the resolver's order. Raises OSError, also if the resolver does not answer in time."""
    pool = ThreadPoolExecutor(1)  # the resolver has no time limit
    answer = pool.submit(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    pool.shutdown(wait=False)
    try:
        found = answer.result(timeout_s)
    except futures.TimeoutError:
        raise OSError(errno.ETIMEDOUT, f"the resolver did not answer in {timeout_s:g} s") from None
    except UnicodeError:
        raise OSError(errno.EINVAL, "not a host name") from None
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def _talk(connection: socket.socket, step: Callable[[], float], peer: int, nonce: str) -> Link:
    """Measures the clock, and whether small and large messages pass."""
    try:
        begin, sent = time.monotonic(), time.time()
        known = json.loads(_echo(connection, step(), b"who"))
        took = time.monotonic() - begin
        clock_s = float(known["time"]) - sent - took / 2
        if (known["nonce"], known["node_rank"]) != (nonce, peer):
            return Link(peer, "foreign", f"node {known['node_rank']}, {str(known.get('host'))[:64]}, answers there")
    except OSError as error:
        return Link(peer, "small", words(error))
    except (ValueError, KeyError, TypeError):
        return Link(peer, "foreign", "another program answers there")
    link = Link(peer, clock_s=round(clock_s, 3))
    try:
        _echo(connection, step(), bytes(LARGE))
    except OSError as error:
        return replace(link, fault="large", why=words(error))
    return link


def _echo(connection: socket.socket, end: float, data: bytes) -> bytes:
    """Sends ``data`` and returns the answer. Raises OSError, also at ``end`` (time.monotonic)."""
    connection.settimeout(_left(end))
    connection.sendall(LENGTH.pack(len(data)) + data)
    return _receive(connection, end)


def _receive(connection: socket.socket, end: float) -> bytes:
    """One message. Raises OSError."""
    (length,) = LENGTH.unpack(_exactly(connection, end, LENGTH.size))
    if length > LARGEST:
        raise OSError(errno.EPROTO, "another program answers there")
    return _exactly(connection, end, length)


def _exactly(connection: socket.socket, end: float, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(_left(end))
        part = connection.recv(count - len(data))
        if not part:
            raise OSError(errno.ECONNRESET, "the connection was closed")
        data += part
    return bytes(data)


def _left(end: float) -> float:
    if (left := end - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def words(error: OSError) -> str:
    """The reason as text. The text of a timeout is empty in some Python versions."""
    return "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error) or type(error).__name__)
