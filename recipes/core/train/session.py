"""One attempt of a run, from the process group to the exit status. Every recipe's ``main`` is
called inside it.
"""

import contextlib
import faulthandler
import functools
import os
import random
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed

from recipes.core import files, trust
from recipes.core.config.parser import Settings
from recipes.core.config.run_keys import TrainKeys
from recipes.core.errors import (
    EXIT_CRASH,
    EXIT_DONE,
    EXIT_REQUEUE,
    InputError,
    MachineError,
    one_line,
    shown,
)
from recipes.core.place import processes, stacks
from recipes.core.run import (
    attempt as attempts,
    directory,
    dryrun,
    entry,
    in_use,
    logs,
    resumed,
    signals,
    source,
    watchdog,
)
from recipes.core.run.entry import Start
from recipes.core.train import failure, outcome, rendezvous, torch_errors
from recipes.core.train.device import resolve_device
from recipes.core.train.run import Results, Run
from recipes.core.train.world import World
from recipes.core.slurm import client, environment

Main = Callable[[Any, Run], Results]


def run(main: Main, start: Start) -> NoReturn:
    """Calls ``main(config, run)`` on every rank, in a process group and a run directory, and ends
    the process.

    The results that main returns are written to ``summary.json``. Exit status (see
    docs/resume-and-failures.md): 0 done; 2 invalid configuration or input; 3 this machine or
    allocation cannot run it; 75 saved, to be requeued; 1 any other failure. After a failure, the
    last lines of the log and ``status.json`` name the first rank that failed.
    """
    code = EXIT_CRASH
    info = start.ranks
    keys = start.settings.run
    recipe = start.settings.recipe
    host = socket.gethostname()
    try:
        faulthandler.enable()
        stacks.register()
        os.umask(int(keys.umask, 8))
        start.pulse.tell(recipe=recipe, rank=info.rank, host=host)
        start.pulse.watch(keys.timeout_s + watchdog.MARGIN_S, files.ROOT)
        ranks = start.dry_run.ranks if start.dry_run else info.world_size
        start = replace(start, settings=_fit_to_ranks(start.settings, ranks))
        _set_up(start)
        device = resolve_device(keys.device, info, os.environ, torch.cuda.device_count())
        if device.type == "cpu":
            processes.keep_freed_memory()
        signals.keep_from_workers()

        def tell(name: str) -> None:
            if info.local_rank == 0:
                next_step = "the run saves at one of the next steps and ends"
                if start.settings.config.evaluate:
                    next_step = "the evaluation stops"
                line = f"rank {info.rank} on {host}: {name}: {next_step}"
                print(line, file=sys.stderr, flush=True)

        with (
            rendezvous.process_group(start, device) as world,
            signals.stop_flag(tell, start.by_clock) as stop,
        ):
            if info.rank == 0 and info.in_slurm and keys.stop_before_s:
                left = functools.partial(client.seconds_left, os.environ)
                signals.watch_the_end(stop, keys.stop_before_s, left, tell)
            code = _attempt(main, start, world, stop)
            if code not in (EXIT_DONE, EXIT_REQUEUE):
                # Skip the teardown of the group: it can wait for a rank that has ended, while the
                # others wait for this one.
                failure.leave(code)
    except (InputError, MachineError) as error:
        code = _refuse(start, error)
    except OSError as error:
        code = _refuse(start, files.machine_error(error, f"{host}: {one_line(error)}"))
    except torch.distributed.DistError as error:
        lost = f"rank {info.rank} lost its peers before the run began"
        print(f"{recipe}: {lost}: {torch_errors.peer_text(error)}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    else:
        entry.end(code)
    failure.leave(code)


def _refuse(start: Start, error: InputError | MachineError) -> int:
    """Records and prints why this rank cannot take part. Returns the exit status."""
    rank = start.ranks.rank
    # Write the record first, since this rank may be ended as soon as another rank ends.
    is_told = attempts.refuse(os.environ, error, rank)
    attempts.print_refusal(f"{start.settings.recipe}: {error}", rank == 0, is_told)
    return error.exit_status


def _attempt(
    main: Main,
    start: Start,
    world: World,
    stop: signals.StopFlag,
) -> int:
    """The part of an attempt that has a run directory. Returns the exit status; if this rank
    failed, writes an error record.
    """
    attempt, was_done = open_run_dir(start, world)
    log = attempt.run_dir / "logs" / f"rank{world.rank}.log"
    failure.task_memory()
    with logs.copied_to(log) as terminal, contextlib.ExitStack() as stack:
        current = Run(
            start.settings, world, attempt, stop, terminal, was_done=was_done, dry_run=start.dry_run
        )
        stack.callback(current.close_rows)
        world.pulse.tell(
            recipe=current.settings.recipe,
            rank=world.rank,
            host=world.host,
            attempt=str(attempt.folder),
        )
        over = threading.Event()
        stack.callback(over.set)
        watchers = [failure.watch_peers, failure.tell_collective]
        if world.rank == 0:
            watchers.append(failure.watch_owner)
            if world.device.type == "cuda" and start.settings.run.idle_warn_s:
                watchers.append(failure.watch_idle)
        for watch in watchers:
            name = watch.__name__  # in a dump of the stacks
            threading.Thread(target=watch, name=name, args=(current, over), daemon=True).start()
        try:
            introduce(current, start)
            world.pulse.beat(watchdog.OUTSIDE)
            outcome.finish(current, main(start.settings.config, current))
            world.pulse.beat(watchdog.WAITING)
            torch.distributed.barrier()
            return EXIT_REQUEUE if current.stopping else EXIT_DONE
        except dryrun.DryRunEnd:
            return EXIT_DONE
        except BaseException as error:
            current.failing.acquire()  # never released: nothing else may record an error
            current.console.progress("")
            return failure.fail(current, error)


def open_run_dir(start: Start, world: World) -> tuple[attempts.Attempt, bool]:
    """Opens an attempt in the run directory, which each rank finds by its own keys. Called by all
    ranks.

    Returns it, and whether the run was already done. Raises InputError if another job uses the
    directory. Raises MachineError, on all ranks, if it cannot be written, or if a node of the job
    does not see what rank 0 writes into it: a job that is requeued on other nodes would find no
    checkpoint there and would train from the beginning.
    """
    # In a batch script the run belongs to the job, whatever the number of the step (another srun
    # may have run before).
    of_script = attempts.given(os.environ) is not None
    run_id = environment.job_id(os.environ) if of_script else start.ranks.run_id
    choose = functools.partial(
        directory.choose, start.settings.run.run_dir, start.settings.recipe, base=files.ROOT
    )
    theirs, is_evaluation, number, was_done = world.from_rank_0(
        "run_dir", lambda: _open_on_rank_0(start, world, choose(run_id))
    )

    def enter(tell: Callable[[object], None]) -> attempts.Attempt:
        # without an ID, the name contains the time at which rank 0 began
        name = run_id or Path(theirs).name
        mine = choose(name)
        is_valid = directory.BY_TIME.fullmatch(name) and str(mine) == theirs
        if not (start.settings.run.run_dir or run_id or is_valid):
            places = f"run_dir={mine} here, run_dir={shown(theirs)} on rank 0"
            raise InputError(f"{places}: give the same run_dir= on all machines")
        path = mine / directory.EVALUATION if is_evaluation else mine
        log = path / "logs" / f"rank{world.rank}.log"
        with files.writing_to(path, "run_dir"):
            trust.own_folder(log.parent, is_listed=False)
            # a disk may be mounted read-only
            open(log, "ab", opener=trust.own_without_links).close()
        attempt = attempts.Attempt(path, int(number))
        if start.ranks.in_slurm and start.ranks.local_rank == 0:
            problem = f"this node does not see the files that rank 0 on {world.hosts[0]} writes"
            problem = f"run_dir={path}: {problem}: give a folder that all nodes share"
            world.await_seen(attempt.folder / "opened.json", problem)
        return attempt

    if start.ranks.num_nodes == 1:
        return enter(lambda progress: None), was_done
    # another node may not have the folder in which rank 0 has made it
    return world.together("run directory", enter), was_done


def _open_on_rank_0(start: Start, world: World, run_dir: Path) -> tuple[str, bool, int, bool]:
    recipe = start.settings.recipe
    path = run_dir
    if start.settings.config.evaluate:
        path = directory.inside(run_dir, directory.EVALUATION)
    with files.writing_to(path, "run_dir"):
        attempt = attempts.given(os.environ)
        if attempt and attempt.run_dir == path and not attempt.has_begun:
            attempts.describe(attempt, recipe, os.environ, world.hosts)
        else:
            attempt = attempts.open_next(path, recipe, os.environ, world.hosts)
        wait_s = min(in_use.ENDING_S, start.settings.run.timeout_s / 2)
        problem = in_use.check(attempt, os.environ, wait_s)
        if problem:
            raise InputError(problem)
        trust.own_folder(path / "logs", is_listed=False)  # it has a file of each rank
        trust.own_folder(path / "checkpoints")
        job_id = attempt.facts()["job"]
        if job_id:  # a batch script has noted it, but not a step that was typed
            directory.note_job(run_dir, job_id, source.home(files.ROOT))
    status = directory.read_status(path)
    return str(run_dir), path != run_dir, attempt.number, status.get("state") == "done"


def introduce(run: Run, start: Start) -> None:
    """Prints the first lines: number of ranks, device, run directory, the interface that rank 0's
    node uses and why.
    """
    world = run.world
    backend = world.backend
    again = f", attempt {run.attempt.number + 1}" if run.attempt.number else ""
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''}"
    nodes = f"{world.ranks.num_nodes} node{'s' if world.ranks.num_nodes > 1 else ''}"
    run.say(f"{run.settings.recipe}: {ranks} on {nodes}, {world.device.type}, {backend}{again}")
    run.say(f"run directory: {run.dir}")
    keys = run.settings.words_from_run()
    if keys:
        run.say(f"keys from the resumed run: {keys}")
    size = run.settings.from_run.get("shard_size", "0")
    if size != "0" and run.settings.config.shard_size == 0:
        replaced = f"shard_size={size} of the resumed run does not divide {run.ranks} ranks"
        run.say(f"{replaced}: this run uses shard_size=0, all ranks")
    dropped = world.rank == 0 and resumed.own_env_file(run.settings)
    if dropped:
        unread = f"network={shown(dropped, 4096)} of the resumed run is a file and was not read"
        run.say(f"{unread}: if you trust it, give this key again")
    name = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    used = os.environ.get(name, "").removeprefix("=")
    if used:
        reason = f"{name} was set"
        if start.interface and start.interface.interface == used:
            reason = start.interface.reason
        run.say(f"network: {used} ({reason})")
    elif world.size > 1:
        run.say(f"network: the interface was not determined; {backend} chooses it")
    if start.from_files:
        run.say("variables from env files: " + " ".join(sorted(start.from_files)))


def _fit_to_ranks(settings: Settings, ranks: int) -> Settings:
    """``settings``, with the default in place of a shard_size= of the resumed run that does not
    divide the number of ranks. Raises InputError if the key was given.
    """
    cfg = settings.config
    is_divided = isinstance(cfg, TrainKeys) and cfg.strategy == "fsdp" and cfg.shard_size
    if not is_divided or ranks % cfg.shard_size == 0:
        return settings
    if "shard_size" not in settings.from_run:
        raise InputError(f"shard_size={cfg.shard_size}: must divide the number of ranks, {ranks}")
    saved = {**settings.saved, "shard_size": 0}
    return replace(settings, config=replace(cfg, shard_size=0), saved=saved)


def _set_up(start: Start) -> None:
    """Sets torch's algorithms and threads, and seeds the generators of Python and NumPy for this
    rank. The recipe seeds torch's.
    """
    torch.use_deterministic_algorithms(start.settings.config.deterministic)
    threads = start.settings.run.cpu_threads or int(start.ranks.world_size > 1)
    if threads:
        torch.set_num_threads(threads)
    seed = start.settings.config.seed * 1_000_003 + start.ranks.rank
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
