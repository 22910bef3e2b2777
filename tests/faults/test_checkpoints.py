"""Damaged checkpoints, kills during a save, full disks, unwritable folders, slow file systems,
other models: the last valid checkpoint is never lost.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.core import files
from recipes.core.errors import InputError
from recipes.core.train import checkpoint, sharding
from tests import helpers, states
from tests.faults import conftest
from tests.faults.conftest import Start

LARGE = ("width=20000", "checkpoint_every_steps=5", "keep_best=false")  # some 5.4 MB each
# a checkpoint's other parts
EMPTY = {
    "optimizer": {},
    "scheduler": {},
    "ema": None,
    "sampler": {},
    "rng": [],
}


@pytest.fixture(scope="module")
def made(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the checkpoints of steps 4, 8 and 10."""
    run_dir = tmp_path_factory.mktemp("made") / "run"
    words = (
        "device=cpu",
        f"run_dir={run_dir}",
        "max_steps=10",
        "checkpoint_every_steps=4",
        "cpu_threads=1",
    )
    helpers.run_fork([sys.executable, "-m", "recipes.broken", *words], cwd=repo).expect(0)
    saved = checkpoint.candidates(run_dir / "checkpoints")
    assert [checkpoint.step_of(path) for path in saved] == [10, 8, 4]
    return run_dir


# Damage.


