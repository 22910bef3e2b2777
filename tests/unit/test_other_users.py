"""What another user of the machine has made, can change or sends is not executed, and nothing is
written through it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes import export, predict, prepare, report
from recipes.core import errors, files, trust
from recipes.core.config import envfile, profiles
from recipes.core.config.run_keys import TrainKeys
from recipes.core.data import hub, labelled, pillow, text
from recipes.core.doctor import explain
from recipes.core.errors import ConfigError, InputError, MachineError
from recipes.core.launch import checks, jobs, run_commands, runs, snapshot
from recipes.core.run import attempt as attempts
from recipes.core.run import (
    command_line,
    directory,
    entry,
    logs,
    outlook,
    record,
    resumed,
    rows,
    source,
    table,
)
from recipes.core.run.record import State
from recipes.core.slurm.client import Line
from recipes.core.slurm.jobstate import Job
from recipes.core.train import causal, checkpoint, resume, session, trained
from tests import helpers

STRANGER = 65534
COMMIT = ("commit", "-q", "--allow-empty", "-m", "x")
as_root = pytest.mark.usefixtures("needs_root")
Change = Callable[[Path], object]
CHANGES: dict[str, Change] = {
    "the file is of another user": lambda path: os.chown(path, STRANGER, STRANGER),
    "its folder is of another user": lambda path: os.chown(path.parent, STRANGER, STRANGER),
    "a folder above it is of another user": lambda path: os.chown(
        path.parents[1], STRANGER, STRANGER
    ),
    "all users can write to the file": lambda path: path.chmod(0o666),
    "all users can write to its folder": lambda path: path.parent.chmod(0o777),
    "a group can write to its folder": lambda path: (
        os.chown(path.parent, -1, STRANGER),
        path.parent.chmod(0o775),
    ),
    "a group can write to a folder above it": lambda path: (
        os.chown(path.parents[1], -1, STRANGER),
        path.parents[1].chmod(0o775),
    ),
}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In a folder that all users can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def needs_root() -> None:
    helpers.need("" if os.geteuid() == 0 else "files of another user can be made by root alone")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that only this user can change."""
    env_file = tmp_path / "a/b/file.env"
    env_file.parent.mkdir(parents=True)
    env_file.write_text("NCCL_DEBUG=INFO\n")
    return env_file


def set_list(
    path: Path,
    owner: int,
    user: int,
    group: int,
    others: int,
    *,
    account: int = STRANGER,
    kind: str = "access",
) -> None:
    """Gives ``path`` an access control list: the permissions of its owner, of the user ``account``
    (which are also the most that it allows), of its group and of all others.
    """
    entries = [(1, owner, -1), (2, user, account), (4, group, -1), (16, user, -1), (32, others, -1)]
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    os.setxattr(path, f"system.posix_acl_{kind}", content)


FAILED = runs.Run("", "toy", "7", State.failed, 0, 0, None, {}, None, None, None, None, 1, "", "")


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@as_root
@pytest.mark.parametrize(
    "change",
    [
        "the file is of another user",
        "all users can write to the file",
        "a link",
        "a group",
        "an access control list",
        "a pipe",
        "its folder is of another user",
        "all users can write to its folder",
        "a group can write to its folder",
    ],
)
def test_a_job_script_that_another_user_could_have_made_is_not_opened(
    path: Path, change: str
) -> None:
    with trust.open_own(path) as file:
        assert file.read() == b"NCCL_DEBUG=INFO\n"
    if change == "a link":
        path.rename(path.with_name("target"))
        path.symlink_to("target")
    elif change == "a group":
        os.chown(path, -1, STRANGER)
        path.chmod(0o664)
    elif change == "an access control list":
        path.chmod(0o660)
        set_list(path, 6, 6, 4, 0)
    elif change == "a pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        CHANGES[change](path)
    with pytest.raises((MachineError, OSError)), trust.open_own(path):
        pass


@as_root
def test_a_job_script_is_own_whatever_the_umask_and_the_folder_allow(tmp_path: Path) -> None:
    os.chown(tmp_path, -1, STRANGER)
    tmp_path.chmod(0o2775)
    with umask(0o002):
        trust.write_own(tmp_path / "job.sh", b"#!/bin/bash\n")
    tmp_path.chmod(0o755)
    with trust.open_own(tmp_path / "job.sh"):
        pass


@as_root
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_another_user_can_change_is_not_used(path: Path, change: str) -> None:
    assert trust.who_else_can_change(path) == ""
    CHANGES[change](path)
    with pytest.raises(
        ConfigError,
        match=r"(another user|can write to it).*; or use a copy in env/ of your own clone",
    ):
        envfile.read(path)


@as_root
def test_a_link_to_such_a_file_is_not_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    helpers.use_root(monkeypatch, tmp_path / "clone")
    link = tmp_path / "clone/env/mine.env"
    link.parent.mkdir(parents=True)
    link.symlink_to(path)
    assert envfile.read(link)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="every user can write to it"):
        envfile.read(link)


@as_root
def test_root_the_own_group_and_sticky_folders_are_trusted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path.parents[1] / "link").symlink_to(path.parent)
    with pytest.raises(MachineError, match="must be a folder that belongs to you"):
        trust.private_folder(path.parents[1] / "link")
    path.parent.chmod(0o775)  # root's group
    path.parents[1].chmod(0o1777)
    assert trust.who_else_can_change(path) == ""
    # others can add files to it
    assert "every user can write to it" in trust.who_else_can_change(path.parents[1])
    os.chown(path.parent, -1, STRANGER)
    assert "RECIPES_TRUST_GROUP=1" in trust.who_else_can_change(path)
    monkeypatch.setenv("RECIPES_TRUST_GROUP", "1")
    assert trust.who_else_can_change(path) == ""


def shell_accepts(folder: Path, top: Path = Path("/")) -> bool:
    """Whether the shell of a job uses the code in ``folder``, by the folders up to ``top``."""
    script = '. sbatch/job.sh; require_own "$1" "$2"'
    command = ["bash", "-c", script, "bash", str(folder), str(top)]
    status = subprocess.run(command, cwd=helpers.ROOT, capture_output=True).returncode
    assert status in (0, errors.EXIT_MACHINE)
    return status == 0


@as_root
@pytest.mark.parametrize("change", [change for change in CHANGES if "folder" in change])
def test_the_shell_of_a_job_refuses_the_same_folders(path: Path, change: str) -> None:
    assert shell_accepts(path.parent)
    CHANGES[change](path)
    assert not shell_accepts(path.parent)


@as_root
@pytest.mark.parametrize(
    ("permissions", "is_accepted"),
    [
        (7, False),
        (5, True),
    ],
)
def test_the_shell_of_a_job_reads_access_control_lists(
    path: Path, permissions: int, is_accepted: bool
) -> None:
    set_list(path.parents[1], 7, permissions, 5, 5)
    assert shell_accepts(path.parent) == is_accepted
    assert (trust.who_else_can_change(path.parent) == "") == is_accepted


