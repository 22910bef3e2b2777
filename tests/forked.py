"""Ranks as forks of one process that has imported torch. A fork takes 0.1 s of CPU; a process that
imports torch takes 4 s.

`start` takes a command (`python -m recipes.X`, `python -c CODE`, `python launch.py`), an
environment and a working folder, and returns an object that can be used like a `subprocess.Popen`.
launch.py in a fork starts its ranks as forks, too. The process that is forked starts at the first
call of any worker of the tests, serves all workers, and ends with the last one that has called. It
never runs a backward pass, because autograd refuses to work in a fork of a process that did.

Use `helpers.fork` and `helpers.run_fork` for tests of a run. Use `helpers.start` and `helpers.run`,
which start a new interpreter, for other commands, and for tests of what happens before torch is
imported or when the interpreter exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib.util
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from recipes.core.config import recipe_conf

ROOT = Path(__file__).resolve().parents[1]
PR_SET_PDEATHSIG = 1
POLL_S = 0.01


class Process:
    """A fork. Its methods are those of `subprocess.Popen`. stdout: its stdout and stderr."""

    def __init__(self, args: Sequence[str], pid: int, stdout: int, status: int) -> None:
        self.args = args
        self.pid = pid
        self.stdout = os.fdopen(stdout, encoding="utf-8", errors="replace")
        self.returncode: int | None = None
        self._status = status
        self._read: list[bytes] = []

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            text = os.read(self._status, 64)
            os.close(self._status)
            # empty: the process that is forked has ended
            self.returncode = int(text) if text else -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Waits for the end of the process; its output. As with Popen, a call after TimeoutExpired
        loses no output.
        """
        deadline = time.monotonic() + (timeout or 1e6)
        while True:
            if not select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            piece = os.read(self.stdout.fileno(), 1 << 16)
            if not piece:
                break
            self._read.append(piece)
        self.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.closing(self.stdout):
            return b"".join(self._read).decode(errors="replace"), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(argv: Sequence[str], *, cwd: Path = ROOT, environ: Mapping[str, str]) -> Process:
    """Runs a Python command in a fork. argv: ``python -m module``, ``python -c code`` or ``python
    launch.py``, and arguments.
    """
    read_end, write_end = os.pipe()
    status, status_write = os.pipe()
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    request = {
        "argv": list(map(str, argv)),
        "environ": dict(environ),
        "cwd": str(cwd),
        "blocked": blocked,
    }
    text = json.dumps(request).encode()
    server = _server()
    socket.send_fds(server, [len(text).to_bytes(4, "big")], [write_end, status_write])
    server.sendall(text)
    os.close(write_end)
    os.close(status_write)
    return Process(argv, int.from_bytes(os.read(status, 4), "big"), read_end, status)


