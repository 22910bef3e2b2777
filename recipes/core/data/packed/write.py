"""Packs a folder of images, ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``, into few large files.

index.json is written last. Packing that was interrupted before starts again.
"""

import hashlib
import itertools
import multiprocessing
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import IO, Any

from recipes.core import files
from recipes.core.data import classfolder, datasets, pillow
from recipes.core.data.classfolder import Listing
from recipes.core.data.packed import format
from recipes.core.data.packed.format import PackedCopy, PackOptions
from recipes.core.data.pillow import Unreadable
from recipes.core.errors import InputError, MachineError
from recipes.core.place import processes

LOCK = "packing.lock"
REPORT_S = 10.0
SAMPLES_PER_SHARD = 2048


def pack(source: Path, target: Path, options: PackOptions, say: Callable[[str], None] = print) -> PackedCopy:
    """Writes a packed copy of ``source`` (``train/`` and ``val/``) to ``target``, or verifies the finished copy there.

    say: gets lines for the user. Raises InputError (source, other options, a damaged copy, too many unreadable images) and
    MachineError (disk, lock, a worker that was killed), one line each.
    """
    source, target = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    with files.writing_to(target, "data_dir"):
        if datasets.kind(target / format.INDEX):
            say("imagenet: already there; verifying it")
            return _verified(target, options)
        _check_target(target)
        listings = _listings(source)
        target.mkdir(parents=True, exist_ok=True)
        with files.locked(target / LOCK):
            for old in target.glob("*.bin"):  # of an interrupted packing
                old.unlink()
            try:
                shards = _write_shards(source, target, listings, options, say)
            finally:
                files.remove_temporary(target)  # of workers that were killed
            splits = {split: _join(target, split, listing, shards) for split, listing in listings.items()}
            index = {**format.VERSION, "size": options.size, "quality": options.quality}
            index |= {"classes": listings["train"].classes, "splits": splits}
            files.write_json(target / format.INDEX, index)
            return format.read_index(target)


def _verified(target: Path, options: PackOptions) -> PackedCopy:
    """The finished copy in ``target``. Raises InputError where it is damaged or was packed with other options."""
    copy = format.read_index(target)
    start_again = f"remove {shlex.quote(str(target))} and run the same command to pack again"
    if (copy.size, copy.quality) != (options.size, options.quality):
        raise InputError(
            f"data_dir={str(target)!r}: was packed with size={copy.size} quality={copy.quality}: give these keys, or {start_again}"
        )
    for file in copy.files:
        if fault := datasets.fault_of(target / file.name, file):
            raise InputError(
                f"data_dir={str(target)!r}: the packed copy is damaged ({file.name} {fault}): {start_again}"
            )
    return copy


def _check_target(target: Path) -> None:
    """Raises InputError if ``target`` has files that packing does not write."""
    if datasets.kind(target) == "folder":
        ours = re.compile(r"\..*|lost\+found|packing\.(lock|json)|(train|val)(\.index|-\d{5}\.bin)")
        if others := [name for name in os.listdir(target) if not ours.fullmatch(name)]:
            raise InputError(
                f"data_dir={str(target)!r}: has other files ({min(others)!r}) and no packed copy; give another data_dir="
            )


def _listings(source: Path) -> dict[str, Listing]:
    if not all(datasets.kind(source / split, "source") == "folder" for split in format.SPLITS):
        raise InputError(f"source={str(source)!r}: must have train/<class>/*.JPEG and val/<class>/*.JPEG")
    train = classfolder.scan(source / "train")
    return {"train": train, "val": classfolder.scan(source / "val", train.classes)}


@dataclass(frozen=True)
class _Shard:
    """A shard that was written. size: in bytes. records: of its samples. skipped: ``file`` and ``why`` of each image left out."""

    split: str
    number: int
    size: int
    sha256: str
    records: bytes
    skipped: list[dict[str, str]]


