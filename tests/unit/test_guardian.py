"""Nothing is left of a session of pytest that is killed (tests/guardian.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from recipes.core import files
from tests import helpers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="guardians need Linux")
# The daemon has neither an environment nor a parent that is of the session; root also mounts a disk
# and adds a network namespace.
SESSION = """
import os, subprocess, time
from pathlib import Path
from tests import helpers
from tests.slurm import cluster

def test_daemon(tmp_path):
    here = Path(__file__).parent
    if cluster.missing():
        root = cluster.make_root()
    else:
        root = cluster.start(cluster.ClusterOptions(nodes=1), os.getpid()).root
    (here / "cluster").symlink_to(root)
    daemon = "env -i setsid sh -c 'echo $$ > new; mv new daemon; exec sleep 600' &"
    subprocess.run(daemon, shell=True, cwd=here, check=True)
    if os.geteuid() == 0:
        subprocess.run(["ip", "netns", "add", root.name], check=True)
    with helpers.small_disk(tmp_path / "disk", "64k") if os.geteuid() == 0 else open(os.devnull):
        (here / "ready").touch()
        time.sleep(600)
"""


def test_nothing_is_left_of_a_killed_session(tmp_path: Path) -> None:
    (tmp_path / "test_session.py").write_text(SESSION)
    options = (
        "-n1",
        "-p",
        "tests.conftest",
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path}/temp",
    )
    # Without the mark of the session that this test is in, which it would be part of.
    argv = ["prlimit", "--rss=unlimited", sys.executable, "-m", "pytest", *options, str(tmp_path)]
    session = helpers.start(argv, environ=helpers.clean_environment(PYTHONPATH=str(helpers.ROOT)))
    begun = [tmp_path / "ready", tmp_path / "daemon"]
    helpers.wait_until(
        lambda: all(map(Path.exists, begun)) or session.poll() is not None,
        helpers.START_S,
        "the session's test",
    )
    assert session.poll() is None, helpers.finish(session).out
    daemon = int((tmp_path / "daemon").read_text())
    root = (tmp_path / "cluster").resolve()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert not Path("/run/netns", root.name).exists()
    assert helpers.alive(daemon), "the guardian has ended a session that runs"
    assert root.exists()
    state = files.read_json(root / "state.json") or {}  # of a cluster; none without Slurm
    cgroups = [Path(cgroup) for cgroup in state.get("cgroups", ())]
    assert all(map(Path.exists, cgroups))

    started = helpers.children(session.pid)
    session.kill()
    helpers.wait_for_the_end_of([*started, daemon], helpers.START_S)
    helpers.wait_until(lambda: not root.exists(), helpers.START_S, "the cluster's folder removed")
    assert not any(map(Path.exists, cgroups))
