from pathlib import Path

import pytest

from tests.unit.launch.stand_ins import Bench, Stubs


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, tmp_path / "repository")


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stubs:
    return Stubs(tmp_path, monkeypatch)
