"""environment=: the ranks use a Python that each node has unpacked from an archive. On a real
Slurm.
"""

from __future__ import annotations

import os
import site
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import jobs
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(400)

PROGRAM = "import sys, omegaconf; print('runs in', sys.prefix)"


def pack(folder: Path) -> Path:
    """An archive of an environment whose packages are those of this one."""
    environment = folder / "environment"
    packages = environment / f"lib/python3.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    base = Path(sys.executable).resolve()
    (environment / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    (environment / "bin").mkdir()
    (environment / "bin/python").symlink_to(base)
    archive = folder / "environment.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(environment, ".")
    return archive


@pytest.fixture
def disk(slurm: Cluster, tmp_path: Path) -> Iterator[Path]:
    """A folder that is on a separate disk on each node."""
    folder = tmp_path / "disk"
    folder.mkdir()
    for node in ("node1", "node2"):
        slurm.on_node(node, "mount", "-t", "tmpfs", "disk", folder, check=True)
    yield folder
    for node in ("node1", "node2"):
        slurm.on_node(node, "umount", folder, check=True)


def test_each_node_unpacks_the_environment_once(
    slurm: Cluster, repo: Path, tmp_path: Path, disk: Path
) -> None:
    archive = pack(tmp_path)
    (repo / "where.py").write_text(PROGRAM)
    logs = []
    for number in range(2):
        log = tmp_path / f"log{number}"
        run_dir = tmp_path / f"run{number}"
        keys = ("script=where.py", "device=cpu", f"environment={archive}", f"run_dir={run_dir}")
        words = (*jobs.TWO_BY_ONE, "sbatch/script_2x8.sh", *keys)
        job = jobs.sbatch(slurm, repo, log, *words, env={"TMPDIR": str(disk)})
        assert jobs.ended(slurm, job, log) == ("COMPLETED", "0:0"), log.read_text()
        places = {(run_dir / f"logs/rank{rank}.log").read_text().split()[-1] for rank in range(2)}
        logs.append(log.read_text())
    (place,) = map(Path, places)
    assert place.parent == disk / f"recipes-{os.getuid()}"
    assert f"environment: {archive} is unpacked in {place} (" in logs[0]
    assert "is unpacked" not in logs[1]
    assert "srun: error" not in logs[0]
    for node in ("node1", "node2"):
        kept = slurm.on_node(node, "ls", place.parent, check=True).stdout.split()
        assert [name for name in kept if name.startswith("environment")] == [place.name]


def test_what_is_no_environment_is_refused(slurm: Cluster, repo: Path, tmp_path: Path) -> None:
    archive = tmp_path / "data.tar"
    with tarfile.open(archive, "w") as file:
        file.add(__file__, "data.py")
    keys = ("device=cpu", f"environment={archive}", f"run_dir={tmp_path}/run")
    log = tmp_path / "log"
    job = jobs.sbatch(
        slurm,
        repo,
        log,
        *jobs.ONE_BY_ONE,
        "sbatch/mnist_1x1.sh",
        *keys,
        env={"TMPDIR": str(tmp_path)},
    )
    assert jobs.ended(slurm, job, log) == ("FAILED", "3:0")
    rule = "has no bin/python; pack with: tar -cf FILE -C ENVIRONMENT ."
    assert f"environment: node1: {archive}: {rule}" in log.read_text()
    assert f"mnist: environment={archive}: was not unpacked" in jobs.log_lines(log)[-1]
