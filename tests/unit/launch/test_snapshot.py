"""Snapshots of the code: their content, when one is made, and errors."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.core.errors import MachineError
from recipes.core.launch import snapshot
from recipes.core.run import directory, source


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of one recipe, with other files that are not code."""
    files = {
        "recipes/toy.py": "1",
        "recipes/core/x.py": "2",
        "recipes/words.txt": "3",
        "env/common.env": "A=1",
        "env/clusters/a.yaml": "",
        "launch.py": "4",
        "mine/net.py": "5",
        "mine/kernel.cu": "6",
        "empty/notes.txt": "",
        "tests/test_x.py": "",
        "runs/toy/1/x.py": "",
        "runs/plot.py": "",
        "data/x.py": "",
        "build/lib/x.py": "",
        "build/x.py": "",
        "recipes/__pycache__/toy.pyc": "",
        "recipes/.toy.py.swp": "",
        ".venv/x.py": "",
        "toy-12.out": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_script_in_the_code_can_be_executed(root: Path) -> None:
    """Such as the scontrol that programs find."""
    (root / "recipes/tool").write_text("#!/bin/sh\n")
    copy = snapshot.take(root)
    can_be = [os.access(copy / name, os.X_OK) for name in ("recipes/tool", "launch.py")]
    assert can_be == [True, False]


CODE = {
    "recipes/toy.py",
    "recipes/core/x.py",
    "recipes/words.txt",
    "env/common.env",
    "env/clusters/a.yaml",
    "launch.py",
    "mine/net.py",
    "mine/kernel.cu",
}


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def run_git(root: Path, *words: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.check_output(["git", *named, *words], cwd=root, text=True).strip()


def test_a_snapshot_has_the_code_and_nothing_else(root: Path) -> None:
    copy = snapshot.take(root)
    assert copy.parent == root / "runs" / "code"
    assert contents(copy) == CODE | {"snapshot.json", "code.diff"}
    assert source.home(copy) == root
    assert directory.choose("", "toy", "7", copy) == root / "runs" / "toy" / "7"
    assert (root / "runs/code").stat().st_mode & 0o777 == 0o700


def test_equal_code_shares_a_snapshot(root: Path) -> None:
    first = snapshot.take(root)
    (root / "recipes/__pycache__/other.pyc").write_text("x")
    (root / "toy-13.out").write_text("x")
    assert snapshot.take(root) == first
    (root / "recipes/toy.py").write_text("other")
    second = snapshot.take(root)
    assert second != first
    assert (first / "recipes/toy.py").read_text() == "1"
    assert (second / "recipes/toy.py").read_text() == "other"
    assert {path.name for path in (root / "runs/code").iterdir()} == {first.name, second.name}
    for copy in (second, second.with_name(f"{second.name}-")):
        (copy / "recipes/toy.py").unlink()  # by a purge of old files
        assert contents(snapshot.take(root)) == contents(first)
    for name in ("a", "b"):  # a job of two steps
        assert not snapshot.was_begun(root, "7", root / name)
        snapshot.keep_for(first, "7", root / name)
    for name in ("a", "b"):
        assert snapshot.was_begun(root, "7", root / name)


def plant_nothing(copy: Path) -> None:
    pass


def plant_content(copy: Path) -> None:
    (copy / "recipes/toy.py").write_text("theirs")


def plant_module(copy: Path) -> None:
    (copy / "torch.py").write_text("theirs")


def plant_folder(copy: Path) -> None:
    (copy / "torch").symlink_to(copy / "recipes")


def plant_compiled(copy: Path) -> None:
    (copy / "recipes/__pycache__").mkdir()
    (copy / "recipes/__pycache__/toy.cpython-311.pyc").write_text("theirs")


def plant_copy(copy: Path) -> None:
    """Also if its owner was not careful with the name, which others may then know."""
    copy.rename(copy.with_name("other"))
    shutil.copytree(copy.with_name("other"), copy)


@pytest.mark.parametrize(
    ("plant", "is_shared"),
    [
        (plant_nothing, True),
        (plant_compiled, True),
        (plant_content, False),
        (plant_module, False),
        (plant_folder, False),
        (plant_copy, False),
    ],
)
def test_a_snapshot_that_was_copied_or_changed_is_not_used(
    root: Path, plant: Callable[[Path], None], is_shared: bool
) -> None:
    """Such as with the folder runs/ of another user."""
    first = snapshot.take(root)
    plant(first)
    copy = snapshot.take(root)
    assert (copy == first) == is_shared
    assert contents(copy) == CODE | {"snapshot.json", "code.diff"}
    assert (copy / "recipes/toy.py").read_text() == "1"


def test_other_users_do_not_know_the_name_of_a_snapshot(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could otherwise put code into a folder runs/ for others to copy."""
    first = snapshot.take(root)
    for home in ("other", "other", "missing/home"):
        (root / "other").mkdir(exist_ok=True)
        monkeypatch.setenv("HOME", str(root / home))
        copy = snapshot.take(root)
        assert copy != first


def test_a_snapshot_has_its_commit_and_a_difference_that_git_applies(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = source.stamp(snapshot.take(root))
    assert (stamp["root"], stamp["commit"]) == (str(root), None)
    (root / ".gitignore").write_text("runs/\nignored.py\n")
    run_git(root, "init", "--quiet")
    for number in "12":
        (root / "recipes/core/x.py").write_text(number)
        run_git(root, "add", ".")
        run_git(root, "commit", "--quiet", "--message=all")
    head = run_git(root, "rev-parse", "HEAD")
    clean = snapshot.take(root)
    assert source.commit(clean) == head
    assert source.difference(clean) == b""
    run_git(root, "commit", "--quiet", "--allow-empty", "--message=the same code")
    head = run_git(root, "rev-parse", "HEAD")
    assert source.commit(snapshot.take(root)) == head
    new = {"recipes/new.py": b"mine\n", "mine/körper 1.py": bytes(range(256)), "mine/empty.py": b""}
    others = ("recipes/ignored.py", "toy-13.out", "data/y.py", "recipes/token.txt")
    for name, content in {**new, **dict.fromkeys(others, b"secret")}.items():
        (root / name).write_bytes(content)
    (root / "recipes/toy.py").write_text("changed\n")
    run_git(root, "add", "recipes/toy.py", "recipes/new.py")
    diff = source.difference(root)
    copy = snapshot.take(root)
    assert source.commit(copy) == f"{head}-dirty"
    assert source.difference(copy) == diff
    clone = tmp_path_factory.mktemp("clone")
    run_git(root, "clone", "--quiet", str(root), str(clone))
    subprocess.run(["git", "apply", "-"], cwd=clone, input=diff, check=True)
    assert {name: (clone / name).read_bytes() for name in new} == new
    assert (clone / "recipes/toy.py").read_text() == "changed\n"
    assert len(run_git(clone, "status", "--short", "-uall").splitlines()) == 1 + len(new)
    monkeypatch.setattr(source, "MAX_DIFF_BYTES", len(diff))
    (root / "recipes/weights.bin").write_bytes(os.urandom(2 * len(diff)))
    assert source.difference(root) == diff
    monkeypatch.setattr(source, "MAX_DIFF_BYTES", len(diff) - 1)
    assert source.difference(root) == b"# the difference is too large to be kept here\n"


def test_every_folder_that_python_imports_is_copied(root: Path) -> None:
    added = {"src/mine/__init__.py", "src/mine/deep/net.py"}
    for name in (*added, "notes/a.txt", "elsewhere/x/y.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    (root / "mine/linked").symlink_to(root / "elsewhere/x")
    (root / "recipes/linked.py").symlink_to(root / "toy-12.out")
    (root / "recipes/gone.py").symlink_to(root / "nothing")
    os.mkfifo(root / "recipes" / "pipe")
    copy = snapshot.take(root)
    assert contents(copy) == CODE | added | {
        "recipes/linked.py",
        "mine/linked/y.py",
        "snapshot.json",
        "code.diff",
    }
    assert not (copy / "recipes/linked.py").is_symlink()


def test_too_much_code_is_reported_with_the_largest_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MAX_BYTES", 1 << 20)
    (root / "recipes/weights.bin").write_bytes(b"0" * (1 << 20))
    with pytest.raises(
        MachineError, match=r"code exceeds 1 MiB, .*largest file: .*weights\.bin\).*snapshot=false"
    ):
        snapshot.take(root)
    assert not (root / "runs/code").exists()


def test_an_incomplete_snapshot_is_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(MachineError, match=r"cannot be made \(No space left on device\)"):
        snapshot.take(root)
    assert list((root / "runs/code").iterdir()) == []
