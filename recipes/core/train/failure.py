"""How a rank ends after a failure: it records the error, prints one line and exits. It never reads
the records of other ranks.

Two threads also end a rank: one if it waits too long for the others, one if a later attempt owns
the run directory.
"""

import functools
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed

from recipes.core import files
from recipes.core.errors import (
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_MACHINE,
    EXIT_REQUEUE,
    ConfigError,
    InputError,
    Kind,
    MachineError,
    RunError,
    Stopped,
    one_line,
)
from recipes.core.place import keepalive, memory
from recipes.core.run import (
    attempt as attempts,
    directory,
    in_use,
    judge,
    positions,
    source,
    watchdog,
)
from recipes.core.train import flight, torch_errors
from recipes.core.train.run import Run
from recipes.core.train.world import BEHIND_S, POLL_S
from recipes.core.slurm import client, environment

FENCE_S = in_use.HEARTBEAT_S  # between two checks of the run directory's owner
# a rank that has failed waits this long for the checkpoint that is being written
LAST_SAVE_S = 20.0
# A rank that only lost its peers waits this long before it ends. Otherwise srun -K would kill the
# cause before its record is written.
LINGER_S = 2.0


@functools.cache
def task_memory() -> memory.Memory:
    """The memory of this process's task when this was called first, at the start of a run."""
    return memory.read()


