"""The checks of `launch.py check`, which starts the recipe on this machine up to its first step.
Never imports torch.

The recipe runs as a separate process with one rank on the CPU, in a temporary run directory. It
reports errors as it would in the job. At the point where the training would begin, it writes its
findings (`Found`) and exits.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.core import files, trust
from recipes.core.config import key_value
from recipes.core.config.parser import Settings
from recipes.core.data import datasets
from recipes.core.errors import (
    ConfigError,
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_MACHINE,
    InputError,
    MachineError,
    RunError,
)
from recipes.core.launch import jobs
from recipes.core.place import processes
from recipes.core.run import dryrun
from recipes.core.run.dryrun import Found, Request
from recipes.core.slurm import client, durations, environment

LARGEST = 1 << 20  # bytes of a file that describes a run
START_S = 300.0  # timeout for the recipe to reach its first step
# checkpoints that need space beside those of keep_checkpoints=: the best one and the one being
# written
BESIDE_KEPT = 2


def part(parts: list[dict[str, Any]], name: str, work: Callable[[], Any]) -> tuple[int, Any]:
    """Calls ``work``, prints a line with its result or its error, and adds it to ``parts``. Returns
    the exit status and the result.
    """
    result = None
    status = EXIT_DONE
    try:
        result = work()
        text = str(result)
    except (ConfigError, InputError, MachineError, RunError) as error:
        status = error.exit_status
        text = str(error)
    except (OSError, subprocess.TimeoutExpired) as error:
        status = EXIT_MACHINE
        text = str(error)
    outcome = "failed" if status else "ok"
    print(f"{name + ':':<8}{outcome}: {text}", file=sys.stderr if status else None, flush=True)
    parts.append({"name": name, "ok": not status, "text": text})
    return status, result


def start(
    settings: Settings,
    run_dir: Path,
    ranks: int,
    root: Path,
    timeout_s: float = START_S,
) -> Found:
    """Starts the recipe in a temporary run directory and returns its findings.

    run_dir: the run directory of the job, which is only read. ranks: number of ranks of the job.
    root: the repository. Raises InputError, MachineError or RunError with the recipe's own line;
    its exit status selects the class.
    """
    if not settings.config.starts_a_run:
        return Found()
    recipe = settings.recipe
    with tempfile.TemporaryDirectory(prefix="recipes-check-", ignore_cleanup_errors=True) as name:
        folder = trust.private_temporary(Path(os.path.realpath(name)))
        place = folder / "run"
        found_file = folder / "found.json"
        _show_checkpoints(run_dir / "checkpoints", place / "checkpoints")
        request = Request(str(found_file), ranks)
        words = key_value.words_of(arguments(settings, place))
        environ = environment_of_dry_run(settings, request)
        environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
        stderr = folder / "stderr"  # a pipe would stay open as long as a process of the recipe runs
        try:
            with open(stderr, "wb") as file:
                code = subprocess.run(
                    [sys.executable, "-u", "-m", f"recipes.{recipe}", *words],
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
        findings = files.read_json(found_file)
        records = list(filter(None, map(files.read_json, place.rglob("failed/rank*.json"))))
        lines = stderr.read_text(errors="replace").replace(str(place), str(run_dir)).splitlines()
    for line in lines:
        if line.startswith("warning: "):
            print(line, file=sys.stderr, flush=True)
    if not code and findings:
        return Found(**findings)
    if records:
        line = f"{recipe}: {records[0]['error']}".replace(str(place), str(run_dir))
    elif not code:
        line = f"{recipe}: ended before it called loop.steps() or run.start()"
    else:
        line = lines[-1] if lines else f"{recipe}: ended with status {code}"
    classes = {EXIT_MACHINE: MachineError, EXIT_CONFIG: InputError}
    raise classes.get(code, RunError)(line)


def find_data(settings: Settings, root: Path) -> str:
    """Looks for the files of the run's dataset without opening them. Returns why it could not look;
    "" if it could.

    root: the repository. Raises InputError if files are missing in a folder that exists, or in the
    repository's own data/.
    """
    keys = settings.config
    dataset = keys.dataset
    # a mount may show other folders
    if dataset not in keys.prepared or settings.job.container_mounts:
        return ""
    if "$" in keys.data_dir:
        return f"data_dir={keys.data_dir}: the path contains $, so the data was not checked"
    folder = str(root / datasets.folder_of(keys.data_dir))
    if (keys.data_dir or os.environ.get("RECIPES_DATA")) and not datasets.kind(Path(folder)):
        key = "data_dir" if keys.data_dir else "RECIPES_DATA"
        return (
            f"{key}={folder} does not exist on this machine, so the data was not checked: "
            "the nodes need this folder"
        )
    if dataset == "imagenet":
        datasets.find_imagenet(folder)
    for known in (datasets.MNIST, datasets.CIFAR10, datasets.TEXT, datasets.DIALOGUES):
        if known.name == dataset:
            datasets.find_files(known, folder)
    return ""


def memory(findings: Found, is_divided: bool, gpu_memory_gb: float) -> str:
    """A phrase on the memory that a rank needs; without activations, unless the recipe estimates
    them. Raises ConfigError if a GPU has less.

    is_divided: whether strategy=fsdp divides the model. If the recipe estimates no activations,
    each rank then also needs all weights, in float32, for an evaluation.
    """
    assert findings.rank_bytes is not None and findings.parameters is not None
    whole = 4 * findings.parameters  # bytes of all weights
    if findings.activation_bytes is None:
        needed = findings.rank_bytes + whole * is_divided
        extent = "without activations"
    else:
        needed = findings.rank_bytes + findings.activation_bytes
        extent = "with activations"
    if needed > gpu_memory_gb * 1e9:
        fix = "train a smaller model"
        if whole < gpu_memory_gb * 1e9:
            divide = "give strategy=fsdp on several GPUs"
            if is_divided:
                divide = "divide it over more ranks (nodes=, shard_size=)"
            fix = f"{divide}, or {fix}"
        raise ConfigError(
            f"gpu_memory_gb={gpu_memory_gb:g}: the training needs {files.size_text(needed)} on "
            f"each GPU, {extent}: {fix}"
        )
    return f"{files.size_text(needed)} of {gpu_memory_gb:g} GB on each GPU, {extent}"


def disk_space(run_dir: Path, keep: int, findings: Found | None) -> str:
    """A phrase on the free space on the disk of the run directory and on the size of the
    checkpoints. Writes nothing.

    keep: the value of keep_checkpoints=. findings: those of the recipe; None if the size of a
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
    size = findings.checkpoint_bytes if findings else None
    if size is None:
        return free_text
    existing = len(list((run_dir / "checkpoints").glob("step-*.pt")))
    count = BESIDE_KEPT + max(0, keep - existing)
    each = f"up to {files.size_text(size)}"
    if free is not None and free < count * size:
        raise MachineError(
            f"run_dir={run_dir}: {count} checkpoints of {each} take {files.size_text(count * size)}"
            f", but only {files.size_text(free)} are free in {folder}: "
            f"free some space there, or {fix}"
        )
    if not keep:
        return f"all checkpoints are kept, {each} each; {free_text}"
    return f"{count} checkpoints of {each}, {free_text}"