def flipped(good: bytes, draw: random.Random) -> bytes:
    wrong = bytearray(good)
    wrong[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
    return bytes(wrong)


def cut(good: bytes, draw: random.Random) -> bytes:
    return good[: draw.randrange(len(good))]


def zeroed(good: bytes, draw: random.Random) -> bytes:
    """A block that was never written, as after a crash of the machine."""
    size = draw.choice([1, 64, 512, 4096])
    while True:
        begin = draw.randrange(len(good) - size)
        wrong = good[:begin] + bytes(size) + good[begin + size :]
        if wrong != good:
            return wrong


def refusal(path: Path, whole: dict[str, Any]) -> str:
    """Why a checkpoint is not read; "" if it is. Raises AssertionError if its content differs from
    ``whole``.
    """
    try:
        content = checkpoint.read(path)
    except InputError as error:
        return str(error)
    assert states.digest(content) == states.digest(whole)
    assert content["meta"] == whole["meta"]
    return ""


@pytest.mark.parametrize(
    ("damage", "count"),
    [
        pytest.param(flipped, 300, marks=pytest.mark.fault(28)),
        pytest.param(zeroed, 100, marks=pytest.mark.fault(28)),
        pytest.param(cut, 300, marks=pytest.mark.fault(27)),
    ],
)
def test_a_damaged_checkpoint_is_refused_or_its_content_is_unchanged(
    made: Path, tmp_path: Path, damage: Callable[[bytes, random.Random], bytes], count: int
) -> None:
    """The archive has bytes between its parts that nothing reads."""
    path = checkpoint.candidates(made / "checkpoints")[0]
    good = path.read_bytes()
    whole = checkpoint.read(path)
    draw = random.Random(11)
    refused = 0
    path = tmp_path / "step-00000010.pt"
    for number in range(count):
        path.write_bytes(damage(good, draw))
        said = refusal(path, whole)
        if said:
            assert said.startswith(f"checkpoint {path}: "), number
            assert "\n" not in said
            refused += 1
    assert refused >= (count if damage is cut else count // 2), refused


@pytest.mark.fault(27, 28)
def test_a_run_resumes_from_the_newest_valid_checkpoint_and_needs_one(
    start: Start, made: Path, tmp_path: Path
) -> None:
    run_dir = shutil.copytree(made, tmp_path / "run")
    newest, older, oldest = checkpoint.candidates(run_dir / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:-5000])
    good = bytearray(older.read_bytes())
    good[len(good) // 2] ^= 1
    older.write_bytes(good)
    whole = oldest.read_bytes()
    oldest.write_bytes(b"")
    kept = [path for path in run_dir.rglob("*") if path.is_file() and path.suffix != ".log"]
    before = {path: path.read_bytes() for path in kept}
    refused = helpers.finish(start(run_dir, "max_steps=12", ranks=0)).expect(2)
    lines = [line for line in refused.lines if line.startswith("broken: ")]
    [line] = [line for line in lines if " rank on " not in line]
    assert "no checkpoint can be read" in line
    assert "to start from step 0, move the checkpoints to another folder" in line
    assert "Traceback" not in refused.out
    assert {path: path.read_bytes() for path in before} == before
    oldest.write_bytes(whole)
    ended = helpers.finish(start(run_dir, "max_steps=12", ranks=0)).expect(0)
    for path in (newest, older):
        [line] = [line for line in ended.lines if f"{path.name}: is damaged" in line]
        assert "using the previous" in line
    assert f"resumed from {oldest}, step 4" in ended.lines


# Killed over a save.


@pytest.mark.fault(29)
def test_after_a_kill_at_any_write_of_a_save_the_old_or_new_checkpoint_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is copied before and after each call that changes it, as a kill at that moment
    would leave it.
    """
    folder = tmp_path / "checkpoints"
    points = []
    copies = tmp_path / "copies"
    folder.mkdir()
    content = {**EMPTY, "model": {"w": torch.ones(9)}}
    checkpoint.write(folder, {**content, "meta": {"step": 1, "config": {}}})

    def copy_at(call: str) -> None:
        copy = shutil.copytree(folder, copies / f"{len(points):04d}")
        for part in copy.glob(".*") if call == "fsync" else ():  # a file that is being written
            os.truncate(part, part.stat().st_size // 2)
        points.append(call)

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            copy_at(name)
            result = real(*arguments, **options)
            copy_at(f"after {name}")
            return result

        return call

    with monkeypatch.context() as patch:
        for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink")):
            patch.setattr(owner, name, watched(name, getattr(owner, name)))
        saver = checkpoint.Saver(folder, folder, lambda path, step: copy_at("saved"), keep=1)
        saver.save({**content, "meta": {"step": 2, "config": {}}}, best=True)
        saver.wait()

    # the file, then its name
    whole = [f"{when}{call}" for call in ("fsync", "replace", "fsync") for when in ("", "after ")]
    assert points == [*whole, *whole, *whole, "saved", "unlink", "after unlink"]
    newest: list[int] = []
    for number in range(len(points)):
        copy = copies / f"{number:04d}"
        steps = [checkpoint.read(path)["meta"]["step"] for path in checkpoint.candidates(copy)]
        latest = checkpoint.named(copy, "latest")
        assert int(latest[5:13]) in steps, points[number]
        newest.append(max(steps))
        best = checkpoint.named(copy, "best")
        assert latest in ("step-00000001.pt", best), points[number]
        files.remove_temporary(copy)  # as the next attempt does
        assert not list(copy.glob(".*")), points[number]
    assert newest == sorted(newest)
    renamed = points.index("after replace")
    assert newest[renamed - 1] == 1
    assert newest[renamed] == 2
    assert sorted(path.name for path in folder.iterdir()) == ["best", "latest", "step-00000002.pt"]


@pytest.mark.fault(29)
@pytest.mark.parametrize("after", ["rows of rank 1", "file of rank 0"])
def test_after_a_kill_between_the_files_of_several_ranks_the_old_or_new_checkpoint_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """strategy=fsdp: the same attempt saves the same step again, or a later attempt does with
    another number of ranks.
    """

    def taken_apart(content: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        numbered = {"w": {sharding.NUMBER: 0}}
        return {**content, "model": numbered}, [content["model"]["w"]]

    monkeypatch.setattr(sharding, "taken_apart", taken_apart)
    content = {**EMPTY, "meta": {"step": 2, "config": {}}}

    def save(checkpoint_id: int, ranks: int, files_written: int) -> None:
        for number in [*range(1, ranks), 0][:files_written]:
            w = torch.full((6 // ranks,), float(10 * checkpoint_id + number))
            place = {"number": number, "count": ranks}
            saver = checkpoint.Saver(tmp_path, tmp_path, lambda path, step: None, 1, **place)
            saver.save({**content, "model": {"w": w}}, checkpoint_id=str(checkpoint_id))
            saver.wait()

    save(0, 2, 2)
    save(2, 2, 1)
    save(1, 3, 1 if after == "rows of rank 1" else 3)
    (path,) = checkpoint.candidates(tmp_path)
    w = sharding.whole(checkpoint.read(path))["model"]["w"].tolist()
    old = [0, 0, 0, 1, 1, 1]
    new = [10, 10, 11, 11, 12, 12]
    assert w == (old if after == "rows of rank 1" else new)
    content["meta"] = {"step": 3, "config": {}}
    save(1, 3, 3)
    names = {path.name for path in tmp_path.glob("step-*")}
    rows = {f"step-00000003.1-{number}of3.rows" for number in (1, 2)}
    assert names == {"step-00000003.pt", *rows}


# Room and rights.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 13 MB: two large checkpoints and not three."""
    with helpers.small_disk(tmp_path / "disk", "13m") as folder:
        yield folder


@pytest.mark.fault(30)
def test_a_full_disk_is_reported_and_the_last_checkpoint_stays(start: Start, disk: Path) -> None:
    run_dir = disk / "run"
    ended = helpers.finish(start(run_dir, *LARGE, "max_steps=40", ranks=0)).expect(3)
    line = re.compile(r"broken: .* cannot be written \(No space left on device")
    said = list(filter(line.match, ended.lines))
    assert len(said) == 1, ended.out
    assert str(run_dir) in said[0]
    # what it takes, and what there is
    assert len(re.findall(r"\d[\d.,]* ?[KMG]i?B", said[0])) >= 2, said
    assert "Traceback" not in ended.out
    status = helpers.read(run_dir, "status")
    assert status["state"] == "failed"
    assert status["exit_status"] == 3
    assert conftest.newest(run_dir).name == "step-00000010.pt"
    names = sorted(path.name for path in (run_dir / "checkpoints").glob("[!.]*"))
    assert names == ["latest", "step-00000005.pt", "step-00000010.pt"]
    (run_dir / "checkpoints" / "step-00000005.pt").unlink()  # room
    again = helpers.finish(start(run_dir, *LARGE, "max_steps=12", ranks=0)).expect(0)
    assert f"resumed from {run_dir}/checkpoints/step-00000010.pt, step 10" in again.lines


# The recipe without root's right to write everywhere: all its capabilities are dropped.
UNPRIVILEGED = """
import ctypes, os
from recipes import broken
from recipes.core.run import entry
from recipes.core.train import session
START = entry.begin("broken")
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
none = (ctypes.c_uint32 * 6)()
if os.geteuid() == 0:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capset(header, none) == 0, ctypes.get_errno()
session.run(broken.main, START)
"""


@pytest.mark.fault(31)
@pytest.mark.parametrize("there", [False, True])
def test_an_unwritable_run_directory_fails_before_training(
    made: Path, tmp_path: Path, there: bool
) -> None:
    """A new run directory in a read-only folder, and a run directory that is itself read-only."""
    run_dir = tmp_path / "closed" / "run"
    run_dir.parent.mkdir()
    if there:
        shutil.copytree(made, run_dir)
    closed = [path for path in (run_dir.parent, *run_dir.parent.rglob("*")) if path.is_dir()]
    for folder in closed:
        folder.chmod(0o500)
    command = [
        sys.executable,
        "-c",
        UNPRIVILEGED,
        "device=cpu",
        "max_steps=20",
        "cpu_threads=1",
        f"run_dir={run_dir}",
    ]
    try:
        ranks = [helpers.finish(rank) for rank in helpers.fork_ranks(command, 2)]
    finally:
        for folder in closed:
            folder.chmod(0o700)
    lines = []
    for rank in ranks:
        rank.expect(3)
        assert "Traceback" not in rank.out
        assert "step 1" not in rank.out
        lines += [line for line in rank.lines if line.startswith("broken: ")]
    [line] = set(lines)  # the same from both ranks
    assert f"run_dir={str(run_dir)!r}: cannot be written (Permission denied)" in line
    assert "give another run_dir" in line
    assert run_dir.exists() == there
    if there:
        assert conftest.newest(run_dir).name == "step-00000010.pt"


# Who sees what.


def behind(marks: Path, rank: int, hidden: str, seconds: int) -> dict[str, str]:
    """A rank that does not see some files for a while."""
    return {
        "FAULT": "blind",
        "FAULT_AT": "start",
        "FAULT_RANK": str(rank),
        "FAULT_DIR": str(marks),
        "FAULT_HIDE": hidden,
        "FAULT_S": str(seconds),
    }


@pytest.mark.fault(32)
@pytest.mark.parametrize(
    ("rank", "hidden", "seconds", "step"),
    [(1, "step-*.pt", 3, 10), (0, "step-00000010.pt", 3600, 8)],
    ids=["rank 1 sees none yet", "rank 0 does not see the newest"],
)
def test_ranks_that_see_different_files_resume_from_one_checkpoint(
    start: Start, made: Path, tmp_path: Path, rank: int, hidden: str, seconds: int, step: int
) -> None:
    """Rank 0 decides."""
    run_dir = shutil.copytree(made, tmp_path / "run")
    environ = behind(tmp_path, rank, hidden, seconds)
    launcher = start(run_dir, "max_steps=14", "checkpoint_every_steps=4", **environ)
    ended = helpers.finish(launcher).expect(0)
    assert (tmp_path / f"reached.{rank}").exists()
    assert f"resumed from {run_dir}/checkpoints/step-{step:08d}.pt, step {step}" in ended.lines
    assert conftest.steps(run_dir, 1) == list(range(step + 1, 15))


@pytest.mark.fault(33)
def test_a_checkpoint_of_another_model_is_refused_and_kept(
    start: Start, made: Path, tmp_path: Path
) -> None:
    run_dir = shutil.copytree(made, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (run_dir / "checkpoints").iterdir()}
    ended = helpers.finish(start(run_dir, "max_steps=20", FAULT="another_model")).expect(2)
    # Rank 1 says it too where it has not seen in time that rank 0 does.
    lines = {line for line in ended.lines if line.startswith(("broken: ", "launch.py: "))}
    [line] = [line for line in lines if "checkpoint" in line]
    assert "belongs to another model" in line
    assert "size mismatch for 0.weight" in line
    assert "Traceback" not in ended.out
    assert {path.name: path.read_bytes() for path in (run_dir / "checkpoints").iterdir()} == before
    assert len(helpers.rows(run_dir)) == len(helpers.rows(made))


@pytest.mark.fault(33)
def test_a_checkpoint_of_another_recipe_is_refused(
    start: Start, made: Path, tmp_path: Path
) -> None:
    there = shutil.copy(made / "checkpoints/step-00000010.pt", tmp_path)
    words = ("recipe=mnist", "dataset=digits", "max_steps=2", f"resume={there}")
    ended = helpers.finish(start(tmp_path / "run", *words, ranks=1)).expect(2)
    [line] = [line for line in ended.lines if line.startswith("mnist: checkpoint")]
    assert line == f"mnist: checkpoint {there}: is of recipe broken, not mnist: use that recipe"
