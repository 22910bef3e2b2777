"""The start of a recipe, before torch is imported: keys, ranks, env files, network interface.

A recipe begins with ``START = entry.begin("name") if __name__ == "__main__" else None``, and imports torch after that, since
some variables of the env files are read when torch is loaded.
"""

import atexit
import errno
import os
import re
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from recipes.core import errors, files
from recipes.core.config import envfile, help, profiles, recipe_conf
from recipes.core.config.parser import Settings
from recipes.core.errors import ConfigError
from recipes.core.files import ROOT
from recipes.core.place import network, ranks
from recipes.core.place.ranks import RankInfo
from recipes.core.run import command_line, dryrun, rundir, source
from recipes.core.run.dryrun import Asked
from recipes.core.run.watchdog import Pulse


@dataclass(frozen=True)
class Start:
    """What a recipe knows before torch is there.

    from_files: variables set from the env files. interface: the one proven by route, None where nothing could be. pulse: how
    far this rank has come, which a process beside it watches. own_folder: of this job, for as long as it runs; one on each node.
    rehearsal: what `launch.py check` wants to know in place of a run.
    """

    settings: Settings
    ranks: RankInfo
    from_files: dict[str, str]
    interface: network.Choice | None
    pulse: Pulse = field(default_factory=Pulse)
    own_folder: Path | None = None
    rehearsal: Asked | None = None


def note_refusal(settings: Settings, status: int, line: str) -> None:
    """Leaves word of a refusal for the batch script, which cannot go by srun's status: the ranks that it ends mask it."""
    job = rundir.job_id(os.environ)
    if job:
        run_dir = rundir.choose(settings.run.run_dir, settings.recipe, job, ROOT)
        with files.umask(int(settings.run.umask, 8)):
            rundir.refuse(run_dir, rundir.launch_id(os.environ), status, line)


def note_refusal_of(recipe: str, words: Sequence[str], status: int, line: str, environ: Mapping[str, str]) -> None:
    """`note_refusal` for words that are not valid keys: only ``run_dir=`` is read from them."""
    run_dir = next((word.partition("=")[2] for word in reversed(words) if word.startswith("run_dir=")), "")
    if (job := rundir.job_id(environ)) and recipe in recipe_conf.names() and not set("$\0") & set(run_dir):
        with files.umask(0o077):
            rundir.refuse(rundir.choose(run_dir, recipe, job, ROOT), rundir.launch_id(environ), status, line)


_through: list[int] = []  # the status of a rank that has done all it had to


def end(code: int) -> NoReturn:
    """Ends a rank that has done all it had to, with this status, whatever the teardown of Python and torch would come to."""
    _through.append(code)
    sys.exit(code)


def _leave() -> None:
    """After all else that is done at exit: the teardown that would follow takes a second, and can hang or crash in a library.

    Not where another tool looks into this process (nsys, a preloaded library), which may write what it has found at the very end.
    """
    if _through and "LD_PRELOAD" not in os.environ and not any("INJECTION" in name for name in os.environ):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_through[0])


