"""The attempts of a run: their numbers, which one owns the run, and what an earlier one can no
longer change.
"""

import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.core import files
from recipes.core.errors import ConfigError, DiskFull, InputError, Kind, MachineError
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, watchdog
from recipes.core.run.attempt import Attempt
from recipes.core.train import checkpoint, metrics, outcome
from tests import helpers


def test_attempts_count_from_zero_above_the_highest_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [helpers.attempt(tmp_path, step=None).number for _ in range(3)] == [0, 1, 2]
    (tmp_path / "attempts/0009").mkdir()
    assert helpers.attempt(tmp_path).number == 10
    # another launch has just made number 10
    monkeypatch.setattr(attempts, "every", lambda run_dir: [Attempt(run_dir, 9)])
    assert helpers.attempt(tmp_path).number == 11


def test_a_file_system_that_repeats_a_call_leaves_a_gap_in_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS does so if the answer of the server was lost."""
    helpers.attempt(tmp_path)
    mkdir = Path.mkdir

    def make(path: Path, *words: Any, **options: Any) -> None:
        mkdir(path, *words, **options)
        if path.name in ("0001", "failed", "ranks"):
            mkdir(path, *words, **options)

    monkeypatch.setattr(Path, "mkdir", make)
    assert attempts.open_next(tmp_path, "mnist", {}).number == 2


def test_an_attempt_owns_the_run_until_a_later_one_begins(tmp_path: Path) -> None:
    assert attempts.owner(tmp_path) is None
    assert attempts.facts(tmp_path) == {}
    first = helpers.attempt(tmp_path, launch="1.0", step=3)
    refused = helpers.attempt(tmp_path, launch="2.0", step=None)
    assert attempts.owner(tmp_path) == first
    assert attempts.newest(tmp_path) == refused
    assert attempts.newest(tmp_path, "1.0") == first
    assert attempts.facts(tmp_path)["attempt"] == 0
    assert attempts.facts(tmp_path)["step"] == 3
    attempts.check_owner(first)
    later = helpers.attempt(tmp_path, launch="3.0", step=5)
    assert attempts.taken_over_by(first) == "3.0"
    attempts.check_owner(later)
    for stale in (first, refused):
        line = r"a later attempt \(3\.0\) writes to this run directory, so this attempt ends"
        with pytest.raises(MachineError, match=line):
            attempts.begin(stale, 3, own=False)


def test_rank_0_adds_the_hosts_and_keeps_what_its_parent_has_noted(tmp_path: Path) -> None:
    environ = {"SLURM_JOB_ID": "7"}
    attempt = attempts.open_next(tmp_path, "mnist", environ, launch="x.1", submitted=5.0)
    files.write_json(attempt.folder / "opened.json", {**attempt.facts(), "time": 9.0})
    attempts.describe(attempt, "mnist", environ, ("a", "b"))
    facts = attempt.facts()
    kept = (facts["launch"], facts["submitted"], facts["time"], facts["hosts"])
    assert kept == ("x.1", 5.0, 9.0, ["a", "b"])


def test_a_local_run_in_an_allocation_is_not_its_job(tmp_path: Path) -> None:
    """`launch.py cancel` would cancel the allocation."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "c", "SLURM_JOB_NUM_NODES": "2"}
    attempt = attempts.open_next(tmp_path, "mnist", environ, launch="host.1.2")
    attempts.describe(attempt, "mnist", environ, ("a",))
    facts = attempt.facts()
    assert (facts["job"], facts["cluster"], facts.get("nodes")) == (None, None, None)
    attempt = attempts.open_next(tmp_path, "mnist", environ)
    mark = attempt.facts()["mark"]
    attempts.describe(attempt, "mnist", environ, ("a",))
    facts = attempt.facts()
    assert (facts["job"], facts["cluster"], facts["nodes"]) == ("7", "c", 2)
    assert facts["mark"] == mark != ""


