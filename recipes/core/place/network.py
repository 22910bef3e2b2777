"""The network interface for traffic between the ranks, which is on the kernel's route to the other nodes; listening sockets."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from recipes.core.place.launcher_variables import is_loopback
from recipes.core.place.ranks import RankInfo

# linux/netlink.h, linux/rtnetlink.h, linux/if_addr.h
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_RTM_NEWADDR, _RTM_GETADDR, _RTM_NEWROUTE, _RTM_GETROUTE = 20, 22, 24, 26
_RTN_LOCAL = 2
_RTA_DST, _RTA_OIF, _RTA_PREFSRC = 1, 4, 7
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_MESSAGE = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence number, port
_ROUTE = struct.Struct("=BBBBBBBBI")  # rtmsg: family, destination's prefix bits, …, type at 7, flags
_ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix bits, flags, scope, interface index
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type

LOOPBACK = "lo"
_SET = "or set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that reaches the other nodes"
FIX_ROUTE = f"bring the interface up, or fix its route (ip route get PEER on that node), {_SET}"
FIX_NAME = f"add the name to DNS, or to /etc/hosts on each node (getent hosts NAME on that node), {_SET}"


class NetworkError(RuntimeError):
    """No interface reaches the peer. what: one line with host and peer. fix: what to do."""

    def __init__(self, what: str, fix: str = FIX_ROUTE) -> None:
        super().__init__(f"{what}: {fix}")
        self.what, self.fix = what, fix


@dataclass(frozen=True)
class Route:
    """The kernel's route to an address."""

    interface: str
    source: str  # this machine's source address on that route; "" if the kernel names none
    local: bool  # the target address is one of this machine's own


@dataclass(frozen=True)
class Choice:
    """The network interface of this node, and why it was chosen."""

    interface: str
    address: str  # this node's address on the interface
    peer: str  # host name of the node whose route decided; "" for a single node
    reason: str


def route_to(address: str) -> Route:
    """The kernel's route to an IPv4 or IPv6 address, like `ip route get`.

    Raises NetworkError if there is no route.
    """
    try:
        target = ipaddress.ip_address(address)
        family = socket.AF_INET if target.version == 4 else socket.AF_INET6
        request = _ROUTE.pack(family, target.max_prefixlen, 0, 0, 0, 0, 0, 0, 0)
        request += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(target.packed), _RTA_DST) + target.packed
        route, attributes = next(_ask(_RTM_GETROUTE, 0, request, _RTM_NEWROUTE, _ROUTE))
        interface = socket.if_indextoname(struct.unpack("=I", attributes[_RTA_OIF])[0])
    except OSError as error:
        raise NetworkError(f"{socket.gethostname()}: no route to {address} ({error.strerror or error})") from None
    source = attributes.get(_RTA_PREFSRC)
    return Route(interface, str(ipaddress.ip_address(source)) if source else "", route[7] == _RTN_LOCAL)


def choose(info: RankInfo) -> Choice | None:
    """The interface for this node's traffic: the one on the route to the first other node; loopback for a single node.

    If the names of the nodes are unknown, the master is the peer. The master's own node then uses the interface that has
    the master's address. The result is None if that interface cannot be determined (the address is a loopback address,
    or several interfaces have it). Then no variable is set, and NCCL and gloo choose. Only one name is resolved, once.

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
    """The variables that make NCCL and gloo use the interface, without those that `environ` already has.

    NCCL treats the name as a prefix unless it begins with `=` (NCCL's user guide, "Environment Variables"). gloo
    expects exact names.
    """
    names = {"NCCL_SOCKET_IFNAME": f"={choice.interface}", "GLOO_SOCKET_IFNAME": choice.interface}
    return {name: value for name, value in names.items() if name not in environ}


def _towards(peer: str) -> Choice:
    """The interface on the route to ``peer``; loopback if ``peer`` is this machine. Raises NetworkError."""
    own, failures = [], []
    for address in _resolve(peer):
        try:
            route = route_to(address)
        except NetworkError as error:
            failures.append(error.what)
            continue
        # This machine's own address does not lead to another node, even if the peer has it too (every docker0 is 172.17.0.1).
        if route.local:
            own.append(address)
            continue
        return Choice(route.interface, route.source, peer, f"route to {peer} ({address})")
    if failures:
        raise NetworkError(f"{socket.gethostname()} does not reach {peer}: {'; '.join(failures)}")
    return Choice(LOOPBACK, "127.0.0.1", peer, f"{peer} ({own[0]}) is this machine")


def _interface_of_master(master: str) -> Choice | None:
    """The only interface that has the master's address, on the master's node; None if there is not exactly one."""
    interface_of = {address: interface for interface, address in own_addresses()}
    found = [address for address in _resolve(master) if address in interface_of and not is_loopback(address)]
    if len({interface_of[address] for address in found}) != 1:
        return None
    return Choice(interface_of[found[0]], found[0], master, f"it has the master's address {found[0]}")


def _resolve(host: str) -> list[str]:
    """All addresses of a host, in the resolver's order. Raises NetworkError if there is none."""
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a host name"
        raise NetworkError(f"{socket.gethostname()} cannot resolve {host} ({reason})", FIX_NAME) from None
    return [str(sockaddr[0]) for *_, sockaddr in answers]


def listener(port: int = 0) -> socket.socket:
    """A socket on ``port``, by default a free one, for IPv6 and IPv4 if the machine has both, as TCPStore's is. Raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2048)
    return socket.create_server(("", port), backlog=2048)


def own_addresses() -> list[tuple[str, str]]:
    """All pairs (interface, address) of this machine."""
    found = []
    request = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    for fields, attributes in _ask(_RTM_GETADDR, _NLM_F_DUMP, request, _RTM_NEWADDR, _ADDRESS):
        # On a point-to-point link IFA_ADDRESS is the address of the other end.
        if packed := attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS):
            found.append((socket.if_indextoname(fields[4]), str(ipaddress.ip_address(packed))))
    return found


def _ask(
    kind: int, flags: int, body: bytes, answer: int, header: struct.Struct
) -> Iterator[tuple[tuple[int, ...], dict[int, bytes]]]:
    """Asks the kernel and yields its answers of one type: header fields and attributes. Raises OSError with its error."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(5)
        kernel.send(_MESSAGE.pack(_MESSAGE.size + len(body), kind, _NLM_F_REQUEST | flags, 1, 0) + body)
        while True:
            data = kernel.recv(1 << 18)
            while data:
                length, received, *_ = _MESSAGE.unpack_from(data)
                payload, data = data[_MESSAGE.size : length], data[_align(length) :]
                if received == _NLMSG_DONE:
                    return
                if received == _NLMSG_ERROR:
                    code = -struct.unpack_from("=i", payload)[0]
                    raise OSError(code, os.strerror(code))
                if received == answer:
                    yield header.unpack_from(payload), dict(_attributes(payload[header.size :]))


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[_align(length) :]


def _align(length: int) -> int:
    return (length + 3) & ~3
