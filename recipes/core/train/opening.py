"""The start of an attempt: its run directory, whether all nodes see it, and the first lines of the log."""

import functools
import os
from collections.abc import Callable
from pathlib import Path

from recipes.core import files
from recipes.core.errors import InputError, shown
from recipes.core.files import ROOT
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, in_use, resumed
from recipes.core.run.attempt import Attempt
from recipes.core.run.entry import Start
from recipes.core.train.run import Run
from recipes.core.train.world import World


def open_run_dir(start: Start, world: World) -> tuple[Attempt, bool]:
    """Opens an attempt in the run directory, which each rank finds by its own keys. Called by all ranks.

    Returns it, and whether the run was already done. Raises InputError if another job uses the directory, MachineError if it cannot be
    written.
    """
    # In a batch script the run belongs to the job, whatever the number of the step (another srun may have run before).
    run_id = directory.job_id(os.environ) if "RECIPES_BATCH" in os.environ else start.ranks.run_id
    choose = functools.partial(directory.choose, start.settings.run.run_dir, start.settings.recipe, base=ROOT)
    theirs, part, number, was_done = world.from_rank_0("run_dir", lambda: _open_on_rank_0(start, world, choose(run_id)))
    own = choose(run_id or Path(theirs).name)  # without an ID, the name contains the time at which rank 0 began
    if not (start.settings.run.run_dir or run_id) and str(own) != theirs:
        raise InputError(
            f"run_dir={own} here, run_dir={shown(theirs)} on rank 0: give the same run_dir= on all machines"
        )
    path = own / directory.EVALUATION if part else own
    if world.rank != 0:
        files.own_folder(path / "logs")
    return Attempt(path, int(number)), bool(was_done)


def _open_on_rank_0(start: Start, world: World, run_dir: Path) -> tuple[str, bool, int, bool]:
    recipe, keys = start.settings.recipe, start.settings.run
    path = directory.inside(run_dir, directory.EVALUATION) if start.settings.config.evaluate else run_dir
    with files.writing_to(path, "run_dir"):
        given = attempts.given(os.environ)
        if given and given.run_dir == path and not given.has_begun:
            attempt = given
            attempts.describe(attempt, recipe, os.environ, world.hosts)
        else:
            attempt = attempts.open_next(path, recipe, os.environ, world.hosts)
        if problem := in_use.check(attempt, os.environ, min(in_use.ENDING_S, keys.timeout_s / 2)):
            raise InputError(problem)
        for name in ("logs", "checkpoints"):
            files.own_folder(path / name)
    status = directory.read_status(path)
    return str(run_dir), path != run_dir, attempt.number, bool(status and status["state"] == "done")


def check_shared(run: Run) -> None:
    """Raises MachineError, on all ranks, if a node of the job does not see what rank 0 writes into the run directory.

    Otherwise a job that is requeued on other nodes would find no checkpoint and would train from the beginning. Called by all ranks.
    """
    world = run.world

    def look(tell: Callable[[object], None]) -> None:
        problem = f"this node does not see the files that rank 0 on {world.hosts[0]} writes"
        problem = f"run_dir={run.dir}: {problem}: give a folder that all nodes share"
        if world.ranks.local_rank == 0:
            world.await_seen((run.attempt.folder / "opened.json").exists, run.dir / "attempts", problem)

    if world.ranks.in_slurm and world.ranks.num_nodes > 1:
        world.together("shared run_dir", look)


def introduce(run: Run, start: Start) -> None:
    """Prints the first lines: number of ranks, device, run directory, the interface that rank 0's node uses and why."""
    world, backend = run.world, run.world.backend
    again = f", attempt {run.attempt.number + 1}" if run.attempt.number else ""
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''}"
    nodes = f"{world.ranks.num_nodes} node{'s' if world.ranks.num_nodes > 1 else ''}"
    run.say(f"{run.settings.recipe}: {ranks} on {nodes}, {world.device.type}, {backend}{again}")
    run.say(f"run directory: {run.dir}")
    if keys := run.settings.words_from_run():
        run.say(f"keys from the resumed run: {keys}")
    if world.rank == 0 and (dropped := resumed.own_env_file(run.settings)):
        unread = f"network={shown(dropped, 4096)} of the resumed run is a file and was not read"
        run.say(f"{unread}: if you trust it, give this key again")
    name = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    if used := os.environ.get(name, "").removeprefix("="):
        proven = start.interface and start.interface.interface == used
        run.say(f"network: {used} ({start.interface.reason if proven and start.interface else f'{name} was set'})")
    elif world.size > 1:
        run.say(f"network: the interface was not determined; {backend} chooses it")
    if start.from_files:
        run.say("variables from env files: " + " ".join(sorted(start.from_files)))
