"""Does this node reach the others, over TCP, as the ranks will? A small server on each, and who asks it. Standard library only.

What a node does costs the same in a job of any size: it asks a fixed number of others (`peers`), the first node among them.
"""

import asyncio
import contextlib
import errno
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

LENGTH = struct.Struct("!I")
LARGEST = 1 << 20  # of a message; what comes with more is nobody's who speaks this
SMALL, LARGE = 64, 256 << 10  # bytes: one packet of any network; many full ones
ECHOES = 8
STEPS = 4  # of a step's time, that asking one node takes at most
QUIET_S = 20.0  # after which a connection on which nothing comes is closed


@dataclass(frozen=True)
class Link:
    """What one node found on the way to another. seconds are wall time; None where it did not come so far.

    fault: "" or what is wrong: name, connect, small, large (small messages pass and large ones do not), foreign (somebody else
    answers), master (the node answers, but its master port does not), silent (it never said where it listens).
    """

    peer: int  # node_rank
    host: str
    address: str = ""
    fault: str = ""
    why: str = ""
    name_s: float | None = None
    round_trip_s: float | None = None
    clock_s: float | None = None  # the peer's clock less this node's

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def peers(node_rank: int, num_nodes: int) -> list[int]:
    """The nodes that a node asks: the first, the next, and one half-way round; at most three, and each node is asked by some."""
    chosen = (0, (node_rank + 1) % num_nodes, (node_rank + num_nodes // 2) % num_nodes)
    return sorted(set(chosen) - {node_rank})


class Server:
    """Answers on a port until it is closed: tells who it is, and sends back what comes. ``nonce`` tells this run from others."""

    def __init__(self, node_rank: int, nonce: str) -> None:
        self._hello = {"node_rank": node_rank, "nonce": nonce, "host": socket.gethostname()}
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.AbstractServer] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="reach", daemon=True)
        self._thread.start()

    def listen(self, port: int = 0, descriptor: int = -1) -> int:
        """Listens on all addresses, IPv6 and IPv4, on ``port`` (0: any that is free), which is given. Raises OSError.

        descriptor: of a socket that listens already, in place of a port.
        """
        listening = socket.socket(fileno=os.dup(descriptor)) if descriptor >= 0 else listener(port)

        async def begin() -> None:
            self._servers.append(await asyncio.start_server(self._answer, sock=listening))

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(10)
        return int(listening.getsockname()[1])

    def close(self) -> None:
        async def end() -> None:
            for server in self._servers:
                server.close()

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await asyncio.wait_for(reader.readexactly(LENGTH.size), QUIET_S))
                if length > LARGEST:
                    break
                data = await asyncio.wait_for(reader.readexactly(length), QUIET_S)
                if data == b"who":
                    data = json.dumps({**self._hello, "time": time.time()}).encode()
                writer.write(LENGTH.pack(len(data)) + data)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass  # who asked has gone, or never spoke this
        finally:
            writer.close()


def listener(port: int) -> socket.socket:
    """A listening socket of both families where the machine has both, as TCPStore's is. Raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def probe(peer: int, host: str, port: int, nonce: str, timeout_s: float, master_port: int = 0) -> Link:
    """Asks the server of node ``peer`` on ``host``. timeout_s: of each step; all together take `STEPS` times that at most,
    whoever answers there, and however slowly. master_port: tried too, where it is given."""
    begin = time.monotonic()
    end = begin + STEPS * timeout_s

    def left() -> float:
        if (remaining := end - time.monotonic()) <= 0:
            raise TimeoutError
        return min(timeout_s, remaining)

    try:
        found = resolve(host, timeout_s)
    except OSError as error:
        return Link(peer, host, fault="name", why=error.strerror or str(error))
    name_s = round(time.monotonic() - begin, 3)
    why = "no address"
    for address in found:
        try:
            with socket.create_connection((address, port), left()) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link = _talk(connection, left, Link(peer, host, address, name_s=name_s), nonce)
        except OSError as error:
            why = words(error)
            continue
        if not link.fault and master_port:
            try:
                socket.create_connection((address, master_port), left()).close()
            except OSError as error:
                return _with(link, fault="master", why=words(error))
        return link
    return Link(peer, host, found[0], "connect", why, name_s)


def resolve(host: str, timeout_s: float) -> list[str]:
    """The addresses of a name, in the resolver's order. Raises OSError, also when the resolver does not answer in time."""
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answers.append(error)

    asking = threading.Thread(target=ask, daemon=True)  # the resolver cannot be given a time limit
    asking.start()
    asking.join(timeout_s)
    if not answers:
        raise OSError(errno.ETIMEDOUT, f"the resolver did not answer in {timeout_s:g} s")
    if isinstance(answers[0], OSError):
        raise answers[0]
    if isinstance(answers[0], UnicodeError):
        raise OSError(errno.EINVAL, "not a host name")
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in answers[0]))


def _talk(connection: socket.socket, left: Callable[[], float], link: Link, nonce: str) -> Link:
    """Round trips, the clock, and whether large messages pass."""
    try:
        begin, asked = time.monotonic(), time.time()
        known = json.loads(_echo(connection, left, b"who"))
        took = time.monotonic() - begin
        clock_s = float(known["time"]) - asked - took / 2
        if (known["nonce"], known["node_rank"]) != (nonce, link.peer):
            return _with(
                link, fault="foreign", why=f"node {known['node_rank']}, {str(known.get('host'))[:64]}, answers there"
            )
    except OSError as error:
        return _with(link, fault="small", why=words(error))
    except (ValueError, KeyError, TypeError):
        return _with(link, fault="foreign", why="something else answers there")
    try:
        trips = []
        for _ in range(ECHOES):
            begin = time.monotonic()
            _echo(connection, left, bytes(SMALL))
            trips.append(time.monotonic() - begin)
        link = _with(link, round_trip_s=round(median(trips), 6), clock_s=round(clock_s, 3))
        _echo(connection, left, bytes(LARGE))
    except OSError as error:
        return _with(link, fault="large" if link.round_trip_s else "small", why=words(error))
    return link


def _with(link: Link, **changes: Any) -> Link:
    return Link(**{**asdict(link), **changes})


def _echo(connection: socket.socket, left: Callable[[], float], data: bytes) -> bytes:
    """Sends ``data`` and gives what comes back. left: seconds that a step may still take. Raises OSError."""
    connection.settimeout(left())
    connection.sendall(LENGTH.pack(len(data)) + data)
    (length,) = LENGTH.unpack(_exactly(connection, left, LENGTH.size))
    if length > LARGEST:
        raise OSError(errno.EPROTO, "something else answers there")
    return _exactly(connection, left, length)


def _exactly(connection: socket.socket, left: Callable[[], float], count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(left())
        part = connection.recv(count - len(data))
        if not part:
            raise OSError(errno.ECONNRESET, "the connection was closed")
        data += part
    return bytes(data)


def words(error: OSError) -> str:
    """Why, in words: a time-out's own text is empty in places."""
    return "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error) or type(error).__name__)


def who_listens(port: int) -> str:
    """The process of this machine that listens on a port, "" where it is not to be seen (another user's)."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):  # closed since, as the listing's own is
                    if os.readlink(f"/proc/{pid}/fd/{name}") in inodes:
                        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                            return f"process {pid} ({file.read().strip()})"
    return ""
