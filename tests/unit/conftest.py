"""What the unit tests share."""

import pytest

from recipes.core.run import queue


@pytest.fixture(autouse=True)
def _no_pause_between_calls_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "AGAIN_S", (0.0, 0.0))