@as_root
@pytest.mark.parametrize("owner", [0, STRANGER])
def test_the_shell_of_a_job_accepts_what_is_in_a_folder_that_nobody_else_can_enter(
    path: Path, owner: int
) -> None:
    path.parent.chmod(0o777)
    path.parents[1].chmod(0o700)
    os.chown(path.parents[1], owner, -1)
    assert shell_accepts(path.parent) == (owner == 0)
    assert (trust.who_else_can_change(path.parent) == "") == (owner == 0)


@as_root
def test_a_folder_that_nobody_else_can_enter_protects_nothing_if_others_can_exchange_it(
    path: Path,
) -> None:
    """Such as a $TMPDIR with mode 700 in a project folder."""
    path.parent.chmod(0o700)
    os.chown(path.parents[1], -1, STRANGER)
    for mode, is_accepted in ((0o755, True), (0o2775, False), (0o3775, True)):
        path.parents[1].chmod(mode)
        assert shell_accepts(path) == is_accepted
        assert (trust.who_else_can_change(path) == "") == is_accepted


@as_root
def test_the_shell_of_a_job_checks_every_folder_up_to_the_clone(tmp_path: Path) -> None:
    code = tmp_path / "clone/runs/code/job"
    code.mkdir(parents=True)
    # Who can change a folder above the clone can exchange the whole of it.
    for folder, is_accepted in (("", True), ("clone/runs", False)):
        (tmp_path / folder).chmod(0o777)
        assert shell_accepts(code, tmp_path / "clone") == is_accepted


@as_root
@pytest.mark.parametrize("name", ["runs", "runs/code"])
def test_a_requeued_job_runs_no_code_that_another_user_chose(tmp_path: Path, name: str) -> None:
    """Such as an older clone of this user, by a link runs/code/job-ID."""
    clone = tmp_path / "clone"
    other = tmp_path / "other/sbatch"
    for folder in (clone / "runs/code", other):
        folder.mkdir(parents=True)
    shutil.copytree(helpers.ROOT / "sbatch", clone / "sbatch")
    (other / "job.sh").write_text("echo other; exit 0\n")
    (clone / "runs/code/job-7").symlink_to(other.parent)
    environ = helpers.clean_environment() | {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    command = ["bash", "-c", ". sbatch/job.sh; begin toy"]
    for is_shared in (False, True):
        if is_shared:
            os.chown(clone / name, -1, STRANGER)
            (clone / name).chmod(0o2775)
        done = subprocess.run(command, cwd=clone, env=environ, capture_output=True, text=True)
        assert (done.stdout == "other\n") != is_shared, done.stderr


@as_root
@pytest.mark.parametrize("stranger", ["", "sbatch", "sbatch/job.sh"])
def test_a_ready_script_uses_no_shared_part_that_another_user_has_made(
    tmp_path: Path, stranger: str
) -> None:
    """It was submitted in another folder than its clone."""
    (tmp_path / "sbatch").mkdir()
    (tmp_path / "sbatch/job.sh").write_text("echo used; exit 0\n")
    if stranger:
        os.chown(tmp_path / stranger, STRANGER, STRANGER)
    ready = ["bash", str(helpers.ROOT / "sbatch/mnist_1x1.sh")]
    done = subprocess.run(ready, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout == "used\n") == (stranger == ""), done.stderr
    assert not stranger or "is not a clone of yours" in done.stderr


@as_root
def test_code_is_not_kept_where_others_can_exchange_it(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/__init__.py").touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o777)
    with pytest.raises(MachineError, match="runs: every user can write to it"):
        snapshot.take(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "INTEL_JIT_PROFILER64=/x.so",
        "NCCL_NET_PLUGIN=/x/libnet.so",
        "NCCL_NET_PLUGIN=libnet.so",
        "NCCL_TUNER_PLUGIN=./x.so",
        "NCCL_CONF_FILE=/x",
        "NCCL_DEBUG_FILE=/x",
        "FI_PROVIDER_PATH=/x",
        "UCX_GDB_COMMAND=x",
        "UCX_STATS_DEST=x",
        "NCCL_TOPO_DUMP_FILE=Makefile",
        "UCX_MODULE_DIR=/x",
        "OMPI_MCA_mca_base_component_path=/x",
        "TRITON_HOME=/x",
        "TORCHINDUCTOR_CUTLASS_DIR=/x",
        "XDG_CACHE_HOME=/x",
        "OMP_TOOL_LIBRARIES=x.so",
        "FOO=1",
    ],
)
def test_an_env_file_outside_env_cannot_choose_code_or_files(path: Path, line: str) -> None:
    valid = "NCCL_DEBUG=INFO\nNCCL_NET_PLUGIN=aws\n"
    path.write_text(f"{line}\n" if "NET_PLUGIN" in line else f"{valid}{line}\n")
    name = line.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name} (may choose|chooses) which code runs"):
        profiles.env_variables(str(path), "")
    path.write_text(f"{valid}OMP_NUM_THREADS=4\n")
    assert profiles.env_variables(str(path), "")["NCCL_NET_PLUGIN"] == "aws"


def test_the_env_file_of_a_run_is_not_inherited(tmp_path: Path) -> None:
    from recipes.conf.toy import Config

    (tmp_path / "config.yaml").write_text("network: /tmp/x.env\nlr: 0.5\n")
    assert resumed.keys_of(tmp_path, "toy", Config) == {"lr": "0.5"}
    settings = command_line.parse([f"run_dir={tmp_path}"], recipe="toy")
    assert resumed.own_env_file(settings) == "/tmp/x.env"  # which is said at the start
    (tmp_path / "config.yaml").write_text("network: mine.env\n")
    assert resumed.keys_of(tmp_path, "toy", Config) == {}
    (tmp_path / "config.yaml").write_text("network: infiniband\n")
    assert resumed.keys_of(tmp_path, "toy", Config) == {"network": "infiniband"}
    (tmp_path / "config.yaml").write_text("num_workers: 4\n")  # of a version that accepted it
    assert resumed.keys_of(tmp_path, "toy", Config) == {}


@as_root
def test_the_umask_of_another_users_run_is_not_inherited(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("umask: '027'\n")
    assert resumed.keys_of(tmp_path, "toy", TrainKeys) == {"umask": "027"}
    os.chown(tmp_path, STRANGER, STRANGER)
    assert resumed.keys_of(tmp_path, "toy", TrainKeys) == {}


@as_root
@pytest.mark.parametrize("name", ["", "attempts", "logs"])
def test_a_run_directory_that_another_user_has_made_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run" / name
    folder.mkdir(parents=True)
    os.chown(folder, STRANGER, STRANGER)
    refused = pytest.raises(MachineError, match=r"belongs to another user; .*give another run_dir=")
    if name == "logs":
        with refused:
            trust.own_folder(folder)
    else:
        with refused:
            attempts.open_next(tmp_path / "run", "toy", {})


@as_root
def test_a_run_directory_that_a_group_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, -1, STRANGER)
    tmp_path.chmod(0o2775)
    with pytest.raises(MachineError, match=r"run_dir: .*: its group can write to it \(run chmod"):
        attempts.open_next(tmp_path, "toy", {})
    trust.own_folder(tmp_path, "data_dir")
    monkeypatch.setenv("RECIPES_TRUST_GROUP", "1")
    attempts.open_next(tmp_path, "toy", {})


