"""The test cluster itself: nothing is left of it after its owner is killed, and a daemon that does not start is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import wait_until
from tests.slurm import cluster as cluster_module
from tests.slurm.cluster import ClusterError, ClusterOptions, start

SCRIPT = Path(cluster_module.__file__)


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


def test_a_daemon_that_does_not_come_up_is_named_with_its_log() -> None:
    with pytest.raises(ClusterError, match=r"slurmctld[\s\S]*NoSuchKey") as caught:
        start(ClusterOptions(nodes=1, extra_conf="NoSuchKey=1"))
    assert "exit status" in str(caught.value)
    mentioned = re.findall(r"/tmp/slurm-test-\w+", str(caught.value))
    assert mentioned
    assert not Path(mentioned[0]).exists()
