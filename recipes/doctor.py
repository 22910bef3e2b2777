"""The doctor finds bad nodes in an allocation, and explains why a run failed.

    srun --ntasks-per-node=1 --gpus-per-node=8 python -m recipes.doctor
    python -m recipes.doctor
    python launch.py recipe=imagenet nodes=4 gpus_per_node=8 doctor=true data_dir=/data
    python -m recipes.doctor explain runs/imagenet/1234
    python -m recipes.doctor network=my.env

The first command examines all nodes of an allocation; its exit status is 0 or 3. The second one
examines this machine alone, for example a login node. With ``doctor=true``, a job is examined at
its start. ``explain`` tells why a run ended; it also takes a folder of runs. The last command
examines with the variables of an env file.

Expected duration: ten seconds on two nodes with two cores each; not measured on GPUs. It ends after
``seconds=120``, even if a check hangs. One process examines a node, and writes a report into
run_dir, since the network may be broken. In a batch job, the nodes only report (``recipes.doctor
report``), and the shell judges after srun (``recipes.doctor judge``). The doctor never imports
torch: checks that need torch or can hang run in their own processes.
"""

import gc
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from recipes.conf.doctor import Config
from recipes.core import errors, files, trust
from recipes.core.config import envfile, help, profiles, run_keys
from recipes.core.doctor import commands, examine, explain, probes, reports
from recipes.core.place import ranks
from recipes.core.run import command_line, directory, source
from recipes.core.slurm import environment

OVER_S = 5.0  # seconds after ``seconds=`` after which this process ends, even if it hangs itself


def main(argv: list[str], told: dict[str, Any]) -> int:
    """Runs a command line without ``--json``. told: gets its results. Returns the exit status."""
    command = argv[0] if argv and argv[0] in ("explain", "report", "judge") else ""
    words = argv[1:] if command else argv
    if {"-h", "--help"} & set(words):
        print(f"{(__doc__ or '').strip()}\n\n{help.help_text('doctor')}")
        return errors.EXIT_DONE
    if command == "explain":
        if not words:
            raise errors.ConfigError(
                "explain: a path is missing: python -m recipes.doctor explain FOLDER"
            )
        sections = explain.explain(list(map(Path, words)))
        told["runs"] = [{"run": name, "lines": lines} for name, lines in sections]
        print("\n".join(explain.in_one(sections)))
        return errors.EXIT_DONE
    gc.disable()  # it would walk all reports repeatedly; this process is short and keeps them all
    source.go_home(files.ROOT)
    settings = command_line.parse(words, recipe="doctor")
    # A batch shell is no rank.
    info = ranks.detect({} if command == "judge" else os.environ)
    envfile.apply(profiles.env_variables(settings.run.network, settings.job.cluster), os.environ)
    os.umask(int(settings.run.umask, 8))
    cfg: Config = settings.config
    # A thread, since a signal handler does not run while a call hangs.
    late = "the examination exceeded seconds= and was stopped"
    limit = threading.Timer(cfg.seconds + OVER_S, _end, [errors.EXIT_MACHINE, late])
    limit.daemon = True
    limit.start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: _end(128 + number))
    run_dir = directory.choose(settings.run.run_dir, "doctor", info.run_id, files.ROOT)
    trust.own_folder(run_dir)
    if command == "judge":
        hosts = environment.nodes_of_job(os.environ) or [socket.gethostname()]
        return examine.give_verdict(reports.Reports(run_dir / "reports"), hosts, run_dir, 0)
    data_dir = os.path.expanduser(cfg.data_dir or os.environ.get("RECIPES_DATA", ""))
    here = probes.Surroundings(
        os.environ, info, run_dir, data_dir, settings.run.device is run_keys.Device.cpu
    )
    is_later = command == "report"
    status = examine.run(here, cfg.seconds, judge_later=is_later, bandwidth=cfg.bandwidth)
    told |= files.read_json(run_dir / "doctor.json")
    return status


def run(argv: list[str]) -> int:
    """Runs a command line. Returns the exit status."""
    return command_line.with_json(argv, _run)


def _run(words: list[str], told: dict[str, Any]) -> int:
    try:
        return main(words, told)
    except BrokenPipeError:
        raise
    except OSError as error:
        why = f"{error.filename or ''} {error.strerror or error}"
        line = f"{socket.gethostname()}: {why}: give another run_dir="
        raise errors.MachineError(line) from None


def _end(status: int, why: str = "") -> NoReturn:
    """Ends this process at once, with all its commands."""
    if why:
        print(f"doctor: {socket.gethostname()}: {why}", file=sys.stderr, flush=True)
    commands.kill_all()
    os._exit(status)


if __name__ == "__main__":
    status = errors.status_of("doctor", run)
    commands.kill_all()
    os._exit(status)  # without waiting for checks that hang
