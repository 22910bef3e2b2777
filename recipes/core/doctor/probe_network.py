"""The network interfaces of a node."""

from recipes.core.doctor.node import Facts, Finding, Surroundings, small_text
from recipes.core.place import network


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
