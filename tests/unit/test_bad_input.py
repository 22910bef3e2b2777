"""Invalid input to the real commands: one line on stderr, status 2 or 3, and no other effect.

Values that a shell would run are in tests/faults/test_canaries.py.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import launch
from recipes.core import errors
from recipes.core.launch import batch, cli, local
from recipes.core.run import entry, source
from tests.helpers import ROOT
from tests.unit.launch.stand_ins import Stubs

ALIASES = ", ".join(
    f"&{y} [{', '.join([f'*{x}'] * 9)}]" for x, y in zip("abcdefghij", "bcdefghijk", strict=True)
)
# Files in the current folder of the commands.
FILES: dict[str, bytes] = {
    "list.yaml": b"- epochs\n- lr\n",
    "nested.yaml": b"optimizer:\n  name: sgd\n",
    "broken.yaml": b"epochs: [3\n",
    "binary.yaml": bytes(range(256)),
    "unknown.yaml": b"epoch: 3\n",
    "value.yaml": b"lr: fast\n",
    "newline.yaml": b'partition: "a\\n#SBATCH --exclusive"\n',
    "again.yaml": b"config: other.yaml\n",
    "python.yaml": b"epochs: !!python/object/apply:os.system ['touch canary']\n",
    "documents.yaml": b"--- a\n--- b",
    "unhashable.yaml": b"? [a]\n: 1",
    "tag.yaml": b"!<%zz> 1",
    "version.yaml": b"%YAML " + b"9" * 5000 + b".1\n---\na: 1",
    "escape.yaml": b'epochs: "\\UFFFFFFFF"',
    "deep.yaml": b"[" * 500,
    "aliases.yaml": f"partition: [&a [x], {ALIASES}]".encode(),  # written out, 9^11 entries
    "large.yaml": b"# " + b"x" * 70_000,
    "shell.env": b"NCCL_DEBUG=$(touch canary)\n",
}

# Arguments that every command with recipe keys refuses, each for another reason.
KEYS: tuple[str, ...] = (
    "epochs",
    "",
    "=3",
    "--epochs=3",
    "\u00e9pochs=3",
    "a[0]=1",  # not key=value
    "epoch=3",
    "x" * 9000 + "=1",
    "\x1b[31m=1",  # unknown keys
    "epochs=",
    "epochs=-1",
    "epochs=1.5",
    "epochs=" + "9" * 9000,
    "max_steps=" + "9" * 19,
    "lr=1e999",
    "warmup=2",
    "compile=maybe",
    "optimizer=adam",
    "backend=nccl",
    "checkpoint_every_steps=-1",
    "timeout_s=0",
    "global_batch_size=0",
    "lr=-1",
    "umask=000",  # types and ranges
    "dataset=minst",
    "variant=nosuch",
    "data_dir=a\nb",
    "data_dir=a\x9bb",
    "data_dir=\udcff",
    "data_dir=a\u2028b",
    "data_dir=~nosuchuser/x",
    "resume=",
    "epochs=${oc.env:NO_SUCH_VARIABLE}",
    "epochs=" + "${a:[" * 300,
    "epochs=${oc.env:\x00}",
    "epochs=" + "[[" * 800,
    "dataset=\x85",
    "dataset=\u202e",
    "network=nosuch",
    "network=./nosuch.env",
    "network=shell.env",
    "config=nosuch.yaml",
    "config=.",
    "config=/dev/zero",
    *(f"config={name}" for name in FILES if name.endswith(".yaml") and name != "newline.yaml"),
)

# Keys of a job, for launch.py whatever the launcher.
JOB: tuple[str, ...] = (
    "recipe=../mnist",
    "recipe=mnist;touch canary",
    "launcher=slrm",
    "nodes=1-4",
    "gpus_per_node=-1",
    "time=1h",
    "partition=a\n#SBATCH --exclusive",
    "name=a/b",
    "exclude=node[1-",
    "dependency=12",
    "mail=@x",
    "extra=-p gpu",
    "extra=--mem=1 2",
    "extra=--nodes=2",
    "extra=--outp=x",
    "extra=--no-requeue",
    "extra=--signal=USR1@9",
    "extra=--wait",
    "extra=--parsable",
    "extra=--array=1-2",
    "cluster=../x",
    "gpus=8;2",
    "gpus=\u0663",
    "node_rank=-1",
    "master=hostA",
    "master=h:1:2",
    "config=newline.yaml",
    "container=/nosuch/torch.sif",
    "container=nosuch.sqsh",
    "container=./nosuch",
    "container=a b",
    "container=$(x)",
    "container_runtime=docker",
    "container_mounts=/a:/b:/c:/d",
    "container_mounts=/a,,/b",
    "container_mounts=/a b",
)

SUBMITTED: tuple[tuple[str, ...], ...] = (
    ("sweep.lr=",),
    ("sweep.lr=0.1,,0.2",),
    ("sweep.lr=0.1,0.1",),
    ("sweep.lr=0.1,-1",),
    ("sweep.lr=0.1,0.2", "lr=1"),
    ("sweep.lrr=1,2",),
    ("sweep.nodes=1,2",),
    ("sweep.run_dir=/a,/b",),
    ("sweep.data_dir=/a\n,/b",),
    ("parallel=-1",),
    ("parallel=2",),
    ("sweep.device=cpu,cuda",),
    ("sweep.num_workers=1,2",),
    ("sweep.cpu_threads=1,2",),
    ("gpus=8,2",),
    ("gpus=0",),
    ("gpus=2", "nodes=3"),
    ("gpus=4", "gpus_per_node=2"),
    ("gpus=4", "ranks_per_node=2"),
    ("master=h:1",),
    ("node_rank=1",),
    ("gpus_per_node=0",),
    ("gpus_per_node=2", "ranks_per_node=3"),
)

HERE: tuple[tuple[str, ...], ...] = (
    ("sweep.lr=0.1,0.2",),
    ("nodes=2",),
    ("gpus=2", "node_rank=1"),
    ("gpus=2,2",),
    ("gpus=0",),
    ("gpus=2,0", "master=h:1"),
    ("node_rank=1",),
    ("master=h:1",),
    ("gpus=2,2", "master=h:0"),
    ("gpus=2,2", "master=h:65536"),
    ("gpus=2", "ranks_per_node=3"),
    ("gpus_per_node=0", "device=auto"),
    ("gpus_per_node=2", "ranks_per_node=3", "device=cuda"),
)


@pytest.fixture
def here(tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands are typed in; Slurm's commands are stubs that note when they are
    called, ranks cannot start.
    """
    folder = tmp_path / "here"
    for path in (folder, tmp_path / "runs"):
        path.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for name in ("sbatch", "srun", "scontrol", "module"):
        stubs.add(name, "echo Submitted batch job 7")
    for variable in list(os.environ):
        if variable.startswith(("SLURM_", "SRUN_", "SBATCH_", "RECIPES_", "RANK")):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(cli, "ROOT", tmp_path)  # where a job would run, and its files be written
    monkeypatch.setattr(local, "run", lambda *_: pytest.fail("ranks were started"))
    return folder


