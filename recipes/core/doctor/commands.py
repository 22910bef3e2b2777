"""Runs commands that may hang, each in a process of its own and for a limited time."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from recipes.core.files import ROOT


REAPED_S = 2.0  # that a command which was killed is waited for
_ASKED: set["subprocess.Popen[str]"] = set()
_BEGINNING = threading.RLock()  # held from a command's start until it is in that set


def ask(
    command: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None, descriptors: Sequence[int] = ()
) -> tuple[str, str]:
    """A command's stdout, and what went wrong in words ("" where nothing did). It is killed after ``timeout_s``, and not waited for.

    environ: its variables, where they are others than this process's. descriptors: open files that it is given.
    """
    try:
        with _BEGINNING:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                start_new_session=True, env=environ, pass_fds=descriptors, cwd=ROOT,
            )  # fmt: skip
            _ASKED.add(process)
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    try:
        return _answer(process, os.path.basename(command[0]), timeout_s)
    finally:
        _ASKED.discard(process)


def leave() -> None:
    """Ends the commands that are still being asked: they are sessions of their own, and would stay. For this process's end."""
    _BEGINNING.acquire(timeout=2)  # and never given back, so that no other begins
    for process in list(_ASKED):
        if process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)


def _answer(process: "subprocess.Popen[str]", name: str, timeout_s: float) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            out, _ = process.communicate(timeout=REAPED_S)
        except subprocess.TimeoutExpired:
            out = ""  # what waits for a dead file system or driver stays, and is nobody's to wait for
        return out, f"{name} did not answer in {timeout_s:g} s"
    if process.returncode:
        return out, " ".join((err or out).split())[-200:] or f"status {process.returncode}"
    return out, ""
