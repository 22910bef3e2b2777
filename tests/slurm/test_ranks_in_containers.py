"""Ranks in a container, on a real Slurm, for machines without Apptainer and pyxis.

Both are stand-ins on the PATH, which note what they were given, set what an image sets, and start the rank. A real Apptainer
is in test_apptainer.py.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.slurm import jobs
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(300)

KEYS = ("device=cpu", "cpu_threads=1", "max_steps=3")
NOTE = """\
note() { "$PYTHON_HERE" -c 'import json, os, sys; json.dump({"words": sys.argv[2:], "environ": dict(os.environ)}, open(sys.argv[1], "w"))' "$@"; }
"""
# An image that sets two variables of the network's: those that are handed over win.
APPTAINER = """\
export NCCL_IB_TIMEOUT=image NCCL_DEBUG=image IMAGE_ONLY=image
for name in "${!APPTAINERENV_@}"; do export "${name#APPTAINERENV_}=${!name}"; done
note "$NOTES/rank$SLURM_PROCID.json" "$@"
while [ "$1" != "$IMAGE" ]; do shift; done
shift
exec "$@"
"""
SRUN = """\
words=() container=
for word in "$@"; do
    case $word in
        --container-*) container=1 given+=("$word"); [ "${word%%=*}" != --container-env ] || names=${word#*=} ;;
        *) words+=("$word") ;;
    esac
done
[ -z "$container" ] || note "$NOTES/srun.json" "$@"
[ -z "$container" ] || for name in NCCL_IB_TIMEOUT NCCL_DEBUG IMAGE_ONLY; do
    case ,$names, in *,$name,*) ;; *) export "$name=image" ;; esac
done
export PATH=$PATH_INSIDE
exec "$REAL_SRUN" "${words[@]}"
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return jobs.copy_repository(tmp_path / "clone")


def surroundings(folder: Path, image: str, **programs: str) -> dict[str, str]:
    """Variables under which the stand-ins ``programs`` are found first."""
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    (folder / "node").mkdir()
    for name, body in programs.items():
        (stand_ins / name).write_text(f"#!/bin/bash\n{NOTE}{body}")
        (stand_ins / name).chmod(0o755)
    return {
        **jobs.PYTHON, "PATH": f"{stand_ins}:{jobs.PYTHON['PATH']}", "NOTES": str(folder), "IMAGE": image, "REAL_SRUN": "/usr/bin/srun",
        "PYTHON_HERE": sys.executable, "PATH_INSIDE": jobs.PYTHON["PATH"], "NCCL_DEBUG": "mine",
        "TMPDIR": str(folder / "node"),
    }  # fmt: skip


def inside(folder: Path, rank: int) -> tuple[list[str], dict[str, str]]:
    """What the runtime was given for a rank: its words, and the variables of the inside."""
    noted = json.loads((folder / f"rank{rank}.json").read_text())
    return noted["words"], noted["environ"]


def check_inside(environ: dict[str, str]) -> None:
    """The env file's over the image's, and the user's over both."""
    assert (environ["NCCL_IB_TIMEOUT"], environ["NCCL_DEBUG"], environ["IMAGE_ONLY"]) == ("23", "mine", "image")
    assert environ["SLURM_PROCID"] in ("0", "1")


