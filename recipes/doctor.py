"""The doctor: is this allocation healthy, which node is bad, which interface do the ranks take; and, afterwards, why did it die?

    srun --ntasks-per-node=1 --gpus-per-node=8 python -m recipes.doctor      # every node of an allocation; status 0 or 3
    python -m recipes.doctor                                                 # this machine alone, a login node too
    python launch.py recipe=imagenet nodes=4 gpus_per_node=8 doctor=true data_dir=/data   # at the head of a job
    python -m recipes.doctor explain runs/imagenet/1234                      # why a run ended; of a folder of runs, each
    python -m recipes.doctor env my.env                                      # what is wrong in an env file
    python -m recipes.doctor network                                         # lines for an env file of one's own

What to expect: ten seconds on two nodes of two cores; with GPUs not measured. The nodes meet through files in run_dir, since a
broken network is what is looked for. Nothing here imports torch: what needs it, or can hang, is a process of its own, and the whole
is over after ``seconds=120``.
"""

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from recipes.core.doctor.node import Surroundings
from recipes.core.run import rundir, source
from recipes.core.files import ROOT
from recipes.conf.doctor import Config
from recipes.core import errors
from recipes.core.config import envfile, parser
from recipes.core.doctor import commands, examine, explain, probe_network, variables
from recipes.core.place import ranks
from recipes.core.place.ranks import RankInfo
from recipes.core.errors import ConfigError
from recipes.core.run.scontrol import Queue

OVER_S = 5.0  # after the whole, for whatever hangs in this process itself


def main(argv: list[str]) -> int:
    if argv[:1] == ["explain"] and len(argv) > 1:
        errors.show("\n".join(explain.explain([Path(word) for word in argv[1:]], Queue())))
        return errors.EXIT_DONE
    if argv[:1] == ["env"] and len(argv) > 1:
        return check_env_files(argv[1:])
    if argv[:1] == ["network"]:
        return propose(argv[1:])
    if argv and argv[0] in ("explain", "env"):
        raise ConfigError(
            f"{argv[0]}: a path is missing: python -m recipes.doctor {argv[0]} {'FOLDER' if argv[0] == 'explain' else 'FILE'}"
        )
    if any(word in ("-h", "--help") for word in argv):
        errors.show(f"{(__doc__ or '').strip()}\n\n{parser.help_text('doctor')}")
        return errors.EXIT_DONE
    keep_all()
    source.go_home(ROOT)
    settings = parser.parse(["json=true" if word == "--json" else word for word in argv], recipe="doctor")
    info = ranks.detect(os.environ)
    envfile.apply(parser.env_variables(settings.run.network, settings.job.cluster), os.environ)
    os.umask(int(settings.run.umask, 8))
    # A thread's, since a signal's handler waits for a call that hangs.
    over = threading.Timer(settings.config.seconds + OVER_S, _out_of_time)
    over.daemon = True
    over.start()
    leaving: list[Callable[[], None]] = []
    _end_when_told(leaving)
    run_dir = rundir.choose(settings.run.run_dir, "doctor", info.run_id or _group_name(info), ROOT)
    cfg: Config = settings.config
    plan = examine.Plan(
        rundir.for_examination(run_dir),
        cfg.seconds,
        settings.run.device is parser.Device.cpu,
        cfg.data_dir or os.environ.get("RECIPES_DATA", ""),
        cfg.bandwidth,
        cfg.json,
    )
    return examine.examine_all(plan, info, leaving)


def _group_name(info: RankInfo) -> str | None:
    """A folder that all ranks know by themselves, where no scheduler names the job."""
    one_machine = os.environ.get("RECIPES_LAUNCH", "") if info.num_nodes == 1 else ""  # another on each
    run = os.environ.get("TORCHELASTIC_RUN_ID") or one_machine
    return f"{info.master_addr}-{info.master_port}-{run}".strip("-").replace("/", "_") if info.world_size > 1 else None


def keep_all() -> None:
    """Without Python's collector, which walks all that the nodes have said again and again: this process is short, and keeps it all."""
    gc.disable()


def check_env_files(files: Sequence[str]) -> int:
    """Prints what is wrong in env files; status 2 where one cannot be used, or sets what cannot work."""
    code = errors.EXIT_DONE
    for file in files:
        try:
            problems = variables.check_file(Path(file), ROOT / "env")
        except envfile.EnvFileError as error:
            print(f"doctor: {error}", file=sys.stderr)
            code = errors.EXIT_CONFIG
            continue
        for problem in problems:
            print(f"{file}: {problem.name}: {problem.what}: {problem.fix}")
            code = errors.EXIT_CONFIG if problem.bad else code
        if not problems:
            print(f"{file}: nothing is wrong with it")
    return code


def propose(words: Sequence[str]) -> int:
    """Prints the lines that one's own env file wants on this node; none is what most want."""
    parser.parse(words, recipe="doctor")
    info = ranks.detect(os.environ)
    here = Surroundings(os.environ, info, ROOT)
    facts, _ = probe_network.interfaces(here)
    chosen = facts.get("chosen") or {"interface": "", "address": ""}
    others = facts["interfaces"].get(chosen["interface"], {}).get("addresses", [])
    infiniband = facts["infiniband"]
    print(
        "\n".join(
            variables.suggestion(chosen["interface"], infiniband, chosen["address"], others, bool(chosen["interface"]))
        )
    )
    return errors.EXIT_DONE


def _out_of_time() -> NoReturn:
    print(
        f"doctor: {socket.gethostname()}: was not through in time (seconds=), and gives up", file=sys.stderr, flush=True
    )
    commands.kill_all()
    os._exit(errors.EXIT_MACHINE)


def _end_when_told(leaving: Sequence[Callable[[], None]]) -> None:
    """Has this process end at once where it is told to, after what ``leaving`` then holds, and leave no other behind.

    A thread does it: Python's handlers are the main thread's, which does not wake up for a signal that came to another one.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def end() -> NoReturn:
        number = ours.recv(1)[0]
        commands.kill_all()
        for last in leaving:
            last()
        os._exit(128 + number)

    threading.Thread(target=end, name="told to end", daemon=True).start()
    signal.set_wakeup_fd(theirs.detach())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda *_: None)


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except (ConfigError, ranks.RankError, envfile.EnvFileError, errors.InputError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        status = errors.EXIT_CONFIG
    except BrokenPipeError:  # whoever read it has seen enough
        status = 128 + signal.SIGPIPE
    except OSError as error:
        print(
            f"doctor: {socket.gethostname()}: {error.filename or ''} {error.strerror or error}: give another run_dir=",
            file=sys.stderr,
        )
        status = errors.EXIT_MACHINE
    commands.kill_all()
    os._exit(status)  # a check that hangs is not waited for
