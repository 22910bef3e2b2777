"""What another user has written is read with limits, is not executed, and leads to no private
file.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.core import errors, files
from recipes.core.data import labelled, pillow, text
from recipes.core.doctor import explain
from recipes.core.errors import ConfigError, InputError, MachineError
from recipes.core.launch import checks, run_commands, runs
from recipes.core.run import attempt as attempts
from recipes.core.run import (
    command_line,
    directory,
    outlook,
    record,
    rows,
    table,
)
from recipes.core.run.record import State
from recipes.core.slurm import client
from recipes.core.slurm.jobstate import Job
from recipes.core.train import checkpoint
from tests import helpers
from tests.unit.other_users.common import FAILED, STRANGER, as_root


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["a named pipe", "a device"])
def test_a_planted_file_among_data_stops_no_reader(tmp_path: Path, kind: str) -> None:
    for name in ("a.jpg", "b.csv", "c.txt"):
        path = tmp_path / name
        os.mkfifo(path) if kind == "a named pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(pillow.Unreadable, match="not an ordinary file"):
        pillow.read_file(tmp_path / "a.jpg")
    with pytest.raises(InputError, match="not an ordinary file"):
        labelled.read_table(tmp_path / "b.csv", tmp_path, False, print)
    with pytest.raises(InputError, match=r"has no \.txt"):
        text.write(str(tmp_path), tmp_path / "text", "bytes", 1, print)


def test_a_named_pipe_in_a_run_directory_stops_no_reader(tmp_path: Path) -> None:
    for name in ("status.json", "job.yaml", "summary.json", "metrics.jsonl", "config.yaml"):
        os.mkfifo(tmp_path / name)
    run = record.read(tmp_path)
    assert (run.state, run.step, run.values) == (State.not_begun, 0, {})


def test_messages_have_no_control_characters(tmp_path: Path) -> None:
    for kind in (ConfigError, InputError, MachineError, errors.RunError):
        assert str(kind("a\x1b]0;b\x07\nc")) == "a\\x1b]0;b\\x07\\nc"


def test_what_a_rank_sends_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who reaches rank 0's port can take the place of a rank."""
    monkeypatch.chdir(tmp_path)
    content = io.BytesIO()
    torch.save(_Evil(), content)
    state: Any = SimpleNamespace(
        **dict.fromkeys(("model", "optimizer", "scheduler"), SimpleNamespace(state_dict=dict)),
        ema=None,
        meta={},
        step=0,
    )
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.content_of(state, {}, [content.getvalue()])
    assert not (tmp_path / "executed").exists()


@as_root
def test_the_run_of_another_user_is_not_cancelled(tmp_path: Path) -> None:
    run = replace(FAILED, folder=str(tmp_path), state="running")
    os.chown(tmp_path, STRANGER, STRANGER)
    with pytest.raises(MachineError, match="belongs to another user"):
        run_commands.cancel(run)
    os.chown(tmp_path, 0, 0)
    for job in ("--me", "7"):
        with pytest.raises(MachineError, match="names no job that you have started"):
            run_commands.cancel(replace(run, job=job))


def test_a_table_of_runs_has_no_control_characters() -> None:
    assert table.aligned([["run", "\x1b]52;c;evil\x07"], ["a\nb", "1"]]) == [
        r"run   \x1b]52;c;evil\x07",
        r"a\nb  1",
    ]


@pytest.mark.timeout(30)
def test_a_named_pipe_in_place_of_best_stops_no_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "best")
    assert checkpoint.named(tmp_path, "best") == ""


def test_a_row_without_an_end_uses_no_memory(tmp_path: Path) -> None:
    """A file of 100 GB that is a hole on the disk."""
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.truncate(100 << 30)
        file.seek(100 << 30)
        file.write('\n{"step": 1}\n')
    assert rows.rows(tmp_path) == [{"step": 1}]


