"""Runs the ranks of one machine without Slurm. If a rank fails, it ends all ranks and reports the
first failure.
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core.errors import EXIT_CONFIG, EXIT_MACHINE, EXIT_REQUEUE, Kind, MachineError
from recipes.core.files import ROOT
from recipes.core.place import network, processes
from recipes.core.run import attempt as attempts
from recipes.core.run import judge, signals, spec
from recipes.core.run.judge import End
from recipes.core.run.logs import say
from recipes.core.run.watchdog import RunningClock
from recipes.core.variables import Environ

# time for the other ranks to complete a checkpoint and end after the first failure
PEERS_GRACE_S = 20.0
STOP_GRACE_S = 600.0  # time for the ranks to save and end after a requested stop

Rank = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Layout:
    """The ranks of each machine, and the address of rank 0."""

    ranks: tuple[int, ...]  # their number on each machine
    node_rank: int = 0  # index of this machine
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: any free port, for ranks on this machine only


def listen(layout: Layout) -> socket.socket:
    """The socket on which rank 0 accepts its peers, bound before any rank starts: no two runs get
    the same port. Raises MachineError.
    """
    try:
        if layout.master_port == 0:
            return socket.create_server(("127.0.0.1", 0), backlog=2048)
        return network.listener(layout.master_port)
    except OSError as error:
        raise MachineError(
            f"port {layout.master_port}: {error.strerror}: give another port in master=HOST:PORT"
        ) from None


def rank_environment(
    layout: Layout, local_rank: int, port: int, environ: Environ
) -> dict[str, str]:
    """The environment of one rank, with the same variable names as torchrun."""
    before = sum(layout.ranks[: layout.node_rank])
    return {
        **environ,
        "RANK": str(before + local_rank),
        "WORLD_SIZE": str(sum(layout.ranks)),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(layout.ranks[layout.node_rank]),
        "GROUP_RANK": str(layout.node_rank),
        "GROUP_WORLD_SIZE": str(len(layout.ranks)),
        "MASTER_ADDR": layout.master_addr,
        "MASTER_PORT": str(port),
    }


def run(
    command: Sequence[str],
    layout: Layout,
    run_dir: Path | None,
    recipe: str,
    environ: Environ,
) -> int:
    """Runs ``command`` once per rank of this machine, in the repository, and returns the exit
    status of the run.

    Each rank has its own session and ends with this process. run_dir: the run directory of
    ``recipe``; None on a machine that is not the first, since rank 0 is on another machine. Raises
    MachineError if the run directory cannot be written.
    """
    launch = f"{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
    # of a job in which this is started
    environ = {name: value for name, value in environ.items() if name != spec.VARIABLE}
    listener = listen(layout) if layout.node_rank == 0 else None
    port = listener.getsockname()[1] if listener else layout.master_port
    attempt = None
    if run_dir:
        attempt = attempts.open_next(run_dir, recipe, environ, launch=launch)
        environ = {**environ, attempts.VARIABLE: str(attempt.folder)}
    ranks: list[Rank] = []
    stop = _Stop()
    try:
        for local_rank in range(layout.ranks[layout.node_rank]):
            variables = rank_environment(layout, local_rank, port, environ)
            handed: list[int] = []
            if listener and local_rank == 0:
                handed = [listener.fileno()]
                variables["RECIPES_LISTEN_FD"] = str(handed[0])
            rank = subprocess.Popen(
                command,
                env=variables,
                cwd=ROOT,
                pass_fds=handed,
                start_new_session=True,
                preexec_fn=processes.die_with(os.getpid()),
            )
            ranks.append(rank)
        if listener:
            listener.close()
        first, early = _watch(ranks, stop)
        end = _end(ranks, first, early, stop, layout)
        if attempt:
            return _report_end(attempt, end)
    finally:
        _signal(ranks, signal.SIGKILL)
        for rank in ranks:
            rank.wait()
    # The run is judged elsewhere: rank 0 is on another machine, or the recipe has no run directory.
    refused = (EXIT_CONFIG, EXIT_MACHINE, EXIT_REQUEUE)
    if end.first and end.exit_status not in refused:
        say(f"failed: {end.reason}")
    return end.exit_status


class _Stop:
    """Counts the signals to stop (`signals.handled`) from now on. Signals at about the same time
    count as one.
    """

    def __init__(self) -> None:
        self.count = 0
        self.number = signal.SIGTERM
        self._last = -math.inf
        for number in signals.handled():
            signal.signal(number, self._note)

    def _note(self, number: int, *_: object) -> None:
        # both the kernel and the ending shell send SIGHUP
        repeated = self.count and number == signal.SIGHUP
        now = time.monotonic()
        if now - self._last > signals.TOGETHER_S and not repeated:
            self.count += 1
            self.number = signal.Signals(number)
            self._last = now


def _watch(ranks: Sequence[Rank], stop: _Stop) -> tuple[int | None, int | None]:
    """Waits until every rank has ended.

    Ends ranks that take too long. Returns the local ranks of the first rank that failed by itself,
    and of a rank that had exited with status 0 before that, which is an error. Each is None if
    there is no such rank.
    """
    first: int | None = None
    early: int | None = None
    stops = 0
    deadline = math.inf
    now = RunningClock().now
    running = ranks
    while running:
        time.sleep(0.02)
        running = [rank for rank in ranks if not has_ended(rank)]
        codes = [rank.returncode for rank in ranks]
        if first is None and not stops:
            first = next((i for i, code in enumerate(codes) if code), None)
            if first is not None:
                deadline = now() + PEERS_GRACE_S
            elif 0 in codes and running:
                early = codes.index(0)
        if stop.count > stops:
            stops = stop.count
            _signal(ranks, stop.number if stops == 1 else signal.SIGKILL)
            deadline = now() + STOP_GRACE_S
            if stops == 1:
                say(
                    f"{stop.number.name}: the ranks save and end; a second signal ends them at once"
                )
        if now() > deadline:
            _signal(ranks, signal.SIGKILL)
            deadline = math.inf
    return first, early


def has_ended(rank: Rank) -> bool:
    """Whether a rank has ended. Kills its remaining processes, for example of a loader, or of what
    a user's program has started.
    """
    if rank.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # do not poll here: poll would reap a rank that has just ended, before its session is
            # killed
            if not os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return False
            # not reaped yet, so the ID is still that of its session
            os.killpg(rank.pid, signal.SIGKILL)
    return rank.poll() is not None


def _signal(ranks: Sequence[Rank], number: signal.Signals) -> None:
    """Sends a signal to every rank that runs. SIGKILL goes to the rank's whole session, including
    loader processes.
    """
    for rank in ranks:
        if not has_ended(rank):
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if number == signal.SIGKILL else os.kill)(rank.pid, number)


def _end(
    ranks: Sequence[Rank], first: int | None, early: int | None, stop: _Stop, layout: Layout
) -> End:
    """How the ranks of this machine ended. first, early: the results of `_watch`."""
    if first is None:
        codes = [rank.returncode for rank in ranks]
        status = next((_status(rank) for rank in ranks if rank.returncode), 0)
        return End(status, stopped=stop.count > 0 and -stop.number in codes)
    code = _status(ranks[first])
    if ranks[first].returncode < 0:
        kind = Kind.killed
        ended = f"was killed by {signal.Signals(code - 128).name}"
    elif early is not None:  # the other ranks failed because they lost this rank
        first = early
        kind = Kind.exited
        ended = "ended with status 0 before the run's end"
    else:
        kind = Kind.error
        ended = f"ended with status {code}"
    number = sum(layout.ranks[: layout.node_rank]) + first
    failing = {"rank": number, "host": socket.gethostname(), "exit_status": code}
    return End(code, failing, f"rank {number} on {failing['host']} {ended}", kind)


def _report_end(attempt: attempts.Attempt, end: End) -> int:
    """Judges the run, prints how it failed, and returns its exit status."""
    newest = attempts.newest(attempt.run_dir, str(attempt.facts().get("launch"))) or attempt
    outcome = judge.close(newest, end)
    logs = attempt.run_dir / "logs"
    if outcome.is_of_all:
        if newest.has_begun:  # the other ranks have printed that they lost it
            say(f"failed: {outcome.line}")
    elif outcome.state == judge.NOT_BEGUN:
        say(outcome.reason)
    elif outcome.state not in ("done", "preempted"):
        say(f"{outcome.state}: {outcome.reason}" + (f"; logs in {logs}" if logs.exists() else ""))
    return outcome.exit_status


def _status(rank: Rank) -> int:
    """The exit status in the shell's convention: 128 plus the number of the signal if a signal
    ended the rank.
    """
    return 128 - rank.returncode if rank.returncode < 0 else rank.returncode
