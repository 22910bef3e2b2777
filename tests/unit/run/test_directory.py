"""The run directory: where it is, and its status."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from recipes.core import files
from recipes.core.errors import Next
from recipes.core.run import directory
from recipes.core.slurm import environment


def test_the_run_directory_is_given_or_named_by_job_or_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    assert directory.choose("a/../b", "mnist", "7", Path("/base")) == tmp_path / "b"
    assert directory.choose("~/y", "mnist", "7", tmp_path) == Path("/home/me/y")
    assert directory.choose("", "mnist", "12_0", tmp_path) == tmp_path / "runs" / "mnist" / "12_0"
    (tmp_path / "round").symlink_to("round")
    # what makes it says what is wrong
    assert directory.choose("round", "mnist", "7", tmp_path) == tmp_path / "round"
    stamped = directory.choose("", "mnist", None, tmp_path)
    assert stamped.parent == tmp_path / "runs" / "mnist"
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{os.getpid()}", stamped.name)


def test_each_job_or_array_task_and_each_launch_of_it_has_its_own_id() -> None:
    assert [environment.job_id(job) for job in ({}, {"SLURM_JOB_ID": ""})] == ["", ""]
    assert environment.job_id({"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12"}) == "14"
    job = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0"}
    assert directory.launch_id({}) == ""
    assert directory.launch_id(job) == "12_0.0"
    assert directory.launch_id({**job, "SLURM_RESTART_COUNT": ""}) == "12_0.0"
    assert directory.launch_id({**job, "SLURM_RESTART_COUNT": "2"}) == "12_0.2"


@pytest.mark.parametrize(
    "content", [b"", b'{"state": "runn', b"[1]", b"\xff\xfe{}", b'{"step": 1, "updated": "x"}']
)
def test_a_damaged_status_file_reads_as_empty(tmp_path: Path, content: bytes) -> None:
    assert directory.read_status(tmp_path / "no" / "folder") == {}
    (tmp_path / "status.json").write_bytes(content)
    assert directory.read_status(tmp_path) == {}


def test_next_is_added_to_the_status_of_the_same_attempt(tmp_path: Path) -> None:
    directory.note_next(tmp_path, Next.requeued, 0)
    assert not (tmp_path / "status.json").exists()
    directory.write_status(tmp_path, "preempted", attempt=0, step=7)
    before = directory.read_status(tmp_path)
    directory.note_next(tmp_path, Next.cancelled, 1)
    assert directory.read_status(tmp_path) == before
    directory.note_next(tmp_path, Next.requeued, 0)
    assert directory.read_status(tmp_path) == {**before, "next": "requeued"}


@pytest.mark.parametrize(
    ("summary", "line"),
    [
        ({"val_top1": None}, ""),
        ({"val_top1": 0.5}, "; val_top1 0.5000"),
        ({"val_top1": 0.5, "best": {"step": 3, "val_top1": 0.5}}, "; val_top1 0.5000"),
        (
            {"val_loss": 0.5, "best": {"step": 3, "val_loss": 0.25}},
            "; val_loss 0.5000 (best 0.2500 at step 3)",
        ),
    ],
)
def test_the_last_result_is_named_and_the_best_one_if_it_is_another(
    tmp_path: Path, summary: dict[str, Any], line: str
) -> None:
    files.write_json(tmp_path / "summary.json", summary)
    assert directory.results(tmp_path) == line


def test_the_status_of_the_run_comes_before_that_of_srun() -> None:
    assert directory.exit_code({"state": "failed", "exit_status": 3}, 143) == 3


def test_an_evaluation_and_an_examination_of_a_run_have_their_own_folder(tmp_path: Path) -> None:
    for name in (directory.DOCTOR, directory.EVALUATION):
        assert directory.inside(tmp_path, name) == tmp_path
    (tmp_path / "config.yaml").touch()
    assert directory.inside(tmp_path, directory.DOCTOR) == tmp_path / "doctor"
    assert directory.inside(tmp_path, directory.EVALUATION) == tmp_path / "evaluation"
