"""script: runs a program of your own on every rank, unchanged, with the variables, logs, requeueing
and failure reports of a recipe.

    # what comes after -- belongs to the program
    python launch.py script=ddp.py nodes=2 gpus_per_node=8 -- --epochs 20
    # the same, as a ready script
    sbatch sbatch/script_2x8.sh script=ddp.py -- --epochs 20

Each task of the job runs this module, which does not import torch. It starts the program and
passes signals on to it: docs/your-script.md. With ``through=torchrun`` or ``accelerate``, each task
starts this launcher, which starts this module again for each rank.
"""

import contextlib
import os
import re
import shlex
import signal
import socket
import sys
import threading
from pathlib import Path

from recipes.conf.script import Config, StopSignal
from recipes.core import files, trust
from recipes.core.config.run_keys import Device
from recipes.core.errors import (
    EXIT_CRASH,
    EXIT_DONE,
    EXIT_REQUEUE,
    Hang,
    InputError,
    Kind,
    MachineError,
    shown,
)
from recipes.core.place import memory
from recipes.core.program import delivery, launchers, silence, supervise
from recipes.core.program.launchers import Launch
from recipes.core.program.remarks import Remarks
from recipes.core.program.supervise import Ended, Rules
from recipes.core.program.watch import Watch
from recipes.core.run import (
    attempt as attempts,
    entry,
    in_use,
    logs,
    look,
    signals,
    spec,
    stop_note,
)
from recipes.core.run.attempt import Attempt
from recipes.core.run.entry import Start
from recipes.core.slurm import environment

# The exception at the end of a traceback or, for a SyntaxError, of a place. torch writes "[rank0]:
# " before each line. A progress bar may stand before the first line.
EXCEPTION = re.compile(
    rb"^.*?((?:\S{1,40} ?)?)(?:Traceback \(most recent call last\):"
    rb'|  File ".*", line \d+)\n(?:\1 .*\n)+\1(\S.*)$',
    re.MULTILINE,
)
TAIL_BYTES = 1 << 16  # the end of a log, in which an exception is looked for
HOST = socket.gethostname()


def variables(start: Start, attempt: Attempt, launch: Launch) -> dict[str, str]:
    """The environment of the program: that of this process, with its place, the run directory and
    the hook.
    """
    info = start.ranks
    environ = dict(os.environ)
    for name in (attempts.VARIABLE, spec.VARIABLE):
        environ.pop(name, None)
    several = info.world_size > 1 and launch.through != "node"
    threads = start.settings.run.cpu_threads or int(several)
    if threads:
        environ.setdefault("OMP_NUM_THREADS", str(threads))
    if launch.on_cpu:
        environ = launchers.OF_CPU | environ
    of_rank = launchers.variables_of_rank(info)
    if launch.through == "node":
        for name in of_rank:
            environ.pop(name, None)
        environ |= launchers.variables_of_node(info, environ)
    else:
        environ |= of_rank
    if launch.through == "rank":
        environ = environment.with_tasks_per_node(environ, info.local_world_size)
    return {
        **launchers.with_hook(environ),
        "RECIPES_RUN_DIR": str(attempt.run_dir),
        # with the job, since a job that the program submits inherits this variable
        "RECIPES_STOP_NOTE": f"{environment.allocation_id(environ)}:{stop_note.path(attempt)}",
    }


def begin(attempt: Attempt) -> None:
    """Rank 0 makes the attempt the owner of the run. Raises InputError if another job uses the run
    directory.
    """
    with files.writing_to(attempt.run_dir, "run_dir"):
        attempts.describe(attempt, "script", os.environ, ())
        problem = in_use.check(attempt, os.environ)
        if problem:
            raise InputError(problem)
        attempts.begin(attempt, 0, own=False, of_program=True)
        attempts.write_status(attempt, "running", 0)


def introduce(start: Start, run_dir: Path, launch: Launch) -> None:
    """Prints the first lines of the log."""
    info = start.ranks
    ranks = info.world_size * launch.nproc
    nodes = info.num_nodes
    name = "task" if launch.through == "node" else "rank"
    who = f"{ranks} {name}{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    by = f", started by {launch.through}" if launch.has_launcher else ""
    print(f"script: {who}{by}: {shlex.join(launch.program)}\nrun directory: {run_dir}")
    if start.interface:
        print(f"network: {start.interface.interface} ({start.interface.reason})")
    if start.from_files:
        print("variables from env files:", *sorted(start.from_files))