def test_apptainer(slurm: Cluster, repo: Path, tmp_path: Path) -> None:
    image, data = tmp_path / "torch.sif", tmp_path / "data"
    image.write_text("")
    data.mkdir()
    (tmp_path / "run").mkdir()  # for one that is not there yet it is the folder above
    (tmp_path / "site").mkdir()
    (tmp_path / "site/site.env").write_text("NCCL_IB_TIMEOUT=23\n")
    environ = surroundings(tmp_path, str(image), apptainer=APPTAINER)
    words = ["recipe=toy", "nodes=2", *KEYS, f"container={image}", f"container_mounts={data}:/data"]
    words += [f"run_dir={tmp_path}/run", f"network={tmp_path}/site/site.env"]
    done = slurm.run(sys.executable, "launch.py", *words, cwd=repo, env=environ, check=True)
    job = done.stdout.split()[1].rstrip(":")
    assert slurm.wait_job(job, 120) == "COMPLETED", done.stdout
    assert jobs.read(tmp_path / "run/status.json")["state"] == "done"
    assert jobs.read(tmp_path / "run/summary.json")["world_size"] == 2
    code = jobs.read(tmp_path / "run/job.yaml")["code"]
    for rank in (0, 1):
        words, environ = inside(tmp_path, rank)
        at = words.index(str(image))
        assert words[0] == "exec"
        assert words[at - 2 : at] == ["--pwd", code]
        binds = {words[i + 1] for i, word in enumerate(words[:at]) if word == "--bind"}
        assert binds == {f"{folder}:{folder}" for folder in (repo, tmp_path / "run", tmp_path / "site")} | {
            f"{data}:/data",
            f"{tmp_path}/node",
        }
        assert "--nv" not in words[:at]  # no GPU was asked for
        assert words[at + 1 : at + 5] == ["python3", "-u", "-m", "recipes.toy"]
        assert f"run_dir={tmp_path}/run" in words[at + 5 :]
        check_inside(environ)
        assert environ["PYTHONNOUSERSITE"] == "1"


def test_pyxis(slurm: Cluster, repo: Path, tmp_path: Path) -> None:
    """pyxis adds options to srun."""
    image = "registry#torch:2"
    (tmp_path / "run").mkdir()
    (tmp_path / "site").mkdir()
    (tmp_path / "site/site.env").write_text("NCCL_IB_TIMEOUT=23\n")
    environ = surroundings(tmp_path, image, srun=SRUN)
    keys = [*KEYS, f"run_dir={tmp_path}/run", f"network={tmp_path}/site/site.env"]
    environ |= {"RECIPES_CONTAINER": image}
    (repo / "sbatch/toy.sh").write_text((repo / "sbatch/mnist_1x1.sh").read_text().replace("mnist", "toy"))
    job = jobs.sbatch(slurm, repo, tmp_path / "log", "--gpus-per-node=0", "sbatch/toy.sh", *keys, env=environ)
    assert slurm.wait_job(job, 120) == "COMPLETED", jobs.tail(tmp_path / "log")
    assert jobs.read(tmp_path / "run/status.json")["state"] == "done"
    noted = json.loads((tmp_path / "srun.json").read_text())
    options = dict(word.split("=", 1) for word in noted["words"] if word.startswith("--container-"))
    assert options["--container-image"] == image
    assert f"{repo}:{repo}" in options["--container-mounts"].split(",")
    assert options["--container-workdir"] == jobs.read(tmp_path / "run/job.yaml")["code"]
    assert {"NCCL_IB_TIMEOUT", "NCCL_DEBUG"} <= set(options["--container-env"].split(","))
    assert noted["environ"]["NCCL_IB_TIMEOUT"] == "23"
    assert "python3" in noted["words"]


@pytest.mark.long
def test_a_missing_container_runtime_is_reported_in_one_line(slurm: Cluster, repo: Path, tmp_path: Path) -> None:
    """The PATH of this job has no Apptainer, even on a machine that has one."""
    (tmp_path / "torch.sif").write_text("")
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in jobs.PYTHON["PATH"].split(":"):
        for program in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if program.name != "apptainer" and not (tools / program.name).is_symlink():
                (tools / program.name).symlink_to(program)
    words = ["recipe=toy", *KEYS, f"container={tmp_path}/torch.sif", "wait=true"]
    done = slurm.run(sys.executable, "launch.py", *words, cwd=repo, env={**jobs.PYTHON, "PATH": str(tools)})
    assert done.returncode == 3, shlex.join(done.args) + done.stdout + done.stderr
    assert "container=: no apptainer on node1" in done.stdout
