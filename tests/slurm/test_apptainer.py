"""Ranks in a real Apptainer image, on a real Slurm.

$RECIPES_TEST_IMAGE names an image of env/apptainer.def that tests/image.py made; without it the
tests are skipped. `make portability` makes one in Debian sid. Root needs --no-privs where it lacks
a capability.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster

IMAGE = os.environ.get("RECIPES_TEST_IMAGE", "")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.long,
    pytest.mark.skipif(
        not IMAGE, reason="RECIPES_TEST_IMAGE names no image: see tests/slurm/image.py"
    ),
]

KEYS = ("device=cpu", "cpu_threads=1", "log_every_steps=1", "global_batch_size=60", "epochs=20")
STEPS = 200
# the inside's shell must not read it again
QUOTED = """a "b" 'c' $HOME $(touch /oops) `touch /oops` \\n ! # é"""


@dataclass(frozen=True)
class Site:
    """folder: in /, so that Apptainer mounts nothing of it without being asked. environ: of the
    user's shell.
    """

    folder: Path
    environ: dict[str, str]

    @property
    def clone(self) -> Path:
        return self.folder / "my clone"

    @property
    def tmpdir(self) -> Path:
        return self.folder / "node's own"

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs/1"


@pytest.fixture
def site(slurm: Cluster) -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="recipes-test-", dir="/"))
    here = Site(folder, {})
    try:
        jobs.copy_repository(here.clone)
        for path in (
            here.tmpdir,
            here.run_dir.parent,
            folder / "site",
            folder / "fast",
            folder / "unnamed",
        ):
            path.mkdir()
        (folder / "fast/file").touch()
        (folder / "site/site.env").write_text("NCCL_IB_TIMEOUT=23\nNCCL_DEBUG=file\n")
        environ = {
            **jobs.PYTHON,
            "APPTAINER_NO_PRIVS": "1",
            "APPTAINER_BIND": f"{folder}/fast:/own/fast",
            "TMPDIR": str(here.tmpdir),
            "NCCL_DEBUG": "mine",
            "NCCL_QUOTED": QUOTED,
            "PYTHONPATH": "/nosuch",
        }
        yield Site(folder, environ)
        jobs.leave_no_job(slurm)
    finally:
        shutil.rmtree(folder)


def submit(slurm: Cluster, site: Site, how: str, *words: str, mounts: str = "") -> tuple[str, Path]:
    """A job and its log: a rank on each of two nodes by launch.py; two and one by a ready
    script.
    """
    mounts = mounts or f"{site.folder}/fast:/data/fast"
    log = site.folder / "log"
    words = (*words, f"run_dir={site.run_dir}", f"network={site.folder}/site/site.env")
    if how == "ready":
        environ = {**site.environ, "RECIPES_CONTAINER": IMAGE, "RECIPES_CONTAINER_MOUNTS": mounts}
        size = (
            "--nodes=2",
            "--ntasks=3",
            "--ntasks-per-node=2",
            "--gpus-per-node=0",
            "--cpus-per-task=1",
        )
        return jobs.sbatch(
            slurm, site.clone, log, *size, "sbatch/mnist_2x8.sh", *words, env=environ
        ), log
    words = ("nodes=2", f"container={IMAGE}", f"container_mounts={mounts}", *words)
    words = words if any(word.startswith("recipe=") for word in words) else ("recipe=mnist", *words)
    done = slurm.run(sys.executable, "launch.py", *words, cwd=site.clone, env=site.environ)
    submitted = re.search(r"^job (\d+): .*\n.*\nlog: tail -F '?(.*?)'?$", done.stdout, re.MULTILINE)
    assert submitted, done.stdout + done.stderr
    return submitted[1], Path(submitted[2])


def inside(slurm: Cluster, job: str) -> dict[int, tuple[str, Path, Path, dict[str, str]]]:
    """Of each rank: its node; the root of its files and its working directory, as this machine sees
    them; its variables.
    """
    ranks = {}
    for process in slurm.processes(job_id=job, command="-m recipes.mnist"):
        seen = Path(f"/proc/{process.pid}")
        pairs = (seen / "environ").read_bytes().decode().split("\0")
        environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if "APPTAINER_CONTAINER" in environ:
            ranks[int(environ["SLURM_PROCID"])] = (
                process.node,
                seen / "root",
                seen / "cwd",
                environ,
            )
    return ranks


