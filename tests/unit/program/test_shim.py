"""The command scontrol that a program finds: a requeue of its own job becomes a stop note, all else
reaches Slurm's scontrol.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipes.core.program import launchers
from recipes.core.run import stop_note
from recipes.core.run.attempt import Attempt
from recipes.core.run.stop_note import StopNote
from tests import helpers
from tests.unit.launch.stand_ins import Stubs

Requeue = Callable[..., StopNote]
ARRAY = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture
def attempt(tmp_path: Path, stubs: Stubs) -> Attempt:
    """An attempt with an empty note. The stub of Slurm's scontrol exits with 4."""
    stubs.add("scontrol", "echo of Slurm; exit 4")
    attempt = helpers.attempt(tmp_path / "run")
    stop_note.write(attempt, StopNote(before_s=90.0))
    return attempt


def environment(attempt: Attempt, **added: str) -> dict[str, str]:
    note = f"7:{stop_note.path(attempt)}"
    return launchers.with_hook(
        {**os.environ, "SLURM_JOB_ID": "7", "RECIPES_STOP_NOTE": note, **added}
    )


@pytest.fixture
def requeue(attempt: Attempt) -> Iterator[Requeue]:
    """Calls `scontrol requeue` as a program does, which waits until the wrapper ends it."""
    calls: list[subprocess.Popen[bytes]] = []

    def call(job: str, **added: str) -> StopNote:
        calls.append(
            subprocess.Popen(["scontrol", "requeue", job], env=environment(attempt, **added))
        )
        helpers.wait_until(lambda: stop_note.read(attempt).reason, 20, "the stop note")
        return stop_note.read(attempt)

    yield call
    for process in calls:
        assert process.poll() is None
        process.kill()
        process.wait()


@pytest.mark.parametrize("job", ["7", "70_3"])
def test_a_requeue_of_the_own_job_writes_the_stop_note(
    requeue: Requeue, stubs: Stubs, job: str
) -> None:
    note = requeue(job, **ARRAY)
    assert note.reason == "scontrol requeue, typed by the program"
    assert note.ends is True
    assert 5 < note.at - time.time() <= 10
    assert stubs.calls("scontrol") == []


@pytest.mark.parametrize(
    ("words", "added"),
    [
        (["requeue", "8"], ARRAY),
        (["requeue", "70_4"], ARRAY),
        (["requeue"], {"SLURM_JOB_ID": ""}),
        (["show", "job", "7"], {}),
        (["hold", "7"], {}),
        (["requeue", "8"], {"SLURM_JOB_ID": "8"}),  # a job that the program has submitted
        (["requeue", "7"], {"RECIPES_STOP_NOTE": "7:/no/such/note"}),
        (["requeue", "7", "a b"], {"RECIPES_STOP_NOTE": ""}),
    ],
)
def test_every_other_command_reaches_slurm(
    attempt: Attempt, stubs: Stubs, words: list[str], added: dict[str, str]
) -> None:
    before = stop_note.read(attempt)
    done = subprocess.run(
        ["scontrol", *words], env=environment(attempt, **added), capture_output=True, timeout=20
    )
    assert done.stdout == b"of Slurm\n"
    assert done.returncode == 4
    assert stubs.calls("scontrol") == [words]
    assert stop_note.read(attempt) == before


def test_a_hook_whose_folder_has_special_characters_finds_slurms_scontrol(
    attempt: Attempt, tmp_path: Path
) -> None:
    """As in a clone whose name has brackets. The command would call itself without end."""
    folder = shutil.copytree(launchers.HOOK / "bin", tmp_path / "[a] *")
    environ = {**environment(attempt), "PATH": f"{folder}:{os.environ['PATH']}"}
    assert subprocess.run(["scontrol", "ping"], env=environ, timeout=5).returncode == 4


def test_the_hook_leaves_the_users_path_and_modules() -> None:
    environ = launchers.with_hook({"PATH": "/a:/b", "PYTHONPATH": "/c"})
    hook = launchers.HOOK
    assert environ == {"PATH": f"{hook}/bin:/a:/b", "PYTHONPATH": f"{hook}:/c"}
    assert launchers.with_hook({}) == {"PATH": f"{hook}/bin:{os.defpath}", "PYTHONPATH": str(hook)}
