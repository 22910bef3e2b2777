"""The network interface for traffic between the ranks, which is on the kernel's route to the other
nodes; listening sockets.
"""

import ctypes
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from recipes.core.place.ranks import RankInfo

LOOPBACK = "lo"
_SET = (
    "or set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that reaches the other nodes"
)
FIX_ROUTE = (
    "bring the interface up, or fix the route "
    f"(ip route get PEER shows it on the node with the fault), {_SET}"
)
FIX_NAME = (
    f"add the name to DNS, or to /etc/hosts on each node (getent hosts NAME tests it), {_SET}"
)
# Position and size of the address in struct sockaddr_in and sockaddr_in6.
_ADDRESS_IN: dict[int, tuple[int, int]] = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}


class NetworkError(RuntimeError):
    """No interface reaches the peer. what: one line with host and peer. fix: what to do."""

    def __init__(self, what: str, fix: str = FIX_ROUTE) -> None:
        super().__init__(f"{what}: {fix}")
        self.what = what
        self.fix = fix


@dataclass(frozen=True)
class Choice:
    """The network interface of this node, and why it was chosen."""

    interface: str
    address: str  # this node's address on the interface
    peer: str  # host name of the node whose route decided; "" for a single node
    reason: str


def choose(info: RankInfo) -> Choice | None:
    """The interface for this node's traffic: the one on the route to the first other node; loopback
    for a single node.

    If the names of the nodes are unknown, the master is the peer. The master's own node then uses
    the interface that has the master's address. The result is None if that interface cannot be
    determined (the address is a loopback address, or several interfaces have it). Then no variable
    is set, and NCCL and gloo choose. Only one name is resolved, once.

    Raises NetworkError if the peer's name does not resolve, or if no route reaches it.
    """
    if info.num_nodes == 1:
        return Choice(LOOPBACK, "127.0.0.1", "", "one node")
    if info.nodes:
        return _towards(info.nodes[1 if info.node_rank == 0 else 0])
    if info.node_rank > 0:
        return _towards(info.master_addr)
    return _interface_of_master(info.master_addr)


def settings(choice: Choice, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make NCCL and gloo use the interface, without those that `environ` already
    has.

    NCCL treats the name as a prefix unless it begins with `=` (NCCL's user guide, "Environment
    Variables"). gloo expects exact names.
    """
    names = {"NCCL_SOCKET_IFNAME": f"={choice.interface}", "GLOO_SOCKET_IFNAME": choice.interface}
    return {name: value for name, value in names.items() if name not in environ}


def _towards(peer: str) -> Choice:
    """The interface on the route to ``peer``; loopback if ``peer`` is this machine. Raises
    NetworkError.
    """
    own_address = ""
    failures = []
    for address in _resolve(peer):
        try:
            source = _source_towards(address)
        except OSError as error:
            failures.append(f"no route to {address} ({error.strerror or error})")
            continue
        # This machine's own address does not lead to another node, even if the peer has it too
        # (every docker0 is 172.17.0.1).
        if source == address or ipaddress.ip_address(address).is_loopback:
            own_address = own_address or address
            continue
        return Choice(_interfaces()[source], source, peer, f"route to {peer} ({address})")
    if failures:
        raise NetworkError(f"{socket.gethostname()} does not reach {peer}: {'; '.join(failures)}")
    return Choice(LOOPBACK, "127.0.0.1", peer, f"{peer} ({own_address}) is this machine")


def _interface_of_master(master: str) -> Choice | None:
    """The only interface that has the master's address, on the master's node; None if there is not
    exactly one.
    """
    interfaces = _interfaces()
    addresses = [
        address
        for address in _resolve(master)
        if address in interfaces and not ipaddress.ip_address(address).is_loopback
    ]
    names = {interfaces[address] for address in addresses}
    if len(names) != 1:
        return None
    return Choice(names.pop(), addresses[0], master, f"it has the master's address {addresses[0]}")


def _resolve(host: str) -> list[str]:
    """All addresses of a host, in the resolver's order. Raises NetworkError if there is none."""
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a host name"
        raise NetworkError(
            f"{socket.gethostname()} cannot resolve {host} ({reason})", FIX_NAME
        ) from None
    return [str(sockaddr[0]) for *_, sockaddr in answers]


def _source_towards(address: str) -> str:
    """This machine's address on the kernel's route to an IPv4 or IPv6 address. Raises OSError if
    there is no route.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # of UDP: no packet is sent
        # without the scope of a link-local address
        return str(probe.getsockname()[0]).partition("%")[0]


class _Address(ctypes.Structure):
    """The first members of struct ifaddrs, see getifaddrs(3)."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("interface", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("sockaddr", ctypes.c_void_p),
    )


def _interfaces() -> dict[str, str]:
    """The interface of each address of this machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.c_void_p()
    interfaces = {}
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    following = first.value
    while following:
        entry = _Address.from_address(following)
        following = entry.next
        if not entry.sockaddr:
            continue
        family = ctypes.c_ushort.from_address(entry.sockaddr).value
        if family in _ADDRESS_IN:
            at, size = _ADDRESS_IN[family]
            address = ctypes.string_at(entry.sockaddr + at, size)
            interfaces[socket.inet_ntop(family, address)] = os.fsdecode(entry.interface)
    libc.freeifaddrs(first)
    return interfaces


def listener(port: int = 0) -> socket.socket:
    """A socket on ``port``, by default a free one, for IPv6 and IPv4 if the machine has both, as
    TCPStore's is. Raises OSError.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=2048)
