"""``launch.py check`` reports the errors of a job before it is submitted, in the words of the run,
and leaves no files.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from recipes.core import files
from recipes.core.errors import MachineError
from recipes.core.launch import checks
from recipes.core.run import command_line
from recipes.core.run.dryrun import Found
from tests import helpers
from tests.helpers import ROOT, Ended
from tests.slurm.jobs import copy_repository

HERE = ("launcher=local", "device=cpu")
DIGITS = ("recipe=mnist", "dataset=digits", *HERE)


def check(
    *words: str, repo: Path = ROOT, cwd: Path = ROOT, before: tuple[str, ...] = (), **environ: str
) -> Ended:
    """Runs ``launch.py check words``, and checks its last line and that there is no traceback."""
    argv = [*before, sys.executable, str(repo / "launch.py"), "check", *words]
    ended = helpers.run(argv, cwd=cwd, environ=helpers.clean_environment(**environ))
    assert ended.lines[-1] == "nothing was submitted", ended.out
    assert "Traceback" not in ended.out
    return ended


def parts(ended: Ended) -> dict[str, str]:
    """The result of each part, by its name."""
    lines = [line for line in ended.lines[:-1] if not line.startswith("keys from the run ")]
    matches = [re.fullmatch(r"(\w+): +(.+)", line) for line in lines]
    assert all(matches), ended.out
    return {match[1]: match[2] for match in matches if match}


def everything(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """The mode, time and content of everything in a folder."""

    def content(path: Path) -> bytes:
        if path.is_symlink():
            return os.readlink(path).encode()
        return path.read_bytes() if path.is_file() else b""

    return {
        str(p): (p.lstat().st_mode, p.lstat().st_mtime_ns, content(p))
        for p in [folder, *folder.rglob("*")]
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run with two ranks, three steps and two checkpoints."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    words = ("ranks_per_node=2", "max_steps=3", "keep_every_steps=2", f"run_dir={run_dir}")
    helpers.run_fork([*helpers.LOCAL, *words]).expect(0)
    names = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert names == ["step-00000002.pt", "step-00000003.pt"]
    return run_dir


# --- valid jobs


def test_check_of_a_valid_job_leaves_nothing_behind(trained: Path, tmp_path: Path) -> None:
    repo = copy_repository(tmp_path / "clone")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    before = everything(repo), everything(trained)
    words = (*DIGITS, "ranks_per_node=2", f"run_dir={trained}", "max_steps=4", "compile=true")
    ended = check(*words, repo=repo, TMPDIR=str(temporary), PYTHONDONTWRITEBYTECODE="1").expect(0)
    said = parts(ended)
    assert list(said) == ["keys", "recipe", "disk"]
    assert said["keys"] == "ok: mnist, 2 ranks"
    assert re.fullmatch(
        r"ok: 1,43\d training samples, [\d,]+ parameters \(3\.9 MB per rank, with gradients "
        r"and optimiser state\), "
        r"continues from step 3",
        said["recipe"],
    )
    disk = rf"ok: 3 checkpoints of up to [\d.]+ MB, [\d.]+ [MG]B free in {trained}/checkpoints"
    assert re.fullmatch(disk, said["disk"])
    assert (everything(repo), everything(trained)) == before
    assert list(temporary.iterdir()) == []


def test_a_recipe_without_checkpoints(tmp_path: Path) -> None:
    words = ("recipe=doctor", *HERE, "ranks_per_node=2", f"run_dir={tmp_path}/run")
    said = parts(check(*words).expect(0))
    assert said["recipe"] == "ok: nothing to train, and no checkpoints"
    assert said["disk"].endswith(f"free in {tmp_path}")
    assert list(tmp_path.iterdir()) == []


# --- errors


def test_a_batch_too_small_for_the_jobs_ranks_is_reported(tmp_path: Path) -> None:
    """The dry run itself has one rank."""
    words = ("recipe=cifar", "dataset=fake", "ranks_per_node=300", "global_batch_size=256")
    ended = check(*words, *HERE, f"run_dir={tmp_path}/run").expect(2)
    assert "needs 300, one for each rank; give at least " in parts(ended)["recipe"]


@pytest.mark.long
def test_a_recipe_that_fails_or_never_begins_is_reported(tmp_path: Path) -> None:
    repo = copy_repository(tmp_path / "clone")
    text = (repo / "recipes/toy.py").read_text().replace("toy", "mine")
    shutil.copy(repo / "recipes/conf/toy.py", repo / "recipes/conf/mine.py")
    for old, new, wanted in (
        (
            "    net = make_net()",
            "    net = make_nett()",
            "mine: NameError: name 'make_nett' is not defined (recipes/mine.py, line LINE)",
        ),
        (
            "    world = run.world\n",
            "    return {}\n",
            "mine: ended before it called loop.steps() or run.start()",
        ),
    ):
        assert old in text
        (repo / "recipes/mine.py").write_text(text.replace(old, new))
        ended = check("recipe=mine", *HERE, repo=repo).expect(1)
        result = parts(ended)["recipe"]
        assert result.startswith("failed: mine: ")
        line = text[: text.index(old)].count("\n") + 1
        assert result.endswith(wanted.replace("LINE", str(line)))


# --- the disk


def test_number_of_checkpoints_that_need_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda folder: 8_388_608)
    two, five, little = (Found(1, 1, 8_300_000 // count) for count in (2, 5, 1000))
    run_dir = tmp_path / "run"
    space = checks.disk_space(run_dir, 3, five)
    assert space == f"5 checkpoints of up to 1.7 MB, 8.4 MB free in {tmp_path}"
    kept = f"all checkpoints are kept, up to 4.2 MB each; 8.4 MB free in {tmp_path}"
    assert checks.disk_space(run_dir, 0, two) == kept
    for keep, size in ((4, five), (1, two), (0, Found(1, 1, 8_300_000))):
        with pytest.raises(MachineError, match=f"run_dir={run_dir}: {keep + 2} checkpoints of "):
            checks.disk_space(run_dir, keep, size)
    (run_dir / "checkpoints").mkdir(parents=True)
    for step in (1, 2, 3):  # which the run will remove
        (run_dir / f"checkpoints/step-{step:08d}.pt").touch()
    assert checks.disk_space(run_dir, 2, two).startswith("2 checkpoints of ")
    monkeypatch.setattr(files, "free_bytes", lambda folder: 88_608)
    assert checks.disk_space(run_dir, 3, little).startswith("2 checkpoints of ")
    assert " free in " in checks.disk_space(run_dir, 3, None)


def test_a_read_only_folder_is_reported(tmp_path: Path) -> None:
    """root must give up its right to write everywhere."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    before: tuple[str, ...] = ()
    if os.geteuid() == 0:
        before = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    ended = check("recipe=doctor", *HERE, f"run_dir={closed}/run", before=before).expect(3)
    line = f"run_dir={closed}/run: {closed} cannot be written: give another run_dir"
    assert parts(ended)["disk"] == f"failed: {line}"
    (tmp_path / "file").touch()
    line = f"{tmp_path}/file is not a folder: give another run_dir"
    with pytest.raises(MachineError, match=line):
        checks.disk_space(tmp_path / "file/run", 3, None)


# --- the end of check


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "launch.py"), "check", *DIGITS]
    process = helpers.start(argv, environ=helpers.clean_environment(TMPDIR=str(tmp_path)))
    helpers.wait_until(
        lambda: list(tmp_path.glob("recipes-check-*/run/logs/rank0.log")),
        helpers.START_S,
        "the recipe runs",
    )
    [started] = helpers.children(process.pid)
    process.send_signal(signal.SIGINT)
    ended = helpers.finish(process, 20).expect(130)
    assert ended.lines[-1] == "nothing was submitted"
    assert "Traceback" not in ended.out
    helpers.wait_until(lambda: not helpers.alive(started), 10, "the recipe has ended")
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_takes_too_long_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = copy_repository(tmp_path / "clone")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (repo / "recipes/toy.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    settings = command_line.parse(["recipe=toy"], environ={})
    before = helpers.children(os.getpid())
    line = r"toy: did not reach its first step on this machine within 0\.5 s"
    with pytest.raises(MachineError, match=line):
        checks.start(settings, tmp_path / "run", 1, repo, timeout_s=0.5)
    assert helpers.children(os.getpid()) == before
    assert list(temporary.iterdir()) == []
