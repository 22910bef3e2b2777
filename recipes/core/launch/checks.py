"""What can be known of a run before it is submitted: `launch.py check` starts its recipe here, up to the first step. Never torch.

The recipe is a process of its own, one rank on the CPU, in a run directory that is removed again. What is wrong with the data, the
model or the checkpoint it says as it would in the job; where the training would begin it leaves a note, `Found`, and ends.
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

PATIENCE_S = 300.0  # for that process to come to its first step
BESIDE_KEPT = 2  # checkpoints that want room beside those of keep_checkpoints=: the best one, and the one being written
OTHER_RUN_DIR = "give another run_dir"
# What tells a process its rank, or its job; of the recipes' own variables those stay that name the data and the site.
PLACE = re.compile(
    r"(SLURMD?|SRUN|SBATCH|SALLOC|OMPI|PMIX?|PALS|TORCHELASTIC)_\w+|MPI_LOCAL\w+|MASTER_(ADDR|PORT)"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|RECIPES_(?!(DATA|CLUSTER)$)\w+"
)


def part(name: str, work: Callable[[], T]) -> tuple[int, T | None]:
    """Says what ``work`` has found, or what is wrong, in a line. Gives the exit status that stands for it, and what was found."""
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
    """Starts the recipe in a run directory of its own, for as long as ``patience_s``; ``run_dir``, the job's, is only read.

    ranks: of the job. root: the repository. base: what paths typed are relative to. Raises InputError, MachineError or RunError,
    with the recipe's own line, by the exit status that it ends with.
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
        if f"run_dir={place}" not in text:  # that line is of the temporary folder itself
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
    """Loads the profile's modules on this machine as the batch script does. Gives their names, or why they were not tried.

    root: the repository. Raises MachineError where one does not load.
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
    """Looks for the files of the run's dataset without opening them. Gives why it could not look, "" if it could.

    root: the repository. base: what paths typed are relative to. Raises InputError where the files are missing in a folder that exists,
    or in the repository's own data/.
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
    """What room there is where the run directory is, or will be, and what the checkpoints take. keep: keep_checkpoints=.

    found: None where what a checkpoint takes is not known. Raises MachineError where that is too little, or a folder cannot be
    written. Nothing is.
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
        mend = f"make room there, or {OTHER_RUN_DIR}" + (" or a smaller keep_checkpoints" if keep > 1 else "")
        raise MachineError(
            f"run_dir={run_dir}: {count} checkpoints of {each} take {files.size_text(count * size)}, {free}: {mend}"
        )
    return f"{count} checkpoints of {each}, {free}" if keep else f"all checkpoints stay, of {each} each, {free}"


def want_writable(folder: Path, what: str, mend: str, size: int = 0) -> Path:
    """``folder``, or its nearest parent that exists. Raises MachineError where this user cannot create files in it.

    what, mend: how the line begins and ends. size: number of bytes to write there, to a file that is removed at once.
    """
    there = Path(os.path.realpath(folder))  # Path.resolve() raises where links lead in a circle
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise MachineError(f"{what}: {there} is no folder: {mend}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise MachineError(f"{what}: {there} cannot be written: {mend}")
    try:
        if size:
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(bytes(size))
    except OSError as error:
        raise MachineError(f"{what}: {there} cannot be written ({error.strerror}): {mend}") from None
    return there


def _show_checkpoints(real: Path, place: Path) -> None:
    """The real run's checkpoints where the start looks for its own, each by a link: none of them can be written or removed."""
    place.mkdir(parents=True)
    names = [*(path.name for path in real.glob("step-*.pt")), "latest", "best"]
    for name in names:
        if os.path.lexists(real / name):
            (place / name).symlink_to(real / name)
    for name in ("config.yaml", "status.json"):  # the run's keys, and whether it has finished
        with contextlib.suppress(OSError):
            shutil.copy(real.parent / name, place.parent)


def _words(settings: Settings, place: Path, base: Path) -> dict[str, str]:
    """The recipe's arguments: those of the job, or the first of a sweep, but on one rank of this machine's CPUs, and unstaged."""
    recipe_class, _ = recipe_conf.load(settings.recipe)
    typed = {**settings.typed, **(settings.sweep[0] if settings.sweep else {})}
    if settings.run.resume not in RESUME_WORDS:
        typed["resume"] = settings.run.resume  # what it stands for: it may go by run_dir
    words = parser.absolute(typed, (RunKeys, recipe_class), base)
    words |= {"device": "cpu", "run_dir": str(place)}
    if settings.run.backend is not Backend.mpi:  # of which this torch may have none
        words["backend"] = "auto"
    if "stage_dir" in recipe_conf.keys_of(settings.recipe):
        words["stage_dir"] = ""
    return words


def _environment(settings: Settings, told: Asked) -> dict[str, str]:
    """This process's, without a rank, a job and GPUs; over loopback, since an interface of the nodes may not be on this machine."""
    kept = {name: value for name, value in os.environ.items() if not PLACE.fullmatch(name)}
    kept.pop("PYTHONSAFEPATH", None)  # python -m imports from the working directory, the repository
    site = {"RECIPES_CLUSTER": settings.job.cluster} if settings.job.cluster else {}
    alone = {"CUDA_VISIBLE_DEVICES": "", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return {**kept, **site, **alone, dryrun.VARIABLE: json.dumps(asdict(told))}


def _run(command: list[str], root: Path, environ: Mapping[str, str], said: Path, patience_s: float) -> int | None:
    """Runs ``command``, its stderr in ``said``; its exit status, or None where it has not ended in time. It leaves no process."""
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
    """Has SIGTERM and SIGHUP end this process as Ctrl-C does, while it is entered: through what is to be removed."""
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
