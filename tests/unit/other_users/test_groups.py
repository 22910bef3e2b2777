"""How groups set up their folders: what is accepted, and what is refused with a fix."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.core import trust
from recipes.core.config import envfile
from recipes.core.errors import ConfigError, MachineError
from recipes.core.launch import jobs
from tests import helpers
from tests.unit.other_users.common import set_list

# no such accounts need to exist
ME = 12345


HEAD = 12346


GROUP = 12345


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


@pytest.fixture
def place(needs_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which "clone" is the clone of this project."""
    helpers.use_root(monkeypatch, tmp_path / "clone")
    monkeypatch.delenv("RECIPES_TRUST_GROUP", raising=False)
    return tmp_path


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
