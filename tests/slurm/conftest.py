"""What the tests of jobs share: a copy of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm import jobs


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for the tests of a file, so that nothing of their jobs stays in runs/ of this one."""
    return jobs.copy_repository(tmp_path_factory.mktemp("clone"))
