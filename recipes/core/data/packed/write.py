"""Packs a folder of images, ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``, into few large files.

No partial file has its final name, and a finished shard is not packed again.
"""

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import shlex
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
from recipes.core.data import classfolder, datasets, pillow
from recipes.core.data.classfolder import Listing
from recipes.core.data.datasets import DataFile
from recipes.core.data.packed import format
from recipes.core.data.packed.format import PackedCopy, PackOptions
from recipes.core.data.pillow import Unreadable
from recipes.core.errors import InputError, MachineError, shown
from recipes.core.place import processes

LOCK = "packing.lock"
REPORT_S = 10.0
SAMPLES_PER_SHARD = 2048


def pack(source: Path, target: Path, options: PackOptions, say: Callable[[str], None] = print) -> PackedCopy:
    """Writes a packed copy of ``source`` (``train/``, ``val/`` or both) to ``target``.

    Continues what an earlier call left unfinished; verifies a finished copy. say: gets lines for the user. Raises InputError
    (source, other options, a damaged copy, too many unreadable images) and MachineError (disk, lock, a worker that was
    killed), one line each.
    """
    source, target = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    try:
        _check_target(target)
        listings = _listings(source)
        target.mkdir(parents=True, exist_ok=True)
        with files.locked(target / LOCK):
            files.remove_temporary(target)
            plan = _plan(listings, options)
            _compare(target, plan)
            if format.is_finished(target):
                say("imagenet: already there; verifying it")
                return _verified(target)
            files.write_json(target / format.PLAN, plan)
            try:
                _write_shards(source, target, listings, options, say)
            finally:
                files.remove_temporary(target)  # of workers that were killed
            _finish(target, listings, options)
            return format.read_index(target)
    except OSError as error:
        raise files.disk_error(error, "data_dir", target) from error


def _listings(source: Path) -> dict[str, Listing]:
    splits = [split for split in format.SPLITS if datasets.kind(source / split, "source") == "folder"]
    if not splits:
        raise InputError(
            f"source={str(source)!r}: has neither train/ nor val/; "
            "give a folder with train/<class>/*.JPEG and val/<class>/*.JPEG"
        )
    listings: dict[str, Listing] = {}
    for split in splits:
        classes = listings["train"].classes if listings else None
        listings[split] = classfolder.scan(source / split, classes)
    return listings


def _check_target(target: Path) -> None:
    if datasets.kind(target) != "folder" or datasets.kind(target / format.PLAN):
        return
    others = [name for name in os.listdir(target) if name not in (LOCK, "lost+found") and not name.startswith(".")]
    if others:
        raise InputError(
            f"data_dir={str(target)!r}: has other files ({min(others)!r}) and no packed copy; give another data_dir="
        )


def _plan(listings: Mapping[str, Listing], options: PackOptions) -> dict[str, Any]:
    """What must be the same in a later call that continues this one."""
    splits = {split: {"samples": len(listing), "names_sha256": listing.digest()} for split, listing in listings.items()}
    return {**format.header(options), "samples_per_shard": SAMPLES_PER_SHARD, "splits": splits}


def _compare(target: Path, plan: Mapping[str, Any]) -> None:
    """Raises InputError if packing was started with another plan, or if packing.json is damaged."""
    path = target / format.PLAN
    if path.exists() and (before := files.read_json(path) or {}) != plan:
        then = " ".join(f"{name}={shown(before.get(name))}" for name in ("size", "quality"))
        raise InputError(
            f"data_dir={str(target)!r}: was started with {then}, or with other images; give these keys and the first source= "
            f"again, or another data_dir=, or remove {shlex.quote(str(target))} to start again"
        )


def _verified(target: Path) -> PackedCopy:
    """The finished copy in ``target``. Raises InputError where it is damaged."""
    copy = format.read_index(target)
    _remove_notes(target)
    for file in copy.files:
        if fault := datasets.fault_of(target / file.name, file):
            raise InputError(
                f"data_dir={str(target)!r}: the packed copy is damaged ({file.name} {fault}): "
                f"remove {shlex.quote(str(target / format.INDEX))} and run the same command to repair it"
            )
    return copy


def _finish(target: Path, listings: Mapping[str, Listing], options: PackOptions) -> None:
    """Joins the records of all shards and writes index.json, last. Raises InputError if too many images are unreadable."""
    splits = {split: _join(target, split, _number_of_shards(listing)) for split, listing in listings.items()}
    for name, listing in listings.items():
        skipped = splits[name]["skipped"]
        if len(skipped) > max(10, len(listing) // 100) or not splits[name]["samples"]:
            some = "; ".join(f"{skip['file']!r} {skip['why']}" for skip in skipped[:3])
            raise InputError(
                f"source=: {len(skipped)} of {len(listing)} images of {name}/ cannot be used ({some}): "
                f"repair or remove them, and remove {shlex.quote(str(target))} to start again"
            )
    classes = next(iter(listings.values())).classes
    files.write_json(target / format.INDEX, {**format.header(options), "classes": classes, "splits": splits})
    _remove_notes(target)


def _remove_notes(target: Path) -> None:
    for note in target.glob("*-?????.json"):
        note.unlink()


def _join(target: Path, split: str, shards: int) -> dict[str, Any]:
    """Writes the split's index from the shards' notes, and gives its part of index.json. One shard's records are in memory at a time."""
    digest = hashlib.sha256()
    written: list[dict[str, Any]] = []
    skipped: list[Mapping[str, str]] = []
    size = 0

    def fill(file: IO[bytes]) -> None:
        nonlocal size
        for number in range(shards):
            note = json.loads(format.note_path(target, split, number).read_bytes())
            records = bytes.fromhex(note["records"])
            digest.update(records)
            size += file.write(records)
            name = format.shard_name(split, number)
            written.append({"file": name, "bytes": note["bytes"], "sha256": note["sha256"]})
            skipped.extend(note["skipped"])

    files.write_whole(target / f"{split}.index", fill)
    samples = size // format.RECORD.size
    return {"samples": samples, "index_sha256": digest.hexdigest(), "shards": written, "skipped": skipped}


@dataclass(frozen=True)
class _Task:
    """A shard to pack. names: of its images, below the split's folder."""

    split: str
    number: int
    names: list[str]
    labels: list[int]


def _number_of_shards(listing: Listing) -> int:
    return -(-len(listing) // SAMPLES_PER_SHARD)


def _write_shards(
    source: Path, target: Path, listings: Mapping[str, Listing], options: PackOptions, say: Callable[[str], None]
) -> None:
    """Writes every shard that is not there yet. say: gets a line about the progress every ten seconds.

    Raises InputError (an image's folder is gone), MachineError (a worker was killed or has no memory) and OSError (the disk).
    """
    tasks = _tasks(listings)
    shards = sum(_number_of_shards(listing) for listing in listings.values())
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


def _tasks(listings: Mapping[str, Listing]) -> Iterator[_Task]:
    for split, listing in listings.items():
        for number in range(_number_of_shards(listing)):
            start = number * SAMPLES_PER_SHARD
            samples = range(start, min(start + SAMPLES_PER_SHARD, len(listing)))
            yield _Task(split, number, [listing.name(i) for i in samples], [listing.label(i) for i in samples])


def _pack_shard(source: Path, target: Path, options: PackOptions, task: _Task) -> int:
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
