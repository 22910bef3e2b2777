"""The choice of the network interface, tested in nodes that are network namespaces with their own /etc/hosts. Needs root."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipes.core.place import network
from recipes.core.place.network import Choice, settings
from tests import helpers
from tests.helpers import ROOT

PROBE = """
import json, sys
from dataclasses import asdict
from recipes.core.place import network; from recipes.core.place import ranks
answers = []
for name, argument in json.loads(sys.argv[1]):
    argument = ranks.RankInfo(**argument) if name == "choose" else argument
    try:
        found = getattr(network, name)(argument)
        answers.append(found and asdict(found))
    except network.NetworkError as error:
        answers.append({"error": str(error)})
print(json.dumps(answers))
"""

# On Debian, a host resolves its own name to 127.0.1.1. The other names are for the other cases.
HOSTS = """
127.0.0.1 localhost
127.0.1.1 {own}
172.17.0.1 {peer}
10.77.0.1 node1
10.77.0.2 node2
10.77.0.1 plain1
127.0.1.1 debian1
127.0.1.1 both1
10.77.0.1 both1
172.17.0.1 docker1
10.77.0.1 docker1
172.17.0.1 only-docker
203.0.113.7 far
10.77.0.99 refused
10.78.0.1 point1
fd77::1 six1
fd77::2 six2
"""


def missing() -> str | None:
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    programs = [name for name in ("ip", "nsenter", "unshare", "mount") if not shutil.which(name)]
    return f"not installed: {', '.join(programs)}" if programs else None


@dataclass(frozen=True)
class Node:
    namespace: str
    name: str
    files: Path

    def ask(self, function: str, *arguments: Any) -> list[Any]:
        """The function's answer inside this node to each argument, as plain data; {"error": …} for a NetworkError."""
        questions = [(function, argument) for argument in arguments]
        inside = 'mount --bind "$0/hosts" /etc/hosts; mount --bind "$0/resolv.conf" /etc/resolv.conf; hostname "$1"'
        argv = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--mount", "--uts", "sh", "-ec"]
        argv += [f'{inside}; shift; exec "$@"', str(self.files), self.name]
        argv += [sys.executable, "-c", PROBE, json.dumps(questions)]
        answer = subprocess.run(argv, capture_output=True, text=True, timeout=30, cwd=ROOT)
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def make_pair(cleanup: ExitStack, files: Path, addresses: tuple[str, str]) -> tuple[Node, Node]:
    """Two nodes joined by a cable (eth0), each with an unreachable docker0 that has the same address on both."""
    unique = secrets.token_hex(3)
    nodes = []
    for own, peer in (("node1", "node2"), ("node2", "node1")):
        folder = files / own
        folder.mkdir()
        (folder / "hosts").write_text(HOSTS.format(own=own, peer=peer))
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        node = Node(f"net-{unique}-{own}", own, folder)
        ip("netns", "add", node.namespace)
        cleanup.callback(ip, "netns", "del", node.namespace)
        nodes.append(node)
    first, second = (node.namespace for node in nodes)
    ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
    for node, address in zip(nodes, addresses, strict=True):
        ip("-n", node.namespace, "link", "set", "lo", "up")
        ip("-n", node.namespace, "link", "add", "docker0", "type", "bridge")
        ip("-n", node.namespace, "address", "add", "172.17.0.1/16", "dev", "docker0")
        ip("-n", node.namespace, "address", "add", address, "dev", "eth0", *(["nodad"] if ":" in address else []))
        ip("-n", node.namespace, "link", "set", "docker0", "up")
        ip("-n", node.namespace, "link", "set", "eth0", "up")
    return nodes[0], nodes[1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    helpers.need(missing())
    with ExitStack() as cleanup:
        nodes = make_pair(cleanup, tmp_path_factory.mktemp("pair"), ("10.77.0.1/24", "10.77.0.2/24"))
        ip("-n", nodes[0].namespace, "route", "add", "prohibit", "10.77.0.99")
        ip("-n", nodes[0].namespace, "address", "add", "10.78.0.1", "peer", "10.78.0.2", "dev", "eth0")
        yield nodes


@pytest.fixture(scope="module")
def pair6(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    helpers.need(missing())
    with ExitStack() as cleanup:
        yield make_pair(cleanup, tmp_path_factory.mktemp("pair6"), ("fd77::1/64", "fd77::2/64"))


def info(node_rank: int, nodes: tuple[str, ...] = (), num_nodes: int = 2, master: str = "") -> dict[str, Any]:
    return {
        "rank": node_rank, "local_rank": 0, "node_rank": node_rank, "world_size": num_nodes, "local_world_size": 1,
        "num_nodes": num_nodes, "master_addr": master, "master_port": 29400, "nodes": nodes,
        "in_slurm": True, "run_id": "1", "restart_count": 0,
    }  # fmt: skip


def choice(interface: str, address: str, peer: str, reason: str) -> dict[str, str]:
    return {"interface": interface, "address": address, "peer": peer, "reason": reason}


def route(peer: str, own: str, address: str) -> dict[str, str]:
    return choice("eth0", own, peer, f"route to {peer} ({address})")


def itself(peer: str, address: str) -> dict[str, str]:
    return choice("lo", "127.0.0.1", peer, f"{peer} ({address}) is this machine")


def of_master(master: str) -> dict[str, str]:
    return choice("eth0", "10.77.0.1", master, "it has the master's address 10.77.0.1")


LONE = choice("lo", "127.0.0.1", "", "one node")
# What each node chooses. Where the nodes are unknown, the master is the peer, and is asked about on its own node too.
CHOICES = (
    (0, info(0, ("node1", "node2", "far"), 3), route("node2", "10.77.0.1", "10.77.0.2")),
    (1, info(1, ("node1", "far", "node2"), 3), route("node1", "10.77.0.2", "10.77.0.1")),
    # Two ranks of each node: rank 1 is on the first node, too.
    (0, {**info(0, ("node1", "node2")), "rank": 1, "local_rank": 1}, route("node2", "10.77.0.1", "10.77.0.2")),
    (0, info(1, ("plain1", "node2")), itself("plain1", "10.77.0.1")),
    (0, info(1, ("debian1", "node2")), itself("debian1", "127.0.1.1")),
    (0, info(0, ("node1",), 1), LONE),
    *((1, info(1, master=name), route(name, "10.77.0.2", "10.77.0.1")) for name in ("docker1", "10.77.0.1")),
    *((0, info(0, master=name), of_master(name)) for name in ("both1", "10.77.0.1")),
    (0, info(0, master="point1"), choice("eth0", "10.78.0.1", "point1", "it has the master's address 10.78.0.1")),
    *((0, info(0, master=name), None) for name in ("localhost", "debian1", "docker1", "far", "::1")),
)


def test_each_node_uses_the_interface_that_reaches_the_other_node(pair: tuple[Node, Node]) -> None:
    for number, node in enumerate(pair):
        asked = [(argument, expected) for at, argument, expected in CHOICES if at == number]
        assert node.ask("choose", *(argument for argument, _ in asked)) == [expected for _, expected in asked]


def test_a_network_with_ipv6_only(pair6: tuple[Node, Node]) -> None:
    asked = [info(0, ("six1", "six2")), info(0, master="six1")]
    named, of_own_master = pair6[0].ask("choose", *asked)
    assert named == choice("eth0", "fd77::1", "six2", "route to six2 (fd77::2)")
    assert of_own_master["interface"] == "eth0"
    local, away = pair6[0].ask("route_to", "fd77::1", "2001:db8::1")
    assert local["local"] is True
    assert "no route to 2001:db8::1" in away["error"]


def test_a_missing_route_or_name_is_reported_with_host_peer_and_fix(pair: tuple[Node, Node]) -> None:
    route_fix, name_fix = ": bring the interface up", "): add the name to DNS, or to /etc/hosts on each node"
    for peer, said, fix in (
        ("far", "node1 does not reach far: node1: no route to 203.0.113.7 (Network is unreachable)", route_fix),
        ("refused", "node1 does not reach refused: node1: no route to 10.77.0.99 (", route_fix),
        ("no-such.invalid", "node1 cannot resolve no-such.invalid (", name_fix),
        ("a" * 70, f"node1 cannot resolve {'a' * 70} (", name_fix),
    ):
        [answer] = pair[0].ask("choose", info(0, ("node1", peer)))
        assert answer["error"].startswith(said)
        assert fix in answer["error"]
        assert answer["error"].endswith(
            "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that reaches the other nodes"
        )
        assert "\n" not in answer["error"]


def test_an_address_of_this_machine_does_not_stand_for_a_peer_that_is_not_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer has two addresses: one that every machine has (docker0), and one to which there is no route."""

    def route_to(address: str) -> network.Route:
        if address == "172.17.0.1":
            return network.Route("lo", address, True)
        raise network.NetworkError("no route to 10.9.9.9")

    monkeypatch.setattr(network, "_resolve", lambda host: ["172.17.0.1", "10.9.9.9"])
    monkeypatch.setattr(network, "route_to", route_to)
    with pytest.raises(network.NetworkError, match=r"does not reach n2: no route to 10\.9\.9\.9"):
        network._towards("n2")


def test_the_route_is_that_of_ip_route_get(pair: tuple[Node, Node]) -> None:
    addresses = ("10.77.0.2", "10.77.0.1", "172.17.3.4", "172.17.0.1", "127.0.0.1", "::1")
    for address, found in zip(addresses, pair[0].ask("route_to", *addresses), strict=True):
        argv = ["ip", "-n", pair[0].namespace, "-json", "route", "get", address]
        said = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)[0]
        local = said.get("type") == "local"
        assert found == {"interface": said["dev"], "source": said["prefsrc"], "local": local}


def test_variables_that_are_set_are_not_changed() -> None:
    eth0 = Choice("eth0", "10.0.0.1", "b", "")
    assert settings(eth0, {}) == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    assert settings(eth0, {"NCCL_SOCKET_IFNAME": "ib"}) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert settings(eth0, {"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": ""}) == {}
    code = "import os; from recipes.core.run import entry; entry.begin('toy'); "
    code += "print(*map(os.environ.get, ('NCCL_SOCKET_IFNAME', 'GLOO_SOCKET_IFNAME', 'TORCH_DISTRIBUTED_DEBUG')))"
    environ = helpers.clean_environment(NCCL_SOCKET_IFNAME="ib", RANK="0", WORLD_SIZE="1")
    words = ["--local-rank=0", "debug=true"]  # the first is of torch.distributed.launch
    assert helpers.run([sys.executable, "-c", code, *words], environ=environ).out == "ib lo DETAIL\n"
