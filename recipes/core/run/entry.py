"""The start of a recipe before torch is imported: its keys, its rank, the env files and the network
interface.

A recipe begins with ``START = entry.begin("name") if __name__ == "__main__" else None``. It imports
torch after this line because torch reads some variables of the env files when it is loaded.
"""

import atexit
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from recipes.core import errors, trust
from recipes.core.config import envfile, help, profiles, recipe_conf
from recipes.core.config.parser import Settings
from recipes.core.errors import ConfigError, MachineError
from recipes.core.files import ROOT
from recipes.core.place import network, ranks
from recipes.core.place.ranks import RankInfo
from recipes.core.run import attempt as attempts
from recipes.core.run import command_line, dryrun, source
from recipes.core.run import spec as specs
from recipes.core.run.dryrun import Request
from recipes.core.run.watchdog import Pulse
from recipes.core.slurm import environment


@dataclass(frozen=True)
class Start:
    """The settings and facts that a recipe has before torch is imported.

    from_files: variables set from the env files. interface: the network interface found by its
    route; None if none was found or the user has set it. pulse: the progress of this rank, which
    the watchdog process monitors. dry_run: the input of the dry run that `launch.py check` started;
    None in a normal run. by_clock: whether the ranks stop by the clock, and not by SIGUSR2.
    """

    settings: Settings
    ranks: RankInfo
    from_files: dict[str, str]
    interface: network.Choice | None
    pulse: Pulse = field(default_factory=Pulse)
    dry_run: Request | None = None
    by_clock: bool = False


_exit_status: list[int] = []  # the status of `end`, once it was called


def end(code: int) -> NoReturn:
    """Ends a rank that has completed its work. The exit status is ``code`` even if the teardown of
    Python or torch would fail.
    """
    _exit_status.append(code)
    sys.exit(code)


def _skip_teardown() -> None:
    """Skips the teardown of Python and torch after `end`. It takes a second, and can hang or crash
    in a library.

    Runs last at exit. The teardown is not skipped if another tool inspects this process (nsys, a
    preloaded library), since such a tool may write its results during the teardown.
    """
    is_inspected = any(name == "LD_PRELOAD" or "INJECTION" in name for name in os.environ)
    if _exit_status and not is_inspected:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status[0])


def begin(recipe: str, argv: Sequence[str] | None = None) -> Start:
    """Checks the keys, finds the rank of this process, and sets the variables of the env files and
    of the network.

    A variable that the user has set is not changed. On an error, the process ends with one line:
    exit status 2 for an invalid key or an inconsistent environment, 3 if this machine cannot take
    part.
    """
    if argv is None:
        argv = sys.argv[1:]
        atexit.register(_skip_teardown)  # atexit calls the function that was registered first last
    # Slurm may signal a short job while it starts. The signals stay blocked until signals.stop_flag
    # installs a handler, so that none is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    # Until the ranks have met there is nothing to save, so SIGINT ends this process at once.
    # Python's own handler would end an import with a traceback, or wait for the other ranks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # python -m torch.distributed.launch adds an argument that repeats LOCAL_RANK
    if "RANK" in os.environ:
        argv = [word for word in argv if not re.fullmatch(r"--local[-_]rank=\d+", word)]
    host = socket.gethostname()
    is_first = _rank_unchecked() == "0"
    try:
        recipe_conf.require(recipe, f'entry.begin("{recipe}") in {Path(sys.argv[0]).name}')
        if any(word in ("-h", "--help") for word in argv):
            print(help.help_text(recipe))
            sys.exit(errors.EXIT_DONE)
        source.go_home(ROOT)
        spec = specs.of_ranks(os.environ, recipe, argv)
        settings = spec.settings if spec else command_line.parse(argv, recipe=recipe)
    except (ConfigError, MachineError) as error:
        _refuse(recipe, error, prints=is_first)
    try:
        info = ranks.detect(os.environ)
        keys = (settings.run.network, settings.job.cluster)
        variables = spec.variables if spec else profiles.env_variables(*keys)
        from_files = envfile.apply(variables, os.environ)
    except ConfigError as error:
        _refuse(recipe, ConfigError(f"{host}: {error}"), prints=is_first)
    is_set = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= os.environ.keys()
    try:
        interface = None if is_set else network.choose(info)
        set_compile_cache()
    except (network.NetworkError, MachineError) as error:
        _refuse(recipe, MachineError(f"{host}: {error}"), prints=info.local_rank == 0)
    if interface:
        os.environ.update(network.settings(interface, os.environ))
    if settings.run.debug:
        # torch reads this variable when it is imported
        os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    if settings.config.deterministic:
        # without it, torch refuses cuBLAS
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    by_clock = spec is not None and spec.by_clock
    asked = dryrun.asked(os.environ)
    return Start(settings, info, from_files, interface, dry_run=asked, by_clock=by_clock)


def set_compile_cache() -> None:
    """Sets the folder of torch's compiled code, unless the user has set it. Raises MachineError."""
    # torch sets the variable to its default, a folder of this name in $TMPDIR, when torch._dynamo
    # is imported (2.15). A process started from such a process can have another $TMPDIR.
    usual = "torchinductor_"
    if Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", usual)).name.startswith(usual):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_cache_of_compiled_code())
    # else g++ reads headers of others from /tmp
    os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")


def _cache_of_compiled_code() -> Path:
    """A folder in the temporary directory in which no other user can write; one for this process
    alone if it cannot be kept. Raises MachineError if another user could exchange that one too.

    torch executes what it finds there. Its own default is a name in /tmp that other users can
    create first, and torch creates this folder even without compile=true (seen with torch 2.15).
    """
    try:
        of_user = trust.private_folder(Path(tempfile.gettempdir()) / f"recipes-{os.getuid()}")
        return trust.private_folder(of_user / _kind_of_machine())
    except MachineError:
        folder = Path(tempfile.mkdtemp(prefix="recipes-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return trust.private_temporary(folder)


def _kind_of_machine() -> str:
    """The Python and the CPU for which code is compiled. torch compares its own version and the GPU
    (2.15), but $TMPDIR may be shared by different nodes.
    """
    flags = re.search(r"^(flags|Features)\b.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    digest = zlib.crc32(str(flags and flags[0]).encode())
    return f"{sys.implementation.cache_tag}-{digest:08x}"


def _rank_unchecked() -> str:
    """The rank of this process as its launcher gives it. It selects the rank that prints before
    ranks are detected.
    """
    of_mpi = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")
    return os.environ.get("RANK") or environment.task(os.environ) or of_mpi or "0"


def _refuse(recipe: str, error: ConfigError | MachineError, *, prints: bool) -> NoReturn:
    """Records a refusal in the attempt that the parent has opened, and ends the process with one
    line.
    """
    rank = _rank_unchecked()
    is_told = attempts.refuse(os.environ, error, int(rank) if rank.isdecimal() else 0)
    attempts.print_refusal(f"{recipe}: {error}", prints, is_told)
    sys.exit(error.exit_status)
