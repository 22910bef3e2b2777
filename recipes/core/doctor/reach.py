"""Checks whether this node reaches others over TCP, as the ranks will: a small server on each node,
and probes of it.

A node probes a fixed number of others (`peers`), so its cost is the same in a job of any size.
"""

import contextlib
import socket
import threading
from collections import deque

from recipes.core.place import network

LARGE = 256 << 10  # bytes: many full packets
QUIET_S = 20.0  # after which the server closes a silent connection
MOST = 64  # connections; a further one closes the oldest, since any user of the cluster may connect


def peers(node_rank: int, num_nodes: int) -> list[int]:
    """The nodes that a node probes: the first, the next, and the node num_nodes/2 places further
    on. Some node probes each node.
    """
    chosen = (0, (node_rank + 1) % num_nodes, (node_rank + num_nodes // 2) % num_nodes)
    return sorted(set(chosen) - {node_rank})


def serve() -> int:
    """Answers each connection with the bytes that it has sent, until this process ends. Returns the
    port. Raises OSError.
    """
    listening = network.listener()
    newest = deque[socket.socket]()

    def accept() -> None:
        while True:
            # the other side is gone, or a default timeout has passed
            with contextlib.suppress(OSError):
                connection, _ = listening.accept()
                newest.append(connection)
                threading.Thread(target=_answer, args=(connection,), daemon=True).start()
                if len(newest) > MOST:
                    newest.popleft().shutdown(socket.SHUT_RDWR)

    threading.Thread(target=accept, daemon=True).start()
    return int(listening.getsockname()[1])


def _answer(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):  # the other side is gone
        connection.settimeout(QUIET_S)
        connection.sendall(_receive(connection))


def probe(host: str, port: int, timeout_s: float) -> tuple[str, str]:
    """The fault of the way to the server of another node, and the reason of the fault; both are ""
    if there is none.

    The fault: connect; small (a connection, but no answer); large (small messages pass and large
    ones do not). timeout_s: of each step.
    """
    for fault, size in (("small", 1), ("large", LARGE)):
        step = "connect"
        try:
            with socket.create_connection((host, port), timeout_s) as connection:
                step = fault
                connection.sendall(bytes(size))
                connection.shutdown(socket.SHUT_WR)
                if len(_receive(connection)) != size:
                    return fault, "the connection was closed"
        except OSError as error:
            return step, error.strerror or "timed out"  # the error of a timeout has no number
    return "", ""


def _receive(connection: socket.socket) -> bytes:
    """What the other side sends until it closes its side, up to about `LARGE` bytes. Raises
    OSError.
    """
    data = bytearray()
    while len(data) <= LARGE and (part := connection.recv(1 << 16)):
        data += part
    return bytes(data)
