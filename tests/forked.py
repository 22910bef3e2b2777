"""Ranks as forks of one process that has imported torch. A fork takes 0.1 s of CPU; a process that imports torch takes 4 s.

`start` and `start_ranks` run code in forks, each with an environment, a working folder and a pipe of its own. What they give can
be used like a `subprocess.Popen`. The process that is forked starts at the first call, in each worker of the tests, and ends
with it. It never runs a backward pass, because autograd refuses to work in a fork of a process that did.

For tests of what a rank does once it has started. How a launcher starts ranks, and what a process does before torch is imported,
is tested with processes of their own (tests/helpers.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
PR_SET_PDEATHSIG = 1
POLL_S = 0.01

# The recipe of the fault tests (tests/faults/broken.py), from its keys to its exit status.
BROKEN = """
import os
from recipes import broken
from recipes.core import entry, session
START = entry.begin("broken")
if "FAULT_SILENT" in os.environ:
    session.SILENT_BACKENDS.add("gloo")
session.run(broken.main, START)
"""


class Process:
    """A fork. Its methods are those of `subprocess.Popen`. stdout: its stdout and stderr."""

    def __init__(self, args: Sequence[str], pid: int, stdout: int, told: int) -> None:
        self.args, self.pid, self.stdout = args, pid, os.fdopen(stdout, encoding="utf-8", errors="replace")
        self.returncode: int | None = None
        self._told = told

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            text = os.read(self._told, 64)
            os.close(self._told)
            self.returncode = int(text) if text else -signal.SIGKILL  # nothing: the process that is forked has ended
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that was not read yet, when the process has ended."""
        deadline, read = time.monotonic() + (timeout or 1e6), []
        while True:
            if not select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            if not (piece := os.read(self.stdout.fileno(), 1 << 16)):
                break
            read.append(piece)
        self.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.closing(self.stdout):
            return b"".join(read).decode(errors="replace"), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    code: str, words: Sequence[str] = (), *, environ: Mapping[str, str], cwd: Path = ROOT, out: int | None = None
) -> Process:
    """Runs ``code`` as ``python -c code words`` would. environ: all its variables. out: where it writes; None: a pipe of its own."""
    read_end, write_end = os.pipe()
    told, tell = os.pipe()
    request = {"code": code, "words": list(words), "environ": dict(environ), "cwd": str(cwd)}
    text = json.dumps(request).encode()
    server = _server()
    socket.send_fds(server, [len(text).to_bytes(4, "big")], [write_end if out is None else out, tell])
    server.sendall(text)
    os.close(write_end)
    os.close(tell)
    return Process(["forked", *words], int.from_bytes(os.read(told, 4), "big"), read_end, told)


@functools.cache
def _server() -> socket.socket:
    """The connection to the process that is forked. It ends when this one does."""
    ours, its = socket.socketpair()
    # -P is of Python 3.11 on; the working folder is the repository, where `tests` and `recipes` are found.
    subprocess.Popen([sys.executable, "-m", "tests.forked", str(its.fileno())], cwd=ROOT, pass_fds=[its.fileno()])
    its.close()
    return ours


# What follows is the process that is forked.


def serve(connection: socket.socket) -> None:
    pids: dict[int, int] = {}  # where each one's status is to be written
    while True:
        if select.select([connection], [], [], POLL_S if pids else None)[0]:
            head, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
            if not head:
                return
            length, text = int.from_bytes(head, "big"), b""
            while len(text) < length:
                text += connection.recv(length - len(text))
            out, tell = descriptors
            pid = os.fork()
            if pid == 0:
                connection.close()
                os.close(tell)
                become(json.loads(text), out)
            os.write(tell, pid.to_bytes(4, "big"))
            os.close(out)
            pids[pid] = tell
        while pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with contextlib.suppress(BrokenPipeError):  # the test has ended before it
                os.write(pids[pid], str(os.waitstatus_to_exitcode(status)).encode())
            os.close(pids.pop(pid))


def become(request: Mapping[str, Any], out: int) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        os.environ.clear()
        os.environ.update(request["environ"])
        os.chdir(request["cwd"])
        random.seed()
        sys.argv = ["-c", *request["words"]]
        exec(compile(request["code"], "<forked>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tests' to handle
    connection = socket.socket(fileno=int(sys.argv[1]))
    import torch
    import torch._dynamo  # the first optimizer would import it, in each fork

    torch.set_num_threads(1)  # or a fork would lack the threads that it believes to have
    import recipes
    from recipes.core import bandwidth, config, images, lars, models, session, train  # noqa: F401
    from tests.faults import broken_conf

    # The recipe of the fault tests, beside the real ones.
    sys.modules["recipes.conf.broken"] = broken_conf
    from tests.faults import broken

    sys.modules["recipes.broken"] = recipes.broken = broken  # type: ignore[attr-defined]
    names = [*config.recipe_names(), "broken"]
    config.recipe_names = lambda: names
    gc.collect()
    gc.freeze()
    serve(connection)


if __name__ == "__main__":
    main()
