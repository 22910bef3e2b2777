"""Every command of the documentation and of the recipes' headers works, typed into a bash.

readme.py beside this file finds the commands, and has what is typed differently in the tests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import helpers
from tests.helpers import ROOT
from tests.slurm import jobs, readme
from tests.slurm.cluster import Cluster
from tests.slurm.readme import BY_HAND, HERE, OWN_SLURM, SLURM, TABLE

TIMEOUT_S = 240
# each for those that were started before it, the first for what all have in common
waits = pytest.mark.timeout(900)


def test_every_command_is_in_the_table() -> None:
    commands = readme.commands()
    assert len(commands) > 70
    assert len(readme.PAGES) > 12
    assert [line for line in commands if line not in TABLE] == [], "each needs an entry in TABLE"
    assert [line for line in TABLE if line not in commands] == [], (
        "these are in TABLE and on no page"
    )
    for line in TABLE:
        shlex.split(readme.typed(line))


def test_commands_are_found_as_a_shell_reads_them() -> None:
    block = "```sh\n# none\nsrun sh -c 'a \\\n    #b' # don't\n\npython x#y  #z\n```\n"
    text = f"# Title\n{block}```text\nsrun: no\n```\n```console\n$ make a\nb\nc\n$ d\n```\n"
    assert readme.fenced(text) == {
        "srun sh -c 'a #b'": "",
        "python x#y": "",
        "make a": "b\nc\n",
        "d": "",
    }
    shown = "```python\n# a/b.py\nx = 1\n```\n```python\nx\n```\n"
    assert readme.files(shown) == {"a/b.py": "# a/b.py\nx = 1\n"}
    assert readme.of_header('"""A.\n\n    python a  # b\n    words\n\npython c\n"""') == {
        "python a": ""
    }
    for wrong in (
        "```\na\n```\n",
        "```text\n$ make a\n```\n",
        "```console\na\n```\n",
        "- ```sh\na\n```\n",
        "```sh\na'\n```\n",
    ):
        with pytest.raises(AssertionError, match=r"block|quote"):
            readme.fenced(wrong)


# --- where the commands run
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A clone with data, an environment and old runs; the variables of the shell; Slurm, where
    there is one.
    """

    clone: Path
    environ: Mapping[str, str]
    slurm: Cluster | None = None


def write_weights(folder: Path) -> Path:
    """A folder for PYTHONPATH, with which torchvision takes a file in there for ResNet-50's
    weights.
    """
    import torch

    folder.mkdir()
    torch.save({}, folder / "weights")
    file = (
        folder / f"resnet50-{hashlib.sha256((folder / 'weights').read_bytes()).hexdigest()[:8]}.pth"
    )
    (folder / "weights").rename(file)
    code = (
        "from torchvision.models import ResNet50_Weights\nResNet50_Weights.DEFAULT.value.url = "
        f"{file.as_uri()!r}\n"
    )
    (folder / "sitecustomize.py").write_text(code)
    return folder


RUNTIME = """\
while [ "${1##*/}" != recipes.sif ] && [ "$1" != recipes ]; do shift; done
shift; touch "$NEW/$(basename "$0")"; exec "$@"
"""
SRUN = """\
words=()
for word in "$@"; do
    case $word in
    --container-*) touch "$NEW/pyxis" ;;
    *) words+=("$word") ;;
    esac
