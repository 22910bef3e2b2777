"""A file that another user can change, and that the code finds, decides nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from recipes import prepare
from recipes.core import errors, files, trust
from recipes.core.config import envfile, profiles
from recipes.core.config.run_keys import TrainKeys
from recipes.core.errors import ConfigError, InputError, MachineError
from recipes.core.launch import jobs, run_commands, runs, snapshot
from recipes.core.run import attempt as attempts
from recipes.core.run import (
    command_line,
    directory,
    entry,
    record,
    resumed,
    source,
)
from recipes.core.run.record import State
from recipes.core.slurm.client import Line
from recipes.core.train import causal, trained
from tests import helpers
from tests.unit.other_users.common import FAILED, STRANGER, as_root, set_list, umask

COMMIT = ("commit", "-q", "--allow-empty", "-m", "x")


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


def shell_accepts(folder: Path, top: Path = Path("/")) -> bool:
    """Whether the shell of a job uses the code in ``folder``, by the folders up to ``top``."""
    script = '. sbatch/job.sh; require_own "$1" "$2"'
    command = ["bash", "-c", script, "bash", str(folder), str(top)]
    status = subprocess.run(command, cwd=helpers.ROOT, capture_output=True).returncode
    assert status in (0, errors.EXIT_MACHINE)
    return status == 0


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
@pytest.mark.parametrize("trusts_group", ["", "1"])
def test_the_shell_of_a_job_reads_access_control_lists(
    path: Path,
    permissions: int,
    is_accepted: bool,
    trusts_group: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RECIPES_TRUST_GROUP", trusts_group)
    set_list(path.parents[1], 7, permissions, 5, 5)
    assert shell_accepts(path.parent) == is_accepted
    assert (trust.who_else_can_change(path.parent) == "") == is_accepted


@pytest.fixture
def clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder in place of the clone."""
    folder = tmp_path / "clone"
    folder.mkdir()
    helpers.use_root(monkeypatch, folder)
    return folder


@as_root
def test_a_group_without_a_name_is_not_taken_for_that_of_the_clone(path: Path, clone: Path) -> None:
    os.chown(clone, -1, 77001)
    clone.chmod(0o2775)
    for group, is_accepted in ((77001, True), (77002, False)):
        os.chown(path.parent, -1, group)
        path.parent.chmod(0o775)
        assert (trust.who_else_can_change(path) == "") == is_accepted
        assert shell_accepts(path, clone) == is_accepted


