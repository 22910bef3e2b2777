"""Two machines without Slurm, joined by hand with gpus=, node_rank= and master=: two network
namespaces. Needs root.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from recipes.core.run import attempt as attempts
from tests import helpers, namespaces
from tests.helpers import LOCAL

TOY = (*LOCAL[:2], "recipe=toy", "launcher=local", "device=cpu")
WORDS = ("max_steps=4", "log_every_steps=1", "timeout_s=60")


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[str, str]]:
    """Two machines that are connected by IPv4 and IPv6. Their host names do not resolve."""
    helpers.need(namespaces.missing())
    with namespaces.joined(("10.83.0.1/24", "fd83::1/64"), ("10.83.0.2/24", "fd83::2/64")) as names:
        yield names


def start(
    machine: str, node_rank: int, *words: str, cwd: Path, command: Sequence[str] = (*TOY, *WORDS)
) -> subprocess.Popen[str]:
    net = f"--net=/run/netns/{machine}"
    inside = ["nsenter", net, "unshare", "--uts", "sh", "-ec", 'hostname "$0"; exec "$@"', machine]
    return helpers.start([*inside, *command, f"node_rank={node_rank}", *words], cwd=cwd)


def finish(*started: subprocess.Popen[str]) -> list[helpers.Ended]:
    ended = [helpers.finish(process) for process in started]
    for machine in ended:
        assert machine.status == 0, "\n".join(machine.out for machine in ended)
    return ended


@pytest.mark.parametrize(
    ("ranks", "host"),
    [((2, 1), "10.83.0.1"), pytest.param((1, 1), "[fd83::1]", marks=pytest.mark.long)],
)
def test_uneven_machines_may_start_in_any_order(
    machines: tuple[str, str], tmp_path: Path, ranks: tuple[int, int], host: str
) -> None:
    layout = (f"gpus={ranks[0]},{ranks[1]}", f"master={host}:29411", "run_dir=run")
    second = start(machines[1], 1, *layout, cwd=tmp_path)
    helpers.wait_until(lambda: helpers.children(second.pid), 20, "the rank of the second machine")
    first = start(machines[0], 0, *layout, cwd=tmp_path)
    ended = finish(first, second)
    run_dir = tmp_path / "run"
    size = sum(ranks)
    assert f"toy: {size} ranks on 2 nodes, cpu, gloo" in ended[0].lines
    assert any(line.startswith("network: eth0 (") for line in ended[0].lines), ended[0].out
    # Rank 0 speaks, and is on the other.
    assert not [line for line in ended[1].lines if line.startswith(("toy:", "epoch"))]
    summary = helpers.read(run_dir, "summary")
    assert summary["world_size"] == size
    assert summary["num_nodes"] == 2
    assert summary["steps"] == 4
    assert summary["restarts"] == 0
    assert attempts.facts(run_dir)["hosts"] == [machines[0]] * ranks[0] + [machines[1]] * ranks[1]
    logs = sorted(path.name for path in (run_dir / "logs").iterdir())
    assert logs == [f"rank{rank}.log" for rank in range(size)]
    assert helpers.read(run_dir, "status")["state"] == "done"


@pytest.mark.long
def test_the_doctor_without_slurm(machines: tuple[str, str], tmp_path: Path) -> None:
    layout = ("recipe=doctor", "gpus=1,1", "master=10.83.0.1:29413")
    words = (*layout, f"run_dir={tmp_path}/run", "seconds=40")
    command = [word for word in LOCAL if not word.startswith(("recipe=", "dataset="))]
    started = []
    for node, name in enumerate(machines):
        started.append(start(name, node, *words, cwd=tmp_path, command=command))
    ended = finish(*started)
    assert "healthy: 2 nodes" in ended[0].lines, ended[0].out
    assert not [line for line in ended[0].lines if line.startswith("BAD")]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_port_in_use_is_reported_in_one_line(host: str, tmp_path: Path) -> None:
    family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
    try:
        taken = socket.create_server((host.strip("[]"), 0), family=family)
    except OSError as error:
        pytest.skip(f"no {host} here: {error}")
    with taken:
        port = taken.getsockname()[1]
        layout = ("gpus=1,1", "node_rank=0", f"master={host}:{port}")
        ended = helpers.run([*LOCAL, *layout, f"run_dir={tmp_path}/run"])
    assert ended.status == 3, ended.out
    assert len(ended.lines) == 1, ended.out
    assert f"port {port}" in ended.lines[0]
    assert "master=HOST:PORT" in ended.lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_the_loss_of_the_first_machine_is_reported(tmp_path: Path) -> None:
    master = f"master=127.0.0.1:{helpers.free_port()}"
    words = [*LOCAL, "gpus=1,1", f"run_dir={tmp_path}", master, "epochs=1000", "timeout_s=20"]
    first = helpers.start([*words, "node_rank=0"])
    second = helpers.start([*words, "node_rank=1"])
    helpers.wait_until(lambda: helpers.rows(tmp_path), helpers.START_S, "a step")
    [rank] = helpers.children(first.pid)
    first.kill()  # and its rank with it
    helpers.wait_for_the_end_of([rank], 10)
    ended = helpers.finish(second, timeout_s=60)
    helpers.finish(first)
    assert ended.status != 0, ended.out
    assert "rank 1 on " in ended.out
    assert "lost its peers after step " in ended.out