def leave(code: int) -> NoReturn:
    """Ends the process at once. Its connections close, so the other ranks notice."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _keep_flight_record(run: Run) -> None:
    """Writes NCCL's last collectives to ``logs/flight-RANK``, for `torchfrtrace`. torch itself
    would write them only after its own timeout.
    """
    if run.world.backend == "nccl":
        record = cast(Any, torch._C._distributed_c10d)._dump_nccl_trace()
        files.write_bytes(run.dir / "logs" / f"flight-{run.world.rank}", record)


def watch_owner(run: Run, over: threading.Event) -> None:
    """Run in a thread: writes heartbeats, and ends this process if a later attempt has taken over
    the run directory.
    """
    while not over.wait(FENCE_S):
        try:
            attempts.check_owner(run.attempt)
            attempts.heartbeat(run.attempt)
        except OSError:  # the file system does not answer for some time
            continue
        except MachineError as error:
            print(f"{run.settings.recipe}: {error}", file=sys.stderr)
            leave(EXIT_MACHINE)


def watch_idle(run: Run, over: threading.Event) -> None:
    """Run in a thread: warns each time that no GPU has computed for ``idle_warn_s``. Ranks that
    wait for others in a collective of NCCL keep their GPUs busy.
    """
    idle_phases = (watchdog.OUTSIDE, watchdog.START, watchdog.SAVING, watchdog.DATA)
    limit_s = run.keys.idle_warn_s
    last_step = -1
    since = run.world.clock.now()
    while not over.wait(POLL_S):
        _, step, phase = run.world.pulse.read()
        if step != last_step or phase not in idle_phases:
            last_step = step
            since = run.world.clock.now()
        elif run.world.clock.now() - since > limit_s:
            since = run.world.clock.now()
            place = watchdog.place(step, phase)
            run.warn(
                f"no GPU has computed for {limit_s:g} s (idle_warn_s) at {place}: "
                "many sites cancel such jobs"
            )


def tell_collective(run: Run, over: threading.Event) -> None:
    """Run in a thread: tells the watchdog the collective of this rank, when it asks."""
    while not over.wait(POLL_S):
        run.world.pulse.answer(lambda: flight.collective(run.world.backend))


def watch_peers(run: Run, over: threading.Event) -> None:
    """Run in a thread: ends this process if it waits ``timeout_s`` for other ranks, or less if the
    node of one of them is lost. torch's timeouts also count time in suspension.
    """
    world = run.world
    last = world.pulse.read()
    since = world.clock.now()
    while not over.wait(POLL_S):
        now = world.pulse.read()
        if now != last or now[2] in (watchdog.OUTSIDE, watchdog.START):
            last = now
            since = world.clock.now()
        elif run.failing.locked():
            return  # another thread already ends this rank
        elif world.size > 1 and world.clock.now() - since > _patience_s(run) - BEHIND_S:
            behind = world.behind()
            # if no rank is behind, the network is the cause
            waits = behind or now[2] == watchdog.WAITING
            is_over = world.clock.now() - since > _patience_s(run) and world.pulse.read() == last
            if waits and is_over and run.failing.acquire(blocking=False):
                _time_out(run, behind)


def _patience_s(run: Run) -> float:
    """How long a rank waits for the others before it ends."""
    timeout_s = run.keys.timeout_s
    return min(timeout_s, keepalive.LOST_S) if run.world.links.lost else timeout_s


def _time_out(run: Run, behind: Mapping[str, Any] | None) -> NoReturn:
    """Ends this process, which has waited too long for other ranks."""
    hosts = dict(enumerate(run.world.hosts))
    late = f"Timed out waiting for the other ranks for {run.keys.timeout_s:g} s (timeout_s)"
    if run.world.links.lost:
        lost = {hosts[rank] for rank in [*run.world.links.lost]}  # a thread may add to them
        late = f"Timed out waiting for {', '.join(sorted(lost))}: it has died or lost its network"
        hosts = {rank: host for rank, host in hosts.items() if host not in lost}
    code = EXIT_CRASH
    try:
        code = fail(run, torch_errors.PeerTimeout(late), behind, hosts)
    finally:
        leave(code)


class Cause(NamedTuple):
    """What ended a rank. line: one line for the record and the log."""

    kind: Kind
    line: str
    exit_status: int = EXIT_CRASH


def fail(
    run: Run,
    error: BaseException,
    behind: Mapping[str, Any] | None = None,
    asked: Mapping[int, str] | None = None,
) -> int:
    """Records and prints what ended this rank, and returns the exit status. behind: the rank for
    which it waited, if that is known. asked: the ranks that are to say where they are, with their
    hosts.
    """
    if isinstance(error, Stopped):
        return _stopped(run, error)

    moment = time.time()
    pulse = run.world.pulse
    cause = cause_of(error, run.stop.reason)
    # Write the record at once: the other ranks lose their connections to this rank now.
    record: dict[str, Any] = {
        "rank": run.world.rank,
        "host": run.world.host,
        "kind": cause.kind,
        "error": cause.line,
        "exit_status": cause.exit_status,
        "behind": behind,
        "moment": moment,
        "progress": moment - pulse.unchanged_s(),
    }
    is_recorded = False
    with suppress(OSError):
        is_ending = bool(run.checkpoints.saver or asked)
        attempts.record(run.attempt, **record, is_ending=is_ending)
        is_recorded = True
    if asked:
        with suppress(Exception):  # it only helps to find the cause
            positions.report(run.attempt, asked)
    pulse.beat(pulse.read()[2])  # else its watchdog may end this rank before what follows
    if cause.kind.is_consequence:
        with suppress(Exception):  # it only helps to find a cause in NCCL
            _keep_flight_record(run)
    if cause.kind is Kind.timeout:
        behind = behind or run.world.behind()
    elif cause.kind is Kind.peer_lost:
        # rank 0 may have ended, and the store with it; torch's C++ code would log that at length
        run.world.silent.set()
    saver = run.checkpoints.saver
    if saver:
        with suppress(Exception):  # a failed save is not the reason why this rank ends
            saver.wait(LAST_SAVE_S)
    record["behind"] = behind
    with suppress(OSError):
        attempts.record(run.attempt, **record)  # a full disk may have space again
        is_recorded = True
    with suppress(OSError):
        _print(run, cause, error, record, is_recorded)
    if cause.kind.is_consequence:
        with suppress(OSError, subprocess.SubprocessError):
            _requeue_without_first_node(run)
        time.sleep(0.0 if behind else LINGER_S)
    elif cause.kind is not Kind.stopped:
        why = {"reason": judge.describe(record), "kind": cause.kind, "first": record}
        with suppress(OSError, MachineError):
            if run.is_running or not (run.dir / "status.json").exists():
                # the judgement of the parent replaces it
                attempts.write_status(run.attempt, "failed", run.step, **why)
    return cause.exit_status


def _stopped(run: Run, error: Stopped) -> int:
    """Records a stop before the first step, when there is no progress to save. Returns the exit
    status.
    """
    if run.world.rank == 0:
        step = directory.read_status(run.dir).get("step", 0)
        with suppress(MachineError):  # a later attempt has taken over the run directory
            attempts.write_status(
                run.attempt, "preempted", step, reason=str(error), kind=Kind.stopped
            )
            run.say(f"stopped by {error} before its first step")
    return EXIT_REQUEUE


def _requeue_without_first_node(run: Run) -> None:
    """With ``restarts=``, requeues the job if its first node does not answer, on which the batch
    script runs: with --no-kill, Slurm would keep the other nodes until the time limit (seen with
    Slurm 22.05). A rank of the second node does it. Raises OSError and SubprocessError.
    """
    ranks = run.world.ranks
    does_it = ranks.node_rank == 1 and ranks.local_rank == 0 and attempts.given(os.environ)
    if not (does_it and ranks.in_slurm and run.keys.restarts):
        return
    first = environment.nodes_of_job(os.environ)[0]
    mine = ranks.nodes[ranks.node_rank]
    if client.silent_nodes([first, mine]) == {first}:
        print(f"the first node, {first}, does not answer: the job is requeued", file=sys.stderr)
        client.requeue(os.environ)


def cause_of(error: BaseException, stop: str = "") -> Cause:
    """What ended this rank. stop: why it was to stop at that moment, or ""."""
    if torch_errors.is_open_files(error):
        fix = "run ulimit -n 65536 before srun, or lower num_workers="
        line = f"the limit on open files is reached{_where(error)}: {fix}"
        return Cause(Kind.machine, line, EXIT_MACHINE)
    if torch_errors.is_dead_worker(error):
        if stop:
            line = f"{stop}, which ended a worker of a DataLoader before the step was complete"
            return Cause(Kind.stopped, line, EXIT_REQUEUE)
        if task_memory().is_exceeded:
            fix = "request more (--mem), or lower num_workers="
            line = f"a worker of a DataLoader {task_memory().describe()}: {fix}"
            return Cause(Kind.out_of_memory, line)
        fix = (
            "if memory or /dev/shm was full, request more (--mem), or lower num_workers=; "
            "if it crashed, the rank's log says where"
        )
        line = f"{one_line(error).rstrip('.')}: {fix}"
        return Cause(Kind.machine, line, EXIT_MACHINE)
    if isinstance(error, OSError) and files.is_full(error):
        problem = f"{error.filename or 'a file'} cannot be written ({error.strerror})"
        return Cause(Kind.disk_full, f"{problem}: free some space there", EXIT_MACHINE)
    if isinstance(error, ConfigError | InputError | MachineError | RunError):
        return Cause(error.kind, str(error), error.exit_status)
    if torch_errors.is_out_of_memory(error):
        text = torch_errors.text_of(error)
        fix = "use a smaller global_batch_size=, or a larger accumulate="
        return Cause(Kind.out_of_memory, f"out of memory: {text.partition(': ')[2] or text}: {fix}")
    if torch_errors.is_lone_value(error):
        line = (
            "batch normalisation needs more than one value per channel, and a forward pass has "
            "one sample: give a larger global_batch_size=, a smaller accumulate= or fewer ranks"
        )
        return Cause(Kind.input, line, EXIT_CONFIG)
    peer_kind = torch_errors.peer_kind(error)
    if peer_kind:
        return Cause(peer_kind, torch_errors.peer_text(error))
    return Cause(Kind.error, torch_errors.text_of(error) + _where(error))


def _where(error: BaseException) -> str:
    """The innermost line of this repository's code in the traceback of ``error``, in brackets; ""
    if there is none.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = source.name_in(files.ROOT, frame.filename)
        if name:
            return f" ({name}, line {frame.lineno})"
    return ""


def _print(
    run: Run, cause: Cause, error: BaseException, record: Mapping[str, Any], is_recorded: bool
) -> None:
    """Prints the line of this rank. Its parent prints the judgement on all ranks; without a parent,
    this rank prints it, as far as it knows.
    """
    recipe = run.settings.recipe
    has_parent = attempts.given(os.environ) is not None
    if cause.exit_status != EXIT_CRASH:
        is_told = has_parent and is_recorded
        attempts.print_refusal(f"{recipe}: {cause.line}", run.world.rank == 0, is_told)
        return

    if cause.kind is Kind.error:
        traceback.print_exception(error)
    ended = "lost its peers" if cause.kind.is_consequence else "failed"
    lines = [
        f"rank {run.world.rank} on {run.world.host} {ended} after step {run.step}: {cause.line}"
    ]
    if not has_parent and (record["behind"] or not cause.kind.is_consequence):
        lines.append(f"{recipe}: failed: {judge.describe(record)}; logs in {run.dir}/logs")
    print(*lines, sep="\n", file=sys.stderr, flush=True)
