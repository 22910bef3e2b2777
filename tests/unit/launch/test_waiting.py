"""wait=true: waiting for a job, and the exit status that it returns."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.core.errors import MachineError
from recipes.core.launch import submit
from recipes.core.run import directory
from recipes.core.slurm import client, jobstate
from tests import helpers


@pytest.mark.parametrize(
    ("state", "code", "left", "expected"),
    [
        ("COMPLETED", 0, "done", 0),
        ("COMPLETED", 0, "", 1),
        ("FAILED", 3, "", 3),
        ("FAILED", 75, "preempted", 75),
        ("CANCELLED", 0, "preempted", 75),
        ("FAILED", 143, "done", 1),
        ("", 0, "done", 0),
        ("", 0, "", 1),
        ("COMPLETED", 0, "failed", 1),
        *((state, 0, "", 1) for state in ["CANCELLED", "TIMEOUT"]),
    ],
)
def test_waiting_returns_the_jobs_exit_status(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    code: int,
    left: str,
    expected: int,
) -> None:
    outages = [None, None, ("RUNNING", 0), None]
    hours = [("RUNNING", 0)] * 30
    states = iter([*[("PENDING", 0)] * 2, *outages, *hours, ("COMPLETING", 0), (state, code)])
    pauses: list[float] = []

    def ask(job: str) -> jobstate.Job | None:
        answer = next(states)
        if answer is None:
            raise MachineError("a controller that is started again does not answer")
        word, status = answer
        return jobstate.Job(job, word, "", status, 0) if word else None

    monkeypatch.setattr(client, "find", ask)
    monkeypatch.setattr(submit.time, "sleep", pauses.append)
    job = "7" if left else "71"  # its run directory may hold an older run's end
    run_dir = tmp_path if state else tmp_path / directory.EVALUATION
    number = helpers.attempt(run_dir, launch=f"{job}.0").number
    directory.write_status(run_dir, left or "done", attempt=number, step=1)
    (tmp_path / "log").write_text("rank 0's words\n")
    assert submit.wait([submit.Submitted("7", tmp_path, tmp_path / "log")]) == expected
    output = capsys.readouterr()
    assert output.out.count("rank 0's words") == 1
    assert output.out.count("job 7 is pending") == 1
    assert output.err.count("asking Slurm again") == 2
    is_stopped = left == "preempted" and state != "CANCELLED"
    assert ("job 7: stopped" in output.err) == is_stopped
    assert max(pauses) == 5.0


def test_an_unmet_dependency_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm does not remove such a job from the queue."""
    options = {"dependency": "afterok:6(failed)"}
    job = jobstate.Job("7", "PENDING", "DependencyNeverSatisfied", options=options)
    monkeypatch.setattr(client, "find", lambda job_id: job)
    assert submit.wait([submit.Submitted("7", Path("/r"), Path("/l"))]) == 3
    line = (
        "job 7 never starts: its dependency afterok:6(failed) cannot be met; "
        "cancel the job: scancel 7\n"
    )
    assert capsys.readouterr().err == line


def test_a_sweep_returns_its_first_nonzero_status(monkeypatch: pytest.MonkeyPatch) -> None:
    run = submit.Submitted("7", Path("/r"), Path("/l"))
    shown: list[bool] = []
    for codes, expected in (((0, 1, 3), 1), ((0, 0), 0)):
        ends = iter(codes)

        def wait(run: submit.Submitted, show: bool, ends: Iterator[int] = ends) -> int:
            shown.append(show)
            return next(ends)

        monkeypatch.setattr(submit, "_wait", wait)
        assert submit.wait([run] * len(codes)) == expected
        assert not list(ends)  # it has waited for all
    assert not any(shown)  # their logs would be mixed
