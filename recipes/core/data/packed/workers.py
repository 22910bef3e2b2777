"""The processes that pack shards, one shard at a time."""

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from recipes.core import files
from recipes.core.data import datasets, pillow
from recipes.core.data.classfolder import Listing
from recipes.core.data.datasets import DataFile
from recipes.core.data.packed import format
from recipes.core.data.packed.format import PackOptions, Record
from recipes.core.data.pillow import Unreadable
from recipes.core.data.progress import Progress
from recipes.core.errors import MachineError
from recipes.core.place import processes

REPORT_S = 0.2


@dataclass(frozen=True)
class Task:
    """A shard to pack. names: of its images, below the split's folder."""

    split: str
    number: int
    names: list[str]
    labels: list[int]


def number_of_shards(listing: Listing, options: PackOptions) -> int:
    return -(-len(listing) // options.samples_per_shard)


def cpus() -> int:
    return len(os.sched_getaffinity(0))


def write_shards(
    source: Path,
    target: Path,
    listings: Mapping[str, Listing],
    options: PackOptions,
    progress: Callable[[Progress], None],
) -> None:
    """Writes every shard that is not there yet. progress: called several times a second; it counts finished shards.

    Raises InputError (an image's folder is gone), MachineError (a worker was killed or has no memory) and OSError (the disk).
    """
    state = Progress(sum(len(listing) for listing in listings.values()))
    tasks = _tasks(listings, options)
    count = min(options.workers or cpus(), sum(number_of_shards(listing, options) for listing in listings.values()))
    waiting: set[Future[Progress]] = set()
    try:
        with _pool(count) as pool:
            while True:
                # No task waits in a pipe: its names can fill it, and Python 3.10 would then block after a worker's death.
                for task in itertools.islice(tasks, count - len(waiting)):
                    waiting.add(_submit(pool, source, target, options, task))
                if not waiting:
                    return
                finished, waiting = wait(waiting, REPORT_S, FIRST_COMPLETED)
                for part in (one.result() for one in finished):
                    state.done += part.done
                    state.kept += part.kept
                    state.skipped += part.skipped
                progress(state)
    except (BrokenProcessPool, MemoryError):
        raise MachineError(
            "a worker ended, most likely for lack of memory: give a smaller workers=; the same command continues"
        ) from None


@contextlib.contextmanager
def _pool(count: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that end with this process, and that an exception in the ``with`` block kills."""
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start, (os.getpid(),))
    try:
        yield pool
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start(parent: int) -> None:
    """Called in each worker first."""
    processes.die_with(parent)()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries print warnings about images
    warnings.simplefilter("ignore")


def _submit(pool: ProcessPoolExecutor, *work: Any) -> "Future[Progress]":
    """Starts a worker if none is idle. It inherits the blocked SIGINT, so Ctrl-C reaches only this process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_pack_shard, *work)
    except OSError as error:
        raise MachineError(f"a worker cannot be started ({error.strerror}): give a smaller workers=") from None
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _tasks(listings: Mapping[str, Listing], options: PackOptions) -> Iterator[Task]:
    for split, listing in listings.items():
        for number in range(number_of_shards(listing, options)):
            start = number * options.samples_per_shard
            samples = range(start, min(start + options.samples_per_shard, len(listing)))
            yield Task(split, number, [listing.name(i) for i in samples], [listing.label(i) for i in samples])


def _pack_shard(source: Path, target: Path, options: PackOptions, task: Task) -> Progress:
    """Writes a shard, then the note that says it is complete; nothing if both are there and valid."""
    shard = target / format.shard_name(task.split, task.number)
    note_path = format.note_path(target, task.split, task.number)
    note = files.read_json(note_path)
    count = len(task.names)
    if note and _is_complete(shard, note, count):
        return Progress(count, kept=count, skipped=len(note["skipped"]))
    records, digest = bytearray(), hashlib.sha256()
    skipped: list[dict[str, str]] = []
    offset = 0

    def fill(file: IO[bytes]) -> None:
        nonlocal offset
        for name, label in zip(task.names, task.labels, strict=True):
            relative = f"{task.split}/{name}"
            try:
                data = pillow.read_file(source / relative)
                payload, height, width = pillow.encode(data, options.size, options.quality)
            except Unreadable as error:
                skipped.append({"file": relative, "why": str(error)})
                continue
            file.write(payload)
            digest.update(payload)
            records.extend(Record(offset, len(payload), task.number, label, height, width).pack())
            offset += len(payload)

    files.write_whole(shard, fill)
    content = {
        "bytes": offset,
        "sha256": digest.hexdigest(),
        "records": records.hex(),
        "skipped": skipped,
    }
    files.write_json(note_path, content)
    return Progress(count, done=count, skipped=len(skipped))


def _is_complete(shard: Path, note: Mapping[str, Any], count: int) -> bool:
    try:
        known = DataFile(shard.name, note["bytes"], note["sha256"])
        samples = len(bytes.fromhex(note["records"])) / format.RECORD.size + len(note["skipped"])
        return samples == count and datasets.fault_of(shard, known) is None
    except (KeyError, TypeError, ValueError):
        return False
