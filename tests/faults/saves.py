"""Watches the operations on files of a save, for test_checkpoints.py."""

import builtins
import os
import pathlib
from collections.abc import Callable
from typing import Any

PATHLIB_OS = getattr(pathlib, "_normal_accessor", os)  # what Path calls: functions of its own in Python 3.10


def watched(call: Callable[[str], None]) -> None:
    """Calls ``call`` at each operation on files in checkpoints/: before and within each write, before and after the others."""
    real_open, fsync, unlink = builtins.open, os.fsync, os.unlink

    def is_ours(path: Any) -> bool:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        return "checkpoints" in os.fspath(path).split("/")

    class Written:
        """A file whose writes come in pieces."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> "Written":
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

        def write(self, data: Any) -> int:
            view = memoryview(data).cast("B")
            call("write")
            self._file.write(view[: len(view) // 2])
            self._file.flush()
            call("half written")
            self._file.write(view[len(view) // 2 :])
            return len(view)

    def opened(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        writes = not isinstance(path, int) and set(mode) & set("wxa") and "b" in mode and is_ours(path)
        if writes:
            call("open")
        file = real_open(path, mode, *args, **options)
        return Written(file) if writes else file

    def flushed(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if not is_ours(number):
            return fsync(number)
        call("fsync")
        fsync(number)
        call("after fsync")

    def moved(move: Any) -> Any:
        def replaced(source: Any, target: Any, **options: Any) -> None:
            if is_ours(target):
                call("rename")
            move(source, target, **options)
            if is_ours(target):
                call("after rename")

        return replaced

    def removed(path: Any, **options: Any) -> None:
        if is_ours(path):
            call("unlink")
        unlink(path, **options)

    builtins.open, os.fsync, os.unlink = opened, flushed, removed  # type: ignore[assignment]
    if PATHLIB_OS is not os:
        PATHLIB_OS.unlink = removed
    for name in ("replace", "rename", "link"):
        setattr(os, name, moved(getattr(os, name)))
