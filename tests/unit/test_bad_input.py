"""Invalid input to the real commands: one line on stderr, status 2 or 3, and no other effect.

Values that a shell would run are in tests/faults/test_canaries.py.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import launch
from recipes import prepare
from recipes.core import errors
from recipes.core.launch import batch, cli, local
from recipes.core.run import entry, source
from tests.helpers import ROOT

# Files in the current folder of the commands.
FILES: dict[str, bytes] = {
    "list.yaml": b"- epochs\n- lr\n",
    "nested.yaml": b"optimizer:\n  name: sgd\n",
    "text.yaml": b"epochs=3\n",
    "broken.yaml": b"epochs: [3\n",
    "tabs.yaml": b"epochs:\t3\n\tlr: 1\n",
    "binary.yaml": bytes(range(256)),
    "deep.yaml": b"[" * 1000,
    "unknown.yaml": b"epoch: 3\n",
    "value.yaml": b"lr: fast\n",
    "job.yaml": b"nodes: 4\n",
    "newline.yaml": b'partition: "a\\n#SBATCH --exclusive"\n',
    "again.yaml": b"config: other.yaml\n",
    "python.yaml": b"epochs: !!python/object/apply:os.system ['touch canary']\n",
    "strange.yaml": b"? [a, b]\n: 1\n",
    "spaces.yaml": b"a key: 1\n",
    "twice.yaml": b"epochs: 1\nlr: 1\nepochs: 2\n",
    "escape.yaml": b'epochs: "\\UFFFFFFFF"\n',
    "large.yaml": b"# " + b"x" * 70_000,
    "shell.env": b"NCCL_DEBUG=$(touch canary)\n",
    "path.env": b"PATH=/evil\n",
    "latin.env": b"NCCL_DEBUG=\xe9\n",
    "big.env": b"# " + b"x" * 70_000,
}

# Words that every command with recipe keys refuses, each for another reason.
KEYS: tuple[str, ...] = (
    # not key=value
    "epochs", "", "=3", "epochs =3", "--epochs=3", "\u00e9pochs=3", "epochs\n=3", "$(touch canary)", "a.b=1", "a[0]=1",
    # unknown keys
    "epoch=3", "EPOCHS=3", "__class__=1", "x" * 9000 + "=1", "\u202eepochs=3", "\x1b[31m=1",
    # types and ranges
    "epochs=", "epochs=three", "epochs=-1", "epochs=1.5", "epochs=0x10", "epochs=null", "epochs=[3]", "epochs=\u00b3",
    "epochs=" + "9" * 9000, "max_steps=" + "9" * 19, "epochs=3;touch canary", "lr=fast", "lr=nan", "lr=1e999", "lr=-0.1", "warmup=2",
    "seed=-1", "global_batch_size=0", "num_workers=1000000", "log_every_steps=0", "compile=maybe", "dtype=float64", "optimizer=adam",
    "device=tpu", "backend=nccl", "timeout_s=0", "max_requeues=-1", "cpu_threads=-1", "checkpoint_every_s=-1",
    # names of data sets, variants, files and folders
    "dataset=minst", "dataset=../x", "variant=nosuch", "data_dir=a\nb", "data_dir=a\x00b", "data_dir=\udcff", "data_dir=a\u2028b",
    "data_dir=~nosuchuser/x", "data_dir=" + "x" * 5000, "run_dir=???", "resume=",
    # interpolations
    "epochs=${oc.env:NO_SUCH_VARIABLE}", "epochs=${epochs}", "epochs=${", "epochs=${oc.decode:3}", "epochs=${oc.env:${oc.env:HOME}}",
    "epochs=" + "${a:[" * 300,
    # env files
    "network=nosuch", "network=./nosuch.env", "network=/dev/zero", "network=a\nb", "network=shell.env", "network=path.env",
    "network=latin.env", "network=big.env",
    # files of keys
    "config=nosuch.yaml", "config=", "config=.", "config=/dev/zero", "config=list.yaml", "config=nested.yaml", "config=text.yaml",
    "config=broken.yaml", "config=tabs.yaml", "config=binary.yaml", "config=deep.yaml", "config=unknown.yaml", "config=value.yaml",
    "config=again.yaml", "config=python.yaml", "config=strange.yaml", "config=spaces.yaml", "config=twice.yaml", "config=escape.yaml",
    "config=large.yaml",
)  # fmt: skip

# Keys of a job, for launch.py whatever the launcher.
JOB: tuple[str, ...] = (
    "recipe=", "recipe=minst", "recipe=../mnist", "recipe=core", "recipe=__init__", "recipe=mnist;touch canary", "recipe=${oc.env:HOME}",
    "launcher=slrm", "nodes=0", "nodes=many", "nodes=1-4", "nodes=99999999", "gpus_per_node=-1", "gpus_per_node=2000",
    "ranks_per_node=0", "cpus_per_rank=0", "time=0", "time=1h", "time=1:0", "time=UNLIMITED", "time=\u0663", "partition=a b",
    "partition=a\n#SBATCH --exclusive", "partition=" + "a" * 300, "name=a/b", "name=a%b", "name=" + "n" * 65, "name=\u00e9",
    "exclude=node[1-", "exclude=node[2-1]", "exclude=a,,b", "exclude=n[1-99999999]", "dependency=12", "dependency=afterok:a", "mail=@x",
    "extra=-p gpu", "extra=--mem=1 2", "extra=--nodes=2", "extra=--outp=x", "extra=--mem=1 --mem=2", "extra=--wrap=x",
    "cluster=nosuch", "cluster=../x", "wait=perhaps", "gpus=8;2", "gpus=8,", "node_rank=-1", "master=hostA", "master=a b:1",
    "master=h:1:2", "config=newline.yaml",
)  # fmt: skip

SUBMITTED: tuple[tuple[str, ...], ...] = (
    ("sweep.lr=",), ("sweep.lr=0.1,,0.2",), ("sweep.lr=0.1,0.1",), ("sweep.lr=0.1,-1",), ("sweep.lr=0.1,0.2", "lr=1"), ("sweep.lrr=1,2",),
    ("sweep.nodes=1,2",), ("sweep.run_dir=/a,/b",), ("sweep.seed=" + ",".join(map(str, range(1001))),), ("sweep.data_dir=/a\n,/b",),
    ("parallel=-1",), ("parallel=2",), ("sweep.device=cpu,cuda",), ("sweep.num_workers=1,2",), ("sweep.cpu_threads=1,2",),
    ("gpus=8,2",), ("gpus=0",), ("gpus=2", "nodes=3"), ("gpus=4", "gpus_per_node=2"), ("gpus=4", "ranks_per_node=2"), ("master=h:1",), ("node_rank=1",), ("gpus_per_node=0",), ("gpus_per_node=2", "ranks_per_node=3"),
)  # fmt: skip

HERE: tuple[tuple[str, ...], ...] = (
    ("sweep.lr=0.1,0.2",),
    ("nodes=2",), ("gpus=2", "node_rank=1"), ("gpus=2,2",), ("gpus=0",), ("gpus=2,0", "master=h:1"), ("node_rank=1",), ("master=h:1",),
    ("gpus=2,2", "master=h:0"), ("gpus=2,2", "master=h:65536"), ("gpus=2", "ranks_per_node=3"), ("gpus_per_node=0", "device=auto"),
    ("gpus_per_node=2", "ranks_per_node=3", "device=cuda"),
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands are typed in; Slurm's commands are stubs that note when they are called, ranks cannot start."""
    folder, stubs = tmp_path / "here", tmp_path / "bin"
    for path in (folder, stubs, tmp_path / "runs"):
        path.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for name in ("sbatch", "srun", "scontrol", "module"):
        (stubs / name).write_text(f'#!/bin/sh\ntouch "{tmp_path}/{name}-was-called"\necho Submitted batch job 7\n')
        (stubs / name).chmod(0o755)
    for variable in [v for v in os.environ if v.startswith(("SLURM_", "SRUN_", "SBATCH_", "RECIPES_", "RANK"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PATH", f"{stubs}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(cli, "ROOT", tmp_path)  # where a job would run, and its files be written
    monkeypatch.setattr(local, "run", lambda *_: pytest.fail("ranks were started"))
    return folder


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def one_line(text: str, limit: int = 700) -> str:
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    line = text[:-1]
    assert line.isprintable(), ascii(line)
    assert len(line) <= limit
    assert "Traceback" not in line
    return line


def refused(
    command: Callable[[], int], here: Path, capsys: pytest.CaptureFixture[str], status: int = errors.EXIT_CONFIG
) -> str:
    """Runs a command in this process and gives the one line that it says; that is all that it does."""
    before, variables = tree(here.parent), dict(os.environ)
    assert command() == status
    out, err = capsys.readouterr()
    assert out == ""
    assert tree(here.parent) == before
    assert dict(os.environ) == variables
    return one_line(err)


# What is wrong is in the file, and named.
INSIDE = {"unknown.yaml": "epoch=3", "value.yaml": "lr=fast", "spaces.yaml": "a key=1", "newline.yaml": "partition=a"}


def names_its_key(line: str, word: str) -> None:
    """The line says which word is wrong: the key, or the file that was given, or the key in there."""
    key, equals, value = word.partition("=")
    if value in INSIDE:
        assert INSIDE[value] in line
    elif equals and key.isidentifier() and key.isascii() and len(key) < 30:
        assert f"{key}=" in line or (key == "network" and str(Path(value)) in line), line


def test_launch_refuses_each_invalid_key_in_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word in (*KEYS, *JOB):
        argv = ["launcher=print", "recipe=mnist", "device=cpu", word]
        line = refused(partial(launch.main, argv), here, capsys)
        assert line.startswith("launch.py: ")
        names_its_key(line, word)


@pytest.mark.parametrize("word", [KEYS[0], "epochs=-1", "network=shell.env", "config=value.yaml"])
def test_each_command_refuses_an_invalid_key_in_one_line(
    word: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: dict[str, Callable[[], int]] = {
        "slurm": lambda: launch.main(["recipe=mnist", "launcher=slurm", word]),
        "local": lambda: launch.main(["recipe=mnist", "launcher=local", word]),
        "batch": lambda: batch.main(["begin", "mnist", word]),
        "recipe": lambda: status_of_begin((word,)),
    }
    for name, command in commands.items():
        line = refused(command, here, capsys)
        assert line.startswith("mnist: " if name in ("batch", "recipe") else "launch.py: ")
        names_its_key(line, word)


def status_of_begin(words: tuple[str, ...]) -> int:
    with pytest.raises(SystemExit) as ended:
        entry.begin("mnist", words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_contradictory_keys_of_a_submission_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in SUBMITTED:
        argv = ["launcher=slurm", "recipe=mnist", *words]
        line = refused(partial(launch.main, argv), here, capsys)
        assert words[0].split("=")[0] in line or words[-1] in line


def test_contradictory_keys_of_a_local_run_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in HERE:
        argv = ["launcher=local", "recipe=mnist", "device=cpu", *words]
        line = refused(partial(launch.main, argv), here, capsys)
        assert words[0].split("=")[0] in line or words[-1].split("=")[0] in line


def test_a_job_key_in_a_config_file_of_a_recipe_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--nodes=4" in refused(lambda: batch.main(["begin", "mnist", "config=job.yaml"]), here, capsys)


@pytest.mark.parametrize("words", [[], ["check"], ["finish", "mnist"], ["finish", "mnist", "x"], ["x", "mnist", "1"]])
def test_invalid_commands_of_the_batch_script_print_the_usage(
    words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "usage:" in refused(lambda: batch.main(words), here, capsys)


@pytest.mark.parametrize("recipe", ["nosuch", "../mnist", "", "os;touch canary", "core", "a\nb"])
def test_an_unknown_recipe_is_refused(recipe: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(here.parent)
    assert batch.main(["begin", recipe]) == errors.EXIT_CONFIG
    assert "recipe=" in capsys.readouterr().err
    assert tree(here.parent) == before


PREPARE = (
    (("minst",), "'mnist'"),
    (("data_dir=x",), "give a dataset first"),
    (("mnist", "cifar"), "key=value"),
    (("mnist", "data-dir=x"), "key=value"),
    (("mnist", "datadir=x"), "'data_dir'"),
    (("mnist", "data_dir=a\nb"), "data_dir="),
    (("mnist", "data_dir=a\x00b"), "data_dir="),
    (("mnist", "data_dir=~nosuchuser/x"), "data_dir="),
    (("mnist", "data_dir=\udcff"), "data_dir="),
    (("mnist", "source=/nosuch/folder"), "source="),
    (("mnist", "source=http://mirror.invalid/x"), "source="),
    (("mnist", "source=$(touch canary)"), "source="),
    (("mnist", "source=file:///etc/passwd"), "source="),
    (("mnist", "epochs=1"), "epochs"),
    (("--mnist",), "--mnist"),
    (("a\nb",), "mnist"),
)


def test_invalid_words_of_prepare_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in PREPARE:
        assert said in refused(partial(prepare.main, words), here, capsys)


# --- the environment


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RECIPES_CLUSTER": "a\nb"},
    ],
    ids=lambda v: ascii(v)[:50],
)  # fmt: skip
def test_contradictory_environments_are_refused(
    variables: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # other ranks let rank 0 speak first
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = refused(lambda: status_of_begin(("run_dir=/proc/none",)), here, capsys)
    assert any(name in line or (name == "RECIPES_CLUSTER" and "cluster=" in line) for name in variables), line


def test_a_submission_without_slurm_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(here))
    line = refused(lambda: launch.main(["recipe=mnist"]), here, capsys, errors.EXIT_MACHINE)
    assert "launcher=local" in line


def test_the_message_of_a_failed_sbatch_is_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sbatch = here.parent / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\nprintf 'sbatch: error: no\\nsbatch: error: never\\n' >&2\nexit 1\n")
    line = refused(lambda: launch.main(["recipe=mnist", "partition=x"]), here, capsys, errors.EXIT_MACHINE)
    assert line == "launch.py: Slurm refuses this job: no never"


def test_a_removed_current_folder_is_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = here / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    for launcher in ("print", "slurm", "local"):
        argv = ["recipe=mnist", f"launcher={launcher}", "device=cpu"]
        line = refused(partial(launch.main, argv), here, capsys, errors.EXIT_MACHINE)
        assert "cd to another" in line


def test_a_local_run_with_too_few_gpus_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    argv = ["recipe=mnist", "launcher=local", "gpus_per_node=4"]
    line = refused(lambda: launch.main(argv), here, capsys, errors.EXIT_MACHINE)
    assert "4 ranks" in line
    assert "2 are visible" in line
    assert socket.gethostname() in line


def test_launch_in_a_snapshot_names_the_repository(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "home", lambda root: Path("/the/repository"))
    assert "use launch.py in /the/repository" in refused(lambda: launch.main(["recipe=mnist"]), here, capsys)


def test_launch_without_words_prints_the_keys(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main([]) == errors.EXIT_CONFIG
    without = capsys.readouterr().out
    assert "recipe=" in without
    for argv in (["--help"], ["-h"]):
        assert launch.main(argv) == 0
        assert capsys.readouterr().out == without


# --- as processes


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("launch.py", "recipe=mnist", "launcher=print", "epoch=3"), 2),
        (("launch.py", "recipe=mnist", "data_dir=\udcff"), 2),
        (("-m", "recipes.core.launch.batch", "begin", "mnist", "lr=fast"), 2),
        (("-m", "recipes.mnist", "nodes=2"), 2),
        (("-m", "recipes.prepare", "minst"), 2),
    ],
    ids=lambda v: ascii(" ".join(v))[1:60] if isinstance(v, tuple) else None,
)
def test_a_refusal_is_the_only_output_of_the_process(command: tuple[str, ...], status: int, here: Path) -> None:
    words = [str(ROOT / word) if word == "launch.py" else word for word in command]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    before = tree(here.parent)
    ran = subprocess.run(
        [sys.executable, *words], cwd=here, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout) == (status, "")
    one_line(ran.stderr)
    assert tree(here.parent) == before
