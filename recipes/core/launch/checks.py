"""The checks of `launch.py check`, which starts the recipe on this machine up to its first step.

This module does not import torch. The recipe runs as a separate process with one rank on the CPU, in a temporary run
directory. It reports errors in the data, the model or the checkpoint as it would in the job. At the point where the
training would begin, it writes its findings (`Found`) and exits.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from recipes.core import errors, files
from recipes.core.config import parser, recipe_conf
from recipes.core.config.parser import Settings
from recipes.core.config.run_keys import RESUME_WORDS, Backend, Device, RunKeys
from recipes.core.data import datasets
from recipes.core.errors import ConfigError, InputError, MachineError, RunError
from recipes.core.place import processes
from recipes.core.run import dryrun
from recipes.core.run.dryrun import Asked, Found

T = TypeVar("T")

PATIENCE_S = 300.0  # timeout for the recipe to reach its first step
BESIDE_KEPT = 2  # checkpoints that need space beside those of keep_checkpoints=: the best one and the one being written
OTHER_RUN_DIR = "give another run_dir"
# Variables that give a process its rank or its job. The recipes' own variables for the data and the site are kept.
PLACE = re.compile(
    r"(SLURMD?|SRUN|SBATCH|SALLOC|OMPI|PMIX?|PALS|TORCHELASTIC)_\w+|MPI_LOCAL\w+|MASTER_(ADDR|PORT)"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|RECIPES_(?!(DATA|CLUSTER)$)\w+"
)


def part(name: str, work: Callable[[], T]) -> tuple[int, T | None]:
    """Calls ``work`` and prints one line with its result or its error.

    Returns the exit status for it, and the result.
    """
    try:
        found = work()
    except (ConfigError, InputError, MachineError, RunError) as error:
        print(f"{name + ':':<8}failed: {error}", file=sys.stderr, flush=True)
        known = errors.EXIT_CRASH if isinstance(error, RunError) else errors.EXIT_CONFIG
        return errors.EXIT_MACHINE if isinstance(error, MachineError) else known, None
    print(f"{name + ':':<8}ok: {found}", flush=True)
    return errors.EXIT_DONE, found


def start(
    settings: Settings, run_dir: Path, ranks: int, root: Path, base: Path, patience_s: float = PATIENCE_S
) -> Found:
    """Starts the recipe in a temporary run directory, with the timeout ``patience_s``, and returns its findings.

    run_dir: the run directory of the job, which is only read. ranks: number of ranks of the job. root: the repository.
    base: the folder that typed paths are relative to. Raises InputError, MachineError or RunError with the recipe's own
    line; its exit status selects the class.
    """
    recipe = settings.recipe
    if not settings.config.starts_a_run:
        return Found()
    try:
        made = tempfile.TemporaryDirectory(prefix="recipes-check-", ignore_cleanup_errors=True)
    except OSError as error:
        raise MachineError(
            f"no temporary folder can be made ({error.strerror}): set TMPDIR to one that can be written"
        ) from None
    with _removed_when_told_to_end(), made as folder:
        names = ("run", "found.json", "said", "compiled")
        place, note, said, compiled = (Path(os.path.realpath(folder), name) for name in names)
        _show_checkpoints(run_dir / "checkpoints", place / "checkpoints")
        told = Asked(str(note), ranks, settings.run.device is not Device.cpu)
        words = [f"{name}={value}" for name, value in _words(settings, place, base).items()]
        command = [sys.executable, "-u", "-m", f"recipes.{recipe}", *words]
        environ = {**_environment(settings, told), "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
        code = _run(command, root, environ, said, patience_s)
        text = said.read_text(errors="replace")
        if f"run_dir={place}" not in text:  # such a line reports an error of the temporary folder itself
            text = text.replace(str(place), str(run_dir))
        lines = [line for line in text.splitlines() if line.strip()]
        found = files.read_json(note)
    if code is None:
        raise MachineError(f"{recipe}: has not come to its first step within {patience_s:g} s on this machine")
    if code < 0:
        name = signal.Signals(-code).name
        raise RunError(
            f"{recipe}: was killed by {name} here, on the way to its first step: has this machine the memory?"
        )
    if code == errors.EXIT_DONE and found:
        for line in lines:
            if line.startswith("warning: "):
                print(line, file=sys.stderr, flush=True)
        return Found(**found)
    line = lines[-1] if lines else f"{recipe}: ended before it came to run.resume() or run.begin()"
    known: dict[int, type[Exception]] = {errors.EXIT_CONFIG: InputError, errors.EXIT_MACHINE: MachineError}
    raise known.get(code, RunError)(line.partition("; logs in ")[0])


def load_modules(root: Path, modules: Sequence[str], environ: Mapping[str, str], patience_s: float = 120.0) -> str:
    """Loads the profile's modules on this machine as the batch script does.

    Returns their names, or why they were not tried. root: the repository. Raises MachineError if a module does not
    load.
    """
    known = "type module >/dev/null 2>&1 || . /etc/profile; type module >/dev/null 2>&1"

    def bash(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", *words], env=dict(environ), capture_output=True, text=True, errors="replace", timeout=patience_s,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    try:
        if bash(known).returncode:
            return f"not tried, this machine has no command module: {', '.join(modules)}"
        done = bash('. "$0"; load "$@"', str(root / "sbatch/job.sh"), *modules)
    except subprocess.TimeoutExpired:
        raise MachineError(f"module load {' '.join(modules)}: not loaded within {patience_s:g} s") from None
    if done.returncode:
        lines = [" ".join(line.split()) for line in done.stderr.splitlines() if line.strip()]
        raise MachineError("; ".join([*lines[-1:], *lines[:-1]])[:300] or f"module load {' '.join(modules)} failed")
    return ", ".join(modules)


def look_for_data(settings: Settings, root: Path, base: Path) -> str:
    """Looks for the files of the run's dataset without opening them. Returns why it could not look; "" if it could.

    root: the repository. base: the folder that typed paths are relative to. Raises InputError if files are missing in a
    folder that exists, or in the repository's own data/.
    """
    keys = settings.config
    dataset = getattr(keys, "dataset", "")
    if dataset not in getattr(keys, "prepared", ()) or settings.job.container_mounts:  # a mount may show other folders
        return ""
    if "$" in keys.data_dir:
        return f"data_dir={keys.data_dir} is known on the nodes alone: the data was not looked for"
    named = parser.absolute({"data_dir": keys.data_dir}, (type(keys),), base)["data_dir"]
    folder = str(root / datasets.folder_of(named))
    if (named or os.environ.get("RECIPES_DATA")) and not datasets.kind(Path(folder)):
        key = "data_dir" if named else "RECIPES_DATA"
        return f"{key}={folder} does not exist on this machine: the data was not looked for, and the nodes must have it"
    {"mnist": datasets.find_mnist, "cifar10": datasets.find_cifar10, "imagenet": datasets.find_imagenet}[dataset](
        folder
    )
    return ""


def room(run_dir: Path, keep: int, found: Found | None) -> str:
    """A phrase on the free space on the disk of the run directory and on the size of the checkpoints. Writes nothing.

    keep: the value of keep_checkpoints=. found: the findings of the recipe; None if the size of a checkpoint is not
    known. Raises MachineError if there is too little space or a folder cannot be written.
    """
    want_writable(run_dir, f"run_dir={run_dir}", OTHER_RUN_DIR)
    folder = want_writable(run_dir / "checkpoints", f"run_dir={run_dir}", OTHER_RUN_DIR)
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        raise MachineError(f"run_dir={run_dir}: {folder} cannot be looked at ({error.strerror})") from None
    free = f"{files.size_text(usage.free)} free in {folder}" if usage.total else f"{folder} does not tell its room"
    if found is None:
        return f"{free}; what a checkpoint takes is not known"
    size = found.checkpoint_bytes
    if size is None:
        return f"{free}, for no checkpoints"
    there = sum(1 for _ in (run_dir / "checkpoints").glob("step-*.pt"))
    count = max(BESIDE_KEPT, keep + BESIDE_KEPT - there) if keep else BESIDE_KEPT
    each = files.size_text(size)
    if usage.total and usage.free < count * size:
        fix = f"make room there, or {OTHER_RUN_DIR}" + (" or a smaller keep_checkpoints" if keep > 1 else "")
        raise MachineError(
            f"run_dir={run_dir}: {count} checkpoints of {each} take {files.size_text(count * size)}, {free}: {fix}"
        )
    return f"{count} checkpoints of {each}, {free}" if keep else f"all checkpoints stay, of {each} each, {free}"


def want_writable(folder: Path, what: str, fix: str, size: int = 0) -> Path:
    """Returns ``folder``, or its nearest parent that exists.

    Raises MachineError if this user cannot create files in it. what, fix: the beginning and the end of the error line;
    ``fix`` is the fix. size: number of bytes to write there as a test, to a file that is removed immediately.
    """
    there = Path(os.path.realpath(folder))  # Path.resolve() raises for symbolic links in a circle
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise MachineError(f"{what}: {there} is not a folder: {fix}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise MachineError(f"{what}: {there} cannot be written: {fix}")
    try:
        if size:
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(bytes(size))
    except OSError as error:
        raise MachineError(f"{what}: {there} cannot be written ({error.strerror}): {fix}") from None
    return there


def _show_checkpoints(real: Path, place: Path) -> None:
    """Links the checkpoints of the real run into the temporary run directory.

    The recipe cannot write or remove them.
    """
    place.mkdir(parents=True)
    names = [*(path.name for path in real.glob("step-*.pt")), "latest", "best"]
    for name in names:
        if os.path.lexists(real / name):
            (place / name).symlink_to(real / name)
    for name in ("config.yaml", "status.json"):  # the keys of the run, and whether it has finished
        with contextlib.suppress(OSError):
            shutil.copy(real.parent / name, place.parent)


def _words(settings: Settings, place: Path, base: Path) -> dict[str, str]:
    """The arguments of the recipe: those of the job or of the first run of a sweep, but on the CPU, without staging."""
    recipe_class, _ = recipe_conf.load(settings.recipe)
    typed = {**settings.typed, **(settings.sweep[0] if settings.sweep else {})}
    if settings.run.resume not in RESUME_WORDS:
        typed["resume"] = settings.run.resume  # with references resolved, since run_dir changes below
    words = parser.absolute(typed, (RunKeys, recipe_class), base)
    words |= {"device": "cpu", "run_dir": str(place)}
    if settings.run.backend is not Backend.mpi:  # mpi is kept, since this torch may be built without it
        words["backend"] = "auto"
    if "stage_dir" in recipe_conf.keys_of(settings.recipe):
        words["stage_dir"] = ""
    return words


def _environment(settings: Settings, told: Asked) -> dict[str, str]:
    """This process's environment without the variables of a rank or a job, without GPUs, and with loopback.

    The network interface of the nodes may not exist on this machine.
    """
    kept = {name: value for name, value in os.environ.items() if not PLACE.fullmatch(name)}
    kept.pop("PYTHONSAFEPATH", None)  # python -m imports from the working directory, the repository
    site = {"RECIPES_CLUSTER": settings.job.cluster} if settings.job.cluster else {}
    alone = {"CUDA_VISIBLE_DEVICES": "", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return {**kept, **site, **alone, dryrun.VARIABLE: json.dumps(asdict(told))}


def _run(command: list[str], root: Path, environ: Mapping[str, str], said: Path, patience_s: float) -> int | None:
    """Runs ``command`` with its stderr in the file ``said``. Returns its exit status; None after a time out.

    No process remains.
    """
    with open(said, "wb") as errors:
        process = subprocess.Popen(
            command, env=environ, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            start_new_session=True, preexec_fn=processes.die_with(os.getpid()),
        )  # fmt: skip
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _removed_when_told_to_end() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise KeyboardInterrupt within the ``with`` block.

    Temporary files are therefore removed.
    """
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
