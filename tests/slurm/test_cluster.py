"""The test cluster itself: its nodes and networks, its faults, and that nothing is left after it is taken down."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import wait_until
from tests.slurm import cluster as cluster_module
from tests.slurm.cluster import Cluster, ClusterError, ClusterOptions, start

SCRIPT = Path(cluster_module.__file__)
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2")


def job_output(slurm: Cluster, folder: Path, command: str, *options: str) -> list[str]:
    """Lines that a batch script with this command prints, sorted: tasks write in any order."""
    script, log = folder / "job.sh", folder / "job.log"
    script.write_text(f"#!/bin/bash\n{command}\n")
    job = slurm.submit(f"--output={log}", *options, script)
    assert slurm.wait_job(job) == "COMPLETED", log.read_text()
    return sorted(log.read_text().splitlines())


def left_over(root: Path, state: dict[str, Any]) -> list[str]:
    """What there still is of a cluster: folder, link, mounts, processes."""
    found = [str(root)] if root.exists() else []
    found += [name for name in os.listdir("/sys/class/net") if name == state["link"]]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(root) in line]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(root) in line:
            found.append(line)
    return found


def test_tasks_are_given_gpus(slurm: Cluster, tmp_path: Path) -> None:
    command = "srun bash -c 'echo $SLURM_PROCID $SLURM_GPUS_ON_NODE $CUDA_VISIBLE_DEVICES'"
    assert job_output(slurm, tmp_path, command, *TWO_BY_TWO) == [f"{rank} 2 0,1" for rank in range(4)]
    command = "srun --gpus-per-task=1 bash -c 'echo $SLURM_PROCID $CUDA_VISIBLE_DEVICES'"
    assert job_output(slurm, tmp_path, command, *TWO_BY_TWO) == ["0 0", "1 1", "2 0", "3 1"]


def test_every_node_is_a_host_of_its_own(slurm: Cluster, tmp_path: Path) -> None:
    command = "srun bash -c 'echo $(hostname) $(ls /sys/class/net) $(ip -4 -o addr show docker0 | grep -o 172.*/16)'"
    lines = job_output(slurm, tmp_path, command, "--nodes=2")
    assert lines == [f"{name} docker0 eth0 lo veth0 172.17.0.1/16" for name in ("node1", "node2")]


def test_names_resolve_to_the_data_network_but_the_own_one_to_loopback(slurm: Cluster) -> None:
    _, second = slurm.nodes
    assert slurm.on_node("node1", "getent", "ahostsv4", "node1").stdout.split()[0] == "127.0.1.1"
    assert slurm.on_node("node1", "getent", "ahostsv4", "node2").stdout.split()[0] == second.address


def test_the_login_sides_name_is_known_to_the_nodes(slurm: Cluster) -> None:
    name = os.uname().nodename
    assert slurm.on_node("node1", "getent", "ahostsv4", name).stdout.split()[0] == slurm.login_address


def test_an_ordinary_user_can_submit(slurm: Cluster) -> None:
    done = slurm.run("srun", "--chdir=/", "id", "-un", user="nobody", group="nogroup", extra_groups=[], cwd="/")
    assert done.stdout.strip() == "nobody", done.stderr


def test_a_jobs_end_is_seen_without_accounting(slurm: Cluster) -> None:
    failed = slurm.submit("--output=/dev/null", "--wrap=exit 3")
    assert slurm.wait_job(failed) == "FAILED"
    assert slurm.jobs(failed)[0]["ExitCode"] == "3:0"
    tasks = slurm.submit("--output=/dev/null", "--array=0-1", "--wrap=exit $SLURM_ARRAY_TASK_ID")
    assert slurm.wait_job(tasks) == "FAILED"
    asleep = slurm.submit("--output=/dev/null", "--wrap=sleep 60")
    with pytest.raises(ClusterError, match=f"the end of job {asleep} not within 0.2 s: "):
        slurm.wait_job(asleep, timeout_s=0.2)
    slurm.run("scancel", asleep)
    assert slurm.wait_job(asleep) == "CANCELLED"


def test_down_leaves_nothing() -> None:
    cluster = start(ClusterOptions(nodes=1))
    state = json.loads((cluster.root / "state.json").read_text())
    job = cluster.submit("--output=/dev/null", "--wrap=setsid sleep 65 & sleep 65")
    wait_until(lambda: len(cluster.processes(job_id=job, command="sleep 65")) >= 2, 10, "both sleepers")
    sleepers = cluster.processes(job_id=job, command="sleep 65")
    cluster.down()
    assert left_over(cluster.root, state) == []
    assert not [each for each in sleepers if Path(f"/proc/{each.pid}").exists()]
    cluster.down()


def test_a_killed_owner_leaves_nothing() -> None:
    code = (
        "import os, time; from tests.slurm.cluster import *\n"
        "with running_cluster(ClusterOptions(nodes=1)) as c:\n"
        "    job = c.submit('--output=/dev/null', '--wrap=sleep 66'); c.wait_running(job)\n"
        "    print(c.root, flush=True); time.sleep(60)"
    )
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=SCRIPT.parents[2]) as owner:
        assert owner.stdout is not None
        root = Path(owner.stdout.readline().strip())
        state = json.loads((root / "state.json").read_text())
        assert len(left_over(root, state)) > 3
        owner.kill()
    wait_until(lambda: not left_over(root, state), 10, "that nothing is left")


def test_command_line_up_and_down_after_a_crash() -> None:
    up = subprocess.run([sys.executable, SCRIPT, "up", "--nodes=1", "--gpus=2"], capture_output=True, text=True)
    assert up.stdout.startswith("export SLURM_CONF=/tmp/slurm-test-"), up.stderr
    assert len(up.stdout.splitlines()) == 1
    conf = Path(up.stdout.strip().partition("=")[2])
    root = conf.parents[1]
    state = json.loads((root / "state.json").read_text())
    try:
        greeting = subprocess.run(["bash", "-c", f"{up.stdout}\nsrun hostname"], capture_output=True, text=True)
        assert greeting.stdout == "node1\n", greeting.stderr
        status = subprocess.run([sys.executable, SCRIPT, "status"], capture_output=True, text=True)
        assert f"{root}: up\n" in status.stdout
        of_another = {**os.environ, "SUDO_UID": "4711"}
        subprocess.run([sys.executable, SCRIPT, "down"], check=True, capture_output=True, env=of_another)
        assert left_over(root, state)
        os.kill(state["processes"][0][0], signal.SIGKILL)
        wait_until(lambda: left_over(root, state) == [str(root)], 10, "that the folder alone is left")
        status = subprocess.run([sys.executable, SCRIPT, "status"], capture_output=True, text=True)
        assert f"{root}: crashed\n" in status.stdout
    finally:
        subprocess.run([sys.executable, SCRIPT, "down", root], check=True, capture_output=True)
    wait_until(lambda: not left_over(root, state), 10, "that nothing is left")


def test_a_daemon_that_does_not_come_up_is_named_with_its_log() -> None:
    with pytest.raises(ClusterError, match=r"slurmctld[\s\S]*NoSuchKey") as caught:
        start(ClusterOptions(nodes=1, extra_conf="NoSuchKey=1"))
    assert "exit status" in str(caught.value)
    mentioned = re.findall(r"/tmp/slurm-test-\w+", str(caught.value))
    assert mentioned
    assert not Path(mentioned[0]).exists()
