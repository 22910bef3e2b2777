"""Runs commands that may hang, each in a separate process and for a limited time."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from recipes.core.files import ROOT

_running: set["subprocess.Popen[str]"] = set()
_starting = threading.RLock()  # held from a command's start until the command is in the set above


def run(
    command: Sequence[str],
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> tuple[str, str]:
    """A command's stdout, and why it failed ("" if it did not). It is killed after ``timeout_s``.

    environ: its variables; None for those of this process. descriptors: open files that it
    inherits.
    """
    try:
        with _starting:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
                env=environ,
                pass_fds=descriptors,
                cwd=ROOT,
            )
            _running.add(process)
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            out, _ = process.communicate(timeout=2)
        except subprocess.TimeoutExpired:
            out = ""  # a process that waits for a dead file system or driver cannot be killed
        return out, f"{os.path.basename(command[0])} did not answer in {timeout_s:g} s"
    finally:
        _running.discard(process)
    if process.returncode:
        return out, " ".join((err or out).split())[-200:] or f"status {process.returncode}"
    return out, ""


def kill_all() -> None:
    """Kills the commands that still run, and prevents further ones. Called when this process ends,
    since each command has its own session and would outlive it.
    """
    _starting.acquire(timeout=2)  # never released
    for process in list(_running):
        if process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
