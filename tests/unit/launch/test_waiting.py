"""wait=true: waiting for a job, and the exit status that it returns."""

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
    states = iter([("PENDING", 0), None, None, ("RUNNING", 0), ("COMPLETING", 0), (state, code)])

    def ask(job: str) -> jobstate.Job | None:
        answer = next(states)
        if answer is None:
            raise MachineError("a controller that is started again does not answer")
        word, status = answer
        return jobstate.Job(job, word, "", status, 0) if word else None

    monkeypatch.setattr(client, "find", ask)
    monkeypatch.setattr(submit.time, "sleep", lambda s: None)
    job = "7" if left else "71"  # its run directory may hold an older run's end
    run_dir = tmp_path if state else tmp_path / directory.EVALUATION
    number = helpers.attempt(run_dir, launch=f"{job}.0").number
    directory.write_status(run_dir, left or "done", attempt=number, step=1)
    (tmp_path / "log").write_text("rank 0's words\n")
    assert submit.wait([submit.Submitted("7", tmp_path, tmp_path / "log")]) == expected
    output = capsys.readouterr()
    assert output.out.count("rank 0's words") == 1
    assert output.err.count("asking Slurm again") == 1
    assert ("job 7: stopped" in output.err) == (left == "preempted")


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
    for codes, expected in (((0, 3, 1), 3), ((0, 0), 0)):
        ends = iter(codes)
        monkeypatch.setattr(submit, "_wait", lambda *_, ends=ends, **__: next(ends))
        assert submit.wait([run] * len(codes)) == expected
        assert not list(ends)  # it has waited for all
