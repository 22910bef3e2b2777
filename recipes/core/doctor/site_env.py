"""Proposes the lines of an env file that a node's network requires."""

import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address

_HCA = re.compile(r"[A-Za-z0-9_.-]+(?::[0-9]*){0,3}")
_INTERFACE = re.compile(r"(?!lo[0-9]*$)[A-Za-z0-9_.:-]{1,15}")


def env_lines(
    interface: str,
    infiniband: Mapping[str, Mapping[str, str]],
    address: str,
    others: Sequence[str] = (),
    proven: bool = True,
) -> list[str]:
    """Lines for an env file that this node's network requires, each after a comment with the reason; one comment if none is required.

    interface, address: those that reach the other nodes (`network.Choice`). infiniband: maps "mlx5_0:1" to "state", "link" and "rate"
    as in /sys/class/infiniband. others: all addresses of the interface. proven: the recipes find the interface on each node.
    Source: NCCL 2.30, transport/net_ib/init.cc (it skips ports that are not ACTIVE, and mixes InfiniBand with Ethernet ports) and
    os/linux.cc (it takes an interface's IPv4 address before its IPv6 addresses).
    """
    lines = []
    active = [port for port, values in infiniband.items() if values.get("state") in ("ACTIVE", "4: ACTIVE")]
    native = sorted(port for port in active if infiniband[port].get("link") == "InfiniBand")
    if native and len(native) < len(active) and all(_HCA.fullmatch(port) for port in native):
        lines += [
            f"# Of {len(active)} ACTIVE ports {len(native)} are InfiniBand and the others Ethernet; NCCL mixes them.",
            f"NCCL_IB_HCA=={','.join(native)}",
        ]
    if _ip_version(address) == 6 and 4 in map(_ip_version, others):
        lines += [
            "# The other nodes are reached by IPv6; NCCL takes the interface's IPv4 address where it has both.",
            "NCCL_SOCKET_FAMILY=AF_INET6",
        ]
    if not proven and _INTERFACE.fullmatch(interface):
        lines += [
            "# The route to the other nodes is unknown here; valid only if every node has this interface.",
            f"NCCL_SOCKET_IFNAME=={interface}",
            "# gloo requires the exact name.",
            f"GLOO_SOCKET_IFNAME={interface}",
        ]
    if lines:
        return lines
    if infiniband and not active:
        return ["# No setting helps: no InfiniBand or RoCE port is ACTIVE, and NCCL uses TCP. Ask the site's support."]
    over = f"{len(active)} InfiniBand or RoCE ports" if active else "TCP, since there is no InfiniBand or RoCE device"
    return [f"# Nothing is required. Without settings, NCCL uses {over}."]


def _ip_version(text: str) -> int | None:
    try:
        return ip_address(text).version
    except ValueError:
        return None