@functools.cache
def _server() -> socket.socket:
    """The connection to the process that is forked. The worker that takes its address starts it."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))  # of all workers
    digest = hashlib.sha256(f"{session} {ROOT}".encode()).hexdigest()
    address = f"\0recipes-tests-{digest}"  # no file: it ends with its last process
    connection = socket.socket(socket.AF_UNIX)
    while True:
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(address)
            except OSError:
                pass  # another worker has taken it, and may not listen yet
            else:
                listener.listen()
                start_server(listener.fileno())
        if connection.connect_ex(address) == 0:
            return connection
        time.sleep(POLL_S)


def start_server(listener: int) -> None:
    # No -P, which requires Python 3.11: the working folder is the repository, where `tests` and
    # `recipes` are found.
    command = [sys.executable, "-m", "tests.forked", str(listener)]
    subprocess.Popen(command, cwd=ROOT, pass_fds=[listener])


# The rest runs in the process that is forked, and in its forks.


def serve(listener: socket.socket) -> None:
    pids: dict[int, int] = {}  # pid: the pipe for its exit status
    workers = [listener.accept()[0]]
    while workers:
        ready, _, _ = select.select([listener, *workers], [], [], POLL_S if pids else None)
        for connection in ready:
            if connection is listener:
                workers.append(listener.accept()[0])
            elif request := receive(connection):
                start_fork(pids, *request)
            else:
                workers.remove(connection)
                connection.close()
        while pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with contextlib.suppress(BrokenPipeError):  # the test has ended before it
                os.write(pids[pid], str(os.waitstatus_to_exitcode(status)).encode())
            os.close(pids.pop(pid))


def receive(connection: socket.socket) -> tuple[dict[str, Any], int, int] | None:
    """A request of this user, the pipe for its output and the pipe for its exit status; None if
    there will be no more.
    """
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    head, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
    if not head or struct.unpack("3i", peer)[1] != os.getuid():
        return None
    length = int.from_bytes(head, "big")
    text = b""
    while len(text) < length:
        text += connection.recv(length - len(text))
    out, tell = descriptors
    return json.loads(text), out, tell


def start_fork(pids: dict[int, int], request: dict[str, Any], out: int, tell: int) -> None:
    pid = os.fork()
    if pid == 0:
        os.dup2(out, 1)
        os.dup2(out, 2)
        signal.pthread_sigmask(signal.SIG_SETMASK, request.pop("blocked"))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        become(**request)
    os.write(tell, pid.to_bytes(4, "big"))
    os.close(out)
    pids[pid] = tell


def become(
    argv: Sequence[str],
    environ: Mapping[str, str],
    cwd: str,
    pass_fds: Sequence[int] = (),
    prepare: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Runs the command ``argv`` in this fork, and exits."""
    code = 1
    try:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in pass_fds:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prepare()
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(cwd)
        random.seed()
        mode, *words = (word for word in argv[1:] if word != "-u")
        from recipes.core.launch import local

        local.subprocess = SimpleNamespace(Popen=Rank)  # type: ignore[assignment]
        if mode.endswith("launch.py"):
            import launch

            sys.argv = [mode, *words]
            code = launch.main(words)
        else:
            sys.argv = ["-c" if mode == "-c" else "", *words[1:]]
            if mode == "-c":
                exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
            else:
                assert mode == "-m", argv
                spec = importlib.util.find_spec(words[0])
                assert spec
                assert spec.origin, words[0]
                runpy.run_path(spec.origin, run_name="__main__")
            code = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class Rank:
    """A rank that launch.py starts, as a fork of it: what `recipes.core.launch.local` uses of
    `subprocess.Popen`.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        pass_fds: Sequence[int],
        start_new_session: bool,
        preexec_fn: Callable[[], None],
    ) -> None:
        assert start_new_session
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(
                        number,
                        signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler,
                    )
            become(argv, env, str(cwd), pass_fds, preexec_fn)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def add_broken() -> None:
    """Makes the recipe of the fault tests (tests/faults/broken.py) one of the recipes."""
    import recipes

    for name in ("conf.broken", "broken"):  # the keys first
        path = ROOT / "tests" / "faults" / f"{name.replace('conf.broken', 'broken_conf')}.py"
        spec = importlib.util.spec_from_file_location(f"recipes.{name}", path)
        assert spec
        assert spec.loader
        module = sys.modules[f"recipes.{name}"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    recipes.broken = module  # type: ignore[attr-defined]
    names = [*recipe_conf.names(), "broken"]
    recipe_conf.names = lambda: names


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests handle Ctrl-C
    listener = socket.socket(fileno=int(sys.argv[1]))
    import sklearn.datasets  # noqa: F401
    import torch
    import torch._dynamo  # the first optimizer would import it, in each fork

    import launch  # noqa: F401
    from recipes.core.train import loop, models, optimizers, scores, session  # noqa: F401

    torch.set_num_threads(1)  # a fork does not inherit threads
    add_broken()
    gc.collect()
    gc.freeze()
    serve(listener)


if __name__ == "__main__":
    main()
