"""launch.py runs, logs, cancel and resume: the state of a run from its files and its line in the
queue.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.core import files
from recipes.core.errors import ConfigError, InputError, MachineError, Next
from recipes.core.launch import jobs, run_commands, runs
from recipes.core.report import page
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, in_use
from recipes.core.run.record import Record
from recipes.core.slurm import jobstate
from recipes.core.slurm.client import Line
from tests import helpers
from tests.unit.launch.stand_ins import Stubs

PENDING = Line("PENDING", "2026-11-26T12:00:00", "", 7200.0, False, "Resources")
RUNNING = Line("RUNNING", "", "node[1-2]", 3600.0, False, "")


def status(state: str, **more: Any) -> dict[str, Any]:
    return {"state": state, "step": 7, **more}


def recorded(of_run: dict[str, Any], refused: str = "") -> Record:
    record = Record(Path(), of_run, {}, {}, [], 0.0)
    vars(record)["refused"] = refused
    return record


SOON = "Resources; expected to start at 2026-11-26T12:00:00"


def ended(state: str) -> Line:
    return Line(state, "", "", None, False, "")


def case(
    of_run: dict[str, Any],
    job: Line | None,
    state: str,
    note: str = "",
    refused: str = "",
    alive: bool = False,
    has_job: bool = True,
) -> tuple[Any, ...]:
    return recorded(of_run, refused), job, alive, has_job, (state, note)


@pytest.mark.parametrize(
    ("record", "job", "alive", "has_job", "expected"),
    [
        case({}, PENDING, "pending", SOON),
        case(status("preempted"), PENDING, "requeued", SOON),
        case(
            status("preempted"),
            Line("REQUEUE_HOLD", "", "", None, True, "JobHeldUser"),
            "held",
            "JobHeldUser",
        ),
        case({}, RUNNING, "starting", "node[1-2]", alive=True),
        case(status("running"), RUNNING, "running", "node[1-2]", alive=True),
        case(status("done"), None, "done", refused="the newest was refused"),
        case(status("failed", reason="rank 1 failed first"), None, "failed", "rank 1 failed first"),
        case(status("incomplete", reason="early"), None, "failed", "early"),
        case(status("preempted"), None, "stopped", "saved at step 7"),
        case(status("preempted", next="cancelled"), None, "cancelled", "saved at step 7"),
        case(status("running"), None, "running", alive=True, has_job=False),
        case(status("running"), None, "running", "", "a later one was refused", True, False),
        case(status("running"), None, "refused", "lr=1", "lr=1", False, False),
        case(status("running"), None, "lost", "it ended without a final status"),
        case(status("running"), ended("NODE_FAIL"), "lost", "it ended without a final status"),
        case(
            status("running"),
            ended("CANCELLED"),
            "cancelled",
            "it ended before it wrote its final status",
        ),
        case({}, None, "refused", "data_dir= is missing", "data_dir= is missing"),
        case({}, ended("CANCELLED"), "cancelled", "before it began"),
        case({}, None, "cancelled", "it never began"),
        case({}, None, "lost", "it never began", alive=False, has_job=False),
    ],
)
def test_the_state_of_a_run(
    record: Record, job: Line | None, alive: bool, has_job: bool, expected: tuple[str, str]
) -> None:
    assert runs.in_queue(record, job, alive, has_job) == expected


@pytest.mark.parametrize(
    ("of_run", "expected"),
    [
        (status("preempted"), "unknown"),
        (status("preempted", next="requeued"), "unknown"),
        (status("running"), "unknown"),
        (status("preempted", next="cancelled"), "cancelled"),
        (status("failed", reason="no"), "failed"),
    ],
)
def test_a_run_that_slurm_may_start_again_is_unknown_while_slurm_does_not_answer(
    of_run: dict[str, Any], expected: str
) -> None:
    assert runs.in_queue(recorded(of_run), None, False, True, asked=False)[0] == expected


def begun(run_dir: Path, state: str = "running", job: str = "18", cluster: str = "") -> Path:
    """A run of batch job ``job`` that has done three steps."""
    environ = {"SLURM_JOB_ID": job, "SLURM_CLUSTER_NAME": cluster}
    attempts.begin(attempts.open_next(run_dir, "mnist", environ), 0, own=False)
    directory.write_status(run_dir, state, attempt=0, step=3)
    if job:
        files.write_json(
            run_dir / "job.yaml",
            directory.marked(run_dir, {"job_id": job, "run_dir": str(run_dir)}),
        )
    return run_dir


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A finished run with results, a pending job, and an element of an array that failed."""
    done, pending, element = (tmp_path / "runs/mnist" / name for name in ("11", "12", "13_1"))
    for folder, job in ((done, "11"), (pending, "12"), (element, "13_1")):
        folder.mkdir(parents=True)
        about = {
            "job_id": job,
            "recipe": "mnist",
            "arguments": ["lr=1"],
            "root": str(tmp_path),
            "log": f"{folder}/out",
        }
        files.write_json(folder / "job.yaml", directory.marked(folder, about))
    attempts.begin(attempts.open_next(done, "mnist", {}), 0, own=False)
    directory.write_status(done, "done", attempt=0, step=20)
    best = {
        "best": {"val_f1": 0.75, "step": 10},
        "steps": 20,
        "val_f1": 0.5,
        "samples_per_second": 9.5,
    }
    files.write_json(done / "summary.json", best)
    (element / "metrics.jsonl").write_text(
        '{"step": 3, "total_steps": 20, "epoch": 1, "loss": 1, "val_top1": 0.25}\n'
    )
    attempts.open_next(element, "mnist", {})
    directory.write_status(
        element, "failed", attempt=0, step=3, reason="rank 0 on node1 failed first: no"
    )
    for age, folder in enumerate((element, pending, done), 1):
        os.utime(folder, (time.time() - age, time.time() - age))
    return tmp_path


