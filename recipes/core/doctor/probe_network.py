"""The network interfaces and names of a node."""

import json
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any
from recipes.core.place import network
from recipes.core.doctor.node import Finding
from recipes.core.doctor.node import Facts
from recipes.core.doctor.node import Surroundings
from recipes.core.doctor import commands
from recipes.core.doctor import node


SLOW_NAME_S = 1.0


def interfaces(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """The network's interfaces and InfiniBand ports, as sysfs tells, and the route to the other nodes."""
    facts: Facts = {"interfaces": {}, "infiniband": {}}
    findings = []
    addresses: dict[str, list[str]] = {}
    for name, address in network.own_addresses():
        addresses.setdefault(name, []).append(address)
    for folder in sorted((here.root / "sys/class/net").glob("*")):
        speed, state = node.small_text(folder / "speed"), node.small_text(folder / "operstate")
        facts["interfaces"][folder.name] = {
            "state": state,
            "mbit": int(speed) if speed.isdecimal() else None,
            "mtu": int(node.small_text(folder / "mtu") or 0),
            "addresses": addresses.get(folder.name, []),
        }
    for folder in sorted((here.root / "sys/class/infiniband").glob("*/ports/*")):
        port = f"{folder.parts[-3]}:{folder.name}"
        state = node.small_text(folder / "state").partition(": ")[2] or node.small_text(folder / "state")
        link = node.small_text(folder / "link_layer")
        facts["infiniband"][port] = {"state": state, "rate": node.small_text(folder / "rate"), "link": link}
        if state not in ("ACTIVE", ""):
            findings.append(Finding(f"InfiniBand port {port} is {state} ({link or 'link unknown'})",
                                    f"if it should carry NCCL: its cable, switch and subnet manager; if not: NCCL_IB_HCA=^{port}", bad=False))  # fmt: skip
    try:
        chosen = network.choose(here.info)
    except network.NetworkError as error:
        down = [name for name, one in facts["interfaces"].items() if one["state"] == "down"]
        told = f"; down there: {', '.join(down)}" if down else ""
        return facts, [
            *findings,
            Finding(f"{error.what}{told}", error.fix),
        ]
    if not chosen:
        return facts, findings
    facts["chosen"] = {"interface": chosen.interface, "address": chosen.address, "reason": chosen.reason}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if (
            here.others
            and (value := here.environ.get(name))
            and not _names(value, chosen.interface, exact=name[0] == "G")
        ):
            findings.append(Finding(f"{name}={value}, and the route to {chosen.peer} goes by {chosen.interface}",
                                    f"unset {name}, or set it to {chosen.interface}", bad=not _any_is_there(value, facts["interfaces"], name[0] == "G")))  # fmt: skip
    return facts, findings


def _names(value: str, interface: str, exact: bool) -> bool:
    """Whether a list of interfaces as NCCL reads it (prefixes; = exact; ^ all but these), or gloo (exact), has this one."""
    if exact:
        return interface in value.split(",")
    if value.startswith("^"):
        rest = value[1:].removeprefix("=").split(",")
        return interface not in rest if value.startswith("^=") else not any(interface.startswith(one) for one in rest)
    if value.startswith("="):
        return interface in value[1:].split(",")
    return any(interface.startswith(one) for one in value.split(","))


def _any_is_there(value: str, there: Mapping[str, Any], exact: bool) -> bool:
    """Whether a list as `_names` reads it names any interface of this machine."""
    return any(_names(value, interface, exact) for interface in there)


def names(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """This node's own name, and how long the resolver takes, both ways."""
    host = socket.gethostname()
    begin = time.monotonic()
    out, wrong = commands.ask([sys.executable, "-S", "-c", RESOLVE, host], 20)
    took = time.monotonic() - begin
    if wrong:
        return {}, [
            Finding(
                f"it does not resolve its own name {host} ({wrong})",
                f"add {host} to DNS or to /etc/hosts there",
                bad=bool(here.info.nodes),  # where the others are known by their names
            )
        ]
    addresses, reverse_s = json.loads(out)
    facts: Facts = {"addresses": addresses, "seconds": round(took, 2), "reverse_s": reverse_s}
    findings = []
    if here.info.num_nodes > 1 and addresses and all(one.startswith("127.") or one == "::1" for one in addresses):
        fix = "a rank that listens on that is not reached (the recipes' are): delete that line from /etc/hosts there"
        findings.append(Finding(f"its own name is {addresses[0]} there", fix, bad=False))
    if reverse_s > SLOW_NAME_S:
        findings.append(
            Finding(
                f"a reverse look-up takes {reverse_s:.1f} s",
                "each rank's start waits for it: fix DNS, or list the nodes in /etc/hosts",
                bad=False,
            )
        )
    return facts, findings


RESOLVE = """
import json, socket, sys, time
try:
    found = sorted({a[4][0] for a in socket.getaddrinfo(sys.argv[1], None)})
except OSError as error:
    sys.exit(str(error.strerror))
begin = time.monotonic()
try:
    socket.gethostbyaddr(found[0])
except OSError:
    pass
print(json.dumps([found, round(time.monotonic() - begin, 2)]))
"""