def tree(folder: Path) -> list[str]:
    """The files in a folder, without those that a submission makes in runs/."""
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(path for path in paths if not path.startswith(("runs/code", "runs/submitit")))


def one_line(text: str, limit: int = 700) -> str:
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    line = text[:-1]
    assert line.isprintable(), ascii(line)
    assert len(line) <= limit
    assert "Traceback" not in line
    return line


def refused(
    command: Callable[[], int],
    here: Path,
    capfd: pytest.CaptureFixture[str],
    status: int = errors.EXIT_CONFIG,
) -> str:
    """Runs a command in this process. Returns its one line, which is all that it does."""
    before = tree(here.parent)
    variables = dict(os.environ)
    assert command() == status
    out, err = capfd.readouterr()
    assert out == ""
    assert tree(here.parent) == before
    assert dict(os.environ) == variables
    return one_line(err)


# What is wrong is in the file, and named.
INSIDE = {"unknown.yaml": "epoch=3", "value.yaml": "lr=fast", "newline.yaml": "partition=a"}


def names_its_key(line: str, word: str) -> None:
    """The line says what is wrong: the key, or the file that was given, or the key in there."""
    key, equals, value = word.partition("=")
    if value in INSIDE:
        assert INSIDE[value] in line
    elif equals and key.isidentifier() and key.isascii() and len(key) < 30:
        assert f"{key}=" in line or (key == "network" and str(Path(value)) in line), line


def test_launch_refuses_each_invalid_key_in_one_line(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for word in (*KEYS, *JOB):
        argv = ["launcher=print", "recipe=mnist", "device=cpu", word]
        line = refused(partial(launch.main, argv), here, capfd)
        assert line.startswith("launch.py: ")
        names_its_key(line, word)


def test_each_command_refuses_an_invalid_key_in_one_line(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    commands: dict[str, Callable[[], int]] = {
        "launch.py: ": lambda: launch.main(["recipe=mnist", "launcher=local", "config=value.yaml"]),
        "mnist: ": lambda: batch.main(["begin", "mnist", "mnist.sh", "config=value.yaml"]),
        "mnist: lr": lambda: status_of_begin(("config=value.yaml",)),
    }
    for start, command in commands.items():
        line = refused(command, here, capfd)
        assert line.startswith(start)
        names_its_key(line, "config=value.yaml")


def status_of_begin(words: tuple[str, ...]) -> int:
    with pytest.raises(SystemExit) as ended:
        entry.begin("mnist", words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("launcher", "cases"),
    [
        ("slurm", SUBMITTED),
        ("local", HERE),
    ],
)
def test_contradictory_keys_are_refused(
    launcher: str, cases: tuple[tuple[str, ...], ...], here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    device = ["device=cpu"] if launcher == "local" else []
    for words in cases:
        argv = [f"launcher={launcher}", "recipe=mnist", *device, *words]
        line = refused(partial(launch.main, argv), here, capfd)
        assert any(words[i].split("=")[0] in line for i in (0, -1))


def test_a_contradictory_environment_is_refused(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # other ranks let rank 0 speak first
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "RANK" in refused(lambda: status_of_begin(("run_dir=/proc/none",)), here, capfd)


def test_submission_needs_slurm(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(here))
    line = refused(lambda: launch.main(["recipe=toy"]), here, capfd, errors.EXIT_MACHINE)
    assert "launcher=local" in line


def test_launch_in_a_snapshot_names_the_repository(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "home", lambda root: Path("/the/repository"))
    line = refused(lambda: launch.main(["recipe=mnist"]), here, capfd)
    assert "use launch.py in /the/repository" in line


def test_launch_without_words_prints_the_keys(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch.main([]) == errors.EXIT_CONFIG
    without = capfd.readouterr().out
    assert "recipe=" in without
    for argv in (["--help"], ["-h"]):
        assert launch.main(argv) == 0
        assert capfd.readouterr().out == without


def test_a_refusal_is_the_only_output_of_the_process(here: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    before = tree(here.parent)
    for words in (
        (str(ROOT / "launch.py"), "recipe=mnist", "data_dir=\udcff"),
        ("-m", "recipes.mnist", "nodes=2"),
    ):
        ran = subprocess.run(
            [sys.executable, *words],
            cwd=here,
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.stdout == ""
        assert ran.returncode == 2
        one_line(ran.stderr)
    assert tree(here.parent) == before
