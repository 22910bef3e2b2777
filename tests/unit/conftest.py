"""What the unit tests share."""

from pathlib import Path

import pytest

from recipes.core.slurm import client
from tests import helpers
from tests.helpers import ROOT
from tests.unit.launch.stand_ins import Bench, Stubs


@pytest.fixture(autouse=True)
def _no_pause_between_calls_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "AGAIN_S", (0.0, 0.0))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, tmp_path / "repository")


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stubs:
    return Stubs(tmp_path, monkeypatch)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path at which the test writes the profile of cluster=here. Its repository is a temporary
    folder.
    """
    root = tmp_path / "repository"
    (root / "env/clusters").mkdir(parents=True)
    (root / "recipes").symlink_to(ROOT / "recipes")
    for file in (ROOT / "env").glob("*.env"):
        (root / "env" / file.name).symlink_to(file)
    helpers.use_root(monkeypatch, root)
    return root / "env/clusters/here.yaml"
