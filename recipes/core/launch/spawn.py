"""Ranks that plain Python starts with multiprocessing: ``python -m recipes.toy spawn=2``.

`local.supervise` monitors them.
"""

import multiprocessing
import os
import runpy
import socket
import sys
import time
from typing import Any

from recipes.core import errors
from recipes.core.errors import MachineError
from recipes.core.files import ROOT
from recipes.core.launch import local
from recipes.core.launch.local import Rank
from recipes.core.place import network
from recipes.core.place.processes import die_with
from recipes.core.run import directory, entry
from recipes.core.run.entry import Start

SPAWNED = "RECIPES_SPAWNED"  # set in a process that this module started
STARTED_BY = {"env": "torchrun (or whatever set RANK)", "slurm": "srun", "openmpi": "mpirun", "pmi": "mpiexec"}


def processes(module: str, start: Start) -> None:
    """Runs ``module`` in ``spawn=`` processes on this machine and exits with the exit status of the run.

    In one of these processes, the function returns immediately. If another launcher has already started several ranks,
    the function prints one line and exits with status 2.
    """
    if SPAWNED in os.environ:
        return
    info, count = start.ranks, start.settings.config.spawn
    in_batch_script = "RECIPES_BATCH" in os.environ  # which expects the ranks of its own srun, and reads their result
    if in_batch_script or (info.launcher in STARTED_BY and info.world_size > 1):
        if info.rank:
            time.sleep(1.5)  # rank 0 prints the line before the launcher ends all ranks
        else:
            by = f"{STARTED_BY.get(info.launcher, 'srun')} has already started this process as rank 0 of {info.world_size}"
            print(
                f"{start.settings.recipe}: spawn={count}: {by}: omit spawn=, or start plain python",
                file=sys.stderr,
            )
        sys.exit(errors.EXIT_CONFIG)
    run_dir = directory.choose(start.settings.run.run_dir, start.settings.recipe, info.run_id, ROOT)
    folder = directory.for_evaluation(run_dir) if start.settings.config.evaluate else run_dir
    argv, context = [*sys.argv, f"run_dir={run_dir}"], multiprocessing.get_context("spawn")

    def start_rank(variables: dict[str, str], listener: socket.socket | None) -> Rank:
        process = context.Process(target=_one, args=(os.getpid(), module, argv, variables, listener))
        process.start()
        return _Process(process)

    # Remove the variables that this process has set: each rank sets them itself and logs them.
    set_here = dict(start.from_files)
    if start.interface:
        set_here |= network.settings(start.interface, {})
    if start.own_folder:
        set_here |= {name: value for name, value in os.environ.items() if value.startswith(str(start.own_folder))}
    environ = {name: value for name, value in os.environ.items() if set_here.get(name) != value}
    entry.remove_own_folder(start)
    try:
        sys.exit(
            local.supervise(
                start_rank,
                local.Layout((count,)),
                folder,
                start.settings.recipe,
                {**environ, SPAWNED: str(os.getpid())},
            )
        )
    except MachineError as error:
        print(f"{start.settings.recipe}: {error}", file=sys.stderr)
        sys.exit(errors.EXIT_MACHINE)


class _Process:
    """A process of multiprocessing with the interface of subprocess.Popen."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid = int(process.pid)
        self.returncode: int | None = None  # as of the last poll, since asking multiprocessing reaps the process

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self) -> None:
        self._process.join()
        self.poll()


def _one(parent: int, module: str, argv: list[str], variables: dict[str, str], listener: socket.socket | None) -> None:
    """The target of a new process: sets up its session and environment, and runs the module as a rank."""
    os.setsid()
    die_with(parent)()
    os.environ.clear()
    os.environ.update(variables)
    if listener:
        os.environ["RECIPES_LISTEN_FD"] = str(listener.detach())
    sys.argv = argv
    runpy.run_module(module, run_name="__main__", alter_sys=True)
