"""The test cluster itself: jobs are confined, nothing is left after its owner is killed, a daemon
that does not start is named.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need, wait_until
from tests.slurm import cluster as cluster_module
from tests.slurm.cluster import (
    ClusterError,
    ClusterOptions,
    cgroups_missing,
    running_cluster,
    start,
)

SCRIPT = Path(cluster_module.__file__)
# Prints the number of cores, what opening each device says, and the status of a process that uses
# 300 MB.
PROBE = """
import errno, os, subprocess, sys
print(len(os.sched_getaffinity(0)))
for device in sys.argv[1:]:
    try:
        open(device)
    except OSError as error:
        print(errno.errorcode[error.errno])
print(subprocess.run([sys.executable, "-c", "bytearray(300 << 20)"]).returncode)
"""


def left_over(root: Path, state: dict[str, Any]) -> list[str]:
    """What there still is of a cluster: folder, link, mounts, cgroups, processes."""
    remains = [str(root)] if root.exists() else []
    remains += [name for name in os.listdir("/sys/class/net") if name == state["link"]]
    remains += [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(root) in line
    ]
    remains += [cgroup for cgroup in state["cgroups"] if Path(cgroup).exists()]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(root) in line:
            remains.append(line)
    return remains


def freezer_states(state: dict[str, Any]) -> list[str]:
    cgroups = map(Path, state["cgroups"])
    return [file.read_text() for path in cgroups for file in path.glob("**/freezer.state")]


def test_a_killed_owner_leaves_nothing() -> None:
    code = (
        "import os, time; from tests.slurm.cluster import *\n"
        "with running_cluster(ClusterOptions(nodes=1)) as c:\n"
        "    job = c.submit('--output=/dev/null', '--wrap=sleep 66'); c.wait_running(job)\n"
        "    c.run('scontrol', 'suspend', job, check=True)\n"
        "    print(c.root, flush=True); time.sleep(60)"
    )
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=SCRIPT.parents[2]) as owner:
        assert owner.stdout is not None
        root = Path(owner.stdout.readline().strip())
        state = json.loads((root / "state.json").read_text())
        assert len(left_over(root, state)) > 3
        wait_until(lambda: "FROZEN\n" in freezer_states(state), 10, "that the job is suspended")
        owner.kill()
    wait_until(lambda: not left_over(root, state), 10, "that nothing is left")


def test_a_job_has_only_its_cores_memory_and_gpus(tmp_path: Path) -> None:
    need(cgroups_missing())
    (tmp_path / "probe.py").write_text(PROBE)
    with running_cluster(ClusterOptions(nodes=1, gpus=2)) as cluster:
        devices = [str(cluster.root / f"dev/nvidia{index}") for index in range(2)]
        command = shlex.join(["srun", sys.executable, str(tmp_path / "probe.py"), *devices])
        job = cluster.submit(
            f"--output={tmp_path}/log", "--gpus=1", "--mem=100M", f"--wrap={command}"
        )
        cluster.wait_job(job)
    lines = (tmp_path / "log").read_text().splitlines()
    # no driver has the GPU of the job; the other one is not allowed
    assert lines[:4] == [
        "1",
        "ENXIO",
        "EPERM",
        "-9",
    ]


def test_a_daemon_that_does_not_come_up_is_named_with_its_log() -> None:
    with pytest.raises(ClusterError, match=r"slurmctld[\s\S]*NoSuchKey") as caught:
        start(ClusterOptions(nodes=1, extra_conf="NoSuchKey=1"))
    assert "exit status" in str(caught.value)
    mentioned = re.findall(r"/tmp/slurm-test-\w+", str(caught.value))
    assert mentioned
    assert not Path(mentioned[0]).exists()