@pytest.mark.parametrize("kind", ["a link", "a named pipe"])
def test_a_planted_file_of_metrics_is_not_read(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_text("PRIVATE\n")
    attempt = attempts.open_next(tmp_path / "run", "toy", {})
    metrics = tmp_path / "run/metrics.jsonl"
    metrics.symlink_to(tmp_path / "secret") if kind == "a link" else os.mkfifo(metrics)
    with contextlib.suppress(OSError):
        attempts.begin(attempt, 0, own=False)
    assert metrics.is_symlink() or metrics.is_fifo()
    assert rows.rows(tmp_path / "run") == []


@as_root
def test_a_link_of_another_user_leads_to_no_run(tmp_path: Path) -> None:
    attempts.open_next(tmp_path / "mine/run", "toy", {})
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/link").symlink_to(tmp_path / "mine")
    assert table.find([tmp_path / "shared"]) == [tmp_path / "mine/run"]
    os.chown(tmp_path / "shared/link", STRANGER, STRANGER, follow_symlinks=False)
    assert table.find([tmp_path / "shared"], may_be_empty=True) == []


def test_a_run_that_cannot_be_read_costs_no_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        attempts.open_next(tmp_path / "runs" / name, "toy", {})
    run_dir = tmp_path / "runs/a"
    opened = directory.marked(run_dir, {"process": "x"})
    files.write_json(run_dir / "attempts/0000/opened.json", opened)
    assert run_commands.show([], tmp_path) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2  # the head and the other run
    assert "runs/a: cannot be read (" in err


@as_root
def test_a_folder_that_is_closed_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    (closed / "run").mkdir(parents=True)
    closed.chmod(0o700)
    os.seteuid(STRANGER)
    try:
        for folder, why in ((closed, "cannot be read"), (closed / "run", "no run was found")):
            with pytest.raises(InputError, match=f"{folder}: {why}"):
                run_commands.command(["logs", str(folder)], tmp_path, {})
        with pytest.raises(ConfigError, match="there is no such file"):
            command_line.parse([f"script={closed}/train.py"])
        # a log of the run of another user, and of a job that is not one's own
        assert not record.is_log_of(tmp_path, closed / "job.out")
        job = Job("7", "FAILED", log=f"{closed}/job.out")
        monkeypatch.setattr(client, "find", lambda *of, **more: job)
        _, log = outlook.without_run("7", tmp_path)
        assert log is None
        # a run_dir that was typed: whatever makes it says what is wrong
        place = directory.choose(f"{closed}/run", "mnist", None, tmp_path)
        assert directory.inside(place, directory.EVALUATION) == closed / "run"
    finally:
        os.seteuid(0)


@as_root
def test_a_log_of_another_user_is_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs/rank0.log"
    log.write_text("first\n\x1b]0;pwned\x07last\n")
    os.chown(log, STRANGER, STRANGER)
    assert run_commands.logs(tmp_path, "0", False) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["first", r"\x1b]0;pwned\x07last"]


@as_root
@pytest.mark.parametrize("name", ["logs/rank0.log", "logs", "job.yaml"])
def test_the_run_of_another_user_shows_no_private_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(os, "execvp", lambda *words: pytest.fail("tail"))
    private = tmp_path / "private/rank0.log"
    private.parent.mkdir()
    private.write_text("secret\n")
    run_dir = tmp_path / "theirs"
    (run_dir / "logs").mkdir(parents=True)
    if name == "logs":
        (run_dir / name).rmdir()
    if name == "job.yaml":
        files.write_json(run_dir / name, {"job_id": "7", "log": str(private)})
    else:
        (run_dir / name).symlink_to(private if "/" in name else private.parent)
    for path in (run_dir, *run_dir.rglob("*")):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    assert "secret" not in "".join(explain.of_run(run_dir))
    job = Job("7", "RUNNING", error_log=str(private))
    of_slurm = outlook.Outlook("7", job, True, "")
    assert explain.batch_logs(record.read(run_dir), of_slurm) == []
    with pytest.raises((InputError, MachineError), match=r"link of another user|has no logs"):
        run_commands.logs(run_dir, "", False)


@pytest.mark.parametrize("command", ["resume", "compare"])
def test_a_run_that_cannot_be_read_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("PATH", "/nosuch")  # no Slurm
    for name in ("a", "b"):
        attempts.open_next(tmp_path / "runs" / name, "toy", {})
    read = record.read
    monkeypatch.setattr(record, "read", lambda folder: read(folder / {"a": ""}[folder.name]))
    with pytest.raises(InputError, match=r"runs/b: cannot be read \("):
        run_commands.command([command, f"{tmp_path}/runs/a", f"{tmp_path}/runs/b"], tmp_path, {})


@as_root
def test_a_run_of_another_user_does_not_keep_others_from_being_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nosuch")  # no Slurm
    for name in ("theirs", "mine"):
        attempts.open_next(tmp_path / "runs" / name, "toy", {})
    os.chown(tmp_path / "runs/theirs", STRANGER, STRANGER)
    ranks = tmp_path / "runs/theirs/attempts/0000/ranks"
    ranks.rmdir()
    ranks.symlink_to(tmp_path / "nothing")
    assert run_commands.command(["cancel", f"{tmp_path}/runs"], tmp_path, {}) == 3
    said = capsys.readouterr()
    assert "0000/ranks: is a link, which another user may have made: skipped" in said.err
    assert "runs/mine: is not running: lost" in said.out


@pytest.mark.timeout(30)
def test_a_log_cannot_keep_explain_busy(tmp_path: Path) -> None:
    line = '  File "a' + '", line 1' * 200_000 + "\nx\n"
    (tmp_path / "rank0.log").write_text(f"CUDA out of memory\n{line}")
    assert explain.of_logs(tmp_path / "rank0.log")


def test_check_copies_no_file_without_an_end(tmp_path: Path) -> None:
    """Else `launch.py check run_dir=` fills the temporary folder."""
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "status.json").symlink_to("/dev/null")
    (run_dir / "config.yaml").touch()
    os.truncate(run_dir / "config.yaml", 4 << 20)
    place = tmp_path / "place"
    checks._show_checkpoints(run_dir / "checkpoints", place / "checkpoints")
    assert [path.name for path in place.iterdir()] == ["checkpoints"]