@pytest.mark.parametrize(("how", "world_size"), [("slurm", 2), ("ready", 3)])
def test_mnist_is_signalled_requeued_and_finished(
    slurm: Cluster, site: Site, how: str, world_size: int
) -> None:
    raw = site.folder / "data/MNIST/raw"
    helpers.write_mnist(raw)
    jobs.know(site.clone / "recipes/core/data/datasets.py", raw)
    job, log = submit(slurm, site, how, *KEYS, f"data_dir={site.folder}/data")
    try:
        jobs.wait_for_training(slurm, job, site.run_dir)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{jobs.tail(log)}") from None
    ranks = inside(slurm, job)
    assert sorted(ranks) == list(range(world_size))
    code = jobs.read(site.run_dir / "job.yaml")["code"]
    for node, root, cwd, environ in ranks.values():
        assert environ["APPTAINER_CONTAINER"] == IMAGE
        # The user's value wins over the env file's, and this over the image's.
        values = [
            environ[name] for name in ("NCCL_DEBUG", "NCCL_IB_TIMEOUT", "IMAGE_ONLY", "NCCL_QUOTED")
        ]
        assert values == ["mine", "23", "image", QUOTED]
        assert "PYTHONPATH" not in environ
        # starts in the code, then works in the repository
        assert environ["PWD"] == code
        assert cwd.samefile(site.clone)
        for path in (
            "data/fast/file",
            "own/fast/file",
            f"{raw}/train-images-idx3-ubyte",
            f"{site.tmpdir}",
        ):
            assert (root / path.lstrip("/")).exists(), path
        assert not (root / f"{site.folder}/unnamed".lstrip("/")).exists()
        shared = Path(f"/proc/{slurm.node(node).pid}/root/dev/shm")
        assert (root / "dev/shm").stat().st_dev == shared.stat().st_dev
    slurm.run("scancel", "--signal=USR2", job, check=True)
    jobs.wait_requeued(slurm, job, log, 60)
    saved = jobs.read(site.run_dir / "status.json")
    assert saved["state"] == "preempted"
    assert saved["reason"] == "SIGUSR2"
    jobs.start_again(slurm, job)
    assert jobs.ended(slurm, job, log) == ("COMPLETED", "0:0"), jobs.tail(log)
    summary = jobs.read(site.run_dir / "summary.json")
    expected = {
        "world_size": world_size,
        "num_nodes": 2,
        "steps": STEPS,
        "restarts": 1,
        "resumed_from_step": saved["step"],
        "val_samples": 100,
    }
    assert {key: summary[key] for key in expected} == expected
    assert "/oops" not in log.read_text()


def test_a_packed_copy_is_staged_to_the_nodes_tmpdir_and_loaded_by_workers(
    slurm: Cluster, site: Site
) -> None:
    images = site.folder / "images"
    packed = site.folder / "packed"
    helpers.image_sets(images)
    words = (
        "-m",
        "recipes.prepare",
        "imagenet",
        f"source={images}",
        f"data_dir={packed}",
        "size=40",
    )
    slurm.run(sys.executable, *words, cwd=site.clone, check=True)
    keys = (
        "device=cpu",
        "arch=resnet18",
        "px=32",
        "val_px=32",
        "val_resize=36",
        "num_workers=2",
        "global_batch_size=16",
        "max_steps=4",
        f"data_dir={packed}",
        "stage_dir=$TMPDIR",
    )
    job, log = submit(slurm, site, "slurm", "recipe=imagenet", *keys)
    assert jobs.ended(slurm, job, log) == ("COMPLETED", "0:0"), jobs.tail(log)
    assert list(site.tmpdir.glob("packed-*/index.json"))


def test_the_doctor_examines_the_nodes_inside_the_image(slurm: Cluster, site: Site) -> None:
    job, log = submit(
        slurm, site, "slurm", "recipe=toy", "device=cpu", "max_steps=3", "doctor=true"
    )
    assert jobs.ended(slurm, job, log) == ("COMPLETED", "0:0"), jobs.tail(log)
    assert jobs.read(site.run_dir / "doctor/doctor.json")["healthy"]


def test_the_runtime_s_own_message_is_in_the_log(slurm: Cluster, site: Site) -> None:
    job, log = submit(slurm, site, "slurm", *KEYS, mounts="/nosuch")
    assert jobs.ended(slurm, job, log)[0] == "FAILED"
    assert jobs.log_lines(log)[-1].endswith("before the run began"), jobs.tail(log)
    assert "mount source /nosuch doesn't exist" in log.read_text()
