"""The checks of `launch.py check`, which starts the recipe on this machine up to its first step.
Never imports torch.

The recipe runs as a separate process with one rank on the CPU, in a temporary run directory. It
reports errors as it would in the job. At the point where the training would begin, it writes its
findings (`Found`) and exits.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.core import errors, files, trust
from recipes.core.config.parser import Settings
from recipes.core.config.run_keys import RESUME_WORDS
from recipes.core.data import datasets
from recipes.core.errors import ConfigError, InputError, MachineError, RunError
from recipes.core.launch import allocation, jobs, submit
from recipes.core.launch.jobs import Job
from recipes.core.place import durations, processes
from recipes.core.run import dryrun, queue
from recipes.core.run.dryrun import Found, Request

START_S = 300.0  # timeout for the recipe to reach its first step
SLURM_S = 120.0  # timeout for Slurm's answer
# checkpoints that need space beside those of keep_checkpoints=: the best one and the one being
# written
BESIDE_KEPT = 2


def part(parts: list[dict[str, Any]], name: str, work: Callable[[], Any]) -> tuple[int, Any]:
    """Calls ``work``, prints a line with its result or its error, and adds it to ``parts``. Returns
    the exit status and the result.
    """
    try:
        found = work()
    except (
        ConfigError,
        InputError,
        MachineError,
        RunError,
        OSError,
        subprocess.TimeoutExpired,
    ) as error:
        print(f"{name + ':':<8}failed: {error}", file=sys.stderr, flush=True)
        parts.append({"name": name, "ok": False, "text": str(error)})
        if isinstance(error, RunError):
            return errors.EXIT_CRASH, None
        return errors.EXIT_CONFIG if isinstance(
            error, (ConfigError, InputError)
        ) else errors.EXIT_MACHINE, None
    print(f"{name + ':':<8}ok: {found}", flush=True)
    parts.append({"name": name, "ok": True, "text": str(found)})
    return errors.EXIT_DONE, found


def start(
    settings: Settings,
    run_dir: Path,
    ranks: int,
    root: Path,
    base: Path,
    timeout_s: float = START_S,
) -> Found:
    """Starts the recipe in a temporary run directory and returns its findings.

    run_dir: the run directory of the job, which is only read. ranks: number of ranks of the job.
    root: the repository. base: the folder that typed paths are relative to. Raises InputError,
    MachineError or RunError with the recipe's own line; its exit status selects the class.
    """
    if not settings.config.starts_a_run:
        return Found()
    recipe = settings.recipe
    with tempfile.TemporaryDirectory(prefix="recipes-check-", ignore_cleanup_errors=True) as name:
        folder = trust.private_temporary(Path(os.path.realpath(name)))
        place = folder / "run"
        found_file = folder / "found.json"
        stderr = folder / "stderr"
        _show_checkpoints(run_dir / "checkpoints", place / "checkpoints")
        request = Request(str(found_file), ranks)
        words = [f"{name}={value}" for name, value in arguments(settings, place, base).items()]
        command = [sys.executable, "-u", "-m", f"recipes.{recipe}", *words]
        environ = {
            **environment(settings, request),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        }
        try:
            with open(stderr, "wb") as file:
                code = subprocess.run(
                    command,
                    env=environ,
                    cwd=root,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=file,
                    timeout=timeout_s,
                    preexec_fn=processes.die_with(os.getpid()),
                ).returncode
        except subprocess.TimeoutExpired:
            late = f"did not reach its first step on this machine within {timeout_s:g} s"
            raise MachineError(f"{recipe}: {late}") from None
        written = files.read_json(found_file)
        records = [
            record for path in place.rglob("failed/rank*.json") if (record := files.read_json(path))
        ]
        lines = stderr.read_text(errors="replace").replace(str(place), str(run_dir)).splitlines()
    for line in lines:
        if line.startswith("warning: "):
            print(line, file=sys.stderr, flush=True)
    if code:
        failed = {errors.EXIT_MACHINE: MachineError, errors.EXIT_CONFIG: InputError}.get(
            code, RunError
        )
        if records:
            raise failed(f"{recipe}: {records[0]['error']}".replace(str(place), str(run_dir)))
        raise failed((lines or [f"{recipe}: ended with status {code}"])[-1])
    if not written:
        raise RunError(f"{recipe}: ended before it called loop.steps() or run.begin()")
    return Found(**written)


def find_data(settings: Settings, root: Path, base: Path) -> str:
    """Looks for the files of the run's dataset without opening them. Returns why it could not look;
    "" if it could.

    root: the repository. base: the folder that typed paths are relative to. Raises InputError if
    files are missing in a folder that exists, or in the repository's own data/.
    """
    keys = settings.config
    dataset = getattr(keys, "dataset", "")
    # a mount may show other folders
    if dataset not in getattr(keys, "prepared", ()) or settings.job.container_mounts:
        return ""
    if "$" in keys.data_dir:
        return f"data_dir={keys.data_dir}: the path contains $, so the data was not looked for"
    data_dir = settings.absolute({"data_dir": keys.data_dir}, base)["data_dir"]
    folder = str(root / datasets.folder_of(data_dir))
    if (data_dir or os.environ.get("RECIPES_DATA")) and not datasets.kind(Path(folder)):
        key = "data_dir" if data_dir else "RECIPES_DATA"
        return f"{key}={folder} does not exist on this machine, so the data was not looked for: the nodes need it"
    if dataset == "imagenet":
        datasets.find_imagenet(folder)
    else:
        known = (datasets.MNIST, datasets.CIFAR10, datasets.TEXT)
        datasets.find_files({one.name: one for one in known}[dataset], folder)
    return ""


def memory(found: Found, is_divided: bool, gpu_memory_gb: float) -> str:
    """A phrase on the memory that a rank needs, without activations. Raises ConfigError if a GPU
    has less.

    is_divided: whether strategy=fsdp divides the model. Each rank then also needs all weights, in
    float32, for an evaluation.
    """
    assert found.rank_bytes is not None and found.parameters is not None
    whole = 4 * found.parameters  # bytes of all weights
    needed = found.rank_bytes + whole * is_divided
    if needed > gpu_memory_gb * 1e9:
        fix = (
            "divide it over more ranks (nodes=, shard_size=)"
            if is_divided
            else "give strategy=fsdp on several GPUs"
        )
        fix = (
            f"{fix}, or train a smaller model"
            if whole < gpu_memory_gb * 1e9
            else "train a smaller model"
        )
        raise ConfigError(
            f"gpu_memory_gb={gpu_memory_gb:g}: the training needs {files.size_text(needed)} on each GPU, "
            f"without activations: {fix}"
        )
    return f"{files.size_text(needed)} of {gpu_memory_gb:g} GB on each GPU, without activations"


def disk_space(run_dir: Path, keep: int, found: Found | None) -> str:
    """A phrase on the free space on the disk of the run directory and on the size of the
    checkpoints. Writes nothing.

    keep: the value of keep_checkpoints=. found: the findings of the recipe; None if the size of a
    checkpoint is not known. Raises MachineError if there is too little space or the folder cannot
    be written.
    """
    fix = "give another run_dir"
    folder = Path(os.path.realpath(run_dir / "checkpoints"))  # or its nearest parent that exists
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        problem = "cannot be written" if folder.is_dir() else "is not a folder"
        raise MachineError(f"run_dir={run_dir}: {folder} {problem}: {fix}")
    free = files.free_bytes(folder)
    free_text = f"{'unknown space' if free is None else files.size_text(free)} free in {folder}"
    size = found.checkpoint_bytes if found else None
    if size is None:
        return free_text
    existing = sum(1 for _ in (run_dir / "checkpoints").glob("step-*.pt"))
    count = max(BESIDE_KEPT, keep + BESIDE_KEPT - existing) if keep else BESIDE_KEPT
    each = f"up to {files.size_text(size)}"
    if free is not None and free < count * size:
        needed = f"{count} checkpoints of {each} take {files.size_text(count * size)}"
        needed += f", but only {files.size_text(free)} are free in {folder}"
        raise MachineError(f"run_dir={run_dir}: {needed}: free some space there, or {fix}")
    if not keep:
        return f"all checkpoints are kept, {each} each; {free_text}"
    return f"{count} checkpoints of {each}, {free_text}"


def expected_start(job: Job) -> str:
    """Slurm's answer on when ``job`` would start. Raises MachineError if Slurm refuses the job.

    ``sbatch --test-only`` counts only the nodes that are up now.
    """
    answer = subprocess.run(
        ["sbatch", "--test-only"],
        input=jobs.sbatch_script(job),
        env=allocation.clean_environment(os.environ, job.directives),
        cwd=job.root,
        capture_output=True,
        text=True,
        timeout=SLURM_S,
    )
    if answer.returncode != 0:
        raise MachineError(submit.refusal(answer.stderr))
    partition = job.directives.get("partition") or os.environ.get("SBATCH_PARTITION", "")
    if "," not in partition:  # of several, one may be enough
        require_within(job, queue.partition(partition))
    return submit.one_line(answer.stderr)


def require_within(job: Job, partition: Mapping[str, str]) -> None:
    """Raises MachineError if a partition never starts the job. ``sbatch --test-only`` accepts such
    a job at some sites.

    partition: its fields, see `queue.partition`.
    """
    time_s = durations.seconds(job.directives.get("time", ""))
    most_s = durations.seconds(partition.get("MaxTime", ""))
    most_nodes = partition.get("MaxNodes", "")
    name = partition.get("PartitionName", "")
    problem = ""
    if time_s and most_s and time_s > most_s:
        problem = f"time={job.directives['time']}: is more than the {partition['MaxTime']} of partition {name}"
    elif most_nodes.isdecimal() and (job.keys.nodes or 1) > int(most_nodes):
        problem = f"nodes={job.keys.nodes}: are more than the {most_nodes} of partition {name}"
    if problem:
        raise MachineError(
            f"{problem}, so the job would never start: give a smaller value, or another partition="
        )


def _show_checkpoints(real: Path, place: Path) -> None:
    """Links the checkpoints of the real run into the temporary run directory, so that the recipe
    cannot change them.
    """
    place.mkdir(parents=True)
    for path in real.glob("[!.]*"):  # hidden folders hold checkpoints that are being written
        (place / path.name).symlink_to(path)
    for name in ("config.yaml", "status.json"):  # the keys of the run, and whether it has finished
        with contextlib.suppress(OSError):
            shutil.copy(real.parent / name, place.parent)


def arguments(settings: Settings, place: Path, base: Path) -> dict[str, str]:
    """The arguments of the recipe: those of the job or of the first run of a sweep, but on the CPU,
    without staging.
    """
    typed = {**settings.typed, **(settings.sweep[0] if settings.sweep else {})}
    if settings.run.resume not in RESUME_WORDS:
        # with references resolved, since run_dir changes below
        typed["resume"] = settings.run.resume
    words = settings.absolute(typed, base)
    words |= {"device": "cpu", "run_dir": str(place), "backend": "auto"}
    if hasattr(settings.config, "stage_dir"):
        words["stage_dir"] = ""
    return words


def environment(settings: Settings, request: Request) -> dict[str, str]:
    """This process's environment without the variables of a rank or a job, without GPUs, and with
    loopback.

    The network interface of the nodes may not exist on this machine.
    """
    kept = allocation.clean_environment(os.environ)
    kept.pop("PYTHONSAFEPATH", None)  # python -m imports from the working directory, the repository
    site = {"RECIPES_CLUSTER": settings.job.cluster} if settings.job.cluster else {}
    without_gpus = {
        "CUDA_VISIBLE_DEVICES": "",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {**kept, **site, **without_gpus, dryrun.VARIABLE: json.dumps(asdict(request))}
