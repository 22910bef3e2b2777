"""Submission through submitit: the environment of sbatch, and the files that it leaves."""

import json
import os
import sys
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission

from recipes.core import files
from recipes.core.errors import MachineError
from recipes.core.launch import checks, submit
from tests import helpers
from tests.unit.launch.stand_ins import Stubs, describe


def test_the_run_directory_has_the_script_and_the_description(
    tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    banner = "echo 'Site news: job 42 was the last one'"  # of a site's wrapper
    stubs.add("sbatch", f'env > "$NOTES/env"; {banner}; echo Submitted batch job 7; {banner}')
    monkeypatch.setenv("SLURM_NTASKS", "9")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    monkeypatch.setenv("SBATCH_PARTITION", "theirs")
    job = describe("data_dir=/$(touch canary)", "nodes=2", "partition=gpu", root=tmp_path)
    [submitted] = submit.submit(job, sys.executable, "")
    assert submitted.job == "7"
    assert submitted.run_dir == tmp_path / "runs" / "mnist" / "7"
    text = (submitted.run_dir / "job.sh").read_text()
    [script] = [
        path for path in (tmp_path / "runs/submitit").glob("*.sh") if "submission" not in path.name
    ]
    assert script.read_text() == text
    payload = DelayedSubmission.load(tmp_path / "runs/submitit/7_submitted.pkl")
    assert payload.function == os.execvp
    assert payload.args == ("/bin/bash", ["bash", str(script)])
    described = json.loads((submitted.run_dir / "job.yaml").read_text())
    assert described["job_id"] == "7"
    assert described["arguments"] == ["data_dir=/$(touch canary)"]
    environ = (tmp_path / "env").read_text()
    assert "SBATCH_ACCOUNT=mine" in environ
    assert "SLURM_NTASKS" not in environ
    assert "SBATCH_PARTITION" not in environ  # sbatch would prefer it to the key that was given
    for path in (tmp_path / "runs" / "submitit").iterdir():
        assert path.name == submit.MARK or path.stat().st_mode & 0o077 == 0, path
    assert not list(tmp_path.rglob("canary"))
    text = next((tmp_path / "runs/submitit").glob("*submission*.sh")).read_text()
    assert "export PYTHONUTF8=1\n" in text
    assert f"\nexec {sys.executable} " in text
    assert "srun" not in text
    stubs.add("sbatch", 'env > "$NOTES/env"; echo "sbatch: Job 7 to start at noon" >&2')
    assert checks.expected_start(describe("account=x", root=tmp_path)) == "to start at noon"
    environ = (tmp_path / "env").read_text()
    assert "SBATCH_ACCOUNT=mine\n" not in environ
    assert "SLURM_NTASKS=9\n" not in environ


def test_a_folder_of_jobs_that_came_with_a_copy_is_not_used(tmp_path: Path, stubs: Stubs) -> None:
    """Slurm would write the log through a link in it."""
    stubs.add("sbatch", "echo Submitted batch job 7")
    folder = tmp_path / "runs/submitit"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "7_0_log.out").touch()  # of another user, or of an earlier version
    (folder / "folder.json").write_text('{"purpose": "submitit", "mark": "x"}')
    names = list[str]()
    for _ in range(3):
        [submitted] = submit.submit(describe(root=tmp_path), sys.executable, "")
        names.append(submitted.log.parent.name)
        if len(names) == 2:
            (tmp_path / "runs/submitit-2/8_0_log.out").symlink_to(tmp_path)
    assert names == ["submitit-2", "submitit-2", "submitit-3"]


def test_the_id_of_an_array_is_that_of_the_line_of_sbatch(tmp_path: Path, stubs: Stubs) -> None:
    (tmp_path / "runs").mkdir()
    stubs.add("sbatch", "echo 'Site news: job 42 was the last one'; echo Submitted batch job 7")
    job = describe("sweep.lr=0.1,0.2", root=tmp_path)
    assert [run.job for run in submit.submit(job, sys.executable, "")] == ["7_0", "7_1"]


PARTITIONS = """\
PartitionName=main
   AllocNodes=ALL Default=YES QoS=N/A
   MaxNodes=2 MaxTime=UNLIMITED MinNodes=0

PartitionName=short
   AllocNodes=ALL Default=NO QoS=N/A
   MaxNodes=UNLIMITED MaxTime=00:10:00 MinNodes=0
"""


