"""The state of runs and why they ended, by their records, their jobs and their logs."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from recipes.core import files
from recipes.core.doctor import explain as explaining
from recipes.core.errors import ConfigError, Kind, MachineError, Next
from recipes.core.run import attempt as attempts
from recipes.core.run import directory
from recipes.core.slurm import client
from recipes.core.slurm.jobstate import Job
from tests import helpers

Answers = dict[str, Job | None]
NO_SLURM = None
Argument = TypeVar("Argument")


def asking(
    call: Callable[[Argument], list[str]], argument: Argument, answers: Answers | None
) -> list[str]:
    """The lines of ``call`` if Slurm gives these answers; None: no Slurm that can be asked."""

    def find(job_id: str, **options: object) -> Job | None:
        if answers is None:
            raise MachineError("scontrol is not on the PATH")
        return answers[job_id]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "find", find)
        return call(argument)


def of_run(run_dir: Path, answers: Answers | None) -> list[str]:
    return asking(explaining.of_run, run_dir, answers)


def explain(paths: Sequence[Path], answers: Answers | None) -> list[str]:
    return asking(lambda paths: explaining.in_one(explaining.explain(paths)), paths, answers)


def run_directory(
    path: Path,
    state: str = "failed",
    reason: str = "",
    rank: int | None = None,
    host: str | None = None,
    kind: Kind | None = None,
    launch: str = "1.0",
) -> Path:
    for name in ("logs", "checkpoints"):
        (path / name).mkdir(parents=True)
    job = launch.partition(".")[0] if launch == "1.0" else ""
    helpers.attempt(
        path, launch=launch, job=job, hosts=["node1", "node1", "node2", "node2"], process={}
    )
    first = {"rank": rank, "host": host, "exit_status": 1} if rank is not None else None
    directory.write_status(path, state, attempt=0, step=7, reason=reason, kind=kind, first=first)
    return path


def refuse(run: Path, line: str) -> None:
    refused = helpers.attempt(run, launch="2.0", step=None)
    attempts.refuse({attempts.VARIABLE: str(refused.folder)}, ConfigError(line))


def grow_old(run: Path) -> None:
    """The run has last written something an hour ago."""
    then = time.time() - 3599.6  # "1:00:00 ago" for most of the second that follows
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "updated": then}))
    for path in (*(run / "attempts").rglob("*.json"), *(run / "logs").iterdir()):
        os.utime(path, (then, then))


def test_the_runs_own_records_come_first(tmp_path: Path) -> None:
    reason = "rank 3 on node2 failed first: RuntimeError: [Errno 5] Input/output error"
    run = run_directory(tmp_path / "run", reason=reason, rank=3, host="node2")
    (run / "logs" / "rank0.log").write_text(
        "RuntimeError: Connection closed by peer\nOSError: Stale file handle\n"
    )
    (run / "logs" / "rank3.log").write_text("step 6\nOSError: [Errno 5] Input/output error\n")
    (run / "checkpoints" / "x.log").write_text("CUDA out of memory\n")
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    lines = of_run(run, NO_SLURM)
    assert lines[0] == reason
    assert lines[3] == "  logs/rank3.log: OSError: [Errno 5] Input/output error"
    assert lines[4].startswith("consequence: lost another rank (1 file)")
    assert lines[-3:] == [
        "logs/rank3.log ends:",
        "  | step 6",
        "  | OSError: [Errno 5] Input/output error",
    ]
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_failure_records_explain_a_run_without_a_final_status(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", "running")
    lines = of_run(run, NO_SLURM)
    assert lines == [
        "it is running, at step 7, status written 0:00:00 ago; scontrol is not on the PATH"
    ]
    grow_old(run)
    ended = "it ended without a final status, at step 7, status written 1:00:00 ago"
    assert of_run(run, NO_SLURM) == [ended, "scontrol is not on the PATH"]
    attempts.record(
        attempts.Attempt(run, 0), rank=2, host="node2", kind=Kind.error, error="ValueError: x"
    )
    assert of_run(run, NO_SLURM)[0] == "rank 2 on node2 failed first: ValueError: x"


def test_a_stopped_run_outside_slurm_says_how_to_resume(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", "preempted", "SIGUSR2", launch="host.1.2")
    assert of_run(run, NO_SLURM) == [
        "stopped by SIGUSR2, saved at step 7; to resume, start the run again with the same run_dir="
    ]
    directory.write_status(run, "preempted", attempt=0, step=0, reason="SIGUSR2")
    assert of_run(run, NO_SLURM)[0].startswith("stopped by SIGUSR2; to resume")


def test_a_refusal_counts_if_it_is_newer_than_the_status(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", "done")
    refuse(run, "checkpoint x: differs from these keys")
    assert of_run(run, NO_SLURM) == [
        "the newest start was refused: checkpoint x: differs from these keys"
    ]


def test_a_refused_launch_does_not_hide_a_running_run(tmp_path: Path) -> None:
    run = run_directory(tmp_path, "running")
    refuse(run, "run_dir= is used by job 1")
    first, second = of_run(run, {"1": job("RUNNING")})
    assert first == "it is running, at step 7, status written 0:00:00 ago; job 1 is running"
    assert second == "a later start was refused: run_dir= is used by job 1"
    helpers.attempt(run, launch="3.0")
    directory.write_status(run, "done", attempt=2, step=9)
    assert of_run(run, NO_SLURM) == ["status.json says done: nothing failed"]


def job(state: str, reason: str = "", restarts: int = 0, **more: Any) -> Job:
    return Job("1", state, reason, restarts=restarts, **more)


@pytest.mark.parametrize(
    ("answer", "noted", "words"),
    [
        (
            job("PENDING", "BeginTime", 1, start="2026-11-23T13:25:32"),
            Next.requeued,
            "job 1 is pending (BeginTime), expected to start at 2026-11-23T13:25:32",
        ),
        (job("COMPLETING", "", 1), None, "job 1 is completing"),
        (
            job("CANCELLED"),
            Next.requeued,
            "job 1 is cancelled; the job was cancelled: to resume, "
            "start the run again with the same run_dir=",
        ),
        (
            job("COMPLETING", "NonZeroExitCode"),
            Next.max_requeues,
            "job 1 is completing (NonZeroExitCode); not requeued, since max_requeues= is reached: "
            "to resume, start the run again with the same run_dir=",
        ),
        (
            job("RUNNING", has_script=False),
            None,
            "job 1 is running; to resume, start the run again with the same run_dir=",
        ),
        (
            None,
            Next.no_progress,
            "Slurm no longer knows job 1; not requeued, since its last start completed no step "
            "or saved no file: to resume, start the run again with the same run_dir=",
        ),
        (
            None,
            Next.requeued,
            "Slurm no longer knows job 1; to resume, start the run again with the same run_dir=",
        ),
    ],
)
def test_a_stopped_run_says_what_comes_next(
    tmp_path: Path, answer: Job | None, noted: Next | None, words: str
) -> None:
    run = run_directory(tmp_path, "preempted", "SIGTERM", kind=Kind.stopped)
    if noted:
        directory.note_next(run, noted, 0)
    assert of_run(run, {"1": answer}) == [f"stopped by SIGTERM, saved at step 7; {words}"]


def test_a_job_submitted_later_is_the_one_that_counts(tmp_path: Path) -> None:
    run = run_directory(tmp_path, "preempted", "SIGTERM", kind=Kind.stopped)
    files.write_json(run / "job.yaml", {"job_id": "2"})
    answers = Answers({"1": job("FAILED"), "2": Job("2", "PENDING", "Resources", 0, 0)})
    for slurm, said in (
        (answers, "job 2 is pending (Resources)"),
        (
            NO_SLURM,
            "scontrol is not on the PATH; to resume, start the run again with the same run_dir=",
        ),
    ):
        assert of_run(run, slurm) == [f"stopped by SIGTERM, saved at step 7; {said}"]


def test_a_run_whose_job_lives_is_running_and_nothing_is_diagnosed(tmp_path: Path) -> None:
    run = run_directory(tmp_path, "running")
    (run / "logs" / "rank0.log").write_text("OSError: [Errno 28] No space left on device\n")
    grow_old(run)
    lines = of_run(run, {"1": job("RUNNING")})
    assert lines == ["it is running, at step 7, status written 1:00:00 ago; job 1 is running"]
    lines = of_run(run, {"1": job("PENDING", "BeginTime", 1)})
    assert lines[0].startswith("it ended without a final status")
    assert lines[1].startswith("cause: disk is full (1 file)")
    assert lines[-1] == "job 1 is pending (BeginTime)"


def test_a_job_of_another_cluster_is_not_looked_for_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters may share a file system, and this one may have a job with the same ID."""
    monkeypatch.setattr(client, "cluster_name", lambda: "here")
    run = run_directory(tmp_path, "running")
    opened = tmp_path / "attempts/0000/opened.json"
    for cluster, begin, end in (
        ("here", "it ended without a final status, at step 7", " ago"),
        ("there", "it is running, at step 7", "; its job is on cluster there"),
    ):
        files.write_json(opened, {**json.loads(opened.read_text()), "cluster": cluster})
        line = of_run(run, {"1": job("FAILED")})[0]
        assert line.startswith(begin)
        assert line.endswith(end)


