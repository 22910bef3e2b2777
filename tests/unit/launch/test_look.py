"""Which runs `launch.py look` refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.core.errors import InputError, MachineError
from recipes.core.launch import run_commands
from tests import helpers


def test_a_run_that_does_not_run_or_belongs_to_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nosuch")  # no Slurm
    words = ["look", str(tmp_path / "run")]
    helpers.attempt(tmp_path / "run", process={"place": "elsewhere"}, step=None)
    with pytest.raises(InputError, match=r"/run: is not running: lost$"):
        run_commands.command(words, tmp_path, {})
    monkeypatch.setattr(run_commands, "MAY_HAVE_RANKS", ("lost",))
    monkeypatch.setattr(run_commands.trust, "is_own", lambda path: False)
    with pytest.raises(MachineError, match=r"/run: belongs to another user$"):
        run_commands.command(words, tmp_path, {})
