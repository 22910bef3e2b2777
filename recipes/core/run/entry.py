"""The start of a recipe before torch is imported: its keys, its rank, the env files and the network interface.

A recipe begins with ``START = entry.begin("name") if __name__ == "__main__" else None``. It imports torch after this
line because torch reads some variables of the env files when it is loaded.
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
    """The settings and facts that a recipe has before torch is imported.

    from_files: variables set from the env files. interface: the network interface found by its route; None if none was
    found or the user has set it. pulse: the progress of this rank, which the watchdog process monitors. own_folder:
    temporary folder of this job on this node; None if there is none. rehearsal: the input of the dry run that
    `launch.py check` started; None in a normal run.
    """

    settings: Settings
    ranks: RankInfo
    from_files: dict[str, str]
    interface: network.Choice | None
    pulse: Pulse = field(default_factory=Pulse)
    own_folder: Path | None = None
    rehearsal: Asked | None = None


def note_refusal(settings: Settings, status: int, line: str) -> None:
    """Records a refusal in the run directory for the batch script. Does nothing outside a Slurm job.

    The batch script cannot use srun's exit status: srun ends the other ranks, and their status can mask that of this
    rank.
    """
    job = rundir.job_id(os.environ)
    if job:
        run_dir = rundir.choose(settings.run.run_dir, settings.recipe, job, ROOT)
        with files.umask(int(settings.run.umask, 8)):
            rundir.refuse(run_dir, rundir.launch_id(os.environ), status, line)


def note_refusal_of(recipe: str, words: Sequence[str], status: int, line: str, environ: Mapping[str, str]) -> None:
    """`note_refusal` for words that are not valid keys. Only ``run_dir=`` is read from ``words``."""
    run_dir = next((word.partition("=")[2] for word in reversed(words) if word.startswith("run_dir=")), "")
    if (job := rundir.job_id(environ)) and recipe in recipe_conf.names() and not set("$\0") & set(run_dir):
        with files.umask(0o077):
            rundir.refuse(rundir.choose(run_dir, recipe, job, ROOT), rundir.launch_id(environ), status, line)


_through: list[int] = []  # the exit status of a rank that has completed its work


def end(code: int) -> NoReturn:
    """Ends a rank that has completed its work.

    The exit status is ``code`` even if the teardown of Python or torch would fail.
    """
    _through.append(code)
    sys.exit(code)


def _leave() -> None:
    """Skips the teardown of Python and torch, which takes a second and can hang or crash in a library.

    Runs last at exit. The teardown is not skipped if another tool inspects this process (nsys, a preloaded library),
    since such a tool may write its results during the teardown.
    """
    if _through and "LD_PRELOAD" not in os.environ and not any("INJECTION" in name for name in os.environ):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_through[0])


def begin(recipe: str, argv: Sequence[str] | None = None) -> Start:
    """Checks the keys, finds the rank of this process, and sets the variables of the env files and of the network.

    A variable that the user has set is not changed. On an error, the process ends with one line: exit status 2 for an
    invalid key or an inconsistent environment, 3 if this machine cannot take part.
    """
    if argv is None:
        atexit.register(_leave)  # atexit calls the function that was registered first last
    # Slurm may signal a short job while it starts. The signals stay blocked until signals.stop_flag installs a handler,
    # so that none is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    argv = sys.argv[1:] if argv is None else argv
    if "RANK" in os.environ:  # python -m torch.distributed.launch adds an argument that repeats LOCAL_RANK
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
    if own_folder and wants_tmpdir:  # TMPDIR is now the run's own folder, which is removed at the end of the run
        line = f"{host}: stage_dir={settings.config.stage_dir}: TMPDIR is not set in this job: give a folder of the nodes' own disks"
        note_refusal(settings, errors.EXIT_CONFIG, line)
        _refuse(recipe, line, errors.EXIT_CONFIG, speaks=info.local_rank == 0)
    if settings.run.debug:
        os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")  # torch reads this variable when it is imported
    return Start(settings, info, from_files, interface, own_folder=own_folder, rehearsal=dryrun.asked(os.environ))


def _own_folder(environ: MutableMapping[str, str], speaks: bool) -> Path | None:
    """Creates a folder on the node's own disk for this job's temporary files and compile caches.

    The function also sets the variables for this folder. A variable that is already set takes precedence. Jobs do not
    share these caches because several jobs would write to them at the same time, and because the home folder is slow
    when many nodes use it. `remove_own_folder` removes the folder. Returns None outside Slurm or if the folder cannot
    be used.
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
    """Removes the job's own folder on this node. Call it on every rank when the node has no more work for the run."""
    if start.own_folder and start.ranks.local_rank == 0:
        shutil.rmtree(start.own_folder, ignore_errors=True)


def _apply_env_files(settings: Settings) -> dict[str, str]:
    """Sets the variables of the env files (common < fabric < site) that the user has not set.

    Raises EnvFileError or ConfigError.
    """
    return envfile.apply(profiles.env_variables(settings.run.network, settings.job.cluster), os.environ)


def _rank_hint() -> str:
    """The rank of this process as its launcher gives it, unchecked.

    It selects the rank that prints before ranks are detected.
    """
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0")


def _refuse(recipe: str, message: str, status: int, *, speaks: bool) -> NoReturn:
    """Ends the process with one line.

    Ranks without ``speaks`` wait 1.5 s so that the line of the rank with it comes first.
    """
    if not speaks:
        time.sleep(1.5)
    print(f"{recipe}: {message}", file=sys.stderr, flush=True)
    sys.exit(status)
