"""script: runs a program of your own on every rank, unchanged, with the variables, logs, requeueing and failure reports of a recipe.

    python launch.py script=ddp.py nodes=2 gpus_per_node=8 -- --epochs 20    # what comes after -- belongs to the program
    sbatch sbatch/script_2x8.sh script=ddp.py -- --epochs 20                 # the same, as a ready script

Each rank of the job runs this module, which does not import torch. It starts the program and passes signals on to it: docs/your-script.md.
"""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from recipes.core import errors, files
from recipes.core.errors import InputError, Kind, MachineError
from recipes.core.place import processes
from recipes.core.run import attempt as attempts
from recipes.core.run import entry, in_use, logs, signals
from recipes.core.run.attempt import Attempt
from recipes.core.run.entry import Start

# The exception at the end of a traceback or, for a SyntaxError, of a place. torch writes "[rank0]: " before each line.
EXCEPTION = re.compile(
    rb'^(.*)(?:Traceback \(most recent call last\):|  File ".*", line \d+)\n(?:\1 .*\n)+\1(\S.*)$', re.MULTILINE
)
TAIL_BYTES = 1 << 16  # the end of a log, in which an exception is looked for
HOST = socket.gethostname()


def variables(start: Start, run_dir: Path) -> dict[str, str]:
    """The environment of the program: that of this process, with its place under torchrun's names."""
    info, threads = start.ranks, start.settings.run.cpu_threads or int(start.ranks.world_size > 1)
    environ = {name: value for name, value in os.environ.items() if name != attempts.VARIABLE}
    if listener := environ.pop("RECIPES_LISTEN_FD", ""):  # launcher=local has reserved the port for rank 0
        os.close(int(listener))
    if threads:
        environ.setdefault("OMP_NUM_THREADS", str(threads))
    return {
        **environ,
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.local_world_size),
        "NODE_RANK": str(info.node_rank),
        "GROUP_RANK": str(info.node_rank),
        "GROUP_WORLD_SIZE": str(info.num_nodes),
        "MASTER_ADDR": info.master_addr or "127.0.0.1",
        "MASTER_PORT": str(info.master_port or free_port()),
        "RECIPES_RUN_DIR": str(run_dir),
    }


def free_port() -> int:
    """A free port of this machine, for a single rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run(
    command: Sequence[str], workdir: str, environ: Mapping[str, str], beat: Callable[[str], None]
) -> tuple[int, str]:
    """Runs the program of this rank, and passes signals on to it. beat: called every few seconds, with why it is to stop.

    Returns its exit status, or minus the signal that ended it, and why it was to stop; "" if it was not. Raises InputError.
    """
    reason, stops, null = "", set(signals.handled()), subprocess.DEVNULL
    signal.pthread_sigmask(signal.SIG_BLOCK, {*stops, signal.SIGCHLD})  # sigtimedwait receives them
    die = processes.die_with(os.getpid())

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*signals.SIGNALS, signal.SIGCHLD})
        die()

    # The canary has the signals blocked, so those that are sent to it stay pending.
    canary = subprocess.Popen(["sleep", "infinity"], stdin=null, stdout=null, stderr=null, preexec_fn=die)
    try:
        child = subprocess.Popen(command, cwd=workdir or None, env=environ, preexec_fn=prepare)
    except OSError as error:
        raise InputError(f"script={command[0]}: cannot be started in {workdir} ({error.strerror})") from None
    try:
        while child.poll() is None:
            found = signal.sigtimedwait({*stops, signal.SIGCHLD}, in_use.HEARTBEAT_S)
            if found and found.si_signo in stops:
                reason = reason or signal.Signals(found.si_signo).name
                if not _reaches_all(canary.pid, found.si_signo):
                    child.send_signal(found.si_signo)
            beat(reason)
        # A signal to all processes may have ended the program before it arrives here.
        if child.returncode and (found := signal.sigtimedwait(stops, signals.TOGETHER_S)):
            reason = reason or signal.Signals(found.si_signo).name
            beat(reason)
    finally:
        canary.kill()
        child.kill()
    return child.returncode, reason


def _reaches_all(canary: int, number: int) -> bool:
    """Whether a signal was sent to all processes of this rank, and not to this process alone: it is then pending in ``canary``.

    The launcher and, with ProctrackType=proctrack/cgroup, Slurm send it to this process alone.
    """
    time.sleep(signals.TOGETHER_S)
    pending = re.search(r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{canary}/status").read_text(), re.MULTILINE)
    return bool(pending and int(pending[1], 16) >> (number - 1) & 1)


def begin(attempt: Attempt) -> None:
    """Rank 0 makes the attempt the owner of the run. Raises InputError if another job uses the run directory."""
    with files.writing_to(attempt.run_dir, "run_dir"):
        attempts.describe(attempt, "script", os.environ, ())
        if problem := in_use.check(attempt, os.environ):
            raise InputError(problem)
        attempts.begin(attempt, 0, own=False, of_program=True)
        attempts.write_status(attempt, "running", 0)


def introduce(start: Start, run_dir: Path, command: Sequence[str]) -> None:
    """Prints the first lines of the log."""
    info = start.ranks
    ranks, nodes = (f"{n} {what}{'s' * (n > 1)}" for n, what in ((info.world_size, "rank"), (info.num_nodes, "node")))
    print(f"script: {ranks} on {nodes}: {shlex.join(command)}\nrun directory: {run_dir}")
    if start.interface:
        print(f"network: {start.interface.interface} ({start.interface.reason})")
    if start.from_files:
        print("variables from env files: " + " ".join(sorted(start.from_files)))


def last_exception(log: Path) -> str:
    """The last exception of this attempt in a log, as "; " and its line; "" if there is none."""
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        found = EXCEPTION.findall(file.read().rpartition(b"\f")[2])
    return "; " + errors.shown(found[-1][1].decode(errors="replace"), 300) if found else ""


def describe(returncode: int) -> tuple[Kind, int, str]:
    """How a program ended: the kind, the exit status in the shell's convention, and words for a message."""
    if returncode < 0:
        return Kind.killed, 128 - returncode, f"was killed by signal {-returncode} ({signal.strsignal(-returncode)})"
    return Kind.error, returncode, f"exited with status {returncode}"