@as_root
@pytest.mark.parametrize("name", ["model", "attempts/0000", "checkpoints/best", "doctor/reports"])
def test_a_link_from_when_others_could_write_to_a_run_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run_dir = tmp_path / "run"
    link = run_dir / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    problem = f"run_dir: {link} belongs to another user; remove it \\(rm -r {link}\\), or give"
    with pytest.raises(MachineError, match=problem):
        trust.own_folder(link.parent)
    trust.own_folder(link.parent, is_listed=False)
    trust.own_folder(link.parent, "data_dir")
    os.chown(link.parent, -1, STRANGER)
    link.parent.chmod(0o2775)
    monkeypatch.setenv("RECIPES_TRUST_GROUP", "1")
    trust.own_folder(link.parent)


@as_root
@pytest.mark.parametrize(
    "opens",
    [
        lambda run_dir: attempts.open_next(run_dir, "toy", {}),
        lambda run_dir: jobs.record(run_dir, b"", "7", "toy", []),
        lambda run_dir: export.main([str(run_dir), "hf"]),
        lambda run_dir: export.main([str(run_dir), "to=tensorboard"]),
        lambda run_dir: run_commands.to_resume(replace(FAILED, folder=str(run_dir)), []),
    ],
)
def test_what_opens_a_run_directory_refuses_a_planted_file(
    tmp_path: Path, opens: Callable[[Path], object]
) -> None:
    jobs.record(tmp_path / "run", b"", "7", "toy", [])
    planted = tmp_path / "run/config.yaml"
    planted.write_text("lr: 9\n")
    os.chown(planted, STRANGER, STRANGER)
    with pytest.raises(MachineError, match=r"config\.yaml belongs to another user; remove it"):
        opens(tmp_path / "run")


@as_root
def test_metrics_are_not_exported_into_a_folder_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "run/attempts").mkdir(parents=True)
    (tmp_path / "run/summary.json").symlink_to(tmp_path / "secret.json")
    os.chown(tmp_path / "run", STRANGER, STRANGER)
    with pytest.raises(MachineError, match="belongs to another user"):
        export.main([str(tmp_path / "run"), "to=tensorboard"])
    assert sorted(os.listdir(tmp_path / "run")) == ["attempts", "summary.json"]


def test_predictions_are_not_written_through_a_planted_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".bashrc").write_text("mine")
    (tmp_path / "out.csv").symlink_to(tmp_path / ".bashrc")
    model = SimpleNamespace(classes=["a"], path="x")
    monkeypatch.setattr(trained, "load", lambda run, device: model)
    (tmp_path / "a.png").touch()
    monkeypatch.setattr(predict, "answers", lambda model, paths, faults: [(paths[0], [1.0])])
    predict.main(["run", str(tmp_path / "a.png"), "--csv", str(tmp_path / "out.csv")])
    assert (tmp_path / ".bashrc").read_text() == "mine"
    assert (tmp_path / "out.csv").read_text().splitlines()[0] == "file,class,a"
    end, pipe = os.pipe()  # as with --csv /dev/stdout
    predict.main(["run", str(tmp_path / "a.png"), "--csv", f"/dev/fd/{pipe}"])
    assert os.read(end, 100).startswith(b"file,class,a")


@as_root
@pytest.mark.parametrize("kind", ["html", "csv", "safetensors"])
def test_a_typed_file_is_not_written_through_a_folder_link_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    attempts.open_next(tmp_path / "run", "toy", {})
    (tmp_path / "mine").mkdir()
    link = tmp_path / "shared"
    link.symlink_to(tmp_path / "mine")
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    out = f"{link}/out.{kind}"
    monkeypatch.setattr(trained, "load", lambda *_: SimpleNamespace(classes=["a"], path="x"))
    monkeypatch.setattr(export, "to_safetensors", lambda model: b"")
    run = str(tmp_path / "run")
    write, words = {
        "html": (report.main, [run, f"html={out}"]),
        "csv": (predict.main, [run, str(tmp_path / "a.png"), "--csv", out]),
        "safetensors": (export.main, [run, kind, f"out={out}"]),
    }[kind]
    with pytest.raises(MachineError, match="shared: is a link of another user"):
        write(words)
    assert not [*(tmp_path / "mine").iterdir()]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["a named pipe", "a device"])
def test_a_planted_file_among_data_stops_no_reader(tmp_path: Path, kind: str) -> None:
    for name in ("a.jpg", "b.csv", "c.txt"):
        path = tmp_path / name
        os.mkfifo(path) if kind == "a named pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(pillow.Unreadable, match="not an ordinary file"):
        pillow.read_file(tmp_path / "a.jpg")
    with pytest.raises(InputError, match="not an ordinary file"):
        labelled.read_table(tmp_path / "b.csv", tmp_path, False)
    with pytest.raises(InputError, match=r"has no \.txt"):
        text.write(str(tmp_path), tmp_path / "text", "bytes", 1, print)


def test_a_log_is_not_written_through_a_planted_link(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").symlink_to(tmp_path / "authorized_keys")
    with (
        pytest.raises(MachineError, match=r"rank0\.log cannot be written"),
        logs.copied_to(tmp_path / "rank0.log"),
    ):
        pass
    assert not (tmp_path / "authorized_keys").exists()


def test_a_named_pipe_in_a_run_directory_stops_no_reader(tmp_path: Path) -> None:
    for name in ("status.json", "job.yaml", "summary.json", "metrics.jsonl", "config.yaml"):
        os.mkfifo(tmp_path / name)
    run = record.read(tmp_path)
    assert (run.state, run.step, run.values) == (State.not_begun, 0, {})


def test_messages_have_no_control_characters(tmp_path: Path) -> None:
    for kind in (ConfigError, InputError, MachineError, errors.RunError):
        assert str(kind("a\x1b]0;b\x07\nc")) == "a\\x1b]0;b\\x07\\nc"


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_what_a_rank_sends_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who reaches rank 0's port can take the place of a rank."""
    monkeypatch.chdir(tmp_path)
    content = io.BytesIO()
    torch.save(_Evil(), content)
    state: Any = SimpleNamespace(
        **dict.fromkeys(("model", "optimizer", "scheduler"), SimpleNamespace(state_dict=dict)),
        ema=None,
        meta={},
        step=0,
    )
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.content_of(state, {}, [content.getvalue()])
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["../../home/me/.ssh", "/etc/cron.d", "..", "a-run-of-mine"])
def test_what_rank_0_sends_names_no_folder(tmp_path: Path, name: str) -> None:
    """With run_dir= each rank knows its run directory."""
    settings = SimpleNamespace(run=SimpleNamespace(run_dir=f"{tmp_path}/run"), recipe="toy")
    ranks = SimpleNamespace(rank=1, run_id=None)
    start: Any = SimpleNamespace(settings=settings, ranks=ranks)
    sent = [name, False, 3, False]
    world: Any = SimpleNamespace(rank=1, from_rank_0=lambda purpose, work: sent)
    attempt, _ = session.open_run_dir(start, world)
    assert attempt.folder == tmp_path / "run/attempts/0003"
    settings.run.run_dir = ""
    for sent[0] in (name, str(files.ROOT / "runs/toy" / name)):
        problem = r"^run_dir=.* here, run_dir=.* on rank 0: give the same"
        with pytest.raises(InputError, match=problem):
            session.open_run_dir(start, world)


