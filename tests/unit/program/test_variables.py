"""The environment of a user's program, and what it needs before it starts."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes import script
from recipes.core.errors import DiskFull, InputError, MachineError
from recipes.core.place import ranks
from recipes.core.run import attempt
from recipes.core.run.attempt import Attempt

TWO = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "2",
}


def test_a_node_that_does_not_see_the_run_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start: Any = SimpleNamespace(ranks=ranks.detect({}))
    monkeypatch.delenv(attempt.VARIABLE, raising=False)
    with pytest.raises(InputError, match="must be started by a job script"):
        script.main(start)
    monkeypatch.setenv(attempt.VARIABLE, str(tmp_path / "attempts/0001"))
    with pytest.raises(MachineError, match=f"{script.HOST}: does not see run_dir={tmp_path}: give"):
        script.main(start)


@pytest.mark.parametrize(
    ("exported", "cpu_threads", "world", "expected"),
    [
        ("8", 0, TWO, "8"),
        ("8", 3, TWO, "8"),
        ("", 0, TWO, "1"),
        ("", 3, TWO, "3"),
        ("", 0, {}, None),
        ("8", 0, {}, "8"),
    ],
)
def test_the_users_variables_are_kept(
    monkeypatch: pytest.MonkeyPatch,
    exported: str,
    cpu_threads: int,
    world: dict[str, str],
    expected: str | None,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    if exported:
        monkeypatch.setenv("OMP_NUM_THREADS", exported)
    settings = SimpleNamespace(run=SimpleNamespace(cpu_threads=cpu_threads))
    start: Any = SimpleNamespace(ranks=ranks.detect(world), settings=settings)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "typed")
    launch: Any = SimpleNamespace(through="rank", on_cpu=True)
    variables = script.variables(start, Attempt(Path("/run"), 0), launch)
    assert variables.get("OMP_NUM_THREADS") == expected
    assert variables["ACCELERATE_USE_CPU"] == "typed"
    assert variables["ACCELERATE_TORCH_DEVICE"] == "cpu"
    assert variables["RECIPES_STOP_NOTE"] == "7:/run/attempts/0000/stop.json"


def test_a_full_disk_before_the_program_starts_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*words: object, **names: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    start: Any = SimpleNamespace(ranks=ranks.detect(TWO))
    launch: Any = None
    monkeypatch.setattr(script.look, "answer_requests", lambda *words: None)
    monkeypatch.setattr(script.trust, "own_folder", full)
    with pytest.raises(DiskFull, match=f"^run_dir='{tmp_path}': cannot be written"):
        script.run_rank(start, Attempt(tmp_path, 0), launch, False, 0)
    monkeypatch.setattr(script, "_copied_to", lambda log: contextlib.nullcontext())
    monkeypatch.setattr(script.attempts, "note_rank", full)
    with pytest.raises(DiskFull, match=f"^run_dir='{tmp_path}': cannot be written"):
        script.run_rank(start, Attempt(tmp_path, 0), launch, False, 0)
