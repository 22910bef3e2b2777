"""Requests of ``launch.py look``, and the answers of the ranks. Standard library only.

A request is a folder in ``attempts/`` of the run directory. A process beside each rank writes an
answer into it: the watchdog of a recipe's rank, or the wrapper of a program.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from recipes.core import files, trust
from recipes.core.errors import MachineError
from recipes.core.place import processes, proctree, stacks
from recipes.core.run import attempt as attempts

PREFIX = "look-"  # of the folder's name
REQUEST = "request.json"
POLL_S = 4.0  # between two looks for requests, of each rank
# A new process may be about to start another program, which the signal of `stacks` would end.
EXEC_S = 0.2
STACKS_S = 3.0  # for the stacks of all processes of a rank
STOPPED = ("T", "t")  # states of a process that SIGSTOP or a debugger has stopped


def answer_requests(tell: Callable[[], files.Json], more: Callable[[], files.Json]) -> None:
    """Run in a thread: answers requests until this process ends.

    tell: returns rank, host and progress, and the folder of the attempt unless the environment has
    it; may raise ValueError. more: returns `describe`, and what else an answer has.
    """
    answered = set[str]()
    while True:
        time.sleep(POLL_S)
        try:
            facts = tell()
            attempt = facts.get("attempt") or os.environ.get(attempts.VARIABLE)
            requests = list(Path(attempt).parent.glob(f"{PREFIX}*")) if attempt else []
        except (ValueError, OSError):  # the rank has told nothing yet, or tells something now
            continue
        for request in (each for each in requests if each.name not in answered):
            with contextlib.suppress(OSError, MachineError), trust.open_own(request / REQUEST):
                answered.add(request.name)
                answer = {**facts, **more()}
                files.write_json(request / f"rank{facts['rank']:04d}.json", answer)


def describe(root: int) -> files.Json:
    """How many CPUs a tree of processes uses as ``cpus``, and as ``processes`` its Python processes
    that have called `stacks.register`, from its root; without any, the one that was started last.
    """
    tree = [process for process in map(proctree.read, [*proctree.descendants(root)]) if process]
    python = [process for process in tree if stacks.STACKS in process.caught]
    cpu_s, begun = processes.cpu_time(root)
    time.sleep(EXEC_S)
    later_s, ended = processes.cpu_time(root)
    deadline = time.monotonic() + STACKS_S
    described = []
    for process in python or tree[-1:]:
        folder = Path(f"/proc/{process.pid}")
        facts = {"pid": process.pid, "command": " ".join(process.command)}
        facts |= dict.fromkeys(("state", "kernel", "stack"), "")
        with contextlib.suppress(OSError):  # it has ended, or has the setuid bit
            facts["state"] = processes.stat(process.pid)[0]
            facts["kernel"] = (folder / "wchan").read_text()
            # a stopped process would write its stack when it continues
            if facts["state"] not in STOPPED:
                stack = stacks.read(process.pid, deadline - time.monotonic())
                facts["stack"] = stack.replace(f'"{os.readlink(folder / "cwd")}/', '"')
        described.append(facts)
    # less than 0 if a process has ended
    cpus = max(0.0, later_s - cpu_s) / (ended - begun)
    return {"processes": described, "cpus": round(cpus, 2)}