@pytest.mark.parametrize("name", ["../x.pt", "/x/step-00000001.pt", "config.yaml"])
def test_what_rank_0_sends_names_no_file(tmp_path: Path, name: str) -> None:
    settings = SimpleNamespace(run=SimpleNamespace(resume=f"{tmp_path}/mine.pt"))
    checkpoints = tmp_path / "run/checkpoints"
    context: Any = SimpleNamespace(settings=settings, folder=checkpoints)
    assert resume.at(context, 0, "step-00000001.pt") == checkpoints / "step-00000001.pt"
    assert resume.at(context, 3, "mine.pt") == tmp_path / "mine.pt"
    with pytest.raises(InputError, match="which is not a checkpoint"):
        resume.at(context, 0, name)


@as_root
def test_a_link_of_another_user_does_not_lead_a_run_elsewhere(tmp_path: Path) -> None:
    for place in (tmp_path / "mine", tmp_path / "theirs"):
        place.symlink_to(tmp_path / "target")
    os.chown(tmp_path / "theirs", STRANGER, STRANGER, follow_symlinks=False)
    chosen = directory.choose(str(tmp_path / "mine/run"), "toy", None, tmp_path)
    assert chosen == tmp_path / "target/run"
    for path in ("theirs", "theirs/run"):
        with pytest.raises(MachineError, match=r"theirs: is a link of another user"):
            directory.choose(str(tmp_path / path), "toy", None, tmp_path)
    second = f"{tmp_path}/second"
    Path(second).symlink_to("theirs")
    with pytest.raises(MachineError, match="is a link of another user"):
        command_line.parse([f"run_dir={second}"], recipe="toy").absolute(
            {"run_dir": second}, tmp_path
        )


@pytest.mark.parametrize(
    "line",
    [
        "recipe: script",
        "script: /x/evil.sh",
        "program: /x/evil.sh",
        "workdir: /x",
        "through: x",
        "launcher_args: --x",
        "container: docker://evil",
        "container_runtime: pyxis",
        "container_mounts: /x",
        "allow_code: x",
        "extra: --x",
        "cluster: x",
        "environment: x.tar",
        "sweep.environment: x.tar",
        "sweep.args: --x",
    ],
)
def test_a_file_of_keys_does_not_choose_what_runs(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys.yaml").write_text(f"lr: 0.1\n{line}\n")
    name = line.partition(":")[0].removeprefix("sweep.")
    with pytest.raises(ConfigError, match=f"sets {name}, which decides what runs"):
        command_line.parse(["recipe=toy", f"config={tmp_path}/keys.yaml"])


@as_root
def test_the_run_of_another_user_is_not_cancelled(tmp_path: Path) -> None:
    run = replace(FAILED, folder=str(tmp_path), state="running")
    os.chown(tmp_path, STRANGER, STRANGER)
    with pytest.raises(MachineError, match="belongs to another user"):
        run_commands.cancel(run)
    os.chown(tmp_path, 0, 0)
    with pytest.raises(MachineError, match="--me is not a job ID"):
        run_commands.cancel(replace(run, job="--me"))


def test_a_new_run_directory_follows_the_umask_and_not_the_list_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_list(tmp_path, 7, 7, 7, 0, kind="default")
    with monkeypatch.context() as before_removal, umask(0o077):
        before_removal.setattr(trust, "_remove_lists", lambda folder: None)
        trust.own_folder(tmp_path / "at first")
    assert (tmp_path / "at first").stat().st_mode & 0o777 == 0o700  # also the most of the list
    with umask(0o077):
        trust.own_folder(tmp_path / "run")
        (tmp_path / "run/file").touch()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "run/file").stat().st_mode & 0o777 == 0o600
    assert os.listxattr(tmp_path / "run") == []


@as_root
def test_a_profile_behind_a_link_is_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clone/env/clusters").mkdir(parents=True)
    (tmp_path / "site.yaml").write_text("partition: work\n")
    (tmp_path / "clone/env/clusters/site.yaml").symlink_to(tmp_path / "site.yaml")
    monkeypatch.setattr(profiles, "ROOT", tmp_path / "clone")
    monkeypatch.setattr(trust, "ROOT", tmp_path / "clone")
    assert profiles.cluster_profile("site") == {"partition": "work"}
    os.chown(tmp_path / "site.yaml", STRANGER, STRANGER)
    with pytest.raises(ConfigError, match="belongs to another user"):
        profiles.cluster_profile("site")


@as_root
@pytest.mark.parametrize("planted", ["nothing", "a folder", "a file"])
def test_compiled_code_is_in_a_folder_that_others_cannot_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o1777)
    usual = tmp_path / f"recipes-{os.getuid()}"
    if planted != "nothing":
        usual.mkdir() if planted == "a folder" else usual.touch()
        os.chown(usual, STRANGER, STRANGER)
    folder = entry._cache_of_compiled_code()
    assert (folder.parent == usual) == (planted == "nothing")
    assert folder.stat().st_mode & 0o777 == 0o700


@as_root
def test_a_temporary_folder_that_a_group_can_exchange_is_not_used(tmp_path: Path) -> None:
    os.chown(tmp_path, -1, STRANGER)
    tmp_path.chmod(0o2775)
    with pytest.raises(MachineError, match=r"its group can write to it.*set TMPDIR to a folder"):
        trust.private_temporary(Path(tempfile.mkdtemp(dir=tmp_path)))
    tmp_path.chmod(0o3775)
    trust.private_temporary(Path(tempfile.mkdtemp(dir=tmp_path)))


def test_a_table_of_runs_has_no_control_characters() -> None:
    assert table.aligned([["run", "\x1b]52;c;evil\x07"], ["a\nb", "1"]]) == [
        r"run   \x1b]52;c;evil\x07",
        r"a\nb  1",
    ]


@pytest.mark.timeout(30)
def test_a_named_pipe_in_place_of_best_stops_no_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "best")
    assert checkpoint.named(tmp_path, "best") == ""


def test_a_row_without_an_end_uses_no_memory(tmp_path: Path) -> None:
    """A file of 100 GB that is a hole on the disk."""
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.truncate(100 << 30)
        file.seek(100 << 30)
        file.write('\n{"step": 1}\n')
    assert rows.rows(tmp_path) == [{"step": 1}]


@as_root
def test_the_doctor_writes_no_verdict_into_a_folder_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", STRANGER, STRANGER)
    words = ["-m", "recipes.doctor", "device=cpu", f"run_dir={tmp_path}/run"]
    assert "belongs to another user" in helpers.run([sys.executable, *words]).expect(3).out


@as_root
def test_resume_takes_its_words_from_a_file_of_this_user(tmp_path: Path) -> None:
    run = replace(FAILED, folder=str(tmp_path))
    jobs.record(tmp_path, b"#!/bin/bash\n", "7", "toy", ["max_steps=1"])
    assert "max_steps=1" in run_commands.to_resume(run, [])
    for change in (lambda path: os.chown(path, STRANGER, STRANGER), lambda path: path.chmod(0o666)):
        (tmp_path / "job.yaml").unlink()
        jobs.record(tmp_path, b"#!/bin/bash\n", "7", "toy", ["max_steps=1"])
        change(tmp_path / "job.yaml")
        with pytest.raises(MachineError, match=r"job\.yaml: .*so it is not executed"):
            run_commands.to_resume(run, [])


