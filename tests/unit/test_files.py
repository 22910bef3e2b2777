"""Atomic writes, the umask, and one-line messages: recipes/core/files.py and errors.py."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.core import errors, files
from recipes.core.errors import DiskFull, MachineError


def test_a_failed_write_json_keeps_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    files.write_json(path, {"a": 1})

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(OSError, match="No space"):
                files.write_json(path, {"b": 2})
        assert files.read_json(path) == {"a": 1}, name
        assert os.listdir(tmp_path) == ["x.json"], name
    with pytest.raises(TypeError):
        files.write_json(path, {"b": object()})
    assert files.read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_write_json_flushes_before_it_replaces_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    files.write_json(tmp_path / "x.json", {"a": 1})

    def noted(name: str) -> Callable[..., None]:
        real = getattr(os, name)

        def call(*arguments: Any) -> None:
            done.append(name)
            real(*arguments)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name))
    files.write_json(tmp_path / "x.json", {"b": "ü"})
    assert files.read_json(tmp_path / "x.json") == {"b": "ü"}
    assert os.listdir(tmp_path) == ["x.json"]
    assert done == ["fsync", "replace", "fsync"]  # the file, then its name


def test_a_file_system_may_be_unable_to_flush_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    number = errno.EINVAL

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, "a folder")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_json(tmp_path / "x.json", {"a": 1})
    assert files.read_json(tmp_path / "x.json") == {"a": 1}
    number = errno.EIO
    with pytest.raises(OSError, match="a folder"):
        files.write_json(tmp_path / "x.json", {"a": 2})


def test_only_temporary_files_are_removed(tmp_path: Path) -> None:
    for name in (".x.json.node1.12.0123abcd", ".x.json", "x.12.0123abcd"):
        (tmp_path / name).touch()
    files.remove_temporary(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".x.json", "x.12.0123abcd"]


def test_limits_of_what_is_read_and_shown(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1234")
    assert files.read_bounded(tmp_path / "x", 4) == b"1234"
    with pytest.raises(ValueError, match="larger than 3 bytes"):
        files.read_bounded(tmp_path / "x", 3)
    assert [errors.shown("x" * size, 5) for size in (5, 6)] == ["xxxxx", "xxxx…"]
    sizes = [files.size_text(size) for size in (99_940, 100_000, 9_999_900_000, 10_000_000_000)]
    assert sizes == ["99.9 kB", "0.1 MB", "9999.9 MB", "10.0 GB"]


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "none/out.csv"
    with pytest.raises(FileNotFoundError, match=f"'{path}'$"):
        files.write_bytes(path, b"")


def test_a_closed_pipe_is_no_error_of_a_folder() -> None:
    """The reader of stdout has closed it: `errors.status_of` ends the command without a line."""
    with pytest.raises(BrokenPipeError), files.writing_to(Path("/d"), "data_dir"):
        raise BrokenPipeError


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES])
def test_a_full_disk_or_quota_is_told_from_other_errors(number: int) -> None:
    with pytest.raises(MachineError) as caught, files.writing_to(Path("/d"), "run_dir"):
        raise OSError(number, "x")
    fix = "give another run_dir="
    if number != errno.EACCES:
        fix = f"free some space there, or {fix}"
    assert str(caught.value) == f"run_dir='/d': cannot be written (x): {fix}"
    assert isinstance(caught.value, DiskFull) == (number != errno.EACCES)


@pytest.mark.parametrize(
    "text", ["a\nb", "a\r\n\tb", "a\u2028b", "a\x85b", "a\x1b[31mb", "é ü", "", "x" * 5000]
)
def test_an_error_is_shown_in_one_printable_line(text: str) -> None:
    line = errors.one_line(ValueError(text))
    assert line.startswith("ValueError")
    assert len(line.splitlines()) == 1
    assert len(line) <= 300
    assert line.isprintable()
