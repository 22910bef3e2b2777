"""Proposes the lines of an env file that a node's network requires."""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address


def env_lines(infiniband: Mapping[str, Mapping[str, str]], address: str, others: Sequence[str]) -> list[str]:
    """Lines for an env file that this node's network requires, each after a comment with the reason; one comment if none is required.

    infiniband: maps "mlx5_0:1" to "state" and "link" as in /sys/class/infiniband. address: reaches the other nodes; "" if unknown.
    others: all addresses of its interface.
    Source: NCCL 2.30, transport/net_ib/init.cc (it skips ports that are not ACTIVE, and mixes InfiniBand with Ethernet ports) and
    os/linux.cc (it takes an interface's IPv4 address before its IPv6 addresses).
    """
    lines = []
    active = [port for port, values in infiniband.items() if values["state"] == "ACTIVE"]
    native = sorted(port for port in active if infiniband[port]["link"] == "InfiniBand")
    if native and len(native) < len(active):
        lines += [
            f"# Of {len(active)} ACTIVE ports {len(native)} are InfiniBand and the others Ethernet; NCCL mixes them.",
            f"NCCL_IB_HCA=={','.join(native)}",
        ]
    if ":" in address and any(ip_address(other).version == 4 for other in others):
        lines += [
            "# The other nodes are reached by IPv6; NCCL takes the interface's IPv4 address where it has both.",
            "NCCL_SOCKET_FAMILY=AF_INET6",
        ]
    if lines:
        return lines
    if infiniband and not active:
        return ["# No setting helps: no InfiniBand or RoCE port is ACTIVE, and NCCL uses TCP. Ask the site's support."]
    over = f"{len(active)} InfiniBand or RoCE ports" if active else "TCP, since there is no InfiniBand or RoCE device"
    return [f"# Nothing is required. Without settings, NCCL uses {over}."]