def test_a_copy_of_another_users_run_names_no_script_job_or_process(tmp_path: Path) -> None:
    """The copy belongs to this user, and its author knew its path."""
    copy = tmp_path / "copy"
    theirs = tmp_path / "theirs"
    jobs.record(theirs, b"#!/bin/bash\n", "7", "toy; x", [])
    attempt = attempts.open_next(theirs, "toy", {"SLURM_JOB_ID": "8"})
    for path in (theirs / "job.yaml", attempt.folder / "opened.json"):
        path.write_text(path.read_text().replace(str(theirs), str(copy)))
    shutil.copytree(theirs, copy)
    running = Line("RUNNING", "", "node1", 60.0, False, "")
    run = runs.read(copy, {"7": running, "8": running})
    assert (run.job, run.state) == ("", State.lost)
    fix = f"python launch.py 'recipe=toy; x' run_dir={copy}"
    with pytest.raises(MachineError, match=f"was copied here.*{fix}"):
        run_commands.to_resume(run, [])
    with pytest.raises(MachineError, match="was copied here"):
        run_commands.resume(run, [])


def test_a_run_counts_only_with_a_mark_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user can write into a run while it is copied, and then knows the inode of the copy.
    The mark may be of an earlier run of this user that had this inode.
    """
    homes = {name: tmp_path / name for name in ("mine", "theirs")}
    for home in homes.values():
        home.mkdir()

    def read_in(home: Path) -> str:
        monkeypatch.setenv("HOME", str(home))
        try:
            return str(run_commands._own_description(tmp_path / "run")["job_id"])
        except MachineError as error:
            return "copied" if "was copied here" in str(error) else ""

    def record_in(home: Path) -> None:
        monkeypatch.setenv("HOME", str(home))
        jobs.record(tmp_path / "run", b"#!/bin/bash\n", "7", "toy", ["max_steps=1"])

    record_in(homes["theirs"])
    assert (read_in(homes["theirs"]), read_in(homes["mine"])) == ("7", "copied")
    record_in(homes["mine"])
    assert (read_in(homes["theirs"]), read_in(homes["mine"])) == ("copied", "7")
    key = homes["mine"] / ".config/recipes/key"
    assert key.stat().st_mode & 0o777 == 0o600
    (tmp_path / "run/job.sh").write_text("evil\n")
    run = replace(FAILED, folder=str(tmp_path / "run"))
    with pytest.raises(
        MachineError, match=r"job\.sh: was changed, .*: python launch.py recipe=toy"
    ):
        run_commands.resume(run, [])
    job = tmp_path / "run/job.yaml"
    job.write_text(job.read_text().replace("max_steps=1", "max_steps=2"))
    assert read_in(homes["mine"]) == "copied"
    record_in(homes["mine"])
    key.chmod(0o640)  # others may have read it
    assert read_in(homes["mine"]) == "copied"
    record_in(tmp_path / "nosuch")
    assert read_in(tmp_path / "nosuch") == "copied"


def test_cancel_ends_no_process_that_another_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", lambda *words: pytest.fail("kill"))
    monkeypatch.setenv("PATH", "/nosuch")  # no Slurm
    attempt = attempts.open_next(tmp_path / "run", "toy", {})
    facts = attempt.read("opened.json")
    pid = os.getppid()
    facts["process"] |= {"pid": pid, "started": attempts.start_time(pid)}
    files.write_json(attempt.folder / "opened.json", facts)
    run = replace(FAILED, folder=str(tmp_path / "run"), state="running")
    with pytest.raises(MachineError, match="scancel 7 failed"):
        run_commands.cancel(run)


def test_a_rank_without_the_home_of_its_job_keeps_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as in a container."""
    in_job = {"SLURM_JOB_ID": "7"}
    attempt = attempts.open_next(tmp_path / "run", "toy", in_job)
    with monkeypatch.context() as inside:
        inside.setenv("HOME", "/nosuch")
        attempts.describe(attempt, "toy", in_job, ["node1"])
    opened = attempt.read("opened.json")
    assert opened["hosts"] == ["node1"]
    assert directory.is_marked(tmp_path / "run", opened)


def test_a_submission_makes_no_folder_with_an_inherited_list(tmp_path: Path) -> None:
    set_list(tmp_path, 7, 7, 7, 0, kind="default")
    with umask(0o077):
        jobs.record(tmp_path / "me/run", b"", "7", "toy", [])
    for name in ("me", "me/run"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
        assert os.listxattr(tmp_path / name) == []


@as_root
def test_data_are_not_written_through_a_link_of_another_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "index.json").write_text("{}")
    (tmp_path / "data").mkdir()
    link = tmp_path / "data/cifar10"
    link.symlink_to(mine)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    for split in ("train", "test"):
        (tmp_path / "source" / split / "a").mkdir(parents=True)
    words = ["cifar10", f"data_dir={tmp_path}/data", f"source={tmp_path}/source"]
    assert prepare.main(words) == errors.EXIT_MACHINE
    assert "cifar10: is a link of another user; give the folder itself" in capsys.readouterr().err
    assert (mine / "index.json").read_text() == "{}"


@as_root
def test_a_folder_for_data_is_not_behind_a_link_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "mine/text").mkdir(parents=True)
    link = tmp_path / "data"
    link.symlink_to(tmp_path / "mine")
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(MachineError, match="data: is a link of another user"):
        trust.own_folder(link / "text", "data_dir")


