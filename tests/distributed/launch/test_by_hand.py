"""Two machines without Slurm, joined by hand with gpus=, node_rank= and master=: two network namespaces. Needs root."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from recipes.core.run import attempt as attempts
from tests import helpers
from tests.helpers import LOCAL, Ended

WORDS = ("max_steps=4", "log_every_steps=1", "timeout_s=60")


def missing() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    programs = [name for name in ("ip", "nsenter", "unshare", "hostname") if not shutil.which(name)]
    return f"not installed: {', '.join(programs)}" if programs else None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces that are connected by IPv4 and IPv6. Their host names do not resolve."""
    helpers.need(missing())
    unique = secrets.token_hex(3)
    with ExitStack() as cleanup:
        names = (f"hand-{unique}-0", f"hand-{unique}-1")
        for name in names:
            ip("netns", "add", name)
            cleanup.callback(ip, "netns", "del", name)
        ip("-n", names[0], "link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", names[1])
        for node, name in enumerate(names):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"10.83.0.{node + 1}/24", "dev", f"cable{node}")
            ip("-n", name, "address", "add", f"fd83::{node + 1}/64", "dev", f"cable{node}", "nodad")
            ip("-n", name, "link", "set", f"cable{node}", "up")
        yield names


def start(
    machine: str, node_rank: int, *words: str, cwd: Path, command: Sequence[str] = (*LOCAL, *WORDS)
) -> subprocess.Popen[str]:
    inside = [
        "nsenter",
        f"--net=/run/netns/{machine}",
        "unshare",
        "--uts",
        "sh",
        "-ec",
        'hostname "$0"; exec "$@"',
        machine,
    ]
    return helpers.start([*inside, *command, f"node_rank={node_rank}", *words], cwd=cwd)


def check_run(run_dir: Path, ended: tuple[Ended, Ended], machines: tuple[str, str], ranks: tuple[int, int]) -> None:
    assert [e.status for e in ended] == [0, 0], "\n".join(e.out for e in ended)
    size = sum(ranks)
    assert f"mnist: {size} ranks on 2 nodes, cpu, gloo" in ended[0].lines
    assert any(line.startswith("network: cable0 (") for line in ended[0].lines), ended[0].out
    assert f"network: {machines[1]} has cable1 instead" in ended[0].lines
    # Rank 0 speaks, and is on the other.
    assert not [line for line in ended[1].lines if line.startswith(("mnist:", "epoch"))]
    summary = helpers.read(run_dir, "summary")
    found = {k: summary[k] for k in ("world_size", "num_nodes", "steps", "val_samples", "restarts")}
    assert found == {"world_size": size, "num_nodes": 2, "steps": 4, "val_samples": 359, "restarts": 0}
    assert attempts.facts(run_dir)["hosts"] == [machines[0]] * ranks[0] + [machines[1]] * ranks[1]
    assert sorted(p.name for p in (run_dir / "logs").iterdir()) == [f"rank{r}.log" for r in range(size)]
    assert helpers.read(run_dir, "status")["state"] == "done"


def test_uneven_machines_may_start_in_any_order(machines: tuple[str, str], tmp_path: Path) -> None:
    layout = ("gpus=2,1", "master=10.83.0.1:29411")
    second = start(machines[1], 1, *layout, cwd=tmp_path)
    helpers.wait_until(lambda: helpers.children(second.pid), 20, "the rank of the second machine")
    first = start(machines[0], 0, *layout, "run_dir=run", cwd=tmp_path)
    ended = (helpers.finish(first), helpers.finish(second))
    check_run(tmp_path / "run", ended, machines, (2, 1))


@pytest.mark.long
def test_two_machines_over_ipv6(machines: tuple[str, str], tmp_path: Path) -> None:
    layout = ("gpus=1,1", "master=[fd83::1]:29412")
    first = start(machines[0], 0, *layout, "run_dir=run", cwd=tmp_path)
    second = start(machines[1], 1, *layout, cwd=tmp_path)
    ended = (helpers.finish(first), helpers.finish(second))
    check_run(tmp_path / "run", ended, machines, (1, 1))