def test_a_run_is_read_from_its_files_and_the_queue(root: Path) -> None:
    folders = runs.find([], root)
    assert [path.name for path in folders] == ["11", "12", "13_1"]
    done, pending, failed = (runs.read(folder, {"12": PENDING}) for folder in folders)
    assert done.state == "done"
    assert done.step == 20
    assert done.steps == 20
    assert done.starts == 1
    assert done.best == {"val_f1": 0.75}
    assert done.samples_per_second == 9.5
    assert pending.state == "pending"
    assert pending.job == "12"
    assert pending.step == 0
    assert pending.left_s is None
    assert pending.recipe == "mnist"
    assert failed.step == 3
    assert failed.steps == 20
    assert failed.epoch == 1
    assert failed.best == {"val_top1": 0.25}
    assert failed.state == "failed"
    assert failed.note == "rank 0 on node1 failed first: no"
    head, *lines = run_commands.lines_of([done, pending, failed], time.time())
    assert head.split() == ["run", "state", "step", "best", "samples/s", "age", "starts", "note"]
    assert [line.split()[1] for line in lines] == ["done", "pending", "failed"]


def test_the_best_result_is_in_the_newest_row(root: Path) -> None:
    """Whatever the state of the run is, and however long it is."""
    folder = begun(root / "runs/mnist/20", job="20")
    rows = [{"step": 1, "best": None, "val_top1": 0.5}, {"step": 2, "loss": 0.25}]
    for best, expected in (
        (None, {}),
        ({"val_top1": 0.75, "step": 1}, {"val_top1": 0.75}),
        ({"val_loss": math.nan, "step": 1}, {}),
        (7, {}),
    ):
        rows[1]["best"] = best
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert runs.read(folder, {"20": RUNNING}).best == expected
        assert runs.read(folder, {}).best == expected


