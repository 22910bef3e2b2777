"""What tests of whole runs share: starting launch.py or a recipe, reading what it leaves, and
finding its processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from recipes.core import files
from recipes.core.run import attempt as attempts
from recipes.core.run import command_line, spec
from recipes.core.run.attempt import Attempt
from tests import forked

ROOT = Path(__file__).resolve().parents[1]
# for a run to take its first steps on cores that other tests keep busy; nothing here is about how
# fast it starts
START_S = 150.0
STARTED: list[subprocess.Popen[str] | forked.Process] = []  # by `start`, in the test that runs
DATA = Path(os.environ.get("RECIPES_DATA") or ROOT.parent / "shared" / "data")
LOCAL = (
    sys.executable,
    str(ROOT / "launch.py"),
    "recipe=mnist",
    "launcher=local",
    "device=cpu",
    "dataset=digits",
)

# A rank's place and the site's choices come from the test alone, also where the tests run inside a
# Slurm job.
_PLACE = (
    "SLURM_",
    "SRUN_",
    "SBATCH_",
    "PMI",
    "OMPI_",
    "MPI_",
    "RECIPES_",
    "TORCHELASTIC_",
    "GROUP_",
    "NCCL_",
    "GLOO_",
)
_PLACES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)

Found = TypeVar("Found")


def need(missing: str | None) -> None:
    """Skips the test for what this machine has not, if anything; fails it where
    $RECIPES_REQUIRE_SLURM=1, since all is said to be there.
    """
    if missing and os.environ.get("RECIPES_REQUIRE_SLURM") == "1":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


def real_data(name: str) -> Path:
    """A file or folder of real data below `DATA`. Skips the test where there is no such data at
    all, as on a user's machine.

    Raises AssertionError where the data is there and ``name`` is missing: then the test must run.
    """
    if not DATA.is_dir() and "RECIPES_DATA" not in os.environ:
        pytest.skip(f"no real data: {DATA} does not exist, and RECIPES_DATA is not set")
    assert (DATA / name).exists(), f"{DATA} has no {name}"
    return DATA / name


def free_port() -> int:
    """A port that is free, and that no connection and no other worker of the tests is given before
    it is used.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 20000 + 1000 * (worker % 12)
    for port in random.sample(range(first, first + 1000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError("no port is free")


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own in ``folder``, of so many bytes: 64k, 8m."""
    folder.mkdir()
    need("" if os.geteuid() == 0 else "a disk can be mounted by root alone")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    need(f"no disk can be mounted here: {done.stderr.strip()}" if done.returncode else "")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def clean_environment(**added: str) -> dict[str, str]:
    """This process's environment without anything that tells a process its rank, and with
    ``added``.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_PLACE) and k not in _PLACES}
    return {**kept, **added}


@dataclass(frozen=True)
class Ended:
    """How a command ended. out: its stdout and stderr together."""

    status: int
    out: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    def expect(self, status: int) -> Ended:
        """The same, if the command ended with ``status``."""
        assert self.status == status, f"status {self.status}, not {status}: {self.out}"
        return self


def start(
    argv: Sequence[str], *, cwd: Path = ROOT, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts a command, its stdout and stderr together in one pipe; `finish` waits for it."""
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=dict(environ or clean_environment()),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    _remember(process)
    return process


def _remember(process: subprocess.Popen[str] | forked.Process) -> None:
    """For `unread`. A thread may start commands for tests that run later; the failure of an earlier
    test must not end them.
    """
    if threading.current_thread() is threading.main_thread():
        STARTED.append(process)


def unread() -> Iterator[tuple[str, str]]:
    """Kills each process that the test has started and not waited for; its command and its
    output.
    """
    for process in STARTED:
        if process.stdout and not process.stdout.closed:
            process.kill()
            # What it has started may hold the pipe; or another thread of the test reads it, and
            # closes it now.
            with contextlib.suppress(subprocess.TimeoutExpired, OSError, ValueError):
                command = shlex.join(map(str, process.args))  # type: ignore[arg-type]
                yield command, process.communicate(timeout=10)[0]


def finish(process: subprocess.Popen[str] | forked.Process, timeout_s: float = 120) -> Ended:
    """Waits for the end of what `start` has started, killing it, and failing, after
    ``timeout_s``.
    """
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(
            f"still running after {timeout_s:g} s: {process.communicate(timeout=60)[0]}"
        ) from None
    return Ended(process.returncode, out)


def run(
    argv: Sequence[str], *, cwd: Path = ROOT, environ: Mapping[str, str] | None = None
) -> Ended:
    return finish(start(argv, cwd=cwd, environ=environ))


def fork(
    argv: Sequence[str], *, cwd: Path = ROOT, environ: Mapping[str, str] | None = None
) -> forked.Process:
    """Like `start`, for a Python command that imports torch: in a fork of a process that has
    imported it (tests/forked.py).
    """
    process = forked.start(argv, cwd=cwd, environ=environ or clean_environment())
    _remember(process)
    return process


def run_fork(
    argv: Sequence[str], *, cwd: Path = ROOT, environ: Mapping[str, str] | None = None
) -> Ended:
    return finish(fork(argv, cwd=cwd, environ=environ))


def place(rank: int, ranks: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """The variables of a rank on this machine."""
    values = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in values.items()} | {"MASTER_ADDR": address}


def fork_ranks(argv: Sequence[str], ranks: int, **added: str) -> list[forked.Process]:
    """A command of Python on so many ranks, each a fork with its place in its environment; `finish`
    waits for one.
    """
    port = free_port()
    return [
        fork(argv, environ=clean_environment(**place(rank, ranks, port), **added))
        for rank in range(ranks)
    ]


def run_ranks(code: str, words: Sequence[str], ranks: int, **added: str) -> Ended:
    """Python's ``-c code words`` on so many ranks; the highest status, and the output of all."""
    processes = fork_ranks([sys.executable, "-c", code, *words], ranks, **added)
    ended = [finish(process) for process in processes]
    return Ended(max(rank.status for rank in ended), "".join(rank.out for rank in ended))


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl; a last line that is still being written is left out.

    A row that comes again with the evaluation that a stop has put off is one row, of the attempt
    that has trained the step.
    """
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    merged: list[dict[str, Any]] = []
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        row = json.loads(line)
        before = merged[-1] if merged else {}
        is_repeated = before.get("step") == row["step"]
        if is_repeated and "val_top1" in row and "val_top1" not in before:
            merged[-1] = row | {"attempt": before["attempt"]}
        else:
            merged.append(row)
    return merged


def read(run_dir: Path, name: str) -> dict[str, Any]:
    """``NAME.json`` of a run directory."""
    content = json.loads((run_dir / f"{name}.json").read_text())
    assert isinstance(content, dict)
    return content


def children(pid: int) -> list[int]:
    """The process ids of the children of ``pid``, in the order in which they were started."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in pids]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    state = stat.rpartition(")")[2].split()[0]
    return state not in ("Z", "X")