def test_a_heartbeat_shows_that_a_run_lives_where_slurm_does_not(tmp_path: Path) -> None:
    run = run_directory(tmp_path, "running")
    grow_old(run)
    of_salloc = Answers({"1": job("RUNNING", has_script=False)})
    for answers in (NO_SLURM, of_salloc):
        assert "it ended without a final status" in of_run(run, answers)[0]
    attempts.heartbeat(attempts.Attempt(run, 0))
    for answers in (NO_SLURM, of_salloc):
        assert "it is running, at step 7, status written 1:00:00 ago" in of_run(run, answers)[0]


def test_a_process_of_this_machine_is_seen(tmp_path: Path) -> None:
    """Also one that is stopped, for example by Ctrl-Z, and writes no heartbeat."""
    run = run_directory(tmp_path, "running", launch="host.1.2")
    opened = tmp_path / "attempts/0000/opened.json"

    def is_of(pid: int, started: str) -> None:
        process = {"place": attempts.namespace(), "pid": pid, "started": started, "host": "a"}
        files.write_json(opened, {**json.loads(opened.read_text()), "process": process})

    is_of(1, "0")
    assert "it ended without a final status" in of_run(run, NO_SLURM)[0]
    is_of(os.getppid(), attempts.start_time(os.getppid()))
    grow_old(run)
    assert "it is running, at step 7" in of_run(run, NO_SLURM)[0]


