"""What a node unpacks: whole, or not at all."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from recipes.core.errors import MachineError
from recipes.core.launch import unpack


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
    with pytest.raises(KeyboardInterrupt):
        unpack.unpack(folder, tmp_path / "environment.tar")
    assert not folder.exists()


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "unpacked/environment-1"
    folder.parent.mkdir()
    folder.parent.chmod(0o777)
    with pytest.raises(MachineError, match="with mode 700"):
        unpack.main(["prepare", str(folder)])