def begin(recipe: str, argv: Sequence[str] | None = None) -> Start:
    """Checks the keys, finds this process's rank, and sets the variables of the env files and of the network interface.

    A variable that the user has set stays as it is. Ends the process with one line: status 2 for a wrong key or surroundings
    that contradict themselves, 3 where this machine cannot take part.
    """
    if argv is None:
        atexit.register(_leave)  # the first that is registered is called last
    # Slurm may signal a short job while it starts; held back until there is a handler (preempt.stop_flag), it is not lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    argv = sys.argv[1:] if argv is None else argv
    if "RANK" in os.environ:  # python -m torch.distributed.launch says in a word what is in the environment too
        argv = [word for word in argv if not re.fullmatch(r"--local[-_]rank=\d+", word)]
    if any(word in ("-h", "--help") for word in argv):
        errors.show(help.help_text(recipe))
        sys.exit(errors.EXIT_DONE)
    host = socket.gethostname()
    if other := source.other_code(ROOT, os.environ):
        _refuse(recipe, f"{host}: {other}", errors.EXIT_CONFIG, speaks=_rank_hint() == "0")
    source.go_home(ROOT)
    try:
        settings = command_line.parse(argv, recipe=recipe)
    except ConfigError as error:
        if _rank_hint() == "0":
            note_refusal_of(recipe, argv, errors.EXIT_CONFIG, str(error), os.environ)
        _refuse(recipe, str(error), errors.EXIT_CONFIG, speaks=_rank_hint() == "0")
    try:
        info = ranks.detect(os.environ)
        from_files = _apply_env_files(settings)
    except (ranks.RankError, envfile.EnvFileError, ConfigError) as error:
        note_refusal(settings, errors.EXIT_CONFIG, f"{host}: {error}")
        _refuse(recipe, f"{host}: {error}", errors.EXIT_CONFIG, speaks=_rank_hint() == "0")
    named = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= os.environ.keys()
    try:
        interface = None if named else network.choose(info)
    except network.NetworkError as error:
        note_refusal(settings, errors.EXIT_MACHINE, f"{host}: {error}")
        _refuse(recipe, f"{host}: {error}", errors.EXIT_MACHINE, speaks=info.local_rank == 0)
    if interface:
        os.environ.update(network.settings(interface, os.environ))
    wants_tmpdir = "TMPDIR" in getattr(settings.config, "stage_dir", "") and not os.environ.get("TMPDIR")
    own_folder = _own_folder(os.environ, speaks=info.local_rank == 0)
    if own_folder and wants_tmpdir:  # it is this run's own now, which ends with it
        line = f"{host}: stage_dir={settings.config.stage_dir}: TMPDIR is not set in this job: give a folder of the nodes' own disks"
        note_refusal(settings, errors.EXIT_CONFIG, line)
        _refuse(recipe, line, errors.EXIT_CONFIG, speaks=info.local_rank == 0)
    if settings.run.debug:
        os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")  # torch reads it when it is imported
    return Start(settings, info, from_files, interface, own_folder=own_folder, rehearsal=dryrun.asked(os.environ))


def _own_folder(environ: MutableMapping[str, str], speaks: bool) -> Path | None:
    """Gives a job temporary files and caches of compiled code of its own, on its nodes' disks, where nothing else is set.

    Caches that jobs share are written by several at once, and lie in a home that is slow from many nodes. `remove_own_folder` ends it.
    """
    folder = rundir.own_folder(environ)
    if not folder:
        return None
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "it is somebody else's")
    except OSError as error:
        words = f"{socket.gethostname()}: {folder}: cannot be used ({error.strerror}): caches are shared"
        if speaks:
            print(f"warning: {words}", file=sys.stderr)
        return None
    environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{folder}/inductor")
    environ.setdefault("TRITON_CACHE_DIR", f"{folder}/triton")
    if not environ.get("TMPDIR"):
        environ["TMPDIR"] = str(folder)
    return folder


def remove_own_folder(start: Start) -> None:
    """At the end of all that this process's node does for the run."""
    if start.own_folder and start.ranks.local_rank == 0:
        shutil.rmtree(start.own_folder, ignore_errors=True)


def _apply_env_files(settings: Settings) -> dict[str, str]:
    """common < fabric < site, set where the user has not. Raises EnvFileError or ConfigError."""
    return envfile.apply(profiles.env_variables(settings.run.network, settings.job.cluster), os.environ)


def _rank_hint() -> str:
    """This process's rank as its launcher says it, unchecked: for choosing who speaks when nothing else is known."""
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0")


def _refuse(recipe: str, message: str, status: int, *, speaks: bool) -> NoReturn:
    """Ends with one line. Ranks that see the same as the one that speaks give it time to be the one that is read."""
    if not speaks:
        time.sleep(1.5)
    print(f"{recipe}: {message}", file=sys.stderr, flush=True)
    sys.exit(status)
