"""Connections between rank 0 and one rank of each other node, which notice that a node is lost.

The kernel of a node answers the probes of TCP, also while the processes of the node are stopped or
hold the interpreter's lock. So a connection breaks with a timeout only if the node has died or has
lost its network. Standard library only.
"""

import errno
import selectors
import socket
import threading
import time

from recipes.core.place import network

IDLE_S = 10  # until the first probe
PROBE_S = 5  # between two probes
PROBES = 4  # without an answer
LOST_S = float(IDLE_S + PROBE_S * PROBES)  # a node that does not answer for this long is lost
LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
LONGEST = 16  # bytes of a rank's number
CONNECT_S = 60.0
UNKNOWN = 64  # connections at the same time that have not sent a rank


class NodeLinks:
    """The connections of this rank. lost: the ranks whose nodes do not answer."""

    def __init__(self) -> None:
        self.lost = set[int]()

    def listen(self, world_size: int) -> int:
        """For rank 0: waits for the other nodes in a thread. Returns the port."""
        server = network.listener()
        port: int = server.getsockname()[1]
        threading.Thread(target=self._accept, args=(server, world_size), daemon=True).start()
        return port

    def connect(self, host: str, port: int, rank: int) -> None:
        """For one rank of another node: connects to rank 0 in a thread."""
        threading.Thread(target=self._connect, args=(host, port, rank), daemon=True).start()

    def _accept(self, server: socket.socket, world_size: int) -> None:
        with server, selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select()[:1]:  # it may close another one
                    if key.fileobj is not server:
                        self._read(selector, key, world_size)
                        continue
                    try:
                        connection, _ = server.accept()
                    except OSError:  # it has ended already, or too many files are open
                        time.sleep(1.0)
                        continue
                    _keep_alive(connection)
                    unknown = _of_rank(selector, None)
                    if len(unknown) > UNKNOWN:
                        _close(selector, unknown[1])  # after the server: the oldest stranger
                    selector.register(connection, selectors.EVENT_READ)

    def _read(
        self, selector: selectors.BaseSelector, key: selectors.SelectorKey, world_size: int
    ) -> None:
        """Reads the rank at the other end of a connection, and later the end of the connection.
        key.data: the rank, if it is known.
        """
        connection = key.fileobj
        assert isinstance(connection, socket.socket)
        text = b""
        try:
            text = connection.recv(LONGEST)
        except OSError as error:
            if error.errno in LOST and key.data:
                self.lost.add(key.data)
        if text.isdigit() and not key.data and 0 < int(text) < world_size:
            rank = int(text)
            self.lost.discard(rank)
            for old in _of_rank(selector, rank):  # of a stranger, or before the network was lost
                _close(selector, old)
            selector.modify(connection, selectors.EVENT_READ, rank)
        else:
            _close(selector, key)

    def _connect(self, host: str, port: int, rank: int) -> None:
        """Connects again if the network was lost only for some time, or if a stranger took this
        rank. If rank 0 has ended, nobody listens.
        """
        while True:
            try:
                link = socket.create_connection((host, port), CONNECT_S)
            except OSError:
                if not self.lost:
                    return  # a firewall may be the reason: then timeout_s decides
                time.sleep(PROBE_S)
                continue
            self.lost.discard(0)
            with link:
                link.settimeout(None)
                _keep_alive(link)
                try:
                    link.sendall(str(rank).encode())
                    link.recv(1)
                except OSError as error:
                    if error.errno in LOST:
                        self.lost.add(0)
            time.sleep(PROBE_S)


def _of_rank(selector: selectors.BaseSelector, rank: int | None) -> list[selectors.SelectorKey]:
    """The connections of a rank, oldest first. None: the server, and those that sent no rank."""
    return [key for key in selector.get_map().values() if key.data == rank]


def _close(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    selector.unregister(key.fileobj)
    assert isinstance(key.fileobj, socket.socket)
    key.fileobj.close()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
