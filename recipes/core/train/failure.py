"""The end of an attempt that failed: the error record, the status, the last lines; and the threads that end a rank that waits or lost its run."""

import contextlib
import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed

from recipes.core import errors, files
from recipes.core.errors import InputError, Kind, MachineError, RunError, Stopped, kind_of
from recipes.core.run import entry, failures, liveness, rundir, watchdog
from recipes.core.run.entry import Start
from recipes.core.train import checkpoint, peers
from recipes.core.train.world import POLL_S

if TYPE_CHECKING:
    from recipes.core.train.session import Run

ASKING_S = 5.0  # maximum duration of `World.behind`
# A rank that lost a peer waits this long for the other ranks' records before it names the missing rank.
PEERS_TELL_S = 2.0
FENCE_S = liveness.HEARTBEAT_S  # between two checks of the run directory's owner
LAST_SAVE_S = 20.0  # a rank that has failed waits this long for the checkpoint that is being written
DOCTOR = "srun --ntasks-per-node=1 python -m recipes.doctor, on the same nodes, finds what is wrong with it"


def leave(code: int) -> NoReturn:
    """Ends the process at once. Its connections close, so the other ranks notice."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _keep_flight_record(run: "Run") -> None:
    """Writes NCCL's record of the last collectives to ``logs/flight-RANK``, which `torchfrtrace` reads.

    torch writes it only after its own timeout, which never expires here.
    """
    if run.world.backend == "nccl":
        record = cast(Any, torch._C._distributed_c10d)._dump_nccl_trace()
        files.write_whole(run.dir / "logs" / f"flight-{run.world.rank}", lambda file: file.write(record))


def keep_to_the_fence(run: "Run", over: threading.Event) -> None:
    """Ends this process if a later attempt has taken over the run directory; writes heartbeats until then.

    A thread does this, since the main thread may be waiting in a step.
    """
    while not over.wait(FENCE_S):
        try:
            run.check_mine()
            with contextlib.suppress(OSError):
                liveness.heartbeat(run.dir)
        except MachineError as error:
            print(f"{run.settings.recipe}: {error}", file=sys.stderr)
            leave(errors.EXIT_MACHINE)


def end_a_wait(run: "Run", start: Start, over: threading.Event) -> None:
    """Ends this process if it times out waiting for the other ranks (``timeout_s``), and names the rank that is behind.

    It replaces torch's own timeouts, which also count the time in which the job was suspended.
    """
    world, clock, timeout_s = run.world, run.world.clock, run.keys.timeout_s
    last, since, reported_s = world.pulse.read(), clock.now(), 0.0
    while not over.wait(POLL_S):
        now, moment = world.pulse.read(), clock.now()
        suspended_s = clock.suspension_s()
        if suspended_s not in (0.0, reported_s):  # this suspension is not reported yet
            reported_s = suspended_s
            if world.ranks.local_rank == 0:
                run.warn(f"the job was suspended for {suspended_s:.0f} s; the run continues")
        if now != last or now[2] in (*watchdog.NOT_WATCHED, watchdog.START):
            last, since = now, moment
        elif world.size > 1 and moment - since > timeout_s and not run.failing.locked():
            behind = world.behind()
            waits = behind or now[2] in watchdog.WAITING  # if no rank is behind, the network is the cause
            if waits and world.pulse.read() == last and run.failing.acquire(blocking=False):
                words = f"Timed out waiting for the other ranks for {timeout_s:g} s (timeout_s)"
                code = errors.EXIT_CRASH
                try:
                    code = fail(run, peers.PeerTimeout(words), behind)
                    with contextlib.suppress(Exception):  # the record only helps to find a cause in NCCL
                        _keep_flight_record(run)
                    entry.remove_own_folder(start)
                finally:
                    leave(code)


def _stopped_early(run: "Run", reason: str) -> int:
    """For a stop before the first step: there is no progress to save. Sets the status and returns the exit status."""
    if run.world.rank == 0 and run.is_mine():
        before = rundir.read_status(run.dir)
        step = before["step"] if before else 0
        rundir.write_status(run.dir, "preempted", attempt=run.attempt, step=step, reason=reason, kind=Kind.stopped)
        run.say(f"stopped by {reason} before its first step")
    return errors.EXIT_REQUEUE


class Cause(NamedTuple):
    """What ended a rank. line: one line for the record and the log. traceback: whether the log also needs the traceback."""

    kind: Kind
    line: str
    exit_status: int = errors.EXIT_CRASH
    traceback: bool = False


def fail(run: "Run", error: BaseException, behind: Mapping[str, Any] | None = None) -> int:
    """Records and prints what ended this rank, writes ``status.json`` as far as this rank knows, and returns the exit status.

    behind: the rank for which it waited without success, if that is already known.
    """
    moment = time.time()
    if isinstance(error, Stopped):
        return _stopped_early(run, str(error))
    cause = _cause(run, error)
    # Write the record at once: the other ranks lose their connections to this rank now, and would report it as silent.
    recorded = _record(run, cause, moment, behind)
    if cause.kind is Kind.timeout:
        behind = behind or run.world.behind()
    elif cause.kind in (Kind.peer_lost, Kind.suspended):
        run.world.silent.set()  # rank 0 may have ended, and the store with it; torch's C++ code would log that at length
    if run.saver:
        with contextlib.suppress(Exception):  # a failed save is not the reason why this rank ends
            run.saver.wait(LAST_SAVE_S)
    if behind or not recorded:
        _record(run, cause, moment, behind)
    with contextlib.suppress(OSError):
        _print_cause(run, cause, error, wait_for_peers=not behind)
    with contextlib.suppress(OSError):
        if run.is_mine():  # otherwise the status belongs to a later attempt
            _write_status(run, cause)
    return cause.exit_status


def _cause(run: "Run", error: BaseException) -> Cause:
    """What ended this rank. For a lost peer it prints a line at once, since the rank may then wait for the other ranks' records."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = f"make room; {checkpoint.after_a_restart(run.dir / 'checkpoints')}"
        line = f"{error.filename or 'a file'} cannot be written ({error.strerror}): {fix}"
        return Cause(Kind.disk_full, line, errors.EXIT_MACHINE)
    if isinstance(error, MachineError):
        return Cause(Kind.machine, str(error), errors.EXIT_MACHINE)
    if isinstance(error, InputError):
        return Cause(Kind.input, str(error), errors.EXIT_CONFIG)
    if isinstance(error, RunError):
        return Cause(Kind.error, str(error))
    if any(type(one).__name__ == "InvalidCxxCompiler" for one in _chain(error)):  # of torch._inductor
        line = "compile=true: torch finds no C++ compiler here: install g++, or name one in CXX, or leave compile= out"
        return Cause(Kind.machine, line, errors.EXIT_MACHINE)
    if _is_out_of_memory(error):
        text = errors.one_line(error)
        fix = "a smaller global_batch_size=, or accumulate=, takes less"
        return Cause(Kind.out_of_memory, f"out of memory: {text.partition(': ')[2] or text}: {fix}")
    if kind := peers.peer_kind(error):
        return _lost_peers(run, kind, peers.peer_words(error))
    return Cause(Kind.error, errors.one_line(error), traceback=not isinstance(error, KeyboardInterrupt))


