"""What a node unpacks: whole, or not at all."""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from recipes.core import files
from recipes.core.errors import EXIT_MACHINE, MachineError
from recipes.core.files import ROOT
from recipes.core.launch import unpack
from recipes.core.slurm import client


def test_an_archive_that_ends_early_leaves_no_environment(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_bytes(bytes(1 << 20))
    archive = tmp_path / "cut.tar"
    with tarfile.open(archive, "w") as file:
        file.add(python, unpack.PYTHON)
        file.add(python, "bin/python3")
    archive.write_bytes(archive.read_bytes()[: 3 << 19])
    folder = tmp_path / "unpacked/environment-1"
    folder.parent.mkdir(mode=0o700)
    with pytest.raises(MachineError, match=r"cut\.tar: tar: "):
        unpack.unpack(folder, archive)
    assert [path.name for path in folder.parent.iterdir()] == [".lock"]


def test_a_job_that_is_killed_while_it_unpacks_leaves_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(command: Sequence[Any], **kwargs: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", killed)
    folder = tmp_path / "unpacked/environment-1"
    folder.parent.mkdir(mode=0o700)
    archive = tmp_path / "environment.tar"
    with pytest.raises(KeyboardInterrupt):
        unpack.unpack(folder, archive)
    assert not folder.exists()
    monkeypatch.undo()
    with tarfile.open(archive, "w") as file:
        file.add(__file__, unpack.PYTHON)
    unpack.unpack(folder, archive)  # its rest is in no later job's way
    assert (folder / unpack.PYTHON).exists()


def test_a_job_waits_for_another_one_that_unpacks_on_its_node(tmp_path: Path) -> None:
    """Such as the runs of a sweep, which begin together."""
    archive = tmp_path / "environment.tar"
    with tarfile.open(archive, "w") as file:
        file.add(__file__, unpack.PYTHON)
    folder = tmp_path / "unpacked/environment-1"
    folder.parent.mkdir(mode=0o700)
    second = threading.Thread(target=unpack.unpack, args=(folder, archive))
    with files.locked(folder.parent / ".lock"):
        second.start()
        time.sleep(0.2)
        assert second.is_alive()
        assert not folder.exists()
    second.join()
    assert (folder / unpack.PYTHON).exists()


def test_a_job_does_not_replace_the_archive_that_another_one_unpacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "environment.tar"
    archive.touch()
    copies: list[Path] = []
    monkeypatch.setattr(client, "broadcast", lambda source, target: copies.append(target))
    monkeypatch.setattr(
        unpack, "_on_each_node", lambda environ, step, *_: unpack.MISSING * (step == "prepare")
    )
    for job in ("7", "8"):
        environ = {"SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": "2"}
        unpack.on_all_nodes(str(archive), False, environ)
    assert len(set(copies)) == 2
    copy = tmp_path / "unpacked" / copies[0].name
    copy.parent.mkdir(mode=0o700)
    copy.touch()
    with pytest.raises(MachineError, match="tar: "):
        unpack.main(["unpack-copy", f"{tmp_path}/unpacked/environment-1", str(copy)])
    assert not copy.exists()  # no later job would replace it


def test_the_archive_of_the_user_is_kept_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_this_node(environ: Any, step: str, *paths: Path) -> int:
        return unpack.main([step, *map(str, paths)]) or unpack.MISSING * (step == "prepare")

    monkeypatch.setattr(unpack, "_on_each_node", on_this_node)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    archive = tmp_path / "environment.archive"
    with tarfile.open(archive, "w") as file:
        file.add(__file__, unpack.PYTHON)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    python = unpack.on_all_nodes(str(archive), False, job)
    assert Path(python).exists()
    assert archive.exists()


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "unpacked/environment-1"
    folder.parent.mkdir()
    folder.parent.chmod(0o777)
    with pytest.raises(MachineError, match="with mode 700"):
        unpack.main(["prepare", str(folder)])


def test_a_node_that_refuses_the_folder_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may have made the folder, and put a Python there."""
    archive = tmp_path / "environment.tar"
    archive.touch()
    for status in (3, 137):
        monkeypatch.setattr(unpack, "_on_each_node", lambda *words, status=status: status)
        with pytest.raises(MachineError, match="was not unpacked"):
            unpack.on_all_nodes(str(archive), False, {"SLURM_JOB_ID": "7"})


def test_a_planted_name_stops_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "environment.tar"
    with tarfile.open(archive, "w") as file:
        file.add(__file__, unpack.PYTHON)

    def on_this_node(environ: Any, *words: Any) -> int:
        try:
            status = unpack.main([*map(str, words)])
            return status or unpack.MISSING * bool(capsys.readouterr().out)
        except MachineError:
            return EXIT_MACHINE

    monkeypatch.setattr(unpack, "_on_each_node", on_this_node)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"recipes-{os.getuid()}"
    planted.touch()
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    python = unpack.on_all_nodes(str(archive), False, job)
    assert Path(python).exists()
    assert unpack.on_all_nodes(str(archive), False, job) == python
    os.utime(archive, (1, 1))  # it was packed again
    assert unpack.on_all_nodes(str(archive), False, job) != python


def test_a_task_on_each_node_starts_in_the_folder_of_the_code() -> None:
    """srun alone would start it in /tmp on a node that does not see the folder."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    assert client.on_each_node(environ)[-3:] == ["env", "-C", str(ROOT)]
