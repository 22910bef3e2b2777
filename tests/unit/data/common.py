"""What several tests of data use: a folder that another user can reach, and a user other than root."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that users other than root can reach. pytest's own cannot be reached."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextlib.contextmanager
def not_root() -> Iterator[None]:
    """Runs the ``with`` block as another user, since root may read everything."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        yield
    finally:
        os.seteuid(before)