def test_of_a_program_the_hosts_of_running_ranks_are_known(tmp_path: Path) -> None:
    attempt = helpers.attempt(tmp_path, hosts=())
    for rank, host, ended in ((0, "a", None), (1, "b", 8.0), (2, "c", None)):
        attempts.note_rank(attempt, rank, rank, host, ended)
    assert attempts.hosts(attempt) == {0: "a", 2: "c"}


def test_two_steps_cannot_begin_the_same_attempt(tmp_path: Path) -> None:
    attempt = helpers.attempt(tmp_path)
    rows = metrics.Rows(tmp_path / "metrics.jsonl")
    with pytest.raises(MachineError, match="another Slurm step of this job has begun this attempt"):
        attempts.begin(attempt, 0, own=False)
    rows.add({"step": 1})
    rows.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_the_attempt_of_the_parent_is_found_by_its_variable(tmp_path: Path) -> None:
    attempt = helpers.attempt(tmp_path, step=None)
    assert attempts.given({attempts.VARIABLE: str(attempt.folder)}) == attempt
    assert attempts.given({}) is None
    assert not attempts.refuse({}, ConfigError("nowhere to record it"))
    unseen = tmp_path / "unseen/attempts/0000"
    assert not attempts.refuse({attempts.VARIABLE: str(unseen)}, ConfigError("nor here"))
    environ = {attempts.VARIABLE: str(attempt.folder)}
    assert attempts.refuse(environ, MachineError("no GPU"), rank=5)
    assert attempts.refuse(environ, InputError("no data"))
    assert attempts.refuse(environ, DiskFull("/data is full"), rank=1)
    record, other, full = attempts.records(attempt)
    assert record["rank"] == 5
    assert record["kind"] == "machine"
    assert record["error"] == "no GPU"
    assert record["exit_status"] == 3
    assert other["rank"] == 0
    assert other["kind"] == "input"
    assert other["host"] == socket.gethostname()
    assert full["kind"] == "disk-full"
    assert full["exit_status"] == 3


