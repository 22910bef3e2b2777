"""One cluster of two nodes with eight GPUs each, for all tests of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing, running_cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A running Slurm; a test leaves its nodes idle behind. Skips where there can be none, if it is not required."""
    reason = missing()
    if reason and os.environ.get("RECIPES_REQUIRE_SLURM") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    with running_cluster() as cluster:
        yield cluster
