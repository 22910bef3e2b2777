"""How often a wrapper reads the run directory."""

import time
from pathlib import Path

import pytest

from recipes.core.program.watch import Watch
from tests import helpers


def test_a_request_to_stop_is_recorded_at_once_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper that read the run directory without a pause would need a CPU while its program
    saves.
    """
    looks: list[float] = []
    monkeypatch.setattr(Watch, "_look", lambda self: looks.append(time.monotonic()))
    view = Watch(helpers.attempt(tmp_path), 1)
    helpers.wait_until(lambda: looks, 5.0, "the first look")
    view.tell_stop("SIGUSR2", time.time())
    helpers.wait_until(lambda: len(looks) > 1, 4.0, "a look at the request")
    time.sleep(0.3)
    assert len(looks) == 2
    view.fenced = "the test has ended"
    view.tell_stop("SIGUSR2", time.time())  # ends the thread
