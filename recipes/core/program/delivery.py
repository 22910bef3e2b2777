"""Which processes of a program catch a request to stop, and the delivery of a signal to them.

A signal that a program does not catch would end it unsaved. Launchers and shells between the
wrapper and the program do not pass signals on, so the signal goes to the program itself.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recipes.core.place import proctree
from recipes.core.place.proctree import Process
from recipes.core.program.hook.sitecustomize import STACKS

# A program that catches several of these gets the first one. Frameworks use SIGUSR1 and SIGUSR2 to
# save, and SIGTERM sometimes only to end.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM)
# Programs in Python that start other programs: scripts by their file names, and modules.
RANK_LAUNCHERS = {
    "accelerate",
    "accelerate.commands.accelerate_cli",
    "accelerate.commands.launch",
    "deepspeed",
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "torch.distributed.launch",
    "torch.distributed.run",
    "torchrun",
}
# through which a Python program may start another one
SHELLS = {"bash", "dash", "sh", "zsh"}
LAUNCHERS = RANK_LAUNCHERS | {"conda", "mamba", "ray", "recipes.script"}


@dataclass(frozen=True)
class Target:
    """A process of the program, and the stop signal that it catches.

    protects_workers: whether it has loaded the hook that protects the workers of a DataLoader.
    """

    pid: int
    signal: signal.Signals
    protects_workers: bool


def targets(root: int, order: Sequence[signal.Signals] = STOP_SIGNALS) -> list[Target]:
    """The topmost processes of a tree that catch one of ``order``, each with the first that it
    catches.

    Programs in Python come first. Shells and other executables count only if none of these catches
    a signal. Processes that a Python program starts do not count, except for Python processes that
    it starts as its ranks (``torch.multiprocessing.spawn``).
    """
    return _topmost(root, order, is_program) or _topmost(root, order, lambda p: not p.is_python)


def _topmost(
    pid: int, order: Sequence[signal.Signals], counts: Callable[[Process], bool]
) -> list[Target]:
    process = proctree.read(pid)
    if not process:
        return []
    caught = [number for number in order if number in process.caught]
    if caught and counts(process):
        return [Target(pid, caught[0], STACKS in process.caught or not process.is_python)]
    below = _programs_below(process, through_shells=counts is is_program)
    return [target for child in below for target in _topmost(child, order, counts)]


def _programs_below(process: Process, through_shells: bool) -> list[int]:
    pids = proctree.children(process.pid)
    if not is_program(process):
        return pids
    below = [child for child in map(proctree.read, pids) if child]
    shells = [child.pid for child in below if through_shells and child.program in SHELLS]
    # A fork has the same command. It may be a worker, which blocks the signals only with the hook.
    return shells + [
        child.pid
        for child in below
        if child.is_python and (child.command != process.command or STACKS in child.caught)
    ]


def is_program(process: Process) -> bool:
    """Whether a process is a Python program that is not a launcher of other programs."""
    return process.is_python and launched_by(process) is None


def launched_by(process: Process) -> str | None:
    """The name of the launcher that a Python process runs; None if it runs another program."""
    words = iter(process.command[1:])
    for word in words:
        if word in ("-W", "-X"):
            next(words, None)  # its value
        elif not word.startswith("-"):
            name = os.path.basename(word)
            return name if name in LAUNCHERS else None
    return None


def rank_launcher(root: int) -> str:
    """The launcher in the tree that starts several ranks, such as torchrun; "" if there is none."""
    processes = filter(None, map(proctree.read, proctree.descendants(root)))
    launchers = (launched_by(process) for process in processes if process.is_python)
    return next((name for name in launchers if name in RANK_LAUNCHERS), "")


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end(root: int, number: signal.Signals) -> None:
    """Sends a signal that ends processes to the whole tree below and including ``root``."""
    for pid in list(proctree.descendants(root)):
        send(pid, number)