def wait_until(condition: Callable[[], Found | None], timeout_s: float, awaited: str) -> Found:
    """The first value of ``condition()`` that is true. Raises AssertionError, which names ``what``,
    after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {awaited}"
        time.sleep(0.02)
    return value


def wait_for_the_end_of(pids: Iterable[int], timeout_s: float) -> None:
    """Until none of the processes runs. Raises AssertionError after ``timeout_s``, naming those
    that do.
    """
    pids = list(pids)
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if alive(pid)]:
        if time.monotonic() > deadline:
            told = {
                pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in left
            }
            raise AssertionError(f"of {pids} not ended within {timeout_s:g} s: {told}")
        time.sleep(0.02)


def write_images(folder: Path, classes: int, each: int, px: int, seed: int = 0) -> Path:
    """``folder``/classN/M.JPEG: photos of nothing, whose class is their colour and a bright corner,
    so that it can be learnt.
    """
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(seed)
    for label in range(classes):
        place = folder / f"class{label}"
        place.mkdir(parents=True)
        colour = np.random.default_rng(label).integers(40, 215, 3)
        for number in range(each):
            height, width = (int(px * random.uniform(1, 1.3)) for _ in range(2))
            pixels = random.normal(colour, 30, (height, width, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.JPEG", quality=90)
    return folder


def write_mnist(folder: Path) -> None:
    """``folder`` as MNIST's four files: 600 and 100 images, all of them black and of one class."""
    folder.mkdir(parents=True)
    for name, count in (("train", 600), ("t10k", 100)):
        images = struct.pack(">IIII", 0x803, count, 28, 28) + bytes(count * 784)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
        labels = struct.pack(">II", 0x801, count) + bytes(count)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)


def image_sets(folder: Path) -> Path:
    """``folder`` as the data of cifar (packed) and imagenet (files): two classes, 200 images to
    train on, 8 to evaluate.
    """
    write_images(folder / "train", 2, 100, 32)
    write_images(folder / "val", 2, 4, 40, seed=1)
    (folder / "test").symlink_to(folder / "val")
    words = ["cifar10", f"source={folder}", f"data_dir={folder}"]
    run([sys.executable, "-m", "recipes.prepare", *words]).expect(0)
    return folder


def attempt(
    run_dir: Path,
    *,
    launch: str = "",
    job: str = "",
    hosts: Sequence[str] = ("a",),
    step: int | None = 0,
    **facts: Any,
) -> Attempt:
    """A new attempt in ``run_dir``, as a launch leaves it. step: at which it has begun; None if it
    has not. facts: others in opened.json.
    """
    environ = {"SLURM_JOB_ID": job} if job else {}
    new = attempts.open_next(run_dir, "mnist", environ, hosts, launch)
    files.write_json(new.folder / "opened.json", {**new.facts(), **facts})
    if step is not None:
        attempts.begin(new, step, own=False)
    return new


def in_job(recipe: str, words: Sequence[str], **more: Any) -> dict[str, str]:
    """The variable with which a job of a recipe knows its keys. more: other fields of its Spec."""
    settings = command_line.parse(words, recipe=recipe)
    return {spec.VARIABLE: spec.to_text(spec.Spec(settings, tuple(words), {}, **more))}


def failure(run_dir: Path, rank: int, number: int = 0) -> dict[str, Any]:
    """The error record of a rank."""
    return read(run_dir / "attempts" / f"{number:04d}" / "failed", f"rank{rank:04d}")


def use_root(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Lets the modules of the project that are imported take ``root`` for the project's folder."""
    before = files.ROOT
    for name, module in list(sys.modules.items()):
        if name.startswith("recipes.") and getattr(module, "ROOT", None) == before:
            monkeypatch.setattr(module, "ROOT", root)