@as_root
def test_a_clone_with_an_access_control_list_makes_no_group_trusted(
    path: Path, clone: Path
) -> None:
    """The bits of its group are those of a user in the list."""
    for shared, mode in ((clone, 0o2775), (path, 0o664)):
        os.chown(shared, -1, STRANGER)
        shared.chmod(mode)
    for is_accepted in (True, False):
        assert (trust.who_else_can_change(path) == "") == is_accepted
        assert shell_accepts(path, clone) == is_accepted
        set_list(clone, 7, 7, 5, 5)


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
    environ["HOME"] = str(tmp_path)  # without a key
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
def test_only_the_experiment_of_another_users_run_is_inherited(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("umask: '027'\nkeep_checkpoints: 1\nlr: 0.3\n")
    every = {"umask": "027", "keep_checkpoints": "1", "lr": "0.3"}
    for place in ("", "config.yaml"):
        assert resumed.keys_of(tmp_path, "toy", TrainKeys) == every
        os.chown(tmp_path / place, STRANGER, STRANGER)
        assert resumed.keys_of(tmp_path, "toy", TrainKeys) == {"lr": "0.3"}
        os.chown(tmp_path / place, 0, 0)
    tmp_path.chmod(0o777)  # others may have exchanged the file
    assert resumed.keys_of(tmp_path, "toy", TrainKeys) == {"lr": "0.3"}


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


def test_the_key_of_a_user_is_whole_and_in_a_folder_that_nobody_else_can_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with umask(0):
        made = trust.user_key()
    key = tmp_path / ".config/recipes/key"
    modes = [path.stat().st_mode & 0o777 for path in (key, key.parent, key.parents[1])]
    assert (len(made), modes) == (32, [0o600, 0o700, 0o700])
    key.parent.chmod(0o777)
    assert trust.user_key() == b""
    key.parent.chmod(0o755)
    assert trust.user_key() == made
    key.chmod(0o640)
    assert trust.user_key() == b""  # a group may have read it
    key.chmod(0o600)
    for content in (b"a", b"", made + b"a"):
        key.write_bytes(content)
        assert trust.user_key() == b""


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
    with pytest.raises(MachineError, match="names no job that you have started"):
        run_commands.cancel(run)
    # its folder is taken for another user's of whom root is one, such as in a container
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with pytest.raises(MachineError, match="names no job that you have started"):
        run_commands.cancel(run)


def test_cancel_ends_no_run_that_another_user_gave_the_name_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", lambda *words: pytest.fail("kill"))
    for name in ("a", "b"):
        attempts.open_next(tmp_path / name, "toy", {})
        jobs.record(tmp_path / name, b"", "7", "toy", [])
    for old, new in (("a", "aside"), ("b", "a"), ("aside", "b")):
        (tmp_path / old).rename(tmp_path / new)
    run = replace(FAILED, folder=str(tmp_path / "a"), state="running")
    with pytest.raises(MachineError, match="names no job that you have started with this run_dir="):
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


def test_keys_are_not_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("token: secret\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").symlink_to(tmp_path / "hosts.yml")
    assert record.read(tmp_path / "run").keys == {}


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
        "launcher: local",
        "master: host:29500",
        "max_requeues: 1000",
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


@pytest.mark.parametrize(
    "load", [trained.load, causal.load, lambda folder: prepare.main(["text", f"data_dir={folder}"])]
)
@pytest.mark.parametrize("default", ["torchinductor_me", "another_tmpdir/torchinductor_me"])
def test_a_command_with_a_model_has_a_private_compile_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: str, load: Callable[[Path], object]
) -> None:
    """torch's exporter reads files in this folder. Its default is a name that others can create,
    and torch sets the variable to it.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/{default}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.suppress(InputError):  # there is no checkpoint
        load(tmp_path)
    place = f"{tmp_path}/recipes-{os.getuid()}/{sys.implementation.cache_tag}-"
    assert re.fullmatch(rf"{place}[0-9a-f]{{8}}", os.environ["TORCHINDUCTOR_CACHE_DIR"])


@pytest.mark.timeout(5)
def test_a_number_of_a_megabyte_stops_no_reader_of_keys(tmp_path: Path) -> None:
    """YAML 1.1 reads it in base 60. The time grows with the square of its length."""
    (tmp_path / "config.yaml").write_text("lr: 1" + ":1" * 500_000)
    assert record.read(tmp_path).keys == {}


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


@as_root
def test_in_a_user_namespace_files_of_all_others_are_not_taken_for_those_of_root(
    tmp_path: Path,
) -> None:
    """Their owner is unknown there. A folder above a file, in one that only its owner can change,
    may be of root.
    """
    code = "import sys; from pathlib import Path; from recipes.core import trust; "
    code += "paths = list(map(Path, sys.argv[1:])); "
    code += "print(*(trust.is_own(path, follow_symlinks=False) for path in paths)); "
    code += "print(*(trust.who_else_can_change(path) for path in paths), sep=';')"
    paths = []
    for mode in (0o1777, 0o755):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        (folder / "link").symlink_to(tmp_path)
        (folder / "folder").mkdir()
        for name in ("link", "folder"):
            os.lchown(folder / name, 1234, 1234)
        (folder / "folder/file").touch()
        paths += [folder / "link", folder / "folder", folder / "folder/file"]
    argv = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code, *map(str, paths)]
    of_another = [f"{path} belongs to another user" for path in paths]
    of_another[2] = of_another[1]
    of_another[5] = ""
    assert helpers.run(argv).expect(0).lines == [
        "False False True False False True",
        ";".join(of_another),
    ]
