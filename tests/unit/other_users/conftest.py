"""What the tests of other users share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import helpers


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