@pytest.mark.parametrize(
    ("is_told", "is_first", "waits", "prints"),
    [
        (False, True, [], True),
        (False, False, [1.5], True),
        (True, True, [], True),
        (True, False, [], False),
    ],
)
def test_a_rank_whose_parent_knows_its_refusal_leaves_it_to_the_first(
    is_told: bool,
    is_first: bool,
    waits: list[float],
    prints: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(attempts.time, "sleep", slept.append)
    attempts.print_refusal("no GPU", is_first, is_told)
    assert slept == waits
    assert capsys.readouterr().err == ("no GPU\n" if prints else "")


def test_records_are_those_of_one_attempt_and_damaged_ones_are_ignored(tmp_path: Path) -> None:
    first, second = (helpers.attempt(tmp_path) for _ in range(2))
    for rank, moment in ((2, 5.0), (1, 4.0)):
        attempts.record(first, rank=rank, host="a", kind=Kind.error, error="x", moment=moment)
    (first.folder / "failed/rank0000.json").write_text('{"rank": 0, "ho')
    assert [record["rank"] for record in attempts.records(first)] == [1, 2]
    assert attempts.records(second) == []


def test_a_run_of_the_older_layout_has_its_facts_and_the_numbers_continue(tmp_path: Path) -> None:
    files.write_json(tmp_path / "attempt.json", {"attempt": 4, "launch": "6.0", "recipe": "toy"})
    assert attempts.facts(tmp_path)["recipe"] == "toy"
    assert [helpers.attempt(tmp_path).number for _ in range(2)] == [5, 6]


def write_checkpoint(old: Attempt, step: int = 9) -> None:
    checkpoint.write(
        old.run_dir / "checkpoints", {"model": {}, "meta": {"step": step}}, old.staging
    )


def point_to_it(old: Attempt) -> None:
    checkpoint.point(old.run_dir / "checkpoints/step-00000004.pt", "latest", old.staging)


def set_status(old: Attempt) -> None:
    attempts.check_owner(old)
    directory.write_status(old.run_dir, "running", attempt=old.number, step=9)


def write_summary(old: Attempt) -> None:
    world = SimpleNamespace(rank=0, pulse=watchdog.Pulse())
    run: Any = SimpleNamespace(
        state=None, world=world, attempt=old, dir=old.run_dir, step=9, stopping=""
    )
    outcome.finish(run, {"val_top1": 1.0})


@pytest.mark.parametrize("write", [write_checkpoint, point_to_it, set_status, write_summary])
def test_an_attempt_that_wakes_up_too_late_changes_nothing(
    tmp_path: Path, write: Callable[[Attempt], None]
) -> None:
    """It is stopped just before it renames a checkpoint, ``latest``, the status or the summary."""
    old = helpers.attempt(tmp_path)
    write_checkpoint(old, 5)
    helpers.attempt(tmp_path, step=None)  # was refused
    helpers.attempt(tmp_path, step=5)
    directory.write_status(tmp_path, "running", attempt=2, step=5)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(MachineError, match=r"a later attempt .*writes to this run directory"):
        write(old)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_rows_of_an_attempt_do_not_reach_the_file_of_its_successor(tmp_path: Path) -> None:
    helpers.attempt(tmp_path)
    rows = metrics.Rows(tmp_path / "metrics.jsonl")
    rows.add({"step": 1})
    helpers.attempt(tmp_path, step=1)
    rows.add({"step": 2})  # the first attempt continues
    rows.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_start_that_stalls_does_not_replace_the_rows_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node may lose its network, and get it back when the job runs on other nodes."""
    stalled = helpers.attempt(tmp_path, step=None)
    (tmp_path / "metrics.jsonl").touch()
    copy = shutil.copyfileobj
    opened: list[metrics.Rows] = []

    def stall(*of_copy: Any) -> None:
        copy(*of_copy)
        monkeypatch.setattr(shutil, "copyfileobj", copy)
        helpers.attempt(tmp_path)
        opened.append(metrics.Rows(tmp_path / "metrics.jsonl"))

    monkeypatch.setattr(shutil, "copyfileobj", stall)
    with pytest.raises(MachineError, match="a later attempt"):
        attempts.begin(stalled, 0, own=False)
    opened[0].add({"step": 1})
    opened[0].close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_save_that_is_being_written_cannot_be_renamed_by_an_earlier_attempt(
    tmp_path: Path,
) -> None:
    old = helpers.attempt(tmp_path)
    (tmp_path / "checkpoints").mkdir(exist_ok=True)

    def write(file: object) -> None:
        helpers.attempt(tmp_path)  # the successor begins meanwhile

    with pytest.raises(MachineError, match=r"a later attempt .*writes to this run directory"):
        files.write_whole(tmp_path / "checkpoints/step-00000009.pt", write, old.staging)
    assert not (tmp_path / "checkpoints/step-00000009.pt").exists()


COUNT = """
import os, sys
from pathlib import Path
from recipes.core.errors import Kind
from recipes.core.run import attempt as attempts, judge
run_dir, ranks = Path(sys.argv[1]), int(sys.argv[2])
new = attempts.open_next(run_dir, "mnist", {}, [f"node{i // 8}" for i in range(ranks)])
attempts.begin(new, 0, own=False)
os.fsync = lambda descriptor: None
for rank in range(ranks):
    kind = Kind.error if rank == 3 else Kind.peer_lost
    attempts.record(new, rank=rank, host=f"node{rank // 8}", kind=kind, error="x")
events = {"open"}
events |= {f"os.{name}" for name in "listdir scandir mkdir rename remove utime link".split()}
counted = 0
def count(event, arguments):
    global counted
    counted += event in events
sys.addaudithook(count)
verdict = judge.close(new, judge.End(1))
assert verdict.reason == "rank 3 on node0 failed first: x", verdict
print(counted)
"""


def test_file_operations_of_the_judge_are_linear_in_the_ranks(tmp_path: Path) -> None:
    operations = {}
    for ranks in (16, 256):
        command = [sys.executable, "-c", COUNT, str(tmp_path / str(ranks)), str(ranks)]
        operations[ranks] = int(helpers.run(command).expect(0).out)
    # Python announces each open() of a record twice
    assert operations[256] - operations[16] == 2 * 240
    assert operations[16] < 16 + 40