def test_the_rows_of_a_program_need_nothing_but_a_step(tmp_path: Path) -> None:
    attempts.begin(attempts.open_next(tmp_path, "script", {}), 0, own=False, of_program=True)
    directory.write_status(tmp_path, "done", attempt=0, step=0)
    rows = [
        {"step": 5, "total_steps": 9, "loss": 0.5},
        {"step": 7, "total_steps": 9, "val_f1": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = runs.read(tmp_path, None)
    assert (run.step, run.steps, run.best) == (7, 9, {"val_f1": 0.75})
    text, _ = page.page([tmp_path])
    assert re.findall("<figcaption>(.*?)</figcaption>", text) == ["Loss", "val_f1"]


@pytest.mark.parametrize(
    ("left_s", "expected"), [(math.inf, "no limit"), (3600.0, "1h"), (59.0, "59s")]
)
def test_the_table_shows_the_time_until_the_limit(root: Path, left_s: float, expected: str) -> None:
    running = replace(runs.read(root / "runs/mnist/12", {}), left_s=left_s)
    head, line = run_commands.lines_of([running], time.time())
    assert line[head.index("left") :].startswith(expected)


def test_a_narrow_terminal_shows_whole_names_and_notes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = root / "runs/mnist/13_1"
    failed = runs.read(folder, {})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    head, line, note = run_commands.lines_of([failed], time.time())
    assert head.endswith("note")
    assert line.split()[:2] == [str(folder), "failed"]
    assert note == "    rank 0 on node1 failed first: no"
    monkeypatch.setenv("COLUMNS", "1000")
    assert run_commands.lines_of([failed], time.time())[1].endswith(
        "rank 0 on node1 failed first: no"
    )


def test_the_age_of_a_run_and_the_time_left_are_in_their_largest_unit(root: Path) -> None:
    run = runs.read(begun(root / "runs/mnist/18"), {"18": RUNNING})
    assert run.updated
    head, line = run_commands.lines_of([run], run.updated + 172_800.0)
    cells = dict(zip(head.split(), line.split(), strict=True))
    assert (cells["age"], cells["left"]) == ("2d", "1h")
    with pytest.raises(InputError, match="compare: give at least two runs"):
        run_commands.compare([root / "runs/mnist/18"], {})


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("last", ["13_1"]),
        ("13", ["13_1"]),
        ("13_1", ["13_1"]),
        ("11", ["11"]),
        ("runs", ["11", "12", "13_1"]),
    ],
)
def test_a_run_is_found_by_its_folder_job_or_as_the_last(
    root: Path, monkeypatch: pytest.MonkeyPatch, word: str, expected: list[str]
) -> None:
    monkeypatch.chdir(root)
    assert [path.name for path in runs.find([word], root)] == expected


