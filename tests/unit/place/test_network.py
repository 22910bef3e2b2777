"""The choice of the network interface, tested in nodes that are network namespaces with their own
/etc/hosts. Needs root.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipes.core.place.network import Choice, settings
from recipes.core.run import entry
from tests import helpers, namespaces
from tests.helpers import ROOT
from tests.namespaces import ip

PROBE = """
import json, sys
from dataclasses import asdict
from recipes.core.place import network; from recipes.core.place import ranks
answers = []
for info in json.loads(sys.argv[1]):
    try:
        found = network.choose(ranks.RankInfo(**info))
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
203.0.113.7 far
172.17.0.1 half
203.0.113.7 half
10.77.0.99 refused
10.78.0.1 point1
fd77::1 six1
fd77::2 six2
2001:db8::1 far6
"""


@dataclass(frozen=True)
class Node:
    namespace: str
    name: str
    files: Path

    def ask(self, *infos: dict[str, Any]) -> list[Any]:
        """What a rank chooses inside this node, as plain data; {"error": …} for a NetworkError."""
        inside = (
            'mount --bind "$0/hosts" /etc/hosts; mount --bind "$0/resolv.conf" /etc/resolv.conf; '
            'hostname "$1"'
        )
        argv = [
            "nsenter",
            f"--net=/run/netns/{self.namespace}",
            "unshare",
            "--mount",
            "--uts",
            "sh",
            "-ec",
        ]
        argv += [f'{inside}; shift; exec "$@"', str(self.files), self.name]
        argv += [sys.executable, "-c", PROBE, json.dumps(infos)]
        answer = subprocess.run(argv, capture_output=True, text=True, timeout=30, cwd=ROOT)
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """Two nodes, each with an unreachable docker0 that has the same address on both."""
    helpers.need(namespaces.missing())
    with namespaces.joined(("10.77.0.1/24", "fd77::1/64"), ("10.77.0.2/24", "fd77::2/64")) as (
        first,
        second,
    ):
        nodes = tuple(
            Node(at, name, tmp_path_factory.mktemp(name))
            for at, name in ((first, "node1"), (second, "node2"))
        )
        for node, peer in zip(nodes, ("node2", "node1"), strict=True):
            (node.files / "hosts").write_text(HOSTS.format(own=node.name, peer=peer))
            (node.files / "resolv.conf").write_text(
                "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"
            )
            ip("-n", node.namespace, "link", "add", "docker0", "type", "bridge")
            ip("-n", node.namespace, "address", "add", "172.17.0.1/16", "dev", "docker0")
            ip("-n", node.namespace, "link", "set", "docker0", "up")
        ip("-n", first, "route", "add", "prohibit", "10.77.0.99")
        ip("-n", first, "address", "add", "10.78.0.1", "peer", "10.78.0.2", "dev", "eth0")
        yield nodes


def info(
    node_rank: int, nodes: tuple[str, ...] = (), num_nodes: int = 2, master: str = ""
) -> dict[str, Any]:
    return {
        "rank": node_rank,
        "local_rank": 0,
        "node_rank": node_rank,
        "world_size": num_nodes,
        "local_world_size": 1,
        "num_nodes": num_nodes,
        "master_addr": master,
        "master_port": 29400,
        "nodes": nodes,
    }


def choice(interface: str, address: str, peer: str, reason: str) -> dict[str, str]:
    return {"interface": interface, "address": address, "peer": peer, "reason": reason}


def route(peer: str, address_here: str, address: str) -> dict[str, str]:
    return choice("eth0", address_here, peer, f"route to {peer} ({address})")


def itself(peer: str, address: str) -> dict[str, str]:
    return choice("lo", "127.0.0.1", peer, f"{peer} ({address}) is this machine")


def of_master(master: str) -> dict[str, str]:
    return choice("eth0", "10.77.0.1", master, "it has the master's address 10.77.0.1")


LONE = choice("lo", "127.0.0.1", "", "one node")
# What each node chooses. Where the nodes are unknown, the master is the peer, and is asked about on
# its own node too.
CHOICES = (
    (0, info(0, ("node1", "node2", "far"), 3), route("node2", "10.77.0.1", "10.77.0.2")),
    (1, info(1, ("node1", "far", "node2"), 3), route("node1", "10.77.0.2", "10.77.0.1")),
    # Two ranks of each node: rank 1 is on the first node, too.
    (
        0,
        {**info(0, ("node1", "node2")), "rank": 1, "local_rank": 1},
        route("node2", "10.77.0.1", "10.77.0.2"),
    ),
    (0, info(1, ("plain1", "node2")), itself("plain1", "10.77.0.1")),
    (0, info(1, ("debian1", "node2")), itself("debian1", "127.0.1.1")),
    (0, info(0, ("node1",), 1), LONE),
    *(
        (1, info(1, master=name), route(name, "10.77.0.2", "10.77.0.1"))
        for name in ("docker1", "10.77.0.1")
    ),
    *((0, info(0, master=name), of_master(name)) for name in ("both1", "10.77.0.1")),
    (
        0,
        info(0, master="point1"),
        choice("eth0", "10.78.0.1", "point1", "it has the master's address 10.78.0.1"),
    ),
    (0, info(0, ("six1", "six2")), route("six2", "fd77::1", "fd77::2")),
    (0, info(1, ("six1", "six2")), itself("six1", "fd77::1")),
    (
        0,
        info(0, master="six1"),
        choice("eth0", "fd77::1", "six1", "it has the master's address fd77::1"),
    ),
    *(
        (0, info(0, master=name), None)
        for name in ("localhost", "debian1", "docker1", "far", "::1")
    ),
)


def test_each_node_uses_the_interface_that_reaches_the_other_node(pair: tuple[Node, Node]) -> None:
    for number, node in enumerate(pair):
        asked = [(argument, expected) for at, argument, expected in CHOICES if at == number]
        assert node.ask(*(argument for argument, _ in asked)) == [expected for _, expected in asked]


def test_a_missing_route_or_name_is_reported_with_host_peer_and_fix(
    pair: tuple[Node, Node],
) -> None:
    end = (
        "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that reaches the other "
        "nodes"
    )
    route_fix = ": bring the interface up"
    name_fix = "): add the name to DNS, or to /etc/hosts on each node"
    for peer, said, fix in (
        (
            "far",
            "node1 does not reach far: no route to 203.0.113.7 (Network is unreachable)",
            route_fix,
        ),
        ("refused", "node1 does not reach refused: no route to 10.77.0.99 (", route_fix),
        (
            "half",
            "node1 does not reach half: no route to 203.0.113.7 (",
            route_fix,
        ),  # 172.17.0.1 is node1's own, too
        ("far6", "node1 does not reach far6: no route to 2001:db8::1 (", route_fix),
        ("no-such.invalid", "node1 cannot resolve no-such.invalid (", name_fix),
        ("a" * 70, f"node1 cannot resolve {'a' * 70} (", name_fix),
    ):
        [answer] = pair[0].ask(info(0, ("node1", peer)))
        assert answer["error"].startswith(said)
        assert fix in answer["error"]
        assert answer["error"].endswith(end)
        assert "\n" not in answer["error"]


def test_variables_that_are_set_are_not_changed() -> None:
    eth0 = Choice("eth0", "10.0.0.1", "b", "")
    assert settings(eth0, {}) == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    assert settings(eth0, {"NCCL_SOCKET_IFNAME": "ib"}) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert settings(eth0, {"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": ""}) == {}
    code = "import os; from recipes.core.run import entry; entry.begin('toy'); "
    code += (
        "print(*map(os.environ.get, ('NCCL_SOCKET_IFNAME', 'GLOO_SOCKET_IFNAME', "
        "'TORCH_DISTRIBUTED_DEBUG', 'CUBLAS_WORKSPACE_CONFIG')))"
    )
    environ = helpers.clean_environment(NCCL_SOCKET_IFNAME="ib", RANK="0", WORLD_SIZE="1")
    words = ["--local-rank=0", "debug=true"]  # the first is of torch.distributed.launch
    ended = helpers.run([sys.executable, "-c", code, *words], environ=environ)
    assert ended.out == "ib lo DETAIL None\n"  # the last one is for deterministic=true


def test_the_rank_that_prints_is_that_of_the_innermost_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("PMI_RANK", "SLURM_PROCID", "RANK")
    ranks = []
    for number, name in enumerate(names):
        monkeypatch.setenv(name, str(number))
        ranks.append(entry._rank_unchecked())
    assert ranks == ["0", "1", "2"]