def _tasks(listings: Mapping[str, Listing]) -> Iterator[tuple[str, int, list[tuple[str, int]]]]:
    """Each shard's split, number and images: their names below the split's folder, and their labels."""
    for split, listing in listings.items():
        for number, start in enumerate(range(0, len(listing), SAMPLES_PER_SHARD)):
            samples = range(start, min(start + SAMPLES_PER_SHARD, len(listing)))
            yield split, number, [(listing.name(i), listing.label(i)) for i in samples]


def _write_shards(
    source: Path, target: Path, listings: Mapping[str, Listing], options: PackOptions, say: Callable[[str], None]
) -> list[_Shard]:
    """Writes all shards, and tells ``say`` the progress. Raises MachineError (a worker was killed or has no memory) and OSError."""
    tasks, total = _tasks(listings), sum(map(len, listings.values()))
    count = min(options.workers or len(os.sched_getaffinity(0)), -(-total // SAMPLES_PER_SHARD))
    shards: list[_Shard] = []
    waiting: set[Future[_Shard]] = set()
    said = time.monotonic()
    resource_tracker.ensure_running()  # its start would unblock SIGINT below
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start, (os.getpid(),))
    try:
        while True:
            # No task waits in a pipe: its names can fill it, and Python 3.10 would then block after a worker's death.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # also in new workers: their parent kills them
            for task in itertools.islice(tasks, count - len(waiting)):
                waiting.add(pool.submit(_pack_shard, source, target, options, *task))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            if not waiting:
                return shards
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            shards += [one.result() for one in finished]
            if time.monotonic() - said >= REPORT_S:
                said = time.monotonic()
                done = sum(len(shard.records) // format.RECORD.size + len(shard.skipped) for shard in shards)
                say(f"{done} of {total} images")
    except BaseException as error:
        for worker in multiprocessing.active_children():
            worker.kill()
        if isinstance(error, BrokenProcessPool | MemoryError | BlockingIOError):
            raise MachineError(
                "a worker ended or cannot be started, most likely for lack of memory: give a smaller workers="
            ) from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start(parent: int) -> None:
    """Called in each worker first."""
    processes.die_with(parent)()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries print warnings about images


def _pack_shard(
    source: Path, target: Path, options: PackOptions, split: str, number: int, images: list[tuple[str, int]]
) -> _Shard:
    records, digest = bytearray(), hashlib.sha256()
    skipped: list[dict[str, str]] = []
    size = 0

    def fill(file: IO[bytes]) -> None:
        nonlocal size
        for name, label in images:
            relative = f"{split}/{name}"
            try:
                payload, height, width = pillow.encode(
                    pillow.read_file(source / relative), options.size, options.quality
                )
            except Unreadable as error:
                skipped.append({"file": relative, "why": str(error)})
                continue
            records.extend(format.RECORD.pack(size, len(payload), number, label, height, width))
            size += file.write(payload)
            digest.update(payload)

    files.write_whole(target / format.shard_name(split, number), fill)
    return _Shard(split, number, size, digest.hexdigest(), bytes(records), skipped)


def _join(target: Path, split: str, listing: Listing, shards: list[_Shard]) -> dict[str, Any]:
    """Writes the split's index, and gives its part of index.json. Raises InputError if too many images are unreadable."""
    own = sorted((shard for shard in shards if shard.split == split), key=lambda shard: shard.number)
    skipped = list(itertools.chain.from_iterable(shard.skipped for shard in own))
    if len(skipped) > max(10, len(listing) // 100) or len(skipped) == len(listing):
        some = "; ".join(f"{skip['file']!r} {skip['why']}" for skip in skipped[:3])
        raise InputError(
            f"source=: {len(skipped)} of {len(listing)} images of {split}/ cannot be used ({some}): repair or remove them"
        )
    records = b"".join(shard.records for shard in own)
    files.write_bytes(target / f"{split}.index", records)
    return {
        "samples": len(listing) - len(skipped),
        "index_sha256": hashlib.sha256(records).hexdigest(),
        "shards": [
            {"file": format.shard_name(split, shard.number), "bytes": shard.size, "sha256": shard.sha256}
            for shard in own
        ],
        "skipped": skipped,
    }
