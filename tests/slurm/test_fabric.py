"""Faults of a cluster's network, made for real: the doctor reports each in time, and training works
or reports the cause.

Slurm talks to its nodes over eth0; the ranks over a network of their own, fast0, to which the
nodes' names point. Each node also has a docker0 of one and the same address, which stands before
both in the alphabet, and is 127.0.1.1 by its own name.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster, ClusterOptions, missing, running_cluster

pytestmark = pytest.mark.timeout(300)

V4 = {"node1": "10.77.0.1", "node2": "10.77.0.2"}
BOUND_S = 40
# where the findings are compared as a whole: on a busy machine torch's import alone can take a
# third of the bound
PATIENT_S = 60
TRAINING = (
    "recipes.mnist",
    "device=cpu",
    "dataset=digits",
    "max_steps=5",
    "epochs=1",
    "cpu_threads=1",
)
# rank 1 waits 15 s: it may start 5 s after rank 0, and its line still comes before rank 0 ends it
LATE = "timeout_s=20"


@dataclass
class Fabric:
    """Two nodes and the network between them, which each test damages."""

    slurm: Cluster
    repo: Path

    def on(self, node: str, command: str) -> None:
        done = self.slurm.on_node(node, "sh", "-c", command)
        assert done.returncode == 0, f"{command}: {done.stderr}"

    def set_hosts(self) -> None:
        """What both nodes' names point to."""
        for node in V4:
            lines = ["127.0.0.1 localhost"]
            for name, address in V4.items():
                lines.append(f"{'127.0.1.1' if name == node else address} {name}")
            text = "\n".join(lines)
            self.on(node, f"printf '%s\\n' '{text}' > /etc/hosts")

    def srun(self, *words: str, **environ: str) -> helpers.Ended:
        """Python with these words, a rank on each node."""
        argv = ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
        argv += [sys.executable, "-u", *words]
        done = self.slurm.run(
            *argv,
            cwd=self.repo,
            env={**jobs.PYTHON, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
        )
        return helpers.Ended(done.returncode, done.stdout)

    def doctor(
        self, tmp_path: Path, seconds: int = BOUND_S, **environ: str
    ) -> tuple[helpers.Ended, dict[str, Any]]:
        """The doctor's verdict, which comes within its bound."""
        begin = time.monotonic()
        ended = self.srun(
            "-m",
            "recipes.doctor",
            "device=cpu",
            f"run_dir={tmp_path}/doctor",
            f"seconds={seconds}",
            **environ,
        )
        assert time.monotonic() - begin < seconds + 10, ended.out
        return ended, json.loads((tmp_path / "doctor/doctor.json").read_text())

    def train(self, tmp_path: Path, *words: str, **environ: str) -> helpers.Ended:
        return self.srun("-m", *TRAINING, f"run_dir={tmp_path}/run", *words, **environ)


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    helpers.need(
        missing() or ("" if shutil.which("nft") else "no nft on the PATH: apt-get install nftables")
    )
    repo = jobs.copy_repository(tmp_path_factory.mktemp("repo") / "clone")
    with running_cluster(ClusterOptions()) as slurm:
        first, two = (slurm.node(name).pid for name in V4)
        # a cable from node to node, made outside of both and put into each
        cable = f"ip link add fast0 netns {first} type veth peer name fast0 netns {two}"
        subprocess.run(cable.split(), check=True)
        yield Fabric(slurm, repo)


@pytest.fixture(autouse=True)
def working_network(fabric: Fabric) -> Iterator[None]:
    """A working network, before each test."""
    for node in V4:
        fabric.on(node, "nft flush ruleset; ip addr flush dev fast0; ip link set fast0 mtu 1500 up")
        fabric.on(node, f"ip addr add {V4[node]}/24 dev fast0")
    fabric.set_hosts()
    yield
    jobs.leave_no_job(fabric.slurm)


def bad(verdict: dict[str, Any]) -> str:
    entries = [entry for entry in verdict["entries"] if entry["bad"]]
    return "\n".join(f"{entry['nodes']} {entry['what']}" for entry in entries)


def filtering(rule: str) -> str:
    """The command that applies this rule to what arrives at fast0."""
    chain = "add table inet t; add chain inet t c { type filter hook input priority 0; }"
    return f"nft '{chain}; add rule inet t c iif fast0 {rule}'"


def trained(ended: helpers.Ended, tmp_path: Path) -> None:
    assert ended.status == 0, ended.out
    assert helpers.read(tmp_path / "run", "summary")["steps"] == 5


@pytest.mark.long
def test_a_network_with_a_misleading_interface_is_healthy_and_trains(
    fabric: Fabric, tmp_path: Path
) -> None:
    ended, verdict = fabric.doctor(tmp_path)
    assert ended.status == 0, ended.out
    assert verdict["healthy"] is True
    assert [row["network"] for row in verdict["table"]] == ["fast0", "fast0"]
    trained(fabric.train(tmp_path), tmp_path)
    assert "network: fast0 (route to node2" in (tmp_path / "run/logs/rank0.log").read_text()


@pytest.mark.long
def test_choosing_the_misleading_interface_fails(fabric: Fabric, tmp_path: Path) -> None:
    """Why the interface is chosen by its route: gloo takes the first interface in alphabetical
    order.
    """
    forced = {"GLOO_SOCKET_IFNAME": "docker0", "NCCL_SOCKET_IFNAME": "docker0"}
    ended, verdict = fabric.doctor(tmp_path, PATIENT_S, **forced)
    assert ended.status == 3, ended.out
    assert "note  node1: GLOO_SOCKET_IFNAME=docker0, but the route to node2 uses fast0" in ended.out
    assert "note  node2: GLOO_SOCKET_IFNAME=docker0, but the route to node1 uses fast0" in ended.out
    # Whichever rank connects finds nobody at its own address; the other one waits.
    hangs = (
        r"\[\] the bandwidth test of all nodes stopped after its start \((RuntimeError: Gloo "
        r"connectFullMesh failed|python did not answer in) .*\)"
    )
    assert re.fullmatch(hangs, bad(verdict)), bad(verdict)
    assert verdict["exclude"] == []  # both nodes have it
    ended = fabric.train(tmp_path, "timeout_s=8", **forced)
    assert ended.status != 0
    assert re.search(
        r"^mnist: (node1: rank 0|node2: rank 1) cannot join the process group of 2 ranks "
        r"\(RuntimeError: "
        r"Gloo connectFullMesh failed with .*"
        r"Connection refused, remote=\[172\.17\.0\.1\]:",
        ended.out,
        re.MULTILINE,
    ), ended.out


@pytest.mark.long
def test_an_interface_that_is_down_is_reported(fabric: Fabric, tmp_path: Path) -> None:
    fabric.on("node2", "ip link set fast0 down")
    ended, verdict = fabric.doctor(tmp_path)
    assert ended.status == 3, ended.out
    assert verdict["exclude"] == ["node2"]
    assert "[1] node2 does not reach node1" in bad(verdict)
    assert "interfaces that are down: fast0" in bad(verdict)
    ended = fabric.train(tmp_path, "timeout_s=10")
    assert ended.status != 0
    assert "node2 does not reach node1: no route to 10.77.0.1" in ended.out


@pytest.mark.long
def test_a_firewall_between_the_nodes_is_reported(fabric: Fabric, tmp_path: Path) -> None:
    fabric.on("node2", filtering("drop"))
    ended, verdict = fabric.doctor(tmp_path)
    assert ended.status == 3, ended.out
    assert "cannot connect to" in bad(verdict)
    ended = fabric.train(tmp_path, LATE)
    assert ended.status != 0
    assert "rank 1 cannot reach rank 0 at node1" in ended.out


@pytest.mark.long
def test_an_mtu_that_drops_large_packets_is_reported(fabric: Fabric, tmp_path: Path) -> None:
    for node in V4:  # the interfaces say 9000, and what is between them lets 1500 through
        fabric.on(node, "ip link set fast0 mtu 9000")
        fabric.on(node, filtering("meta length > 1500 drop"))
    ended, verdict = fabric.doctor(tmp_path, PATIENT_S)
    assert ended.status == 3, ended.out
    assert bad(verdict) == (
        "[1] node1 reaches node2 with small packets, but large ones are lost: the MTU on the "
        "path is smaller than the interface's (timed out; 2 of 2 links of node2 fail)"
    )
    assert verdict["exclude"] == ["node2"]
    assert (
        "give both interfaces, and every switch between them, the same MTU: ip link set DEV "
        "mtu 1500"
    ) in ended.out
    ended = fabric.train(tmp_path, "timeout_s=10")
    assert ended.status != 0
    assert re.search(r"Timed out waiting for the other ranks for 10 s \(timeout_s\)", ended.out), (
        ended.out
    )


@pytest.mark.parametrize("hangs", ["node1", "node2"])
@pytest.mark.long
def test_either_node_that_hangs_is_reported(fabric: Fabric, tmp_path: Path, hangs: str) -> None:
    """Its process is stopped at its start. If it is that of the first node, the other node gives
    the verdict.
    """
    code = f"""
import os, runpy, signal, sys
if os.environ["SLURMD_NODENAME"] == "{hangs}":
    os.kill(os.getpid(), signal.SIGSTOP)
sys.argv = ["doctor", *sys.argv[1:]]
runpy.run_module("recipes.doctor", run_name="__main__")
"""
    begin = time.monotonic()
    keys = ("device=cpu", f"run_dir={tmp_path}", f"seconds={BOUND_S}")
    ended = fabric.srun("-c", code, *keys)
    assert time.monotonic() - begin < BOUND_S + 10
    assert ended.status != 0, ended.out  # not 3: srun tells how the one that hung was ended
    assert f"{hangs}: did not answer: it hangs" in ended.out
    assert helpers.read(tmp_path, "doctor")["exclude"] == [hangs]