def test_a_checkpoint_cannot_be_exchanged_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a link of its owner to a private checkpoint of this user."""
    path = tmp_path / "step-00000001.pt"
    torch.save({"of": "theirs"}, path)
    torch.save({"of": "mine"}, tmp_path / "private.pt")

    def exchange(archive: zipfile.ZipFile) -> None:
        path.unlink()
        path.symlink_to(tmp_path / "private.pt")

    monkeypatch.setattr(zipfile.ZipFile, "testzip", exchange)
    assert checkpoint._read_file(path) == {"of": "theirs"}


@as_root
def test_a_typed_run_is_not_exchanged_by_a_link_of_another_user(tmp_path: Path) -> None:
    helpers.attempt(tmp_path / "precious")
    link = tmp_path / "try1"
    link.symlink_to(tmp_path / "precious")
    assert runs.find([str(link)], tmp_path) == [tmp_path / "precious"]
    os.lchown(link, STRANGER, STRANGER)
    with pytest.raises(MachineError, match="try1: is a link of another user"):
        runs.find([str(link)], tmp_path)


@as_root
def test_the_run_of_another_user_leads_to_no_private_file(tmp_path: Path) -> None:
    private = tmp_path / "private/job.yaml"
    helpers.attempt(tmp_path / "private")
    private.write_text('{"arguments": ["args=--token secret"]}')
    run_dir = tmp_path / "runs/theirs"
    (run_dir / "attempts").mkdir(parents=True)
    (run_dir / "data").symlink_to(tmp_path)
    os.chown(run_dir, STRANGER, STRANGER)
    assert not record.read(run_dir).job
    (run_dir / "attempts").rmdir()
    (run_dir / "attempts").symlink_to(private.parent / "attempts")
    # also in a copy, whose links belong to this user, and in a folder of a group
    for user, mode in ((STRANGER, 0o755), (os.geteuid(), 0o755), (os.geteuid(), 0o2775)):
        os.chown(run_dir, user, -1)
        run_dir.chmod(mode)
        with pytest.raises(InputError, match="attempts: is a link, which another user may have"):
            record.read(run_dir)


@pytest.mark.parametrize(
    "name",
    [
        "status.json",
        "summary.json",
        "job.yaml",
        "attempts/0000/opened.json",
        "attempts/0000/failed/rank0000.json",
        "attempts/0000/ranks/rank0000.json",
    ],
)
def test_a_file_of_a_run_is_not_read_through_a_link(tmp_path: Path, name: str) -> None:
    """Its owner could replace it by a link at any time."""
    run_dir = tmp_path / "run"
    attempt = attempts.open_next(run_dir, "toy", {})
    attempts.note_rank(attempt, 0, 0, "node1", None)
    attempts.record(attempt, rank=0, host="node1", kind=errors.Kind.error, error="PRIVATE")
    directory.write_status(run_dir, "done", attempt=0, step=1)
    for part in ("summary.json", "job.yaml"):
        files.write_json(run_dir / part, {"steps": 1})

    def contents() -> list[object]:
        run = record.read(run_dir)
        opened = attempt.read("opened.json")
        lists = [attempts.records(attempt), attempts.program_ranks(attempt)]
        return [run.status, run.summary, run.job, opened, *lists]

    assert all(contents())
    (run_dir / name).rename(tmp_path / "private")
    (run_dir / name).symlink_to(tmp_path / "private")
    assert not all(contents())


def test_a_process_of_a_run_is_a_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        attempts.start_time("../tmp/pipe")  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_read_is_named_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x\x1b]0;y").mkdir()
    scan = os.scandir

    def scandir(path: Any) -> Any:
        if path != tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(table.os, "scandir", scandir)
        assert list(table.run_directories(tmp_path)) == []
    said = capsys.readouterr().err
    assert "cannot be read (Permission denied): skipped" in said
    assert "\x1b" not in said


def test_a_line_number_of_a_million_digits_costs_little(tmp_path: Path) -> None:
    """To search all its parts would take hours for a log of some megabytes."""
    log = tmp_path / "rank0.log"
    log.write_text('  File "x", line ' + "1" * 1_000_000 + "\n    code\nCUDA out of memory\n")
    assert any("out of memory" in line for line in explain.of_logs(log))


def test_a_duration_from_a_file_has_a_limit() -> None:
    """Otherwise one run of another user would stop the table of all runs."""
    assert record.ago(9e14) == record.ago(1e10)