def by_hand(*words: str) -> tuple[str, ...]:
    return (sys.executable, str(helpers.ROOT / "launch.py"), "launcher=local", "device=cpu", "timeout_s=120", *words)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_ten_ranks_over_eight_and_two(machines: tuple[str, str], tmp_path: Path) -> None:
    command = by_hand("recipe=toy", "cpu_threads=1", "gpus=8,2", "master=10.83.0.1:29414", "max_steps=4")
    first = start(machines[0], 0, "run_dir=run", cwd=tmp_path, command=command)
    second = start(machines[1], 1, cwd=tmp_path, command=command)
    ended = (helpers.finish(first, timeout_s=200), helpers.finish(second))
    assert [e.status for e in ended] == [0, 0], "\n".join(e.out for e in ended)
    assert attempts.facts(tmp_path / "run")["hosts"] == [machines[0]] * 8 + [machines[1]] * 2
    summary = helpers.read(tmp_path / "run", "summary")
    assert (summary["world_size"], summary["num_nodes"], summary["steps"]) == (10, 2, 4)
    epochs = {line.split()[0] for each in ended for line in each.lines if line.startswith("[GPU")}
    assert epochs == {f"[GPU{rank}]" for rank in range(10)}


RECIPES = {
    "cifar": ("arch=resnet9", "max_steps=1", "global_batch_size=6"),
    "imagenet": ("variant=dev", "max_steps=1", "global_batch_size=6"),
    "collectives": ("mode=learn",),
}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs_on_uneven_machines(machines: tuple[str, str], tmp_path: Path, recipe: str) -> None:
    data = [f"data_dir={helpers.image_sets(tmp_path / 'images')}"] if recipe == "cifar" else []
    command = by_hand(
        f"recipe={recipe}", "cpu_threads=1", "gpus=2,1", "master=10.83.0.1:29415", *RECIPES[recipe], *data
    )
    first = start(machines[0], 0, "run_dir=run", cwd=tmp_path, command=command)
    second = start(machines[1], 1, cwd=tmp_path, command=command)
    ended = (helpers.finish(first, timeout_s=200), helpers.finish(second))
    assert [e.status for e in ended] == [0, 0], "\n".join(e.out for e in ended)
    assert helpers.read(tmp_path / "run", "status")["state"] == "done"
    assert helpers.read(tmp_path / "run", "summary")["world_size"] == 3


@pytest.mark.long
def test_the_doctor_without_slurm(machines: tuple[str, str], tmp_path: Path) -> None:
    layout = ("recipe=doctor", "gpus=1,1", "master=10.83.0.1:29413", f"run_dir={tmp_path}/run", "seconds=40")
    words = [word for word in LOCAL if not word.startswith(("recipe=", "dataset="))]
    both = [start(name, node, *layout, cwd=tmp_path, command=words) for node, name in enumerate(machines)]
    ended = [helpers.finish(process) for process in both]
    assert [e.status for e in ended] == [0, 0], "\n".join(e.out for e in ended)
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
        ended = helpers.run([*LOCAL, "gpus=1,1", "node_rank=0", f"master={host}:{port}", f"run_dir={tmp_path}/run"])
    assert ended.status == 3, ended.out
    assert len(ended.lines) == 1, ended.out
    assert f"port {port}" in ended.lines[0]
    assert "master=HOST:PORT" in ended.lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_machines_with_different_keys_are_refused(tmp_path: Path) -> None:
    """Two launchers on this machine stand for two machines."""
    port = helpers.free_port()
    words = [*LOCAL, "gpus=1,1", f"master=127.0.0.1:{port}", "max_steps=1"]
    both = [
        helpers.start([*words, "node_rank=0", f"run_dir={tmp_path}", "lr=0.1"]),
        helpers.start([*words, "node_rank=1", "lr=0.5", "checkpoint_every_steps=7"]),
    ]
    ended = [helpers.finish(process) for process in both]
    assert ended[1].status == 2, ended[1].out
    [line] = [line for line in ended[1].lines if "other keys than rank 0" in line]
    assert "lr=0.5 here, lr=0.1 there" in line
    assert "checkpoint_every_steps=7 here, checkpoint_every_steps=0 there" in line
    assert ended[0].status != 0
    assert helpers.rows(tmp_path) == []


@pytest.mark.long
def test_the_loss_of_the_first_machine_is_reported(tmp_path: Path) -> None:
    """Both machines see the run directory, but only the first has its path."""
    words = [*LOCAL, "gpus=1,1", f"master=127.0.0.1:{helpers.free_port()}", "epochs=1000", "timeout_s=20"]
    first = helpers.start([*words, "node_rank=0", f"run_dir={tmp_path}"])
    second = helpers.start([*words, "node_rank=1"])
    helpers.wait_until(lambda: helpers.rows(tmp_path), helpers.START_S, "a step")
    [rank] = helpers.children(first.pid)
    first.kill()  # and its rank with it
    helpers.wait_for_the_end_of([rank], 10)
    ended = helpers.finish(second, timeout_s=60)
    helpers.finish(first)
    assert ended.status != 0, ended.out
    status = helpers.read(tmp_path, "status")
    assert (status["state"], status["first_failing_rank"]) == ("failed", 0), status
    assert "rank 0 on " in status["reason"]