def main(start: Start) -> int:
    """Runs the program of this rank and records how it ended. Raises InputError and MachineError.

    Returns its exit status. Returns 0 if the run was stopped: another status would make srun kill ranks that still save.
    """
    rank, attempt = start.ranks.rank, attempts.given(os.environ)
    if not attempt:
        fix = "use python launch.py script=FILE, or sbatch sbatch/script_2x8.sh script=FILE"
        raise InputError(f"must be started by a job script, or by launcher=local on a single machine: {fix}")
    if not (attempt.folder / "opened.json").exists():
        raise MachineError(f"{HOST}: does not see run_dir={attempt.run_dir}: give a folder that all nodes share")
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.handled())  # `run` passes on what comes from now on
    os.umask(int(start.settings.run.umask, 8))
    if rank == 0:
        begin(attempt)
    log, cfg = attempt.run_dir / "logs" / f"rank{rank}.log", start.settings.config
    files.own_folder(log.parent)
    python = [sys.executable, "-u"] if cfg.program.endswith(".py") else []
    command = [*python, cfg.program, *shlex.split(cfg.args)]

    def beat(stop: str) -> None:
        if rank == 0:
            attempts.check_owner(attempt)
            with contextlib.suppress(OSError):
                if stop:
                    attempts.write_status(attempt, "preempted", 0, reason=stop, kind=Kind.stopped)
                attempts.heartbeat(attempt)

    def record(kind: Kind, code: int, error: str) -> None:
        with contextlib.suppress(OSError):
            attempts.record(attempt, rank=rank, host=HOST, kind=kind, error=error, exit_status=code, moment=moment)

    with logs.copied_to(log):
        if rank == 0:
            introduce(start, attempt.run_dir, command)
        environ = variables(start, attempt.run_dir)
        returncode, stop = run(command, cfg.workdir, environ, beat)
        moment, (kind, code, ended) = time.time(), describe(returncode)
        if code == errors.EXIT_REQUEUE and not stop:
            stop = f"exit status {code}, with which a program asks to be continued"
            record(Kind.stopped, code, stop)
        if stop:
            if rank == 0:
                print(f"script: stopped by {stop}; the program of rank 0 {ended}")
            return errors.EXIT_DONE
        if code:
            record(kind, code, f"the program {ended}")  # at once: the other ranks lose their connections now
            print(f"rank {rank} on {HOST}: the program {ended}", file=sys.stderr)
    if code:
        record(kind, code, f"the program {ended}{last_exception(log)}")  # the log is complete now
    return code


if __name__ == "__main__":
    START = entry.begin("script")
    try:
        status = main(START)
    except (InputError, MachineError) as error:
        status = errors.EXIT_MACHINE if isinstance(error, MachineError) else errors.EXIT_CONFIG
        attempts.refuse(os.environ, status, str(error), START.ranks.rank)
        attempts.print_refusal(f"script: {error}", START.ranks.rank == 0)
    entry.end(status)
