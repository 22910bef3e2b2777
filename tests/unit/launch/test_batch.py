"""The steps of the batch script: what begin writes for the shell, and how finish ends or requeues a
job.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from recipes.core import errors, files
from recipes.core.errors import ConfigError, InputError, Kind, MachineError
from recipes.core.launch import batch, restart, run_commands, runs
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, record, saves, source, stop_note
from recipes.core.run import spec as specs
from recipes.core.run.attempt import Attempt
from recipes.core.run.record import State
from recipes.core.run.spec import Spec
from recipes.core.run.stop_note import StopNote
from recipes.core.slurm.jobstate import Job
from tests import helpers
from tests.unit.launch.stand_ins import Stubs

RUNNING = "JobId=7 JobName=mnist\n   JobState=RUNNING Reason=None"


@pytest.fixture
def preempted(tmp_path: Path) -> Path:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    attempt = helpers.attempt(run_dir, launch="7.0")
    directory.write_status(run_dir, "preempted", attempt=attempt.number, step=12)
    return run_dir


def next_of(run_dir: Path) -> str:
    return str(helpers.read(run_dir, "status")["next"])


def of_job(restarts: str) -> dict[str, str]:
    """The environment of batch.begin in a start of job 7."""
    return {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts, "RECIPES_SNAPSHOT": "false"}


def finish(
    run_dir: Path, *words: str, srun_status: int = 0, recipe: str = "mnist", **environ: str
) -> int:
    """batch.finish in job 7, as the launch that has left the files in ``run_dir``."""
    environ = {"SLURM_JOB_ID": "7", **environ}
    attempt = attempts.newest(run_dir)
    if attempt:
        launch = directory.launch_id(environ)
        files.write_json(attempt.folder / "opened.json", {**attempt.facts(), "launch": launch})
        environ[attempts.VARIABLE] = str(attempt.folder)
    environ |= helpers.in_job(recipe, [f"run_dir={run_dir}", *words])
    return batch.finish(recipe, srun_status, environ)


def stub_scontrol(stubs: Stubs, state: str = RUNNING, requeue: str = "true") -> None:
    stubs.add("scontrol", f"if [ $1 = show ]; then echo {shlex.quote(state)}; else {requeue}; fi")


def begin(folder: Path, *words: str, recipe: str = "mnist", **environ: str) -> list[str]:
    """What batch.begin tells the shell of job 7: a verb and a value."""
    environ = {**of_job(""), **environ}
    shell = batch.begin(recipe, Path(__file__), [f"run_dir={folder}/run", *words], environ)
    return [f"{verb} {value}" for verb, value in shell]


def spec_in(lines: Sequence[str]) -> Spec:
    """What the ranks of a job read, from the lines of `begin`."""
    exported = (line.removeprefix("export ").split("=", 1) for line in lines if "export " in line)
    spec = specs.of_job(dict(exported))
    assert spec
    return spec


def test_variables_of_an_outer_allocation_are_unset(tmp_path: Path, stubs: Stubs) -> None:
    """And only those that a shell can have."""
    stubs.add("scontrol", "printf 'JobId=6 Restarts=1\\n\\nJobId=7 Restarts=0\\n   StdOut=/log\\n'")
    outer = {
        "SLURM_ARRAY_JOB_ID": "5",
        "SLURM_ARRAY_TASK_ID": "4",
        "SLURM_ARRAY_$(touch canary)": "1",
    }
    lines = begin(tmp_path, SLURM_RESTART_COUNT="1", **outer)
    unset = {"unset SLURM_ARRAY_JOB_ID", "unset SLURM_ARRAY_TASK_ID", "unset SLURM_RESTART_COUNT"}
    assert {line for line in lines if "SLURM_" in line} == unset
    described = json.loads((tmp_path / "run/job.yaml").read_text())
    assert described["job_id"] == "7"
    assert described["log"] == "/log"
    assert described["root"] == str(helpers.ROOT)


@pytest.mark.parametrize(
    ("umask", "mode", "names"),
    [
        ("077", 0o600, ("StdErr", "StdOut")),
        ("023", 0o640, ("StdOut", "StdErr")),
    ],
)
def test_the_log_of_a_job_follows_the_umask_of_the_run(
    tmp_path: Path, stubs: Stubs, umask: str, mode: int, names: tuple[str, str]
) -> None:
    """Slurm makes it with the umask of the user's shell."""
    log = tmp_path / "mnist-7.out"
    log.touch()
    log.chmod(0o642)
    stubs.add("scontrol", f"printf 'JobId=7\\n {names[0]}={log}\\n {names[1]}=/dev/null\\n'")
    null = os.stat("/dev/null").st_mode
    before = os.umask(0o022)
    try:
        begin(tmp_path, f"umask={umask}")
    finally:
        os.umask(before)
    assert log.stat().st_mode & 0o777 == mode
    assert os.stat("/dev/null").st_mode == null


