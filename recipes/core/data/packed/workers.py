"""The processes that pack shards, one shard at a time."""

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import signal
import time
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
from recipes.core.data.packed.format import PackOptions
from recipes.core.data.pillow import Unreadable
from recipes.core.errors import MachineError
from recipes.core.place import processes

REPORT_S = 10.0
SAMPLES_PER_SHARD = 2048


@dataclass(frozen=True)
class Task:
    """A shard to pack. names: of its images, below the split's folder."""

    split: str
    number: int
    names: list[str]
    labels: list[int]


def number_of_shards(listing: Listing) -> int:
    return -(-len(listing) // SAMPLES_PER_SHARD)


def write_shards(
    source: Path, target: Path, listings: Mapping[str, Listing], options: PackOptions, say: Callable[[str], None]
) -> None:
    """Writes every shard that is not there yet. say: gets a line about the progress every ten seconds.

    Raises InputError (an image's folder is gone), MachineError (a worker was killed or has no memory) and OSError (the disk).
    """
    tasks = _tasks(listings)
    shards = sum(number_of_shards(listing) for listing in listings.values())
    count = min(options.workers or len(os.sched_getaffinity(0)), shards)
    done, total, said = 0, sum(len(listing) for listing in listings.values()), time.monotonic()
    waiting: set[Future[int]] = set()
    try:
        with _pool(count) as pool:
            while True:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: Ctrl-C ends only this process
                # No task waits in a pipe: its names can fill it, and Python 3.10 would then block after a worker's death.
                for task in itertools.islice(tasks, count - len(waiting)):
                    waiting.add(pool.submit(_pack_shard, source, target, options, task))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                if not waiting:
                    return
                finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                done += sum(one.result() for one in finished)
                if time.monotonic() - said >= REPORT_S:
                    said = time.monotonic()
                    say(f"{done} of {total} images")
    except (BrokenProcessPool, MemoryError, BlockingIOError):
        raise MachineError(
            "a worker ended or cannot be started, most likely for lack of memory: give a smaller workers=; the same "
            "command continues"
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


def _tasks(listings: Mapping[str, Listing]) -> Iterator[Task]:
    for split, listing in listings.items():
        for number in range(number_of_shards(listing)):
            start = number * SAMPLES_PER_SHARD
            samples = range(start, min(start + SAMPLES_PER_SHARD, len(listing)))
            yield Task(split, number, [listing.name(i) for i in samples], [listing.label(i) for i in samples])


def _pack_shard(source: Path, target: Path, options: PackOptions, task: Task) -> int:
    """Writes a shard, then the note that says it is complete; nothing if both are there and valid. Gives the number of images."""
    shard = target / format.shard_name(task.split, task.number)
    note_path = format.note_path(target, task.split, task.number)
    if _is_complete(shard, files.read_json(note_path) or {}, len(task.names)):
        return len(task.names)
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
            records.extend(format.RECORD.pack(offset, len(payload), task.number, label, height, width))
            offset += len(payload)

    files.write_whole(shard, fill)
    note = {"bytes": offset, "sha256": digest.hexdigest(), "records": records.hex(), "skipped": skipped}
    files.write_json(note_path, note)
    return len(task.names)


def _is_complete(shard: Path, note: Mapping[str, Any], count: int) -> bool:
    try:
        known = DataFile(shard.name, note["bytes"], note["sha256"])
        samples = len(bytes.fromhex(note["records"])) / format.RECORD.size + len(note["skipped"])
        return samples == count and datasets.fault_of(shard, known) is None
    except (KeyError, TypeError, ValueError):
        return False