def expected_start(job: jobs.Job) -> str:
    """Slurm's answer on when ``job`` would start. Raises MachineError if Slurm refuses the job.

    ``sbatch --test-only`` counts only the nodes that are up now.
    """
    try:
        answer = client.try_script(jobs.sbatch_script(job), names=job.directives, cwd=job.root)
    except subprocess.CalledProcessError as error:
        raise MachineError(client.refusal(error.stderr)) from None
    name = job.directives.get("partition") or environment.partition_of_sbatch(os.environ)
    partition = None if "," in name else client.partition(name)  # of several, one may be enough
    if partition:
        require_within(job, partition)
    return answer


def require_within(job: jobs.Job, partition: client.Partition) -> None:
    """Raises MachineError if a partition never starts the job. ``sbatch --test-only`` accepts such
    a job at some sites.
    """
    time = job.directives["time"]
    time_s = durations.seconds(time)
    most_s = durations.seconds(partition.max_time)
    nodes = int(job.directives["nodes"].partition("-")[0])  # of a range, the fewest
    if time_s and most_s and time_s > most_s:
        problem = f"time={time}: exceeds the limit {partition.max_time}"
    elif partition.max_nodes is not None and nodes > partition.max_nodes:
        problem = f"nodes=, spare=: {nodes} nodes exceed the limit {partition.max_nodes}"
    else:
        return
    raise MachineError(
        f"{problem} of partition {partition.name}, so the job would never "
        "start: give a smaller value, or another partition="
    )


def _show_checkpoints(real: Path, place: Path) -> None:
    """Links the checkpoints of the real run into the temporary run directory, so that the recipe
    cannot change them.
    """
    place.mkdir(parents=True)
    for path in real.glob("[!.]*"):  # hidden folders hold checkpoints that are being written
        (place / path.name).symlink_to(path)
    for name in ("config.yaml", "status.json"):  # the keys of the run, and whether it has finished
        with contextlib.suppress(OSError, ValueError):  # another user's file may have no end
            content = files.read_bounded(real.parent / name, LARGEST, files.without_links)
            files.write_bytes(place.parent / name, content)


def arguments(settings: Settings, place: Path) -> dict[str, str]:
    """The arguments of the recipe: those of the job or of the first run of a sweep, but on the CPU,
    without staging.
    """
    words = {**settings.typed, **(settings.sweep[0] if settings.sweep else {})}
    words |= {"device": "cpu", "run_dir": str(place), "backend": "auto"}
    if hasattr(settings.config, "stage_dir"):
        words["stage_dir"] = ""
    return words


def environment_of_dry_run(settings: Settings, request: Request) -> dict[str, str]:
    """This process's environment without the variables of a rank or a job, without GPUs, and with
    loopback.

    The network interface of the nodes may not exist on this machine.
    """
    kept = environment.clean(os.environ)
    kept.pop("PYTHONSAFEPATH", None)  # python -m imports from the working directory, the repository
    if settings.job.cluster:
        kept["RECIPES_CLUSTER"] = settings.job.cluster
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": "",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        dryrun.VARIABLE: json.dumps(asdict(request)),
    }