def test_a_link_in_place_of_the_log_changes_no_other_file(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.touch()
    page.chmod(0o644)
    (tmp_path / "log").symlink_to(page)
    batch._restrict_log(Job("7", "RUNNING", log=str(tmp_path / "log")), 0o077)
    assert page.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("age_s", "restarts", "more", "is_refused"),
    [
        (7200.0, "0", {}, True),
        (7200.0, "1", {}, False),
        (3630.0, "0", {}, False),  # the clocks of two machines
        (3630.0, "0", {"mark": "of another folder"}, True),  # a copy with the number of this job
    ],
)
def test_a_job_does_not_continue_the_run_of_an_earlier_job_with_its_id(
    tmp_path: Path,
    stubs: Stubs,
    monkeypatch: pytest.MonkeyPatch,
    age_s: float,
    restarts: str,
    more: dict[str, str],
    is_refused: bool,
) -> None:
    """Job IDs start again after Slurm has lost its state. A second step of this job is younger than
    the job.
    """
    monkeypatch.setattr(source, "home", lambda root: tmp_path)
    earlier = attempts.open_next(tmp_path / "runs/mnist/7", "mnist", {"SLURM_JOB_ID": "7"})
    attempts.begin(earlier, 0, own=False)
    directory.write_status(earlier.run_dir, "done", attempt=0, step=3)
    now = time.time()
    opened = {**earlier.facts(), "time": now - age_s, **more}
    files.write_json(earlier.folder / "opened.json", opened)
    attempts.open_next(earlier.run_dir, "mnist", {"SLURM_JOB_ID": "7"})  # since then
    started = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now - 3600))
    stub_scontrol(stubs, f"{RUNNING} StartTime={started} Restarts={restarts}")
    environ = of_job(restarts)
    if is_refused:
        with pytest.raises(
            ConfigError, match=r"runs/mnist/7: holds the run of an earlier job .*: give run_dir=$"
        ):
            batch.begin("mnist", Path(__file__), [], environ)
    else:
        assert batch.begin("mnist", Path(__file__), [], environ)


