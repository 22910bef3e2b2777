"""Ranks in a container, on a real Slurm, for machines without Apptainer and pyxis.

pyxis is a stand-in for srun on the PATH, which notes how it is called, sets what an image sets, and starts the ranks. A real
Apptainer is in test_apptainer.py, and its command in tests/unit/launch/test_container.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm import jobs
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(300)

KEYS = ("device=cpu", "cpu_threads=1", "max_steps=3")
SRUN = """\
#!/bin/bash
words=()
for word in "$@"; do case $word in --container-*) container=1 ;; *) words+=("$word") ;; esac; done
[ -z "$container" ] || printf '%s\\n' "$@" > "$NOTES/srun"
[ -z "$container" ] || echo "$NCCL_IB_TIMEOUT" > "$NOTES/timeout"
export PATH=$PATH_INSIDE
exec /usr/bin/srun "${words[@]}"
"""


def test_pyxis(slurm: Cluster, tmp_path: Path) -> None:
    """pyxis adds options to srun."""
    repo, image = jobs.copy_repository(tmp_path / "clone"), "registry#torch:2"
    for name in ("run", "site", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "site/site.env").write_text("NCCL_IB_TIMEOUT=23\n")
    (tmp_path / "bin/srun").write_text(SRUN)
    (tmp_path / "bin/srun").chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}/bin:{jobs.PYTHON['PATH']}", "PATH_INSIDE": jobs.PYTHON["PATH"], "NOTES": str(tmp_path),
        "NCCL_DEBUG": "mine", "RECIPES_CONTAINER": image,
    }  # fmt: skip
    keys = [*KEYS, f"run_dir={tmp_path}/run", f"network={tmp_path}/site/site.env"]
    (repo / "sbatch/toy.sh").write_text((repo / "sbatch/mnist_1x1.sh").read_text().replace("mnist", "toy"))
    job = jobs.sbatch(slurm, repo, tmp_path / "log", "--gpus-per-node=0", "sbatch/toy.sh", *keys, env=environ)
    assert slurm.wait_job(job, 120) == "COMPLETED", jobs.tail(tmp_path / "log")
    assert jobs.read(tmp_path / "run/status.json")["state"] == "done"
    words = (tmp_path / "srun").read_text().splitlines()
    options = dict(word.split("=", 1) for word in words if word.startswith("--container-"))
    assert options["--container-image"] == image
    assert f"{repo}:{repo}" in options["--container-mounts"].split(",")
    assert options["--container-workdir"] == jobs.read(tmp_path / "run/job.yaml")["code"]
    assert {"NCCL_IB_TIMEOUT", "NCCL_DEBUG"} <= set(options["--container-env"].split(","))
    assert (tmp_path / "timeout").read_text() == "23\n"
    assert "python3" in words