@pytest.mark.parametrize("kind", ["a link", "a named pipe"])
def test_a_planted_file_of_metrics_is_not_read(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_text("PRIVATE\n")
    attempt = attempts.open_next(tmp_path / "run", "toy", {})
    metrics = tmp_path / "run/metrics.jsonl"
    metrics.symlink_to(tmp_path / "secret") if kind == "a link" else os.mkfifo(metrics)
    with contextlib.suppress(OSError):
        attempts.begin(attempt, 0, own=False)
    assert metrics.is_symlink() or metrics.read_bytes() == b""
    assert rows.rows(tmp_path / "run") == []


@as_root
def test_a_link_of_another_user_leads_to_no_run(tmp_path: Path) -> None:
    attempts.open_next(tmp_path / "mine/run", "toy", {})
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/link").symlink_to(tmp_path / "mine")
    assert table.find([tmp_path / "shared"]) == [tmp_path / "mine/run"]
    os.chown(tmp_path / "shared/link", STRANGER, STRANGER, follow_symlinks=False)
    assert table.find([tmp_path / "shared"], may_be_empty=True) == []


def test_keys_are_not_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("token: secret\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").symlink_to(tmp_path / "hosts.yml")
    assert record.read(tmp_path / "run").keys == {}


def test_a_run_that_cannot_be_read_costs_no_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        attempts.open_next(tmp_path / "runs" / name, "toy", {})
    run_dir = tmp_path / "runs/a"
    opened = directory.marked(run_dir, {"process": "x"})
    files.write_json(run_dir / "attempts/0000/opened.json", opened)
    assert run_commands.show([], tmp_path) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2  # the head and the other run
    assert "runs/a: cannot be read (" in err


@as_root
def test_a_log_of_another_user_is_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs/rank0.log"
    log.write_text("first\n\x1b]0;pwned\x07last\n")
    os.chown(log, STRANGER, STRANGER)
    assert run_commands.logs(tmp_path, "0", False) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["first", r"\x1b]0;pwned\x07last"]


@as_root
@pytest.mark.parametrize("name", ["logs/rank0.log", "logs", "job.yaml"])
def test_the_run_of_another_user_shows_no_private_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(os, "execvp", lambda *words: pytest.fail("tail"))
    private = tmp_path / "private/rank0.log"
    private.parent.mkdir()
    private.write_text("secret\n")
    run_dir = tmp_path / "theirs"
    (run_dir / "logs").mkdir(parents=True)
    if name == "logs":
        (run_dir / name).rmdir()
    if name == "job.yaml":
        files.write_json(run_dir / name, {"job_id": "7", "log": str(private)})
    else:
        (run_dir / name).symlink_to(private if "/" in name else private.parent)
    for path in (run_dir, *run_dir.rglob("*")):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    assert "secret" not in "".join(explain.of_run(run_dir))
    job = Job("7", "RUNNING", error_log=str(private))
    of_slurm = outlook.Outlook("7", job, True, "")
    assert explain.batch_logs(record.read(run_dir), of_slurm) == []
    with pytest.raises((InputError, MachineError), match=r"link of another user|has no logs"):
        run_commands.logs(run_dir, "", False)


@pytest.mark.parametrize("command", ["resume", "compare"])
def test_a_run_that_cannot_be_read_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("PATH", "/nosuch")  # no Slurm
    for name in ("a", "b"):
        attempts.open_next(tmp_path / "runs" / name, "toy", {})
    run_dir = tmp_path / "runs/b"
    opened = directory.marked(run_dir, {"process": "x", "recipe": "toy"})
    files.write_json(run_dir / "attempts/0000/opened.json", opened)
    (run_dir / "status.json").write_text('{"state": "running", "step": 1, "updated": -1e300}')
    with pytest.raises(InputError, match=r"runs/b: cannot be read \("):
        run_commands.command([command, f"{tmp_path}/runs/a", f"{tmp_path}/runs/b"], tmp_path, {})


@as_root
def test_a_run_of_another_user_does_not_keep_others_from_being_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nosuch")  # no Slurm
    for name in ("theirs", "mine"):
        attempts.open_next(tmp_path / "runs" / name, "toy", {})
    os.chown(tmp_path / "runs/theirs", STRANGER, STRANGER)
    (tmp_path / "runs/theirs/status.json").symlink_to(tmp_path / "nothing")
    assert run_commands.command(["cancel", f"{tmp_path}/runs"], tmp_path, {}) == 3
    said = capsys.readouterr()
    assert "runs/theirs/status.json: is a link in the run of another user: skipped" in said.err
    assert "runs/mine: is not running: lost" in said.out


@pytest.mark.timeout(30)
def test_a_log_cannot_keep_explain_busy(tmp_path: Path) -> None:
    line = '  File "a' + '", line 1' * 200_000 + "\nx\n"
    (tmp_path / "rank0.log").write_text(f"CUDA out of memory\n{line}")
    assert explain.of_logs(tmp_path / "rank0.log")


# ---------------------------------------------------------------- how groups set up their folders

# no such accounts need to exist
ME = 12345
HEAD = 12346
GROUP = 12345


@as_root
def test_copied_data_has_no_file_behind_a_link_of_another_user(tmp_path: Path) -> None:
    """Else `recipes.prepare` copies a file that only this user can read into a shared folder."""
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    source = tmp_path / "source"
    (source / "own").mkdir(parents=True)
    (source / "own/a.txt").write_text("a text")
    (source / "file.txt").symlink_to(secret)
    (source / "folder").symlink_to(tmp_path)
    (source / "to_own.txt").symlink_to("own/a.txt")
    # the kernel follows a link before the dots behind it
    (source / "own/deeper").mkdir()
    (source / "own/hop.txt").symlink_to(secret)
    (source / "hop.txt").write_text("a text")
    (source / "deeper").symlink_to("own/deeper")
    (source / "dots.txt").symlink_to("deeper/../hop.txt")
    (source / "dots_to_own.txt").symlink_to("deeper/../a.txt")
    for path in (source, *source.rglob("*")):
        os.lchown(path, STRANGER, STRANGER)

    for name in ("file.txt", "folder/secret.txt", "dots.txt"):
        with pytest.raises(MachineError, match="is a link of another user"):
            list(text._documents(source / name))
        with pytest.raises(MachineError, match="is a link of another user"):
            pillow.read_file(source / name, trust.without_links_of_others)
    for name in ("to_own.txt", "dots_to_own.txt"):
        assert list(text._documents(source / name)) == ["a text"]


@as_root
def test_a_model_is_not_written_into_a_run_of_another_user(tmp_path: Path) -> None:
    """Its owner could replace it by a link to a run of this user while the model is loaded."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    os.chown(tmp_path / "run", STRANGER, STRANGER)
    os.lchown(tmp_path / "link", STRANGER, STRANGER)
    with pytest.raises(MachineError, match="run belongs to another user; give another out="):
        export.main([str(tmp_path / "run"), "safetensors"])
    with pytest.raises(MachineError, match="link: is a link of another user"):
        export.main([str(tmp_path / "link"), "safetensors"])


@as_root
@pytest.mark.parametrize(
    "key",
    [
        "run_dir: mine",
        "umask: '022'",
        "force: true",
        "sweep.force: true",
        "keep_best: false",
        "account: x",
        "dependency: afterok:1",
        "keep_checkpoints: 1",
        "keep_every_steps: 5",
        "mail: them",
    ],
)
def test_keys_of_another_user_choose_no_run_and_no_readers(tmp_path: Path, key: str) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"epochs: 3\n{key}\n")
    words = ["recipe=toy", f"config={keys}"]
    command_line.parse(words)
    os.chown(keys, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match="which only your own file may set"):
        command_line.parse(words)

    keys.write_text("epochs: 3\nsweep.lr: 0.1,0.2\n")
    assert len(command_line.parse(words).sweep) == 2


def test_check_copies_no_file_without_an_end(tmp_path: Path) -> None:
    """Else `launch.py check run_dir=` fills the temporary folder."""
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "status.json").symlink_to("/dev/null")
    (run_dir / "config.yaml").touch()
    os.truncate(run_dir / "config.yaml", 4 << 20)
    place = tmp_path / "place"
    checks._show_checkpoints(run_dir / "checkpoints", place / "checkpoints")
    assert [path.name for path in place.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("load", [trained.load, causal.load])
@pytest.mark.parametrize("default", ["torchinductor_me", "another_tmpdir/torchinductor_me"])
def test_a_loaded_model_has_a_private_compile_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: str, load: Callable[[Path], object]
) -> None:
    """torch's exporter reads files in this folder. Its default is a name that others can create,
    and torch sets the variable to it.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/{default}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(InputError, match="has no checkpoint"):
        load(tmp_path)
    place = f"{tmp_path}/recipes-{os.getuid()}/{sys.implementation.cache_tag}-"
    assert re.fullmatch(rf"{place}[0-9a-f]{{8}}", os.environ["TORCHINDUCTOR_CACHE_DIR"])


@contextlib.contextmanager
def account(user: int) -> Iterator[None]:
    """This process has the rights of a member of GROUP, without those of root."""
    before = os.getgroups()
    os.setgroups([GROUP])
    os.setegid(GROUP)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)


