"""One attempt of a run, from the process group to the exit status. Every recipe's ``main`` is called inside it."""

import contextlib
import faulthandler
import functools
import os
import random
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed

from recipes.core import errors
from recipes.core.errors import InputError, MachineError
from recipes.core.files import ROOT
from recipes.core.place import processes
from recipes.core.run import attempt as attempts
from recipes.core.run import entry, logs, queue, signals, watchdog
from recipes.core.run.dryrun import DryRunEnd
from recipes.core.run.entry import Start
from recipes.core.train import failure, opening, torch_errors
from recipes.core.train.device import resolve_device
from recipes.core.train.rendezvous import process_group
from recipes.core.train.run import Run
from recipes.core.train.world import World


def run(main: Callable[[Any, Run], Mapping[str, Any]], start: Start) -> NoReturn:
    """Calls ``main(config, run)`` on every rank, in a process group and a run directory, and ends the process.

    The results that main returns are written to ``summary.json``. Exit status (see docs/resume-and-failures.md): 0 done; 2 bad
    configuration or bad input; 3 this machine or allocation cannot run it; 75 saved, to be requeued; 1 any other failure. After a
    failure, the last lines of the log and ``status.json`` name the first rank that failed.
    """
    code = errors.EXIT_CRASH
    try:
        faulthandler.enable()
        os.umask(int(start.settings.run.umask, 8))
        start.pulse.tell(recipe=start.settings.recipe, rank=start.ranks.rank, host=socket.gethostname())
        start.pulse.watch(start.settings.run.timeout_s + watchdog.MARGIN_S, ROOT)
        _set_up(start)
        device = resolve_device(start.settings.run.device, start.ranks, os.environ, torch.cuda.device_count())
        if device.type == "cpu":
            processes.keep_freed_memory()
        # Until the ranks have met there is nothing to save, so SIGINT ends this process at once. Python's own handler would run only
        # after the wait for the other ranks.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signals.keep_from_workers()
        info = start.ranks

        def tell(name: str) -> None:
            if info.local_rank == 0:
                evaluates = start.settings.config.evaluate
                ends = "the evaluation stops" if evaluates else "the run saves at one of the next steps and ends"
                print(f"rank {info.rank} on {socket.gethostname()}: {name}: {ends}", file=sys.stderr, flush=True)

        with process_group(start, device) as world, signals.stop_flag(tell, "RECIPES_BY_CLOCK" in os.environ) as stop:
            if info.rank == 0 and info.in_slurm and start.settings.run.stop_before_s:
                left = functools.partial(queue.seconds_left, os.environ)
                signals.watch_the_end(stop, start.settings.run.stop_before_s, left, tell)
            code = _attempt(main, start, world, stop)
            if code not in (errors.EXIT_DONE, errors.EXIT_REQUEUE):
                # Skip the teardown of the group: it can wait for a rank that has ended, while the others wait for this one.
                failure.leave(code)
    except (InputError, MachineError) as error:
        code = errors.EXIT_MACHINE if isinstance(error, MachineError) else errors.EXIT_CONFIG
        # Write the record first, since this rank may be ended as soon as another rank ends.
        attempts.refuse(os.environ, code, str(error), start.ranks.rank)
        attempts.print_refusal(f"{start.settings.recipe}: {error}", start.ranks.rank == 0)
    except torch.distributed.DistError as error:
        lost = f"rank {start.ranks.rank} lost its peers before the run began"
        print(f"{start.settings.recipe}: {lost}: {torch_errors.peer_text(error)}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    if code in (errors.EXIT_DONE, errors.EXIT_REQUEUE):
        entry.end(code)
    failure.leave(code)


def _attempt(main: Callable[[Any, Run], Mapping[str, Any]], start: Start, world: World, stop: signals.StopFlag) -> int:
    """The part of an attempt that has a run directory. Returns the exit status; if this rank failed, writes an error record."""
    attempt, was_done = opening.open_run_dir(start, world)
    log = attempt.run_dir / "logs" / f"rank{world.rank}.log"
    with logs.copied_to(log) as terminal, contextlib.ExitStack() as stack:
        current = Run(start.settings, world, attempt, stop, terminal, was_done=was_done, dry_run=start.dry_run)
        stack.callback(current.close_rows)
        world.pulse.tell(recipe=current.settings.recipe, rank=world.rank, host=world.host, attempt=str(attempt.folder))
        over = threading.Event()
        stack.callback(over.set)
        if world.rank == 0:
            threading.Thread(target=failure.watch_owner, args=(current, over), name="owner watch", daemon=True).start()
        threading.Thread(target=failure.watch_peers, args=(current, over), name="peer watch", daemon=True).start()
        try:
            opening.introduce(current, start)
            opening.check_shared(current)
            world.pulse.beat(watchdog.OUTSIDE)
            results = main(start.settings.config, current)
            current.finish(results)
            world.pulse.beat(watchdog.WAITING)
            torch.distributed.barrier()
            return errors.EXIT_REQUEUE if current.stopping else errors.EXIT_DONE
        except DryRunEnd:
            return errors.EXIT_DONE
        except BaseException as error:
            current.failing.acquire()  # never released: nothing else may record an error
            current.progress("")
            return failure.fail(current, error)


def _set_up(start: Start) -> None:
    """Sets torch's algorithms and threads, and seeds the generators of Python and NumPy for this rank. The recipe seeds torch's."""
    torch.use_deterministic_algorithms(start.settings.config.deterministic)
    if threads := start.settings.run.cpu_threads or int(start.ranks.world_size > 1):
        torch.set_num_threads(threads)
    seed = start.settings.config.seed * 1_000_003 + start.ranks.rank
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