def _lost_peers(run: "Run", kind: Kind, line: str) -> Cause:
    world = run.world
    with contextlib.suppress(OSError):  # stderr is closed
        print(
            f"rank {world.rank} on {world.host} lost its peers at step {run.step}: {line}", file=sys.stderr, flush=True
        )
    stopped_s = world.clock.suspension_s()
    # If a rank that was not suspended has failed, only this rank was suspended, and the other ranks waited for it.
    if stopped_s and all(kind_of(one) is Kind.suspended for one in failures.records(run.dir, run.attempt)):
        line = f"the job was suspended for {stopped_s:.0f} s, and the ranks lost each other ({line})"
        return Cause(Kind.suspended, line, errors.EXIT_REQUEUE)
    return Cause(kind, line)


def _print_cause(run: "Run", cause: Cause, error: BaseException, wait_for_peers: bool) -> None:
    if cause.exit_status != errors.EXIT_CRASH:
        if run.world.rank == 0 or not _rank0_says(run, cause.line):
            print(f"{run.settings.recipe}: {cause.line}", file=sys.stderr)
    elif cause.kind.is_consequence and wait_for_peers:
        _await_peers_words(run)
    elif cause.traceback:
        traceback.print_exception(error)


def _write_status(run: "Run", cause: Cause) -> None:
    """Writes ``status.json``, or ``refused.json`` for a run that did not begin. Prints why the run failed."""
    recipe, attempt = run.settings.recipe, run.attempt
    found = failures.verdict(run.dir, rundir.owner(run.dir, attempt=attempt))
    before = rundir.read_status(run.dir) or {}
    if cause.kind is Kind.suspended:  # it may be requeued: the newest checkpoint is complete
        saved = before.get("step", 0)
        rundir.write_status(run.dir, "preempted", attempt=attempt, step=saved, reason=cause.line, kind=cause.kind)
    elif run.begun or before.get("attempt", attempt) == attempt:
        rundir.write_status(
            run.dir, "failed", attempt=attempt, step=run.step, reason=found.reason, kind=found.kind, first=found.first
        )
    elif cause.exit_status != errors.EXIT_CRASH:
        rundir.refuse(run.dir, run.launch, cause.exit_status, found.reason)
    reports = not cause.kind.is_consequence or run.world.rank == min(
        (one["rank"] for one in failures.records(run.dir, attempt)), default=run.world.rank
    )
    if cause.exit_status == errors.EXIT_CRASH and reports:
        print(f"{recipe}: failed: {found.reason}; logs in {run.dir}/logs", file=sys.stderr, flush=True)
        if cause.kind.is_consequence and run.world.ranks.num_nodes > 1 and found.kind is Kind.timeout:
            print(f"{recipe}: if no rank hangs, the cause is the network: {DOCTOR}", file=sys.stderr, flush=True)


def _await_peers_words(run: "Run") -> None:
    """Gives the other ranks time to write their error records.

    It waits longer if a rank is still asking the store, which rank 0 serves, for the rank that is behind.
    """
    time.sleep(PEERS_TELL_S)
    others = failures.records(run.dir, run.attempt)
    if any(kind_of(other) is Kind.timeout and not other["behind"] for other in others):
        time.sleep(ASKING_S - PEERS_TELL_S)


def _record(run: "Run", cause: Cause, moment: float, behind: Mapping[str, Any] | None = None) -> bool:
    """Writes this rank's error record. Returns False if it cannot be written."""
    try:
        failures.record(
            run.dir, attempt=run.attempt, rank=run.world.rank, host=run.world.host, kind=cause.kind, error=cause.line,
            exit_status=cause.exit_status, behind=behind, moment=moment,
        )  # fmt: skip
    except OSError:
        return False
    return True


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes. torch.compile keeps the error of a backend as ``inner_exception``."""
    while error:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python could not allocate memory. torch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in errors.one_line(error)


def _rank0_says(run: "Run", line: str) -> bool:
    """Whether rank 0 ends with the same line within 1.5 s. Then this rank does not repeat it."""
    for _ in range(15):
        record = failures.read(run.dir, run.attempt, rank=0)
        if record:
            return bool(record["error"] == line)
        time.sleep(0.1)
    return False
