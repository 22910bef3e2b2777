"""Saves checkpoints and is killed over it: ``python saves.py REPOSITORY FOLDER points|moments KILLS``, for test_checkpoints.py.

torch is imported once; each attempt is a fork that runs the recipe broken from its keys to its exit status, as any rank does.

points: one attempt after another is killed at the first, second, … of all that a save asks of the disk, until one is not.
Each has a run directory of its own, FOLDER/<n>, which holds the checkpoint of step 1 already where it begins. moments: one run
directory whose attempts save at each step, and are killed at a random moment. Both print a JSON line for each attempt.
"""

import builtins
import importlib
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

MODULE = "recipes.broken"
PATHLIB_OS = getattr(pathlib, "_normal_accessor", os)  # what Path calls: functions of its own in Python 3.10
EVERY_WRITE = 100  # of a checkpoint's many small ones; test_checkpoints.py looks at each of them, without a kill


def attempt(run_dir: Path, *words: str, first: Callable[[], None] | None = None) -> int:
    """Starts an attempt in a fork of this process, and gives its process id."""
    pid = os.fork()
    if pid == 0:
        become(run_dir, words, first)
    return pid


def become(run_dir: Path, words: tuple[str, ...], first: Callable[[], None] | None) -> NoReturn:
    code = 99
    try:
        from recipes.core.run import entry
        from recipes.core.train import session

        out = os.open(run_dir.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        keys = ("device=cpu", "cpu_threads=1", "pace_s=0", "checkpoint_every_steps=1", f"run_dir={run_dir}")
        start = entry.begin("broken", [*keys, *words])
        if first:
            first()
        session.run(sys.modules[MODULE].main, start)
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def watched(call: Callable[[str], None], every_write: int = EVERY_WRITE) -> None:
    """Calls ``call`` at each operation on files in checkpoints/: before and within each write, before and after the others.

    every_write: which writes of a file: 1 for all; 100 for the first, the 101st and so on.
    """
    real_open, fsync, unlink = builtins.open, os.fsync, os.unlink

    def is_ours(path: Any) -> bool:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        return "checkpoints" in os.fspath(path).split("/")

    class Written:
        """A file whose writes come in pieces."""

        def __init__(self, file: Any) -> None:
            self._file, self._writes = file, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> "Written":
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

        def write(self, data: Any) -> int:
            view = memoryview(data).cast("B")
            self._writes += 1
            if (self._writes - 1) % every_write == 0:
                call("write")
                self._file.write(view[: len(view) // 2])
                self._file.flush()
                call("half written")
                self._file.write(view[len(view) // 2 :])
            else:
                self._file.write(view)
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


def points(folder: Path) -> None:
    """keep_checkpoints=1: a save removes the one before it, which is a point too."""
    assert ended(attempt(folder / "first", "max_steps=1")) == 0
    number = 0
    while True:
        number += 1
        run_dir = Path(shutil.copytree(folder / "first", folder / f"{number:03d}"))
        at: list[str] = []
        report, told = os.pipe()

        def call(what: str, number: int = number, at: list[str] = at, told: int = told) -> None:
            at.append(what)
            if len(at) == number:
                os.write(told, what.encode())
                os.kill(os.getpid(), signal.SIGKILL)

        code = ended(attempt(run_dir, "max_steps=3", "keep_checkpoints=1", first=lambda call=call: watched(call)))
        os.close(told)
        with os.fdopen(report) as text:
            print(json.dumps({"run_dir": str(run_dir), "status": code, "at": text.read()}), flush=True)
        if code != -signal.SIGKILL:
            return


def moments(folder: Path, kills: int) -> None:
    draw, run_dir = random.Random(5), folder / "run"
    for _ in range(kills):
        before = sorted((run_dir / "checkpoints").glob("step-*"))
        pid = attempt(run_dir, "max_steps=1000000", "epochs=1000000", "width=20000")
        deadline = time.monotonic() + 60
        while sorted((run_dir / "checkpoints").glob("step-*")) == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.15)
        os.kill(pid, signal.SIGKILL)
        print(json.dumps({"run_dir": str(run_dir), "status": ended(pid), "at": "any moment"}), flush=True)
        sys.stdin.readline()  # until this one was looked at


if __name__ == "__main__":
    sys.path[0] = sys.argv[1]
    import torch
    import torch._dynamo  # the first optimiser would import it, in each fork

    torch.set_num_threads(1)  # or a fork would lack the threads that it believes to have
    importlib.import_module(MODULE)
    if sys.argv[3] == "points":
        points(Path(sys.argv[2]))
    else:
        moments(Path(sys.argv[2]), int(sys.argv[4]))
