"""The network interfaces of a node."""

from recipes.core.doctor.node import Facts, Finding, Surroundings, small_text
from recipes.core.place import network


def interfaces(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """The interface on the route to the other nodes, and InfiniBand ports that are not active."""
    findings = []
    for folder in sorted((here.root / "sys/class/infiniband").glob("*/ports/*")):
        port, link = f"{folder.parts[-3]}:{folder.name}", small_text(folder / "link_layer")
        state = small_text(folder / "state").rpartition(": ")[2]
        if state not in ("ACTIVE", ""):
            fix = f"check its cable, switch and subnet manager; if NCCL should not use it: NCCL_IB_HCA=^{port}"
            findings.append(Finding(f"InfiniBand port {port} is {state} ({link or 'link unknown'})", fix, bad=False))
    folders = here.root / "sys/class/net"
    try:
        chosen = network.choose(here.info)
    except network.NetworkError as error:
        down = [folder.name for folder in sorted(folders.glob("*")) if small_text(folder / "operstate") == "down"]
        what = f"{error.what}; down there: {', '.join(down)}" if down else error.what
        return {}, [*findings, Finding(what, error.fix)]
    if not chosen:
        return {}, findings
    facts: Facts = {"interface": chosen.interface, "mtu": small_text(folders / chosen.interface / "mtu") or None}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = here.environ.get(name, "")
        # NCCL reads prefixes, = before exact names, and ^ before names to avoid; gloo reads exact names.
        is_listed = any(chosen.interface.startswith(one) for one in value.lstrip("^=").split(","))
        if value and here.has_others and is_listed == value.startswith("^"):
            what = f"{name}={value}, and the route to {chosen.peer} goes by {chosen.interface}"
            findings.append(Finding(what, f"unset {name}, or set it to {chosen.interface}", bad=False))
    return facts, findings