@pytest.mark.parametrize(
    ("words", "exported", "problem"),
    [
        (
            ("time=11", "partition=short"),
            "",
            "time=11: exceeds the limit 00:10:00 of partition short",
        ),
        (("time=11",), "short", "time=11: exceeds the limit 00:10:00 of partition short"),
        (("time=10", "nodes=3", "partition=short"), "", ""),
        (("nodes=3",), "", "nodes=, spare=: 3 nodes exceed the limit 2 of partition main"),
        (
            ("nodes=2", "spare=1", "restarts=1"),
            "",
            "nodes=, spare=: 3 nodes exceed the limit 2 of partition main",
        ),
        (("time=11", "nodes=2"), "", ""),
        (("gpus=3",), "", ""),
        (("time=11", "nodes=3", "partition=main,short"), "", ""),
    ],
)
def test_a_job_that_its_partition_never_starts_is_no_success(
    tmp_path: Path,
    stubs: Stubs,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    exported: str,
    problem: str,
) -> None:
    """At sites without EnforcePartLimits, sbatch accepts such a job."""
    monkeypatch.setenv("SBATCH_PARTITION", exported)
    (tmp_path / "partitions").write_text(PARTITIONS)
    stubs.add("sbatch", 'echo "sbatch: Job 7 to start at noon" >&2')
    only = 'BEGIN { RS = "" } !name || $1 == "PartitionName=" name { print; print "" }'
    stubs.add("scontrol", f"awk -v name=\"${{3:-}}\" '{only}' {tmp_path}/partitions")
    job = describe(*words, root=tmp_path)
    if problem:
        with pytest.raises(
            MachineError, match=f"^{problem}, so the job would never start: give a smaller"
        ):
            checks.expected_start(job)
    else:
        assert "to start at noon" in checks.expected_start(job)


def test_a_run_directory_that_cannot_be_written_is_reported_with_the_job(
    tmp_path: Path, stubs: Stubs
) -> None:
    (tmp_path / "runs" / "mnist").mkdir(parents=True)
    (tmp_path / "runs" / "mnist" / "7").write_text("in the way")
    stubs.add("sbatch", "echo Submitted batch job 7")
    with pytest.raises(
        MachineError,
        match=r"/runs/mnist/7: cannot be written \(.*\), so job 7 will fail: scancel 7",
    ):
        submit.submit(describe(root=tmp_path), sys.executable, "")


def test_the_run_of_an_earlier_job_with_this_id_keeps_its_description(
    tmp_path: Path, stubs: Stubs
) -> None:
    earlier = helpers.attempt(tmp_path / "runs/mnist/7").run_dir
    stubs.add("sbatch", "echo Submitted batch job 7")
    submit.submit(describe(root=tmp_path), sys.executable, "")
    assert not (earlier / "job.yaml").exists()


def test_a_full_disk_for_job_files_is_reported(
    tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(
        files, "write_bytes", lambda path, data: os.write(os.open("/dev/full", os.O_WRONLY), data)
    )
    with pytest.raises(
        MachineError,
        match=r"runs/submitit: cannot be written \(No space left on device\): free some",
    ):
        submit.submit(describe(root=tmp_path), sys.executable, "")


def test_a_refusal_of_sbatch_is_one_line(
    tmp_path: Path, stubs: Stubs, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    stubs.add(
        "sbatch", "echo 'sbatch: error: Batch job submission failed: too many jobs' >&2\nexit 1"
    )
    for job in (describe(root=tmp_path), describe("sweep.lr=0.1,0.2", root=tmp_path)):
        with pytest.raises(MachineError) as caught:
            submit.submit(job, sys.executable, "")
        line = "Slurm refuses this job: Batch job submission failed: too many jobs"
        assert str(caught.value) == line
    assert capsys.readouterr().err == ""


def test_a_job_that_slurm_has_accepted_though_sbatch_failed_is_cancelled(
    tmp_path: Path, stubs: Stubs
) -> None:
    """sbatch gives up where the controller's answer is lost."""
    (tmp_path / "runs").mkdir()
    note = "grep --only-matching --max-count=1 'recipes-[0-9a-f]*' \"$1\" > $NOTES/mark"
    stubs.add("sbatch", f"[ -e $NOTES/mark ] && exec echo Submitted batch job 8; {note}; exit 1")
    stubs.add("squeue", 'echo "6 other"; echo "7 $(cat $NOTES/mark)"')
    stubs.add("scancel", "")
    [submitted] = submit.submit(describe(root=tmp_path), sys.executable, "")
    assert submitted.job == "8"
    assert stubs.calls("scancel") == [["7"]]
    assert len(stubs.calls("sbatch")) == 2


def test_each_run_of_a_sweep_has_its_own_run_directory(tmp_path: Path, stubs: Stubs) -> None:
    (tmp_path / "runs").mkdir()
    stubs.add("sbatch", "echo Submitted batch job 7")
    words = [f"run_dir={tmp_path}/s/r", "sweep.lr=0.1,0.2", "epochs=3", "extra=--comment=mine"]
    job = describe(*words, root=tmp_path)
    folders = [run.run_dir for run in submit.submit(job, sys.executable, f"{tmp_path}/s/r")]
    assert folders == [tmp_path / "s/r/0", tmp_path / "s/r/1"]
    assert "#SBATCH --comment=mine\n" in (folders[1] / "job.sh").read_text()
    noted = [json.loads((folder / "job.yaml").read_text())["arguments"] for folder in folders]
    assert noted == [
        ["epochs=3", f"lr=0.{number}", f"run_dir={tmp_path}/s/r/{number - 1}"] for number in (1, 2)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "runs",
        "s",
        "sbatch.calls",
        "stubs",
    ]