@pytest.mark.parametrize("name", ["job.yaml", ".nfs0000000001", "checkpoints"])
def test_a_new_job_does_not_use_what_was_put_into_its_default_run_directory(
    tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Such as a copied folder with the number that a later job has."""
    monkeypatch.setattr(source, "home", lambda root: tmp_path)
    stub_scontrol(stubs, RUNNING)
    (tmp_path / "runs/mnist/7").mkdir(parents=True)
    (tmp_path / "runs/mnist/7" / name).touch()
    if name == "checkpoints":
        with pytest.raises(ConfigError, match=r"runs/mnist/7: holds .*: give run_dir=$"):
            batch.begin("mnist", Path(__file__), [], of_job(""))
    else:
        assert batch.begin("mnist", Path(__file__), [], of_job(""))


@pytest.mark.parametrize(
    ("limit", "words", "expected"),
    [
        ("2:00", (), True),
        ("8:00", (), False),
        ("2:00", ("stop_before_s=0",), False),
    ],
)
def test_a_job_of_a_few_minutes_stops_by_the_clock(
    tmp_path: Path, stubs: Stubs, limit: str, words: Sequence[str], expected: bool
) -> None:
    """The signal of its script, 120 s before the time limit, would stop the job at its start."""
    stub_scontrol(stubs, f"{RUNNING} TimeLimit={limit} RunTime=00:00:01")
    lines = begin(tmp_path, *words)
    assert spec_in(lines).by_clock == expected
    if expected:
        early = "import os, signal; os.kill(os.getpid(), signal.SIGUSR2)"
        subprocess.run([*spec_in(lines).inside, "-c", early], check=True)
    start = "export SLURM_JOB_END_TIME="
    ends = [int(line.removeprefix(start)) for line in lines if line.startswith(start)]
    assert len(ends) == expected
    assert all(60 < end - time.time() <= 119 for end in ends)


def test_a_job_that_lost_its_files_is_refused(
    tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run directory is on the disk of the node of that start."""
    monkeypatch.setattr(source, "home", lambda root: tmp_path)
    stub_scontrol(stubs, RUNNING.replace("JobName", "ArrayJobId=5 ArrayTaskId=3 JobName"))
    environ = {**of_job("1"), "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    words = [f"run_dir={tmp_path}/run"]
    (tmp_path / "runs/code").mkdir(parents=True)
    (tmp_path / "runs/code/.job-7.json").write_text(json.dumps({f"{tmp_path}/run": True}))
    line = (
        f"run_dir={tmp_path}/run: this job was started before, but this folder does not have its "
        "files: give a folder that all nodes share"
    )
    with pytest.raises(ConfigError, match=f"^{line}$"):
        batch.begin("mnist", Path(__file__), words, environ)
    assert line.endswith(helpers.failure(tmp_path / "run", 0)["error"])
    assert batch.begin("mnist", Path(__file__), words, environ)
    with pytest.raises(MachineError):
        batch.begin("mnist", Path(__file__), ["run_dir=/dev/null/x"], environ)
    monkeypatch.setattr(batch.in_use, "check", lambda *arguments: "another job uses it")
    with pytest.raises(ConfigError, match="another job uses it"):
        batch.begin("mnist", Path(__file__), words, environ)
    assert batch.begin("doctor", Path(__file__), words, environ)  # it only looks


def test_a_job_that_slurm_ends_before_its_run_began_says_what_slurm_does(
    tmp_path: Path, stubs: Stubs, capfd: pytest.CaptureFixture[str]
) -> None:
    helpers.attempt(tmp_path, step=None, hosts=())
    stub_scontrol(stubs, RUNNING.replace("RUNNING", "PENDING") + " Restarts=1")
    assert finish(tmp_path, srun_status=143) == errors.EXIT_REQUEUE
    line = "mnist: it was stopped before the run began; requeued by Slurm\n"
    assert capfd.readouterr().err == line
    stub_scontrol(stubs, f"{RUNNING} Restarts=1")  # Slurm has not decided
    assert finish(tmp_path, srun_status=143, SLURM_RESTART_COUNT="1") == 143


def test_a_doctor_in_a_run_directory_has_its_own_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "doctor").mkdir(parents=True)
    (run_dir / "config.yaml").touch()
    directory.write_status(run_dir, "failed", attempt=helpers.attempt(run_dir).number, step=1)
    attempt = helpers.attempt(run_dir / "doctor", launch="7.0", step=None)
    directory.write_status(run_dir / "doctor", "done", attempt=attempt.number, step=0)
    environ = {"SLURM_JOB_ID": "7", attempts.VARIABLE: str(attempt.folder)}
    environ |= helpers.in_job("doctor", [f"run_dir={run_dir}"])
    assert batch.finish("doctor", 0, environ) == 0
    assert capfd.readouterr().out == f"doctor: done; run directory {run_dir}/doctor\n"
    assert (directory.read_status(run_dir) or {})["state"] == "failed"


def test_a_preempted_run_is_requeued(
    preempted: Path, stubs: Stubs, capfd: pytest.CaptureFixture[str]
) -> None:
    stub_scontrol(stubs, requeue=f"grep -q requeued {preempted}/status.json")  # written before
    assert finish(preempted, "umask=027", srun_status=143) == errors.EXIT_REQUEUE
    assert (preempted / "status.json").stat().st_mode & 0o777 == 0o640
    assert stubs.calls("scontrol") == [["show", "job", "7"], ["requeue", "7"]]
    output = capfd.readouterr().out
    assert "saved at step 12; requeued (restart 1 of at most 20); run directory" in output
    assert next_of(preempted) == "requeued"


def test_a_run_that_was_saved_after_its_time_limit_is_requeued(
    preempted: Path, stubs: Stubs
) -> None:
    stub_scontrol(
        stubs,
        "JobId=7 JobName=x\nJobState=COMPLETING Restarts=0\nTimeLimit=00:01:00 RunTime=00:01:00",
    )
    finish(preempted)
    assert stubs.calls("scontrol")[-1] == ["requeue", "7"]


def test_an_array_task_requeues_only_itself(
    preempted: Path, stubs: Stubs, capfd: pytest.CaptureFixture[str]
) -> None:
    stub_scontrol(stubs, f"{RUNNING} Restarts=4")
    finish(preempted, SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="3", SLURM_RESTART_COUNT="4")
    assert stubs.calls("scontrol") == [["show", "job", "5_3"], ["requeue", "5_3"]]
    assert "restart 5 of at most 20" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("state", "words", "next_word"),
    [
        ("JobState=COMPLETING Restarts=0", "the job was cancelled: to resume", "cancelled"),
        ("JobState=COMPLETING Restarts=1", "requeued by Slurm;", "requeued"),
        (
            "Priority=0\nJobState=COMPLETING Reason=JobHeldUser Restarts=1",
            "requeued, but job 7 is held (JobHeldUser): scontrol release 7 lets it start",
            "held",
        ),
        (
            "JobState=COMPLETING Restarts=0\nPreemptTime=2026-11-23T13:49:29\n"
            "TimeLimit=00:01:00 RunTime=00:01:00",
            "not requeued by Slurm: to resume",
            "not-requeued",
        ),
        (
            "JobState=COMPLETING Restarts=0\nTimeLimit=00:01:00 RunTime=00:00:40",
            "the job was cancelled: to resume",
            "cancelled",
        ),
    ],
)
def test_a_job_whose_end_slurm_has_decided_is_not_requeued(
    preempted: Path,
    stubs: Stubs,
    capfd: pytest.CaptureFixture[str],
    state: str,
    words: str,
    next_word: str,
) -> None:
    stub_scontrol(stubs, f"JobId=7 JobName=x\n{state}")
    assert finish(preempted) == errors.EXIT_REQUEUE
    assert [call[0] for call in stubs.calls("scontrol")] == ["show"]
    assert f"saved at step 12; {words}" in capfd.readouterr().out
    assert next_of(preempted) == next_word


@pytest.mark.parametrize(
    ("words", "restarts"),
    [
        ((), "20"),
        (("max_requeues=0",), ""),
    ],
)
def test_max_requeues_limits_the_requeues(
    preempted: Path,
    stubs: Stubs,
    capfd: pytest.CaptureFixture[str],
    words: Sequence[str],
    restarts: str,
) -> None:
    stub_scontrol(stubs, f"{RUNNING} Restarts={restarts or 0}")
    assert finish(preempted, *words, SLURM_RESTART_COUNT=restarts) == errors.EXIT_REQUEUE
    assert [call[0] for call in stubs.calls("scontrol")] == ["show"]
    assert "not requeued, since max_requeues= is reached: to resume" in capfd.readouterr().out
    assert next_of(preempted) == "max-requeues"