def test_a_run_that_left_no_status_and_no_log_hides_no_other(tmp_path: Path) -> None:
    done = run_directory(tmp_path / "done", "done")
    killed = run_directory(tmp_path / "killed")
    (killed / "status.json").write_text("{")
    assert "  it has not begun: scontrol is not on the PATH" in explain([killed, done], NO_SLURM)
    os.utime(killed / "attempts/0000/opened.json", (1, 1))
    lines = explain([killed, done], {"1": None})
    assert "  it ended before its first status; Slurm no longer knows job 1" in lines


def test_a_failed_run_whose_job_is_requeued_says_so(tmp_path: Path) -> None:
    run = run_directory(
        tmp_path, "failed", "rank 1 on node1 failed first: x", 1, "node1", Kind.error
    )
    lines = of_run(run, {"1": job("PENDING", "BeginTime", 1)})
    assert lines == ["rank 1 on node1 failed first: x", "job 1 is pending (BeginTime)"]


def test_each_run_has_a_section_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, reason in enumerate(("rank 1 on a failed first: x", "rank 2 on b failed first: y")):
        path = tmp_path / "runs" / "mnist" / str(number)
        run = run_directory(path, "failed", reason, number + 1, "ab"[number], Kind.error)
        (run / "logs" / f"rank{number + 1}.log").write_text(
            "CUDA out of memory\n" if number else "Stale file handle\n"
        )
        os.utime(run, (number, number))
    other = run_directory(tmp_path / "other", "done")
    monkeypatch.chdir(tmp_path)
    known = Answers({"1": None})
    lines = explain([Path("runs"), other], known)
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads == ["runs/mnist/0:", "runs/mnist/1:", "other:"]
    first = lines[: lines.index(heads[1])]
    second = lines[lines.index(heads[1]) : lines.index(heads[2])]
    assert "  rank 1 on a failed first: x" in first
    assert any("file system failed" in line for line in first)
    assert not any("CUDA" in line for line in first)
    assert "  rank 2 on b failed first: y" in second
    assert any("CUDA out of memory" in line for line in second)
    assert lines[-1] == "  status.json says done: nothing failed"
    assert explain([run], known) == of_run(run, known)  # one run needs no heading
    monkeypatch.setattr(explaining.source, "home", lambda root: tmp_path)
    for name in ("1", "last"):  # by its job, and as the one that has changed last
        assert explain([Path(name)], known) == of_run(run, known)
    pending = explain([Path("2")], {"2": job("PENDING", "Resources")})
    assert pending == ["the job has no run directory yet: job 1 is pending (Resources)"]