def last_exception(log: Path) -> str:
    """The last exception of this attempt in a log, as "; " and its line; "" if there is none."""
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        tail = file.read().rpartition(b"\f")[2].replace(b"\r", b"\n")
    exceptions = EXCEPTION.findall(tail)
    if not exceptions:
        return ""
    return "; " + shown(exceptions[-1][1].decode(errors="replace"), 300)


def describe(returncode: int) -> tuple[Kind, int, str]:
    """How a program ended: the kind, the exit status in the shell's convention, and words for a
    message.
    """
    status = returncode if returncode >= 0 else 128 - returncode
    if not 128 < status < 128 + signal.NSIG:
        return Kind.error, status, f"exited with status {status}"
    number = status - 128
    hint = "; often the memory was used up" if number == signal.SIGKILL else ""
    name = f"signal {number} ({signal.strsignal(number)}{hint})"
    if returncode < 0:
        return Kind.killed, status, f"was killed by {name}"
    return Kind.killed, status, f"exited with status {status}, as a shell does after {name}"


def launch_of(start: Start) -> Launch:
    """How the program is started. Raises MachineError."""
    cfg: Config = start.settings.config
    python = [sys.executable, "-u"] if cfg.program.endswith(".py") else []
    program = [*python, cfg.program, *shlex.split(cfg.args)]
    on_cpu = start.settings.run.device is Device.cpu
    has_launcher = cfg.through.name in ("torchrun", "accelerate")
    nproc = launchers.nproc_here(cfg.nproc_per_node, on_cpu) if has_launcher else 1
    return Launch(cfg.through.name, program, shlex.split(cfg.launcher_args), nproc, on_cpu)


def rules(
    start: Start, attempt: Attempt, launch: Launch, watch: Watch | None, is_first: bool
) -> Rules:
    """What the supervisor does. Only the first task prints remarks."""
    cfg: Config = start.settings.config
    info = start.ranks
    order = list(delivery.STOP_SIGNALS)
    wanted = ""
    if cfg.stop_signal is not StopSignal.auto:
        wanted = cfg.stop_signal.name
        order = [signal.Signals[f"SIG{wanted}"]]
    is_group = is_first and launch.through == "rank" and info.world_size > 1
    own_ranks = info.local_world_size if watch and launch.through == "rank" else 0
    port = info.master_port if is_group else 0
    name = Path(cfg.program).name
    remarks = Remarks(attempt, watch, is_first, name, info.in_slurm, wanted, port, own_ranks)
    return Rules(order, start.settings.run.timeout_s, remarks)


def watch_run(start: Start, attempt: Attempt, is_first: bool) -> Watch:
    """The view of the run directory of this task. Only the first task looks for a hang."""
    cfg: Config = start.settings.config
    watch = Watch(attempt, start.ranks.rank)
    if is_first and cfg.silent_s:
        facts = (attempt, watch, cfg.silent_s, cfg.saves)
        threading.Thread(target=silence.wait, args=facts, daemon=True).start()
    return watch


def main(start: Start) -> int:
    """Runs the program, or the launcher of this task, and records how it ended. Raises InputError
    and MachineError.

    Returns its exit status. Returns 0 if the run was stopped: another status would make srun kill
    ranks that still save.
    """
    info = start.ranks
    attempt = attempts.given(os.environ)
    if not attempt:
        raise InputError(
            "must be started by a job script, or by launcher=local on a single machine: "
            "use python launch.py script=FILE, or sbatch sbatch/script_2x8.sh script=FILE"
        )
    if not (attempt.folder / "opened.json").exists():
        raise MachineError(
            f"{HOST}: does not see run_dir={attempt.run_dir}: give a folder that all nodes share"
        )
    # the supervisor passes on later signals
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.handled())
    os.umask(int(start.settings.run.umask, 8))
    launch = launch_of(start)
    # launcher=local has reserved the port for rank 0
    listener = os.environ.pop("RECIPES_LISTEN_FD", "")
    if listener:
        os.close(int(listener))
    task = os.environ.pop(launchers.TASK, None)
    is_first = task is None and info.rank == 0
    if is_first:
        begin(attempt)
    if task is None and launch.has_launcher:
        return run_launcher(start, attempt, launch, is_first)
    return run_rank(start, attempt, launch, is_first, None if task is None else int(task))