def test_a_job_below_max_requeues_is_requeued(preempted: Path, stubs: Stubs) -> None:
    """A requeue without bad nodes does not count."""
    stub_scontrol(stubs, f"{RUNNING} Restarts=3")
    (preempted / "doctor").mkdir()
    files.write_json(preempted / "doctor/requeues.json", {"job_id": "7", "count": 1})
    finish(preempted, "max_requeues=3", SLURM_RESTART_COUNT="3")
    assert stubs.calls("scontrol")[-1] == ["requeue", "7"]


def test_a_job_without_progress_is_not_requeued(
    preempted: Path, stubs: Stubs, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first start may be stopped before its first step."""
    stub_scontrol(stubs, f"{RUNNING} Restarts=1")
    directory.write_status(preempted, "preempted", attempt=0, step=0)
    finish(preempted, SLURM_RESTART_COUNT="1")
    assert next_of(preempted) == "requeued"
    (stubs.folder / "scontrol.calls").unlink()
    first = attempts.newest(preempted)
    files.write_json(first.folder / "opened.json", {**first.facts(), "launch": "7.0"})
    again = helpers.attempt(preempted, step=12)
    directory.write_status(preempted, "preempted", attempt=again.number, step=12)
    assert finish(preempted, SLURM_RESTART_COUNT="1") == errors.EXIT_REQUEUE
    assert [call[0] for call in stubs.calls("scontrol")] == ["show"]
    line = "not requeued, since its last start completed no step or saved no file: to resume"
    assert line in capfd.readouterr().out
    assert next_of(preempted) == "no-progress"
    directory.write_status(preempted, "preempted", attempt=again.number, step=13)
    finish(preempted, SLURM_RESTART_COUNT="1")
    assert stubs.calls("scontrol")[-1] == ["requeue", "7"]
    directory.write_status(preempted, "preempted", attempt=again.number, step=12)
    stub_scontrol(stubs)
    finish(preempted)  # the first start of a job that resumes the run
    assert next_of(preempted) == "requeued"


def test_progress_before_a_restart_of_the_ranks_counts(preempted: Path, stubs: Stubs) -> None:
    """The requeued job is stopped while the ranks start again."""
    stub_scontrol(stubs, f"{RUNNING} Restarts=1")
    for step in (12, 90):
        attempt = helpers.attempt(preempted, launch="7.1", step=step)
    directory.write_status(preempted, "preempted", attempt=attempt.number, step=90)
    finish(preempted, SLURM_RESTART_COUNT="1")
    assert next_of(preempted) == "requeued"


PROGRAM = f"program={__file__}"


def stopped_program(run_dir: Path, catches: Sequence[str] | None = None) -> Attempt:
    """The last of two attempts of a program, which was stopped. catches: the signals, None if the
    program has ended before.
    """
    for number in range(2):
        attempt = helpers.attempt(run_dir, launch=f"7.{number}", step=None)
        attempts.begin(attempt, 0, own=False, of_program=True)
        directory.write_status(run_dir, "preempted", attempt=number, step=0)
    attempts.record(
        attempt, rank=0, host="a", kind=Kind.stopped, error="SIGTERM", exit_status=75, name="stop"
    )
    if catches is not None:
        files.write_json(attempt.folder / attempts.CATCHES, {"signals": catches})
    return attempt


def test_the_first_start_of_a_program_is_requeued_without_a_look_at_its_files(
    tmp_path: Path,
    stubs: Stubs,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On a slow file system, that takes longer than Slurm waits before it kills the job script."""
    stub_scontrol(stubs)
    stopped_program(tmp_path)
    for attempt in attempts.every(tmp_path):
        saves.note(attempt, "")
    monkeypatch.setattr(saves, "digest", lambda *words: pytest.fail("read the files"))
    assert finish(tmp_path) == 75
    assert "mnist: stopped; requeued (restart 1 of at most 20)" in capfd.readouterr().out
    assert next_of(tmp_path) == "requeued"


def test_a_requeued_program_that_saves_nothing_is_not_requeued_again(
    tmp_path: Path, stubs: Stubs
) -> None:
    stub_scontrol(stubs)
    run_dir = tmp_path / "run"
    attempt = stopped_program(run_dir)
    (run_dir / "checkpoint").write_text("of the first start")
    saves.note(attempt, "")
    assert finish(run_dir, SLURM_RESTART_COUNT="1") == 75
    assert next_of(run_dir) == "no-progress"
    assert [call[0] for call in stubs.calls("scontrol")] == ["show"]
    finish(run_dir)  # the first start of a job
    assert next_of(run_dir) == "requeued"
    (run_dir / "checkpoint").write_text("of this start")
    finish(run_dir, SLURM_RESTART_COUNT="1")
    assert next_of(run_dir) == "requeued"


@pytest.mark.parametrize(
    ("catches", "words", "is_saved", "restarts", "following"),
    [
        ([], (), False, 2, "max-requeues"),
        ([], (), False, 1, "requeued"),
        ([], ("max_requeues=3",), False, 2, "requeued"),
        ([], ("max_requeues=1",), False, 1, "max-requeues"),
        ([], (), True, 2, "requeued"),
        (["SIGTERM"], (), False, 2, "requeued"),
        (None, (), False, 2, "requeued"),
    ],
)
def test_a_program_that_catches_no_signal_and_saves_nothing_is_requeued_twice(
    tmp_path: Path,
    stubs: Stubs,
    catches: Sequence[str] | None,
    words: Sequence[str],
    is_saved: bool,
    restarts: int,
    following: str,
) -> None:
    stub_scontrol(stubs, f"{RUNNING} Restarts={restarts}")
    run_dir = tmp_path / "run"
    saves.note(stopped_program(run_dir, catches=catches), "")
    if is_saved:
        (run_dir / "checkpoint").touch()
    assert finish(run_dir, *words, SLURM_RESTART_COUNT=str(restarts)) == 75
    assert next_of(run_dir) == following


@pytest.mark.parametrize(
    ("words", "is_saved", "calls", "following"),
    [
        (("restart_on_hang=true",), True, ["show", "requeue"], "requeued"),
        (("restart_on_hang=true",), False, ["show"], "no-progress"),
        ((), True, [], None),
    ],
)
def test_a_program_that_hung_is_requeued_if_the_user_asks_for_it(
    tmp_path: Path,
    stubs: Stubs,
    words: Sequence[str],
    is_saved: bool,
    calls: Sequence[str],
    following: str | None,
) -> None:
    stub_scontrol(stubs)
    run_dir = tmp_path / "run"
    helpers.attempt(run_dir, step=None)
    again = helpers.attempt(run_dir, launch="7.1", step=None)
    attempts.begin(again, 0, own=False, of_program=True)
    (run_dir / "checkpoint").write_text("of the first start")
    saves.note(again, "")
    if is_saved:
        (run_dir / "checkpoint").write_text("of this start")
    attempts.record(again, rank=None, host="", kind=Kind.hang, error="no output", name="hang")
    words = (PROGRAM, "silent_s=9", *words)
    assert finish(run_dir, *words, recipe="script", SLURM_RESTART_COUNT="1") == 1
    assert [call[0] for call in stubs.calls("scontrol")] == calls
    status = helpers.read(run_dir, "status")
    assert (status["state"], status["reason"], status["next"]) == ("failed", "no output", following)
    assert status["first_failing_rank"] is None


@pytest.mark.parametrize(
    ("before_s", "left_s", "words", "expected_s"),
    [
        (120.0, 170.0, (), 50.0),  # Slurm's signal came early
        (120.0, 180.0, (), 60.0),
        (120.0, 128.0, (), 10.0),
        (120.0, 90.0, (), 10.0),  # late
        (120.0, 190.0, (), 10.0),  # typed by hand
        (120.0, 3000.0, (), 10.0),
        (120.0, None, (), 10.0),
        (None, float("inf"), (), 10.0),
        (None, 170.0, (), 50.0),  # Slurm did not answer when the job began
        (15.0, 58.0, (), 43.0),  # a job of a minute: its signal comes at its start
        (300.0, 355.0, ("stop_before_s=300",), 55.0),
        (300.0, 365.0, ("stop_before_s=300",), 10.0),
    ],
)
def test_a_program_is_asked_to_stop_exactly_before_its_time_limit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before_s: float | None,
    left_s: float | None,
    words: Sequence[str],
    expected_s: float,
) -> None:
    """Slurm signals up to 60 s early. A request long before the limit acts as soon as all nodes
    have read the note.
    """
    attempt = helpers.attempt(tmp_path)
    stop_note.write(attempt, StopNote(before_s=before_s))
    monkeypatch.setattr(batch.client, "seconds_left", lambda environ: left_s)
    now = time.time()
    environ = {attempts.VARIABLE: str(attempt.folder)}
    environ |= helpers.in_job("script", [PROGRAM, *words])
    assert batch.ask_to_stop("script", "USR1", environ) == 0
    note = stop_note.read(attempt)
    assert note.reason == "SIGUSR1"
    assert note.before_s == (before_s or 120.0)
    assert note.ends is False
    assert note.at - now == pytest.approx(expected_s, abs=1.0)
    assert (note.limit_at or now) - now == pytest.approx(left_s or 0.0, abs=1.0)


