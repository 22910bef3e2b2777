"""Which requests of `launch.py look` a rank answers, and with what."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from recipes.core import trust
from recipes.core.run import look
from tests import helpers


def test_the_busy_cpus_are_those_of_the_time_between_two_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter([(1.0, 10.0), (2.0, 14.0)])
    monkeypatch.setattr(look, "EXEC_S", 0.0)
    monkeypatch.setattr(look.processes, "cpu_time", lambda root: next(looks))
    assert look.describe(2**22) == {"processes": [], "cpus": 0.25}


class Ended(Exception):
    """In place of the end of the process."""


def test_only_own_requests_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "POLL_S", 0.0)
    attempt = helpers.attempt(tmp_path)
    for name, mode in (("look-own", 0o644), ("look-open", 0o666)):
        (tmp_path / "attempts" / name).mkdir(mode=0o755)
        trust.write_own(tmp_path / "attempts" / name / look.REQUEST, b"{}\n")
        (tmp_path / "attempts" / name / look.REQUEST).chmod(mode)
    program = subprocess.Popen(["sleep", "60"])
    command = Path(f"/proc/{program.pid}/cmdline")
    helpers.wait_until(lambda: command.read_bytes() or None, 10, "its command line")
    looks: list[None] = []

    def tell() -> dict[str, Any]:
        looks.append(None)
        if len(looks) == 1:  # nothing is known
            raise ValueError
        if len(looks) > 3:
            raise Ended
        attempts = {2: {}, 3: {"attempt": str(attempt.folder)}}  # unknown at first
        return {"rank": 3, "host": "node1", **attempts[len(looks)]}

    try:
        with pytest.raises(Ended):
            look.answer_requests(tell, lambda: look.describe(program.pid))
    finally:
        program.kill()
        program.wait()
    answer = helpers.read(tmp_path / "attempts/look-own", "rank0003")
    assert answer["host"] == "node1"
    [process] = answer["processes"]
    assert process["command"] == "sleep 60"
    assert (process["state"], process["stack"]) == ("S", "")
    assert [path.name for path in (tmp_path / "attempts/look-open").iterdir()] == [look.REQUEST]