done
exec /usr/bin/srun "${words[@]}"
"""


def write_stand_ins(folder: Path) -> Path:
    """A folder for PATH with images, and with programs that start what they are to start in an
    image outside of any.
    """
    folder.mkdir()
    for name, body in {"apptainer": RUNTIME, "docker": RUNTIME, "srun": SRUN}.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}")
        (folder / name).chmod(0o755)
    for name in ("recipes.sif", "recipes.sqsh"):
        (folder / name).write_text("")
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("readme")
    clone = jobs.copy_repository(folder / "clone")
    (clone / "tests/slurm").mkdir(parents=True)
    for name in (
        "Makefile",
        "pyproject.toml",
        "tested-versions.txt",
        "tests/slurm/cluster.py",
        "tests/tables.py",
    ):
        shutil.copy(ROOT / name, clone / name)
    shutil.copytree(ROOT / "docs", clone / "docs")
    for name, text in readme.shown_files().items():
        (clone / name).write_text(text)
    for name in ("my.env", "env/clusters/ours.env"):
        shutil.copy(ROOT / "env/ethernet.env", clone / name)
    question = {"role": "user", "content": "Who?"}
    (clone / "questions.jsonl").write_text(json.dumps({"messages": [question]}))
    answer = {"role": "assistant", "content": "Nobody."}
    (clone / "chats.jsonl").write_text(f"{json.dumps({'messages': [question, answer]})}\n" * 3)
    (clone / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        (clone / ".venv" / path.name).symlink_to(path)
    (clone / ".venv/.installed").unlink(missing_ok=True)
    (clone / ".venv/.installed").touch()
    data = helpers.image_sets(clone / "data")  # the default of data_dir=
    helpers.write_mnist(data / "MNIST/raw")
    jobs.know(clone / "recipes/core/data/datasets.py", data / "MNIST/raw")
    variables = {
        "DATA": str(data),
        "PACKED": f"{folder}/packed",
        "MODEL": f"{folder}/model",
        "WEIGHTS": str(write_weights(folder / "weights")),
    }
    variables["IMAGES"] = str(write_stand_ins(folder / "images"))
    variables |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with socket.create_server(("", 0)) as free:  # torchrun's is 29500 for everybody on this machine
        variables["PET_MASTER_PORT"] = str(free.getsockname()[1])
    environ = helpers.clean_environment(**jobs.PYTHON, **variables)
    before = (
        (
            "(! python -m recipes.imagenet device=cpu data_dir=nowhere "
            "run_dir=runs/imagenet/1234) & failing=$!"
        ),
        "python -m recipes.prepare imagenet source=$DATA data_dir=$PACKED size=40",
        f"python -m recipes.cifar {readme.CIFAR} max_steps=1 run_dir=runs/cifar/1234_0",
        f"python -m recipes.finetune {readme.TUNED} dataset=fake run_dir=runs/finetune/1234",
        "python -m recipes.llm device=cpu dataset=made max_steps=1 run_dir=runs/llm/1234",
        "python -m recipes.export runs/llm/1234 hf out=$MODEL",
        "cp $(find $DATA/val -name '*.JPEG' | head -1) photo.jpg",
        "cp -r runs/cifar/1234_0 runs/cifar/1234_1",
        "tar -cf environment.tar -C .venv .",
        "wait $failing",
    )
    prepared = helpers.start(["bash", "-ec", "\n".join(before)], cwd=clone, environ=environ)
    helpers.finish(prepared, 300).expect(0)
    return Site(clone, environ)


@pytest.fixture(scope="module")
def cluster(site: Site, slurm: Cluster) -> Iterator[Site]:
    """The same with a Slurm that has a partition `gpu`."""
    slurm.run("scontrol", "create", "PartitionName=gpu", "Nodes=ALL", check=True)
    yield Site(site.clone, {**site.environ, **slurm.env}, slurm)
    jobs.leave_no_job(slurm)
    slurm.run("scontrol", "delete", "PartitionName=gpu", check=True)


# --- their results
# ----------------------------------------------------------------------------------------------

_port = threading.Lock()  # torchrun and accelerate listen on the same one in all their runs


def check(site: Site, line: str) -> str:
    """Types a command, waits for the jobs that it submits, and checks their results; returns its
    output.
    """
    how = TABLE[line]
    command = readme.typed(line)
    new = Path(tempfile.mkdtemp(dir=site.clone.parent))
    argv = ["bash", "-c", command]
    if how.within.startswith("sbatch"):
        (new / "job.sh").write_text(f"#!/bin/bash\n{command}\n")
        argv = [str(new / "job.sh")]
    with _port if re.search("torchrun|accelerate", command) else contextlib.nullcontext():
        process = helpers.start(
            [*shlex.split(how.within), *argv],
            cwd=site.clone,
            environ={**site.environ, "NEW": str(new)},
        )
        ended = helpers.finish(process, TIMEOUT_S)
    said = f"{command}\n{ended.out}"
    assert ended.status == how.status, said
    assert re.search(how.says, ended.out, re.MULTILINE), said
    shown = readme.commands()[line]
    if shown:
        assert re.fullmatch(re.escape(shown).replace("…", ".*"), ended.out), (
            f"{said}\ninstead of\n{shown}"
        )
    started = "" if " logs " in command else ended.out  # `logs` shows the line of an earlier run
    run_dirs = {
        Path(run_dir) for run_dir in re.findall(r"^run directory: (.+)$", started, re.MULTILINE)
    }
    for job in re.findall(r"^(?:Submitted batch )?job (\d+)", ended.out, re.MULTILINE):
        assert site.slurm
        state = site.slurm.wait_job(job, TIMEOUT_S)
        logs = [*site.clone.glob(f"*{job}*.out"), *site.clone.glob(f"runs/submitit/{job}*.out")]
        assert state == "COMPLETED", "\n".join([said, *map(jobs.tail, logs)])
        run_dirs |= {path.parent for path in site.clone.glob(f"runs/*/{job}*/status.json")}
    if command.startswith("sbatch"):  # sbatch does not print the run directory
        run_dirs |= {site.clone / run_dir for run_dir in re.findall(r"run_dir=(\S+)", command)}
    states = {path: helpers.read(path, "status")["state"] for path in run_dirs}
    assert list(states.values()) == ["done"] * how.runs, f"{said}\n{states}"
    runtime = re.search(r"docker run|recipes\.sif|recipes\.sqsh", line)
    if runtime and how.where == SLURM:
        assert (new / {"recipes.sif": "apptainer", "recipes.sqsh": "pyxis"}[runtime[0]]).exists(), (
            said
        )
    return ended.out


def at_once(
    site: Site, request: pytest.FixtureRequest, where: str
) -> Iterator[dict[str, Future[str]]]:
    """The commands of all tests that were chosen, three at a time: much of their time they wait for
    each other and for Slurm.
    """
    chosen = []
    for item in request.session.items:
        if item.path == Path(__file__):
            chosen.append(getattr(item, "callspec", None))
    typed = [
        call.params["line"] for call in chosen if call and TABLE[call.params["line"]].where == where
    ]
    with ThreadPoolExecutor(3) as pool:
        yield {line: pool.submit(check, site, line) for line in typed}
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def here(site: Site, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[str]]]:
    yield from at_once(site, request, HERE)


@pytest.fixture(scope="module")
def on_slurm(cluster: Site, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[str]]]:
    yield from at_once(cluster, request, SLURM)


def lines(where: str) -> list[object]:
    return [pytest.param(line, id=line[:80]) for line, how in TABLE.items() if how.where == where]


@pytest.mark.long
@waits
@pytest.mark.parametrize("line", lines(HERE))
def test_a_command_on_this_machine(here: dict[str, Future[str]], line: str) -> None:
    if "mpirun" in line:
        jobs.mpirun()
    here[line].result()


@pytest.mark.long
@waits
@pytest.mark.parametrize("line", lines(SLURM))
def test_a_command_on_slurm(on_slurm: dict[str, Future[str]], line: str) -> None:
    if "mpirun" in line:
        jobs.mpirun()
    on_slurm[line].result()


@pytest.mark.long
@pytest.mark.parametrize("line", lines(BY_HAND))
def test_a_command_typed_on_two_machines(
    cluster: Site, slurm: Cluster, line: str, tmp_path: Path
) -> None:
    """The two machines are the nodes of the cluster. The command on the second has node_rank=1."""
    command = f"cd {cluster.clone} && {readme.typed(line)}"
    assert command.count("node_rank=0") == 1
    typed = {"node1": command, "node2": command.replace("node_rank=0", "node_rank=1")}
    keywords = {
        "env": {**cluster.environ, "NEW": str(tmp_path)},
        "timeout": TIMEOUT_S,
        "stderr": subprocess.STDOUT,
        "stdout": subprocess.PIPE,
    }
    with ThreadPoolExecutor() as pool:
        both = []
        for name, words in typed.items():
            both.append(pool.submit(slurm.on_node, name, "bash", "-c", words, **keywords))
    first, second = (done.result() for done in both)
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + second.stdout
    assert "mnist: 2 ranks on 2 nodes, cpu, gloo" in first.stdout
    announced = re.search(r"^run directory: (.+)$", first.stdout, re.MULTILINE)
    assert announced
    assert helpers.read(Path(announced[1]), "status")["state"] == "done"


@pytest.mark.long
def test_the_commands_for_a_private_slurm(site: Site, slurm: Cluster) -> None:
    """It runs beside the cluster of the tests, and only its own cluster is taken down."""
    up, train, down = (line for line, how in TABLE.items() if how.where == OWN_SLURM)
    private = Cluster(Path(check(site, up).splitlines()[-1]).parents[1])
    there = Site(site.clone, {**site.environ, **private.env, "OWN": str(private.root)}, private)
    try:
        assert [node.gpus for node in private.nodes] == [8, 8]
        check(there, train)
    finally:
        check(there, down)
    assert not private.root.exists()
    assert slurm.root.exists()