def test_a_program_that_is_started_again_is_stopped_as_long_before_the_limit(
    tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the options of srun that the first start had, such as those of a container."""
    stub_scontrol(stubs, f"{RUNNING}\n   TimeLimit=01:00:00")
    first = helpers.attempt(tmp_path, launch="7.0")

    def plan(*arguments: object) -> restart.Restart:
        return restart.Restart("", helpers.attempt(tmp_path, launch="7.0", step=None))

    monkeypatch.setattr(batch.restart, "plan", plan)
    environ = {"SLURM_JOB_ID": "7", attempts.VARIABLE: str(first.folder)}
    words = [PROGRAM, f"run_dir={tmp_path}", "restarts=1"]
    environ |= helpers.in_job("script", words, step=("--container-image=a.sqsh",))
    status, shell = batch.step_ended("script", 1, environ)
    second = attempts.newest(tmp_path)
    assert status == 0
    assert ("export", f"{attempts.VARIABLE}={second.folder}") in shell
    assert ("again", "1") in shell
    assert ("step", "--container-image=a.sqsh") in shell
    assert {("step", "--wait=0"), ("program", "script")} <= set(shell)
    assert stop_note.read(second).before_s == 120.0


def test_ranks_that_all_exit_before_the_end_are_started_again(
    tmp_path: Path,
    stubs: Stubs,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stub_scontrol(stubs)
    first = helpers.attempt(tmp_path, launch="7.0")
    again = restart.Restart("", first, ("--nodes=2",))
    monkeypatch.setattr(batch.restart, "plan", lambda *arguments: again)
    environ = {"SLURM_JOB_ID": "7", attempts.VARIABLE: str(first.folder)}
    environ |= helpers.in_job("mnist", [f"run_dir={tmp_path}", "restarts=1"])
    status, shell = batch.step_ended("mnist", 0, environ)
    assert status == 0
    assert [value for verb, value in shell if verb == "step"] == ["--nodes=2"]
    assert capfd.readouterr().out.endswith("\n\f\n")  # `explain` reads what comes after it
    assert next_of(tmp_path) == "restarted"
    assert batch.step_ended("mnist", 0, environ, may_restart=False) == (1, [])


def test_ranks_that_fail_before_a_requeued_run_began_are_started_again(
    tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another job has taken over the run."""
    stub_scontrol(stubs)
    helpers.attempt(tmp_path, launch="7.0")
    directory.write_status(tmp_path, "preempted", attempt=0, step=3)
    second = helpers.attempt(tmp_path, launch="7.1", step=None)
    attempts.record(second, rank=1, host="b", kind=Kind.error, error="no GPU")
    again = restart.Restart("started again", second)
    monkeypatch.setattr(batch.restart, "plan", lambda *arguments: again)
    environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    environ |= {attempts.VARIABLE: str(second.folder)}
    environ |= helpers.in_job("mnist", [f"run_dir={tmp_path}", "restarts=1"])
    status, shell = batch.step_ended("mnist", 1, environ)
    assert status == 0
    assert ("again", "1") in shell
    assert directory.read_status(tmp_path)["state"] == "preempted"
    helpers.attempt(tmp_path, launch="8.0")
    assert batch.step_ended("mnist", 1, environ) == (errors.EXIT_MACHINE, [])


def test_a_hang_for_which_a_restart_has_requeued_the_job_is_not_requeued_again(
    tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_scontrol(stubs)
    attempt = helpers.attempt(tmp_path, launch="7.0", step=None)
    attempts.begin(attempt, 0, own=False, of_program=True)
    attempts.record(attempt, rank=None, host="", kind=Kind.hang, error="no output", name="hang")
    requeued = restart.Restart("too few nodes are left; requeued")
    monkeypatch.setattr(batch.restart, "plan", lambda *arguments: requeued)
    environ = {"SLURM_JOB_ID": "7", attempts.VARIABLE: str(attempt.folder)}
    words = [PROGRAM, f"run_dir={tmp_path}", "restarts=1", "silent_s=9", "restart_on_hang=true"]
    assert batch.step_ended("script", 1, {**environ, **helpers.in_job("script", words)}) == (1, [])
    assert stubs.calls("scontrol") == []


def test_an_evaluation_of_a_run_has_its_own_attempts_and_the_bad_nodes_of_the_job(
    tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_scontrol(stubs)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").touch()
    lines = begin(tmp_path, "evaluate=true", "restarts=1")
    assert "watched 1" in lines
    attempt = attempts.newest(run_dir / "evaluation")
    assert attempts.newest(run_dir) is None
    planned: list[object] = []
    plan = lambda *of: (planned.append(of[3]), restart.Restart(""))[1]  # noqa: E731
    monkeypatch.setattr(batch.restart, "plan", plan)
    monkeypatch.setattr(batch.examination, "requeues", lambda place, _: planned.append(place) or 0)
    exported = dict(line.split(" ", 1)[1].split("=", 1) for line in lines if "export " in line)
    assert exported[attempts.VARIABLE] == str(attempt.folder)
    batch.step_ended("mnist", 1, {"SLURM_JOB_ID": "7", **exported})
    assert planned == [run_dir, run_dir]


def test_a_signal_to_a_batch_shell_without_an_attempt_is_no_error() -> None:
    assert batch.ask_to_stop("script", "USR1", {}) == 0


def test_ranks_of_a_program_need_not_end_together_and_get_signals_in_short_jobs(
    tmp_path: Path, stubs: Stubs
) -> None:
    """srun would end the others 60 s after the first one."""
    stub_scontrol(stubs, f"{RUNNING}\n   TimeLimit=00:05:00")
    of_program = {"step --wait=0", "program script"}
    assert not of_program & set(begin(tmp_path))
    lines = begin(tmp_path, f"script={__file__}", "--", "--wait=9", recipe="script")
    assert of_program <= set(lines)
    assert not spec_in(lines).by_clock


@pytest.mark.parametrize(
    ("limit", "words", "before_s"),
    [
        ("01:00:00", (), 120.0),
        ("00:02:00", (), 30.0),
        ("01:00:00", ("stop_before_s=300",), 300.0),
        ("01:00:00", ("stop_before_s=0",), None),
        ("UNLIMITED", (), None),
    ],
)
def test_the_begin_of_a_program_notes_when_it_is_stopped_and_what_is_saved(
    tmp_path: Path,
    stubs: Stubs,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    words: Sequence[str],
    before_s: float | None,
) -> None:
    stub_scontrol(stubs, f"{RUNNING}\n   TimeLimit={limit}")
    monkeypatch.setenv("HOME", str(tmp_path))
    begin(tmp_path, PROGRAM, "saves=~/out", *words, recipe="script")
    attempt = attempts.newest(tmp_path / "run")
    assert stop_note.read(attempt) == StopNote(before_s=before_s)
    assert files.read_json(attempt.folder / "saves.json")["folder"] == f"{tmp_path}/out"


@pytest.mark.parametrize(
    ("per_node", "through", "is_refused"),
    [
        ("2", "node", True),
        ("8", "torchrun", True),
        ("1", "node", False),
        ("2", "rank", False),
        ("0", "node", False),
    ],
)
def test_a_ready_script_starts_one_task_per_node_for_a_program_with_a_launcher(
    tmp_path: Path, stubs: Stubs, per_node: str, through: str, is_refused: bool
) -> None:
    stub_scontrol(stubs, f"{RUNNING}\n   NtasksPerN:B:S:C={per_node}:0:*:*")
    words = (PROGRAM, f"through={through}")
    if not is_refused:
        assert "program script" in begin(tmp_path, *words, recipe="script")
        return
    line = (
        f"^through={through}: starts one task per node, but this job has {per_node} tasks per "
        "node: submit it with --ntasks-per-node=1"
    )
    with pytest.raises(ConfigError, match=line):
        begin(tmp_path, *words, recipe="script")


def test_a_ready_script_is_submitted_again_with_its_site_and_container(
    tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cluster= is no argument of the recipe: sbatch/job.sh exports it."""
    stub_scontrol(stubs)
    stubs.add("apptainer", "")
    site = {"RECIPES_CLUSTER": "example", "RECIPES_CONTAINER": "docker://x"}
    site |= {"RECIPES_CONTAINER_RUNTIME": "apptainer", "RECIPES_CONTAINER_MOUNTS": "/m"}
    site |= {"RECIPES_DATA": "/d", "RECIPES_SNAPSHOT": "false"}
    with monkeypatch.context() as in_job:
        for name, value in site.items():
            in_job.setenv(name, value)
        begin(tmp_path, "restarts=1", "min_nodes=1", PATH=os.environ["PATH"], **site)
    folder = tmp_path / "run"
    run = runs.read(folder, {})
    arguments = run_commands.to_resume(run, [])
    stubs.add("sbatch", "env > $NOTES/environ; echo 8")
    run_commands.resume(run, arguments)
    submitted = (stubs.folder / "environ").read_text().splitlines()
    assert {f"{name}={value}" for name, value in site.items()} <= set(submitted)
    described = json.loads((folder / "job.yaml").read_text())
    assert (described["job_id"], described["variables"]) == ("8", site)
    assert "--no-kill" in stubs.calls("sbatch")[0]


def test_an_environment_is_found_from_every_folder(
    tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_scontrol(stubs)
    monkeypatch.setenv("HOME", str(tmp_path))
    archives: list[str] = []

    def on_all_nodes(archive: str, *rest: object) -> str:
        archives.append(archive)
        return "/unpacked/bin/python"

    monkeypatch.setattr(batch.unpack, "on_all_nodes", on_all_nodes)
    for typed in ("~/e.tar", "e.tar"):
        assert "inside /unpacked/bin/python" in begin(tmp_path, f"environment={typed}")
    assert archives == [f"{tmp_path}/e.tar", f"{helpers.ROOT}/e.tar"]


def test_a_job_that_is_refused_after_its_attempt_was_opened_is_shown_as_refused(
    tmp_path: Path, stubs: Stubs
) -> None:
    stub_scontrol(stubs)
    nodes = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}
    assert "step --nodelist=n1" in begin(tmp_path, "restarts=1", "spare=1", **nodes)
    with pytest.raises(ConfigError, match="spare=2: the job has only 2 nodes"):
        begin(tmp_path, "restarts=1", "spare=2", **nodes)
    run = record.read(tmp_path / "run")
    assert run.state is State.refused
    assert run.refused == "spare=2: the job has only 2 nodes: request more"
    assert run.job["job_id"] == "7"


def test_a_file_that_cannot_be_read_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as a run_dir= below a folder of another user."""
    monkeypatch.setattr(source, "go_home", lambda root: None)
    monkeypatch.setattr(batch, "begin", lambda *words: (tmp_path / "no").read_text())
    assert batch.main(["begin", "mnist", "job.sh"]) == errors.EXIT_MACHINE
    line = f"mnist: [Errno 2] No such file or directory: '{tmp_path}/no'\n"
    assert capfd.readouterr().err == line


def test_finish_and_examine_ignore_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "go_home", lambda root: None)
    before = signal.getsignal(signal.SIGTERM)

    def is_ignored(*arguments: object) -> bool:
        return signal.signal(signal.SIGTERM, before) is signal.SIG_IGN

    for step, module in (("finish", batch), ("examine", batch.examination)):
        monkeypatch.setattr(module, step, is_ignored)
        assert batch.main([step, "mnist", "0"]) is True


def test_a_failed_requeue_is_reported_in_one_line(
    preempted: Path,
    stubs: Stubs,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stub_scontrol(
        stubs,
        f"{RUNNING} Restarts=1",
        "printf 'slurm_update error:\\nAccess denied\\n' >&2; exit 1",
    )
    for why in (
        "slurm_update error: Access denied): to resume, start the run again",
        "scontrol is not on the PATH",
    ):
        assert finish(preempted, SLURM_RESTART_COUNT="1") == errors.EXIT_REQUEUE
        output = capfd.readouterr().out
        assert f"not requeued ({why}" in output
        assert next_of(preempted) == "requeue-failed"
        assert len(output.splitlines()) == 1
        directory.write_status(preempted, "preempted", attempt=0, step=12)
        monkeypatch.setenv("PATH", "/nosuch")


@pytest.mark.parametrize(
    ("state", "srun_status", "expected"),
    [
        ("done", 0, 0),
        ("done", 143, 0),
        ("failed", 143, 143),
        ("running", 137, 137),
        ("running", 0, 1),
    ],
)
def test_finish_has_the_runs_status(
    tmp_path: Path, stubs: Stubs, state: str, srun_status: int, expected: int
) -> None:
    stub_scontrol(stubs)
    attempt = helpers.attempt(tmp_path, launch="7.0")
    directory.write_status(tmp_path, state, attempt=attempt.number, step=1)
    assert finish(tmp_path, srun_status=srun_status) == expected
    assert stubs.calls("scontrol") == []
    assert directory.read_status(tmp_path)["state"] != "running"


def test_finish_of_a_refused_run_keeps_the_status(
    preempted: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (preempted / "status.json").read_bytes()
    refused = helpers.attempt(preempted, step=None)
    attempts.refuse({attempts.VARIABLE: str(refused.folder)}, InputError("host: no data in /d"))
    assert finish(preempted, srun_status=143, SLURM_RESTART_COUNT="1") == 2
    assert capfd.readouterr().err == "mnist: host: no data in /d\n"
    assert (preempted / "status.json").read_bytes() == before


def test_files_that_change_after_the_begin_change_no_job_that_has_begun(
    tmp_path: Path, stubs: Stubs
) -> None:
    stub_scontrol(stubs)
    keys = tmp_path / "keys.yaml"
    network = tmp_path / "my.env"
    keys.write_text("epochs: 3\n")
    network.write_text("NCCL_DEBUG=INFO\n")
    lines = begin(tmp_path, f"config={keys}", f"network={network}")
    keys.unlink()
    network.unlink()
    spec = spec_in(lines)
    assert spec.settings.config.epochs == 3
    assert spec.variables["NCCL_DEBUG"] == "INFO"
    words = [line.removeprefix("word ") for line in lines if line.startswith("word ")]
    environ = {specs.VARIABLE: specs.to_text(spec)}
    assert specs.of_ranks(environ, "mnist", words) == spec
    for recipe, others in (("cifar", words), ("mnist", [*words, "lr=1"])):
        assert specs.of_ranks(environ, recipe, others) is None  # another step of the script


def test_a_run_that_never_began_ends_with_sruns_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    helpers.attempt(tmp_path, step=None, hosts=())
    (tmp_path / "logs").mkdir()
    assert finish(tmp_path, srun_status=137) == 137
    line = f"mnist: failed: it ended before the run began; logs in {tmp_path}/logs\n"
    assert capfd.readouterr() == ("", line)


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("done", 0),
        ("failed", 9),
    ],
)
def test_a_log_on_a_full_disk_does_not_change_the_exit_status(
    tmp_path: Path, state: str, status: int
) -> None:
    attempt = helpers.attempt(tmp_path, launch="7.0")
    helpers.attempt(tmp_path, launch="7.0")  # by a second step of the script
    helpers.attempt(tmp_path, launch="8.0", step=None)  # of a job that was refused meanwhile
    directory.write_status(tmp_path, state, attempt=1, step=9)
    of_attempt = {attempts.VARIABLE: str(attempt.folder)}
    of_attempt |= helpers.in_job("mnist", [f"run_dir={tmp_path}"])
    environ = helpers.clean_environment(SLURM_JOB_ID="7", **of_attempt)
    words = ["finish", "mnist", "9"]
    command = [sys.executable, "-m", "recipes.core.launch.batch", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=helpers.ROOT, env=environ, stdout=full, stderr=full)
    assert done.returncode == status