def test_a_message_is_shown_with_its_fix_however_long_it_is(tmp_path: Path) -> None:
    words = "x" * 900 + ": give another run_dir="
    run = run_directory(tmp_path / "run", "failed", words, kind=Kind.input)
    (run / "logs" / "rank0.log").write_text(f"mnist: PermissionError: Permission denied: {words}\n")
    assert [line.endswith(words) for line in of_run(run, NO_SLURM) if "xxx" in line] == [True] * 2
    refuse(run, words)
    assert of_run(run, NO_SLURM) == [f"the newest start was refused: {words}"]


@pytest.mark.parametrize("of_program", [False, True])
def test_logs_of_ranks_that_the_newest_attempt_does_not_have_are_not_read(
    tmp_path: Path, of_program: bool
) -> None:
    """A restart with min_nodes=, or a resumed run, may have fewer ranks."""
    run = run_directory(tmp_path, "failed", "rank 1 on a failed first: x", 1, "a", Kind.error)
    texts = ("Stale file handle\n", "step 3\n", "CUDA out of memory\n")
    for rank, text in enumerate(texts):
        (run / f"logs/rank{rank}.log").write_text(text)
    assert any("CUDA out of memory" in line for line in of_run(run, {"1": None}))
    hosts = [] if of_program else ["a", "a"]
    newest = helpers.attempt(run, launch="1.1", job="1", hosts=hosts)
    if of_program:  # rank 0 has not begun
        attempts.note_rank(newest, 1, 1, "a", None)
    lines = of_run(run, {"1": None})
    assert not any("CUDA out of memory" in line for line in lines)
    assert lines[3] == "  logs/rank0.log: Stale file handle"
    assert lines[4:] == ["logs/rank1.log ends:", "  | step 3"]  # of the rank that failed first


def test_the_log_of_the_job_is_read_too(tmp_path: Path) -> None:
    """It says why a run never began, and holds srun's lines."""
    run = tmp_path / "runs" / "mnist" / "1"
    log = tmp_path / "mnist-1.out"
    run.mkdir(parents=True)
    log.write_text("no Python environment: activate yours before sbatch\n")
    described = {"job_id": "1", "log": str(log)}
    files.write_json(run / "job.yaml", directory.marked(run, described))
    assert explain([tmp_path / "runs"], {"1": None}) == [
        "it never began; Slurm no longer knows job 1",
        f"{log} ends:",
        "  | no Python environment: activate yours before sbatch",
    ]
    files.write_json(run / "job.yaml", {"job_id": "1"})
    # Slurm names it too
    assert f"{log} ends:" in of_run(run, {"1": job("FAILED", error_log=str(log))})
    earlier = {"job_id": "9", "log": str(log)}
    files.write_json(run / "job.yaml", directory.marked(run, earlier))
    helpers.attempt(run, job="1", step=None)
    assert f"{log} ends:" not in of_run(run, {"1": job("FAILED"), "9": None})


def test_a_job_without_a_run_directory_is_explained_by_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explaining.source, "home", lambda root: tmp_path)
    log = tmp_path / "mnist-7.out"
    log.write_text("no Python environment: activate yours before sbatch\n")
    for answer in (job("FAILED", log=str(log)), None):
        assert explain([Path("7")], {"7": answer}) == [
            "the job has no run directory, or its run has a newer job",
            "no known cause in 1 file",
            f"{log} ends:",
            "  | no Python environment: activate yours before sbatch",
        ]
    pending = explain([Path("7")], {"7": job("PENDING", log=str(log))})
    assert pending == ["the job has no run directory yet: job 1 is pending"]


def test_the_duration_of_each_restart_is_shown(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", "done")
    first = attempts.newest(run_dir)
    assert first
    attempts.record(first, rank=0, host="a", kind=Kind.killed, error="x", moment=10, progress=8)
    files.write_json(first.folder / "ended.json", {"time": 14.0})
    second = helpers.attempt(run_dir, step=None, time=20.0)
    files.write_json(second.folder / attempts.RESTART, {"excluded": []})
    helpers.attempt(run_dir, launch="2.0", step=None)  # of another job
    line = "attempt 1 was started again in 12.0 s: detection 2.0 s, teardown 4.0 s, examination"
    assert f"{line} 6.0 s" in explain([run_dir], NO_SLURM)