@pytest.fixture
def place(needs_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which "clone" is the clone of this project."""
    helpers.use_root(monkeypatch, tmp_path / "clone")
    monkeypatch.delenv("RECIPES_TRUST_GROUP", raising=False)
    return tmp_path


def make(folder: Path, mode: int, user: int = ME) -> Path:
    folder.mkdir()
    os.chown(folder, user, GROUP)
    folder.chmod(mode)
    return folder


def own_env_file(folder: Path, mode: int = 0o664) -> Path:
    file = folder / "mine.env"
    file.write_text("NCCL_DEBUG=INFO\n")
    os.chown(file, ME, GROUP)
    file.chmod(mode)
    return file


def test_a_clone_that_its_group_shares_is_accepted(place: Path) -> None:
    """A setgid folder of a project, with umask 002: the group can change all of the code, also
    without the files in runs/.
    """
    clone = make(place / "clone", 0o2775)
    runs = make(clone / "runs", 0o2775)
    with account(ME):
        assert trust.private_folder(runs / "code").stat().st_mode & 0o777 == 0o700
        trust.own_folder(runs / "toy")
        jobs.record(runs / "toy", b"#!/bin/bash\n", "1", "toy", [])
        with trust.open_own(runs / "toy/job.sh"):
            pass


@pytest.mark.parametrize("fix", ["chmod g-w runs", "RECIPES_TRUST_GROUP=1"])
def test_a_folder_for_runs_that_a_group_shares_is_refused_with_a_fix(
    place: Path, monkeypatch: pytest.MonkeyPatch, fix: str
) -> None:
    clone = make(place / "clone", 0o755)
    runs = make(clone / "runs", 0o2775)
    with account(ME):
        problem = (
            r"runs: its group can write to it \(run chmod g-w on it, "
            r"or export RECIPES_TRUST_GROUP=1 if"
        )
        with pytest.raises(MachineError, match=problem):
            trust.private_folder(runs / "code")
        if fix.startswith("chmod"):
            subprocess.run(fix.split(), cwd=clone, check=True)
        else:
            monkeypatch.setenv(*fix.split("="))
        trust.private_folder(runs / "code")


def test_a_home_that_others_cannot_enter_is_accepted(place: Path) -> None:
    """Its primary group is that of all users, so umask 002 lets them write to files which they
    cannot reach.
    """
    make(place / "clone", 0o755)
    home = make(place / "home", 0o700)
    file = own_env_file(make(home / "env", 0o775))
    problem = r": its group can write to it \(run chmod g-w on it"
    with account(ME):
        assert envfile.read(file)
        home.chmod(0o710)
        with pytest.raises(ConfigError, match=rf"mine\.env{problem}"):
            envfile.read(file)
        file.chmod(0o644)
        with pytest.raises(ConfigError, match=f"home/env{problem}"):
            envfile.read(file)
        file.parent.chmod(0o755)
        assert envfile.read(file)


def test_a_project_folder_of_the_head_of_the_group_holds_runs_but_no_env_file(place: Path) -> None:
    project = make(place / "project", 0o2775, HEAD)
    file = own_env_file(make(project / "me", 0o755), 0o644)
    clone = make(place / "clone", 0o755)
    (clone / "env").mkdir()
    os.chown(clone / "env", ME, GROUP)
    with account(ME):
        trust.own_folder(project / "run")
        with pytest.raises(
            ConfigError,
            match=r"project belongs to another user; or use a copy in env/ of your own clone$",
        ):
            envfile.read(file)
        shutil.copy(file, clone / "env")
        assert envfile.read(clone / "env/mine.env")


def test_a_clone_of_root_that_users_can_only_read(place: Path) -> None:
    clone = place / "clone"
    (clone / "env").mkdir(parents=True)
    (clone / "env/site.env").write_text("NCCL_DEBUG=INFO\n")
    home = make(place / "home", 0o755)
    with account(ME):
        assert envfile.read(clone / "env/site.env")
        trust.own_folder(home / "run")
        with pytest.raises(
            MachineError, match=r"cannot be created \(Permission denied\): use a clone of your own$"
        ):
            trust.private_folder(clone / "runs/code")
    (clone / "runs/code").mkdir(parents=True)
    with account(ME), pytest.raises(MachineError, match="must be a folder that belongs to you"):
        trust.private_folder(clone / "runs/code")


def test_a_list_for_one_more_user_is_refused_until_it_is_removed(place: Path) -> None:
    make(place / "clone", 0o755)
    file = own_env_file(make(place / "home", 0o755), 0o640)
    with account(ME):
        set_list(file, 6, 6, 4, 0, account=HEAD)
        with pytest.raises(ConfigError, match=r"remove it with setfacl -b"):
            envfile.read(file)
        # as setfacl -b does, which also restores the group's bits
        os.removexattr(file, "system.posix_acl_access")
        file.chmod(0o640)
        assert envfile.read(file)


def copied(model: Path) -> set[str]:
    with hub.opened(str(model)) as copy:
        return {path.name for path in copy.rglob("*.*")}


@as_root
def test_a_model_has_no_link_of_another_user_and_no_pipe(tmp_path: Path) -> None:
    """The run keeps copies of some of its files."""
    (tmp_path / "secret").write_text("mine")
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    for name in ("x.jinja", "additional_chat_templates/x.jinja", "x.safetensors"):
        link = model / name
        link.symlink_to(tmp_path / "secret")
        assert link.name in copied(model)  # an own link
        os.lchown(link, STRANGER, STRANGER)
        with pytest.raises(MachineError, match=rf"{link}: is a link of another user"):
            copied(model)
        link.unlink()
    os.mkfifo(link)
    link = link.rename(model / "x.jinja")
    with pytest.raises(InputError, match=r"x\.jinja: cannot be copied to .* ordinary file"):
        copied(model)


def test_a_model_cannot_be_exchanged_after_it_was_checked(tmp_path: Path) -> None:
    """By a link of its owner to a private file of this user."""
    (tmp_path / "secret").write_text("mine")
    model = tmp_path / "model"
    model.mkdir()
    names = ("chat_template.jinja", "model.safetensors")
    for name in names:
        (model / name).write_text("theirs")
    with hub.opened(str(model)) as copy:
        for name in names:
            (model / name).unlink()
            (model / name).symlink_to(tmp_path / "secret")
            assert (copy / name).read_text() == "theirs"
    assert not copy.exists()


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.json", {"transformers_weights": "../x.safetensors"}, "its transformers_w"),
        (
            "model.safetensors.index.json",
            {"weight_map": {"head": "/home/me/x.safetensors"}},
            "its head may",
        ),
        (
            "config.json",
            {"text_config": {"attn_implementation": {"": "them/kernel"}}},
            "may lead to a file or to code outside its folder: give a copy of the model without it",
        ),
        ("config.json", {"parts": [{"x\x1b": ["../secret"]}]}, r"its x\\x1b may"),
        (
            "config.json",
            {"vision_config": {"model_args": {"checkpoint_path": "x.pth"}}},
            "its model_args may",
        ),
        ("config.json", {"configuration_files": ["config.5.0.json"]}, "its configuration_f"),
        ("adapter_config.json", {"base_model_name_or_path": "x"}, "is an adapter: merge it"),
    ],
)
def test_a_model_names_no_weights_and_no_code_elsewhere(
    tmp_path: Path, file: str, content: dict[str, object], problem: str
) -> None:
    """transformers would train private weights of this user, or execute a kernel of the hub, and
    timm would open a pickle.
    """
    files.write_json(tmp_path / file, content)
    with pytest.raises(InputError, match=problem):
        copied(tmp_path)


@as_root
def test_code_of_a_model_that_another_user_can_exchange_has_no_digest(tmp_path: Path) -> None:
    """They could show other code to who reads it."""
    code = tmp_path / "model/mine.py"
    model = str(code.parent)
    code.parent.mkdir()
    code.write_text("")
    names = {"AutoConfig": "mine.Config"}
    files.write_json(tmp_path / "model/config.json", {"model_type": "mine", "auto_map": names})
    with hub.opened(model) as copy:
        for place in (code, code.parent):
            os.chown(place, STRANGER, STRANGER)
            fix = "copy the folder, or its run, with cp -r, read the copy, and give it instead"
            with pytest.raises(InputError, match=f"{place} belongs to another user: {fix}$"):
                hub.allows_code(model, copy, "")
            os.chown(place, 0, 0)
        assert not (copy / "mine.py").exists()
        with pytest.raises(InputError, match=rf"mine\.py in {model}\): read it, then give allow_c"):
            hub.allows_code(model, copy, "")
        code.unlink()
        code.symlink_to("missing")
        with pytest.raises(InputError, match=r"missing cannot be read .*: fetch it again"):
            hub.allows_code(model, copy, "")


@as_root
def test_a_link_is_not_taken_for_what_it_leads_to(tmp_path: Path) -> None:
    """Its maker may have put it there after the path was resolved."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    os.lchown(link, STRANGER, STRANGER)
    assert trust.who_else_can_change(link) == f"{link} belongs to another user"


def test_settings_of_a_tokenizer_are_not_passed_to_other_libraries(tmp_path: Path) -> None:
    settings = {"sudachi_kwargs": {"sudachi_config_path": "x"}, "target_spm": "x", "eos": "</s>"}
    files.write_json(tmp_path / "tokenizer_config.json", settings)
    with hub.opened(str(tmp_path)) as copy:
        assert files.read_json(copy / "tokenizer_config.json") == {"eos": "</s>"}


def test_a_model_may_have_the_names_of_what_it_was_made_from(tmp_path: Path) -> None:
    """As in the configs of OPT, MPT, Gemma 3n and Falcon."""
    content = {
        "prefix": "</s>",
        "tokenizer_name": "them/x",
        "vision_config": {"_name_or_path": "/data/x", "model_args": None},
        "auto_map": {"AutoConfig": "them/x--configuration_x.X"},
    }
    files.write_json(tmp_path / "config.json", content)
    assert "config.json" in copied(tmp_path)


def test_a_checkpoint_cannot_be_exchanged_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a link of its owner to a private checkpoint of this user."""
    path = tmp_path / "step-00000001.pt"
    torch.save({"of": "theirs"}, path)
    torch.save({"of": "mine"}, tmp_path / "private.pt")

    def exchange(archive: zipfile.ZipFile) -> None:
        path.unlink()
        path.symlink_to(tmp_path / "private.pt")

    monkeypatch.setattr(zipfile.ZipFile, "testzip", exchange)
    assert checkpoint._read_file(path) == {"of": "theirs"}


@as_root
def test_a_typed_run_is_not_exchanged_by_a_link_of_another_user(tmp_path: Path) -> None:
    helpers.attempt(tmp_path / "precious")
    link = tmp_path / "try1"
    link.symlink_to(tmp_path / "precious")
    assert runs.find([str(link)], tmp_path) == [tmp_path / "precious"]
    os.lchown(link, STRANGER, STRANGER)
    with pytest.raises(MachineError, match="try1: is a link of another user"):
        runs.find([str(link)], tmp_path)


@as_root
def test_the_run_of_another_user_leads_to_no_private_file(tmp_path: Path) -> None:
    private = tmp_path / "private/job.yaml"
    helpers.attempt(tmp_path / "private")
    private.write_text('{"arguments": ["args=--token secret"]}')
    run_dir = tmp_path / "runs/theirs"
    (run_dir / "attempts").mkdir(parents=True)
    (run_dir / "data").symlink_to(tmp_path)
    os.chown(run_dir, STRANGER, STRANGER)
    assert not record.read(run_dir).job
    (run_dir / "job.yaml").symlink_to(private)
    with pytest.raises(InputError, match=r"job\.yaml: is a link in the run of another user"):
        record.read(run_dir)


def test_a_process_of_a_run_is_a_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        attempts.start_time("../tmp/pipe")  # type: ignore[arg-type]


def test_keys_of_a_run_are_not_merged(tmp_path: Path) -> None:
    """Nine merges of nine would take all memory. None of the keys is used then."""
    lines = ["a0: &a0 {k: 1}"]
    for number in range(1, 8):
        before = ", ".join([f"*a{number - 1}"] * 9)
        lines.append(f"a{number}: &a{number} {{<<: [{before}]}}")
    (tmp_path / "config.yaml").write_text("\n".join([*lines, "lr: 0.5"]))
    (tmp_path / "attempts").mkdir()
    assert record.read(tmp_path).keys == {}


def test_a_repository_above_the_code_is_not_asked(tmp_path: Path) -> None:
    """It may be another user's."""
    for words in (("init", "-q"), ("-c", "user.name=a", "-c", "user.email=a@b", *COMMIT)):
        subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)
    (tmp_path / "clone").mkdir()
    assert source.commit(tmp_path)
    assert not source.commit(tmp_path / "clone")


def test_a_folder_that_cannot_be_read_is_named_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x\x1b]0;y").mkdir()
    scan = os.scandir

    def scandir(path: Any) -> Any:
        if path != tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(table.os, "scandir", scandir)
        assert list(table.run_directories(tmp_path)) == []
    said = capsys.readouterr().err
    assert "cannot be read (Permission denied): skipped" in said
    assert "\x1b" not in said


@as_root
def test_in_a_user_namespace_files_of_all_others_are_not_taken_for_those_of_root(
    tmp_path: Path,
) -> None:
    """Their owner is unknown there. A folder in one that only its owner can change may be of
    root.
    """
    code = "import sys; from pathlib import Path; from recipes.core import trust; "
    code += "print(*(trust.is_own(Path(path), follow_symlinks=False) for path in sys.argv[1:]))"
    paths = []
    for mode in (0o1777, 0o755):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        (folder / "link").symlink_to(tmp_path)
        (folder / "folder").mkdir()
        paths += [folder / "link", folder / "folder"]
    for path in paths:
        os.lchown(path, 1234, 1234)
    argv = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code, *map(str, paths)]
    assert helpers.run(argv).expect(0).lines == ["False False False True"]