def run_launcher(start: Start, attempt: Attempt, launch: Launch, is_first: bool) -> int:
    """Runs the launcher of this node. The wrappers that it starts record how their ranks end."""
    info = start.ranks
    environ = {**os.environ, launchers.TASK: str(info.rank)}
    if launch.on_cpu:
        environ = launchers.OF_CPU | environ
    environ.setdefault("OMP_NUM_THREADS", str(start.settings.run.cpu_threads or 1))
    for name in launchers.variables_of_rank(info):
        environ.pop(name, None)
    watch = watch_run(start, attempt, is_first)
    task_memory = memory.read()
    command = launch.command(info, sys.argv[1:])
    log = attempt.run_dir / "logs" / f"node{info.node_rank}.log"
    first_rank = info.node_rank * launch.nproc
    with _copied_to(log):
        if is_first:
            introduce(start, attempt.run_dir, launch)
        ended = supervise.run(
            command, "", environ, rules(start, attempt, launch, watch, is_first), watch
        )
    if is_stopped(attempt, ended, watch, first_rank, is_first):
        return EXIT_DONE
    kind, code, words = describe(ended.returncode)
    if kind is Kind.killed and task_memory.is_exceeded:
        kind = Kind.out_of_memory
        words = task_memory.describe()
    else:
        kind = Kind.error
        words += last_exception(log)
    if code:
        record(attempt, first_rank, kind, code, f"{launch.through} {words}", ended, name="node")
    return code


def run_rank(
    start: Start, attempt: Attempt, launch: Launch, is_first: bool, task: int | None
) -> int:
    """Runs the program of one rank. task: number of the task whose launcher has started this rank;
    None without a launcher.
    """
    rank = start.ranks.rank
    watch = watch_run(start, attempt, is_first) if task is None else None
    task_memory = memory.read()
    log = attempt.run_dir / "logs" / f"rank{rank}.log"
    own_task = rank if task is None else task
    looks = (lambda: {"rank": rank, "host": HOST}, lambda: look.describe(os.getpid()))
    threading.Thread(target=look.answer_requests, args=looks, daemon=True).start()
    with _copied_to(log):
        if is_first:
            introduce(start, attempt.run_dir, launch)
        with files.writing_to(attempt.run_dir, "run_dir"):
            attempts.note_rank(attempt, rank, own_task, HOST, None)
        ended = supervise.run(
            launch.program,
            start.settings.config.workdir,
            variables(start, attempt, launch),
            rules(start, attempt, launch, watch, is_first),
            watch,
        )
        kind, code, words = describe(ended.returncode)
        if is_stopped(attempt, ended, watch, rank, is_first):
            code = EXIT_DONE
        if code and task_memory.is_exceeded:
            why = task_memory.describe(rank if task is None else None)
            if kind is Kind.killed:
                kind = Kind.out_of_memory
                words = why
            else:
                words += f"; one of its processes {why}"
        if code:
            # the others lose their connections now
            record(attempt, rank, kind, code, f"the program {words}", ended)
            print(f"rank {rank} on {HOST}: the program {words}", file=sys.stderr)
        else:
            with contextlib.suppress(OSError):
                attempts.note_rank(attempt, rank, own_task, HOST, ended.at)
    if code:
        # the log is complete now
        record(attempt, rank, kind, code, f"the program {words}{last_exception(log)}", ended)
    return code


def _copied_to(log: Path) -> "contextlib.AbstractContextManager[object]":
    with files.writing_to(log.parents[1], "run_dir"):
        trust.own_folder(log.parent, is_listed=False)
    return logs.copied_to(log)


def record(
    attempt: Attempt, rank: int, kind: Kind, code: int, error: str, ended: Ended, name: str = "rank"
) -> None:
    """Writes the error record of this rank, or of the launcher of this node."""
    with contextlib.suppress(OSError):
        attempts.record(
            attempt,
            rank=rank,
            host=HOST,
            kind=kind,
            error=error,
            exit_status=code,
            moment=ended.at,
            name=name,
        )


def is_stopped(
    attempt: Attempt, ended: Ended, watch: Watch | None, rank: int, is_first: bool
) -> bool:
    """Whether the program ended because it was asked to stop, or because it asks to be continued.
    Records it.
    """
    stop = ended.stop
    _, code, words = describe(ended.returncode)
    if stop and watch:
        with contextlib.suppress(OSError):
            watch.record_stop()
    elif code == EXIT_REQUEUE:
        stop = f"exit status {code}, which asks for a requeue"
        record(attempt, rank, Kind.stopped, code, stop, ended)
    if stop and is_first:
        if ended.was_killed:
            words = "had not ended in time, and was killed"
        print(f"script: stopped by {stop}; the program of rank 0 {words}")
    return bool(stop)


if __name__ == "__main__":
    START = entry.begin("script")
    try:
        status = main(START)
    except (InputError, MachineError) as error:
        status = error.exit_status
        is_told = attempts.refuse(os.environ, error, START.ranks.rank)
        attempts.print_refusal(f"script: {error}", START.ranks.rank == 0, is_told)
    except Hang:
        status = EXIT_CRASH
    entry.end(status)