def test_a_run_with_its_own_run_dir_is_found_by_its_job(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (root / "runs/mnist/12").rename(root / "runs/mnist/mine")
    (tmp_path / "shared/12/attempts").mkdir(parents=True)  # another user may have made it
    monkeypatch.chdir(tmp_path / "shared")
    assert [path.name for path in runs.find(["12"], root)] == ["mine"]
    assert [path.name for path in runs.find(["12", "11", "12"], root)] == ["mine", "11"]
    with pytest.raises(InputError, match="98: no run was found"):
        runs.find(["11", "98"], root)
    with pytest.raises(InputError, match="--faild: must be one of --json, --failed, --sort"):
        run_commands.show(["--faild"], root)
    with pytest.raises(
        InputError, match=r"^1: no run was found: give a run directory, a job ID, or last"
    ):
        runs.find(["1"], root)  # 11 is another job


def test_runs_may_be_a_link_to_another_disk(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    disk = tmp_path_factory.mktemp("disk") / "of_user"
    (root / "runs").rename(disk)
    (root / "runs").symlink_to(disk)
    new = directory.choose("", "mnist", "14", root)
    attempts.open_next(new, "mnist", {})
    jobs.record(new, b"", "14", "mnist", [], root=str(root))
    assert (disk / "mnist/14/attempts/0000").exists()
    assert not (disk / "jobs").exists()  # it is found without a link
    assert runs.find(["11", "last"], root) == [root / "runs/mnist/11", new]
    assert len(runs.find([], root)) == 4


def test_an_element_of_an_array_is_found_by_the_number_in_the_name_of_its_log(root: Path) -> None:
    run_dir = root / "runs/mnist/13_1"
    files.write_json(run_dir / "job.yaml", {"job_id": "13_1", "log": f"{root}/mnist-14.out"})
    assert runs.find(["14"], root) == [run_dir]


def test_a_job_that_ended_without_a_run_directory_is_found_by_its_log(
    root: Path, stubs: Stubs
) -> None:
    log = root / "mnist-98.out"
    log.write_text("no Python environment\n")
    line = (
        "98: the job has no run directory, or its run has a newer job: read its log, "
        rf"{re.escape(str(log))}$"
    )
    for scontrol in (  # Slurm forgets a job after some minutes
        f"printf 'JobId=98\\n JobState=FAILED\\n StdOut={log}\\n'",
        "echo 'Invalid job id specified' >&2; exit 1",
    ):
        stubs.add("scontrol", scontrol)
        for name in ("runs", "logs"):
            with pytest.raises(InputError, match=line):
                run_commands.command([name, "98"], root, {})
    stubs.add("scontrol", f"printf 'JobId=98\\n JobState=PENDING\\n StdOut={log}\\n'")
    with pytest.raises(InputError, match="98: the job has no run directory yet: job 98 is pending"):
        run_commands.command(["runs", "98"], root, {})


def test_a_run_outside_runs_is_found_by_its_job(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "run"
    jobs.record(elsewhere, b"", "14", "mnist", [], root=str(root))
    # Slurm has given this ID before
    jobs.record(elsewhere.with_name("old"), b"", "15", "mnist", [], root=str(root))
    jobs.record(elsewhere, b"", "15", "mnist", [], root=str(root))  # submitted again
    jobs.record(root / "runs/mnist/16", b"", "16", "mnist", [], root=str(root))
    assert runs.find(["15"], root) == [elsewhere]
    assert runs.find(["16"], root) == [root / "runs/mnist/16"]
    assert runs.find([], root).count(elsewhere) == 1
    assert not (root / "runs/jobs/16").exists()


@pytest.mark.parametrize(
    "words",
    [["cancel"], ["resume"], ["resume", "lr=0.1"], ["cancel", ""], ["resume", ""], ["logs", ""]],
)
def test_a_command_does_not_choose_a_run_that_nobody_named(
    root: Path, stubs: Stubs, words: list[str]
) -> None:
    stubs.add("squeue", "echo '12|PENDING|N/A||1:00|1|None'")
    for name in ("scancel", "sbatch"):
        stubs.add(name, "")
    with pytest.raises(InputError, match="give a run"):
        run_commands.command(words, root, {})
    assert not stubs.calls("scancel") + stubs.calls("sbatch")


def test_a_folder_with_an_equals_sign_is_a_run(
    root: Path, stubs: Stubs, capsys: pytest.CaptureFixture[str]
) -> None:
    stubs.add("squeue", "")
    stubs.add("scontrol", "")
    folder = (root / "runs/mnist/12").rename(root / "runs/mnist/lr=0.1")
    assert run_commands.command(["cancel", str(folder)], root, {}) == 0
    assert f"{folder}: is not running" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["logs", "last", "rnak=3"], ["look", "last", "rank=3"]])
def test_a_key_that_a_command_does_not_have_is_refused(root: Path, words: list[str]) -> None:
    with pytest.raises(InputError, match=f"{words[2]}: is not for launch.py {words[0]}"):
        run_commands.command(words, root, {})


def test_a_copy_of_a_run_is_not_the_run(root: Path) -> None:
    original = begun(root / "runs/mnist/17", job="17")
    copy = shutil.copytree(original, root / "runs/mnist/copy")
    running = {"17": RUNNING}
    of_original = runs.read(original, running)
    assert (of_original.state, of_original.nodes) == ("running", "node[1-2]")
    of_copy = runs.read(copy, running)
    assert of_copy.state == "lost"
    assert of_copy.job == ""
    assert of_copy.note.endswith(f"a copy of {original}")
    assert run_commands.cancel(of_copy) == "is not running: lost"
    moved = original.rename(root / "runs/mnist/moved")
    assert runs.read(moved, running).state == "running"


def test_a_job_that_is_stopping_is_not_called_starting(root: Path) -> None:
    folder = begun(root / "runs/mnist/18", "preempted")
    completing = Line("COMPLETING", "", "node1", 60.0, False, "")
    assert runs.read(folder, {"18": RUNNING}).state == "running"  # it has not been requeued yet
    directory.note_next(folder, Next.requeued, 0)
    assert runs.read(folder, {"18": completing}).state == "running"
    assert runs.read(folder, {"18": RUNNING}).state == "starting"  # its next start
    directory.write_status(folder, "failed", attempt=0, step=3)
    attempts.open_next(folder, "mnist", {"SLURM_JOB_ID": "18"})
    assert runs.read(folder, {"18": RUNNING}).state == "starting"


def test_a_job_of_another_cluster_is_not_the_job_with_this_id_here(root: Path) -> None:
    folder = begun(root / "runs/mnist/18", cluster="there")
    for cluster, state in (("there", "running"), ("here", "unknown"), ("", "running")):
        assert runs.read(folder, {"18": RUNNING}, cluster).state == state
    with pytest.raises(MachineError, match="its state is unknown: its job is on cluster there"):
        run_commands.cancel(runs.read(folder, {"18": RUNNING}, "here"))


def test_a_run_of_another_cluster_is_not_cancelled_while_no_job_is_here(
    root: Path, stubs: Stubs
) -> None:
    folder = begun(root / "runs/mnist/18", cluster="there")
    stubs.add("squeue", "")
    stubs.add("scontrol", "echo 'ClusterName = here'")
    with pytest.raises(MachineError, match="its job is on cluster there"):
        run_commands.command(["cancel", str(folder)], root, {})


def test_the_table_is_json_sorted_or_only_of_what_has_failed(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nosuch")  # no Slurm
    assert run_commands.show(["--json", "--failed"], root) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "failed"
    assert told["job"] == "13_1"
    assert run_commands.show(["--json", "--failed", str(root / "runs/mnist/11")], root) == 0
    assert capsys.readouterr().out == ""
    run_commands.show(["--sort=step"], root)
    _, first, second, third = capsys.readouterr().out.splitlines()
    assert first.split()[1:3] == ["unknown", "0"]
    assert second.split()[1:3] == ["failed", "3/20"]
    assert third.split()[1:3] == ["done", "20/20"]
    run_commands.show(["--sort=samples_per_second"], root)  # which only one of them has
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "done"
    run_commands.show(["--sort=note"], root)  # a run that is done has none
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["done", "unknown", "failed"]
    with pytest.raises(InputError, match="--sort=colour: must be one of folder, recipe, job"):
        run_commands.show(["--sort=colour"], root)


def test_logs_of_a_rank_or_of_the_job_are_shown(root: Path) -> None:
    folder = root / "runs/mnist/11"
    (folder / "logs").mkdir()
    (folder / "logs/rank1.log").write_text("of rank 1\n")
    (folder / "out").write_text("of the job\n")
    for rank, expected in (("", "of the job"), ("1", "of rank 1")):
        code = (
            "from recipes.core.launch import run_commands; from pathlib import Path; "
            f"run_commands.logs(Path({str(folder)!r}), {rank!r}, False)"
        )
        assert helpers.run([sys.executable, "-c", code]).lines[-1] == expected
    with pytest.raises(InputError, match=r"has no rank7\.log: its ranks are 1"):
        run_commands.logs(folder, "7", False)


def test_the_ledger_has_a_line_for_each_run_and_their_sum(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, hours in (("a", 1), ("b", 3)):
        seconds = {"queue": 1800.0 * hours, "training": 1800.0 * hours}
        folder = root / "runs/new" / name
        attempts.begin(attempts.open_next(folder, "mnist", {}), 0, own=False)
        directory.write_status(folder, "done", attempt=0, step=1)
        saved = {"seconds": seconds, "gpu_hours_lost": {"queue": 0.5 * hours}}
        summary = {"ledger": saved, "efficiency": "use more CPUs"}
        files.write_json(folder / "summary.json", summary)
    assert run_commands.command(["runs", "--ledger", str(root / "runs/new")], root, {}) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "time", "effective", "queue", "training", "GPU-hours", "lost"]
    assert lines[-1].split() == ["all", "4:00:00", "50.0%", "2:00:00", "2:00:00", "2.00"]
    assert len(lines) == 3
    run_commands.command(["runs", "--ledger", "--json", str(root / "runs/new/a")], root, {})
    run, whole = map(json.loads, capsys.readouterr().out.splitlines())
    assert run["wall_s"] == whole["wall_s"] == 3600.0
    of_a = runs.read(root / "runs/new/a", None)
    assert (of_a.effective, of_a.note) == (0.5, "use more CPUs")


def test_a_local_run_is_asked_to_save(root: Path) -> None:
    folder = root / "runs/mnist/here"
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        attempt = attempts.open_next(folder, "mnist", {})
        facts = helpers.read(attempt.folder, "opened")
        facts["process"] |= {"pid": sleeper.pid, "started": attempts.start_time(sleeper.pid)}
        opened = directory.marked(folder, facts)
        files.write_json(attempt.folder / "opened.json", opened)
        assert "was asked to save and end" in run_commands.cancel(runs.read(folder, None))
        assert sleeper.wait(10) == -signal.SIGTERM
        assert run_commands.cancel(runs.read(folder, None)) == "is not running: lost"
    finally:
        sleeper.kill()


def test_a_local_run_on_another_machine_is_known_by_its_heartbeat(root: Path) -> None:
    folder = begun(root / "runs/mnist/there", job="")
    attempt = attempts.owner(folder)
    assert attempt
    facts = helpers.read(attempt.folder, "opened")
    facts["process"] |= {"host": "there", "place": "of another machine"}
    files.write_json(attempt.folder / "opened.json", directory.marked(folder, facts))
    assert runs.read(folder, {}).state == "running"
    with pytest.raises(MachineError, match="runs on there: type this command there"):
        run_commands.cancel(runs.read(folder, {}))
    before = time.time() - in_use.SEEN_S - 1
    os.utime(attempt.folder / "opened.json", (before, before))
    assert runs.read(folder, {}).state == "lost"


def test_a_run_ends_before_the_interactive_job_in_which_it_was_typed(root: Path) -> None:
    folder = begun(root / "runs/mnist/18")
    (folder / "job.yaml").unlink()  # only a batch script writes it
    opened = folder / "attempts/0000/opened.json"
    facts = files.read_json(opened)
    facts["process"]["place"] = "of another machine"
    files.write_json(opened, directory.marked(folder, facts))
    assert runs.read(folder, {"18": RUNNING}).state == "running"
    before = time.time() - in_use.SEEN_S - 1
    os.utime(opened, (before, before))
    assert runs.read(folder, {"18": RUNNING}).state == "lost"
    os.utime(opened)
    directory.write_status(folder, "done", attempt=0, step=3)
    assert runs.read(folder, {"18": RUNNING}).state == "done"


def test_the_job_of_a_run_is_the_one_that_slurm_has(root: Path) -> None:
    """job.yaml names a job that is still to begin, or, if a later one did not write it, one that
    has ended.
    """
    folder = root / "runs/mnist/12"
    attempt = attempts.open_next(folder, "mnist", {})
    opened = directory.marked(folder, {**attempts.facts(folder), "job": "13"})
    files.write_json(attempt.folder / "opened.json", opened)
    for jobs_in_slurm, job in (
        ({"12": ended("COMPLETED"), "13": RUNNING}, "13"),
        ({"12": PENDING, "13": ended("COMPLETED")}, "12"),
        ({}, "13"),
    ):
        assert runs.read(folder, jobs_in_slurm).job == job


def test_what_cannot_be_resumed_is_refused(root: Path) -> None:
    pending = runs.read(root / "runs/mnist/12", {"12": PENDING})
    local = root / "runs/mnist/here"
    with pytest.raises(InputError, match="is pending: wait until it ends, or cancel it first"):
        run_commands.to_resume(pending, [])
    attempts.open_next(local, "mnist", {})
    with pytest.raises(
        InputError, match=rf"start it again with: python -m recipes\.mnist run_dir={local}"
    ):
        run_commands.to_resume(runs.read(local, {}), [])
    program = root / "runs/script/here"
    attempts.open_next(program, "script", {})
    with pytest.raises(InputError, match=rf"with the command that started it, and .*{program}$"):
        run_commands.to_resume(runs.read(program, {}), [])
    stopped = root / "runs/mnist/12"
    (stopped / "job.sh").write_text("")
    with pytest.raises(ConfigError, match="epoch=3: recipe mnist has no key 'epoch'"):
        run_commands.to_resume(runs.read(stopped, {}), ["epoch=3"])
    with pytest.raises(InputError, match=r"nodes=2: resume keeps the size .* the command that"):
        run_commands.to_resume(runs.read(stopped, {}), ["epochs=3", "nodes=2"])
    with pytest.raises(InputError, match="--: resume keeps the arguments of the program"):
        run_commands.command(["resume", "12", "--", "--lr", "1"], root, {})
    assert "lr=1" in run_commands.to_resume(runs.read(stopped, {}), ["epochs=3"])
    words = run_commands.to_resume(runs.read(stopped, {}), ["lr=2", "epochs=3"])
    assert {"lr=2", "epochs=3"} <= set(words)
    assert "lr=1" not in words


def test_a_resume_of_several_runs_leaves_out_those_that_are_done_or_unknown(
    root: Path, stubs: Stubs, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.record(root / "runs/mnist/13_1", b"#!/bin/bash\n", "13_1", "mnist", [], root=str(root))
    stubs.add("squeue", "exit 1")
    stubs.add("sbatch", "echo 21")
    line = "^resume: none of these runs was stopped or has failed: name one of them$"
    with pytest.raises(InputError, match=line):
        run_commands.command(["resume", "11", "12"], root, {})
    assert run_commands.command(["resume", "11", "12", "13"], root, {}) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line == f"{root}/runs/mnist/13_1: submitted as job 21_1"


@pytest.mark.parametrize("begins", [False, True])
def test_an_element_of_an_array_is_resumed_alone(root: Path, stubs: Stubs, begins: bool) -> None:
    """The job may begin before its number is noted. Then it has written job.yaml itself."""
    folder = root / "runs/mnist/13_1"
    jobs.record(folder, b"#!/bin/bash\n", "13_1", "mnist", ["lr=1"], root=str(root))
    folder = folder.rename(root / "runs/mnist/moved")
    begin = f'echo \'{{"job_id": "21_1", "by": "begin"}}\' > {folder}/job.yaml'
    stubs.add("sbatch", f"{begin if begins else 'true'}; echo 21")
    stubs.add("scontrol", "")
    assert run_commands.resume(runs.read(folder, {}), ["lr=2"]) == "submitted as job 21_1"
    assert "--array=1" in stubs.calls("sbatch")[0]
    described = files.read_json(folder / "job.yaml")
    assert described["job_id"] == "21_1"
    assert described.get("arguments") == (None if begins else ["lr=2"])
    assert described.get("run_dir") == (None if begins else str(folder))


def test_a_cancel_of_several_runs_fails_if_one_cannot_be_read_or_cancelled(root: Path) -> None:
    assert run_commands.cancel_all([Path("damaged")], []) == 3
    folders = [begun(root / "runs/mnist/18", cluster="there"), root / "runs/mnist/11"]
    assert run_commands.cancel_all(folders, [runs.read(each, {}, "here") for each in folders]) == 3


def test_a_run_whose_snapshot_was_removed_is_not_submitted(root: Path, stubs: Stubs) -> None:
    code = root / "runs/code/copy"
    folder = root / "runs/mnist/20"
    text = f"#!/bin/bash\n. {code}/sbatch/job.sh || exit\n".encode()
    jobs.record(folder, text, "20", "mnist", [], root=str(root), code=str(code))
    stubs.add("scontrol", "")
    stubs.add("sbatch", "echo 21")
    run = runs.read(folder, {})
    fix = f"start the run again with: python launch.py recipe=mnist run_dir={folder}"
    with pytest.raises(MachineError, match=f"copy/sbatch/job.sh, which was removed, .*: {fix}"):
        run_commands.resume(run, [])
    assert not stubs.calls("sbatch")
    (code / "sbatch").mkdir(parents=True)
    (code / "sbatch/job.sh").touch()
    assert run_commands.resume(run, []) == "submitted as job 21"


def test_a_ready_script_is_submitted_again_with_its_size() -> None:
    text = """JobId=7 JobName=mnist
   Partition=gpu AllocNode:Sid=login:1 Account=(null) QOS=(null) TimeLimit=00:30:00
   NumNodes=2 NumCPUs=16 NumTasks=4 CPUs/Task=4 ReqB:S:C:T=0:0:*:*
   Socks/Node=* NtasksPerN:B:S:C=2:0:*:* CoreSpec=*
   MinCPUsNode=8 MinMemoryNode=4G MinTmpDiskNode=0
   Features=a100 ExcNodeList=node7 DelayBoot=00:00:00
   Command=/r/sbatch/mnist_2x8.sh lr=1
   TresPerNode=gres:gpu:2"""
    (job,) = jobstate.parse(text)
    script = (helpers.ROOT / "sbatch/mnist_2x8.sh").read_text()
    of_nodes = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"]
    assert jobs.options_of(job, script) == [
        *of_nodes,
        "--cpus-per-task=4",
        "--time=00:30:00",
        "--partition=gpu",
        "--constraint=a100",
        "--mem=4G",
    ]
    for printed, typed in (
        ("MinMemoryCPU=500M", "--mem-per-cpu=500M"),
        ("MinMemoryNode=0", "--mem=0"),
        ("MinMemoryNode=0 MemPerTres=gres:gpu:300", "--mem-per-gpu=300"),
    ):
        (other,) = jobstate.parse(text.replace("MinMemoryNode=4G", printed))
        options = jobs.options_of(other, script)
        assert [option for option in options if option.startswith("--mem")] == [typed]
    (total,) = jobstate.parse(text.replace("S:C=2:0", "S:C=0:0").replace("gres:gpu:2", "(null)"))
    of_job = jobs.options_of(total, script)
    assert of_job[1:3] == ["--ntasks=4", "--gpus-per-node=0"]
    assert jobs.options_of(jobstate.Job("", "", options=job.options), script) == []


@pytest.mark.parametrize("value", ["fast", [1], 10**400, float("nan"), {}])
def test_damaged_values_are_left_out_of_the_table(
    root: Path, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = root / "runs" / "damaged"
    (folder / "attempts").mkdir(parents=True)
    row = dict.fromkeys(("step", "total_steps", "epoch", "samples_per_second", "val_top1"), value)
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    for words in ([str(folder)], [str(folder), "--json"], ["--sort=step"]):
        assert run_commands.show(words, root) == 0
    assert "NaN" not in capsys.readouterr().out
    with pytest.raises(InputError, match=r"--json: launch\.py logs does not support it"):
        run_commands.command(["logs", "--json", "x"], root, {})


def test_a_watched_table_asks_slurm_again_each_time(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun(root / "runs/toy/12", job="12")
    elsewhere = begun(root / "runs/toy/13", job="12", cluster="there")
    monkeypatch.setattr(run_commands.client, "cluster_name", lambda: "here")
    queue = iter([{"12": PENDING}, {"12": RUNNING}])
    monkeypatch.setattr(run_commands.client, "mine", lambda: next(queue, {}))
    pauses = iter([None])

    def sleep(seconds: float) -> None:
        if seconds == run_commands.WATCH_S:
            next(pauses)

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(StopIteration):
        run_commands.show([str(folder), str(elsewhere), "watch"], root)
    first, second = capsys.readouterr().out.split("\033[2J")[1:]
    assert "running" not in first
    assert second.count("running") == 1
