"""The network interfaces and names of a node."""

import json
import socket
import sys
import time

from recipes.core.doctor import commands
from recipes.core.doctor.node import Facts, Finding, Surroundings, small_text
from recipes.core.place import network

SLOW_NAME_S = 1.0


def interfaces(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """The network interfaces and InfiniBand ports in sysfs, and the route to the other nodes."""
    facts: Facts = {"interfaces": {}, "infiniband": {}}
    findings = []
    addresses: dict[str, list[str]] = {}
    for name, address in network.own_addresses():
        addresses.setdefault(name, []).append(address)
    for folder in sorted((here.root / "sys/class/net").glob("*")):
        speed, state = small_text(folder / "speed"), small_text(folder / "operstate")
        facts["interfaces"][folder.name] = {
            "state": state,
            "mbit": int(speed) if speed.isdecimal() else None,
            "mtu": int(small_text(folder / "mtu") or 0),
            "addresses": addresses.get(folder.name, []),
        }
    for folder in sorted((here.root / "sys/class/infiniband").glob("*/ports/*")):
        port = f"{folder.parts[-3]}:{folder.name}"
        state = small_text(folder / "state").partition(": ")[2] or small_text(folder / "state")
        link = small_text(folder / "link_layer")
        facts["infiniband"][port] = {"state": state, "rate": small_text(folder / "rate"), "link": link}
        if state not in ("ACTIVE", ""):
            fix = f"check its cable, switch and subnet manager; if NCCL should not use it: NCCL_IB_HCA=^{port}"
            findings.append(Finding(f"InfiniBand port {port} is {state} ({link or 'link unknown'})", fix, bad=False))
    try:
        chosen = network.choose(here.info)
    except network.NetworkError as error:
        down = [name for name, one in facts["interfaces"].items() if one["state"] == "down"]
        what = f"{error.what}; down there: {', '.join(down)}" if down else error.what
        return facts, [*findings, Finding(what, error.fix)]
    if not chosen:
        return facts, findings
    facts["chosen"] = {"interface": chosen.interface, "address": chosen.address, "reason": chosen.reason}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value, is_exact = here.environ.get(name), name == "GLOO_SOCKET_IFNAME"
        if here.has_others and value and not _selects(value, chosen.interface, is_exact):
            what = f"{name}={value}, and the route to {chosen.peer} goes by {chosen.interface}"
            is_there = any(_selects(value, interface, is_exact) for interface in facts["interfaces"])
            findings.append(Finding(what, f"unset {name}, or set it to {chosen.interface}", bad=not is_there))
    return facts, findings


def _selects(value: str, interface: str, is_exact: bool) -> bool:
    """Whether a list of interfaces selects this one, as NCCL reads it (prefixes; = exact; ^ all others), or gloo (is_exact)."""
    if is_exact:
        return interface in value.split(",")
    body = value.removeprefix("^")
    listed = body.removeprefix("=").split(",")
    is_listed = interface in listed if body.startswith("=") else any(map(interface.startswith, listed))
    return is_listed != value.startswith("^")


def names(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """Whether this node resolves its own name, and how long the look-ups take."""
    host = socket.gethostname()
    begin = time.monotonic()
    out, why = commands.run([sys.executable, "-S", "-c", RESOLVE, host], 20)
    took = time.monotonic() - begin
    if why:
        what, fix = f"it does not resolve its own name {host} ({why})", f"add {host} to DNS or to /etc/hosts there"
        return {}, [Finding(what, fix, bad=bool(here.info.nodes))]  # without a list of nodes, the ranks use addresses
    addresses, reverse_s = json.loads(out)
    facts: Facts = {"addresses": addresses, "seconds": round(took, 2), "reverse_s": reverse_s}
    findings = []
    if here.info.num_nodes > 1 and addresses and all(one.startswith("127.") or one == "::1" for one in addresses):
        fix = "other nodes cannot reach a program that listens on it (the recipes do not): delete that line from /etc/hosts there"
        findings.append(Finding(f"its own name is {addresses[0]} there", fix, bad=False))
    if reverse_s > SLOW_NAME_S:
        fix = "each rank's start waits for it: fix DNS, or list the nodes in /etc/hosts"
        findings.append(Finding(f"a reverse look-up takes {reverse_s:.1f} s", fix, bad=False))
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
