"""Packs a folder of images, ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``, into few large
files.

index.json is written last. Packing that was interrupted before starts again.
"""

import hashlib
import os
import re
import shlex
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

from recipes.core import files, trust
from recipes.core.data import classfolder, datasets, pillow
from recipes.core.data.packed import format
from recipes.core.data.progress import progress
from recipes.core.errors import InputError

SAMPLES_PER_SHARD = 2048
Say = Callable[[str], None]
Encode = Callable[[bytes], tuple[bytes, int, int]]  # `pillow.encode` of a size and quality


def pack(
    source: Path,
    target: Path,
    size: int,
    quality: int,
    workers: int,
    say: Say,
) -> format.PackedCopy:
    """Writes a packed copy of ``source`` (``train/`` and ``val/``) to ``target``, or verifies the
    finished copy there.

    size: pixels of the shorter side. quality: of JPEGs. workers: number of threads, 0 for one per
    CPU. say: gets lines for the user. Raises InputError (source, other options, a damaged copy, too
    many unreadable images) and MachineError (disk, lock), one line each.
    """
    with files.writing_to(target, "data_dir"):
        if datasets.kind(target / format.INDEX):
            say("imagenet: a packed copy exists already; verifying it")
            return _verified(target, size, quality)
        _check_target(target)
        folders = datasets.split_folders(source, "source")
        if not {*format.SPLITS} <= folders.keys():
            needed = "train/<class>/*.JPEG and val/<class>/*.JPEG"
            raise InputError(f"source={str(source)!r}: must have {needed}")
        train = classfolder.scan(folders["train"], say=say)
        val = classfolder.scan(folders["val"], train.classes, say=say)

        with (
            trust.data_folder(trust.resolved(target)) as place,
            files.locked(place / "packing.lock"),
        ):
            if datasets.kind(place / format.INDEX):  # another process has packed it meanwhile
                return _verified(target, size, quality)
            _check_target(place)
            files.remove_temporary(place)  # of an interrupted packing, as are these
            for old in place.glob("*.bin"):
                old.unlink()
            options = {"size": size, "quality": quality}
            encode = partial(pillow.encode, size=size, quality=quality)
            count = workers or len(os.sched_getaffinity(0))
            splits = {
                split: _write_split(split, listing, place, encode, count, say)
                for split, listing in (("train", train), ("val", val))
            }
            index = {**format.VERSION, **options, "classes": train.classes, "splits": splits}
            files.write_json(place / format.INDEX, index)
            return format.read_index(target)


def _verified(target: Path, size: int, quality: int) -> format.PackedCopy:
    """The finished copy in ``target``. Raises InputError if it is damaged or was packed with other
    options.
    """
    copy = format.read_index(target)
    start_again = f"remove {shlex.quote(str(target))} and run the same command to pack again"
    if (copy.size, copy.quality) != (size, quality):
        keys = f"size={copy.size} quality={copy.quality}"
        fix = f"give these keys, or {start_again}"
        raise InputError(f"data_dir={str(target)!r}: was packed with {keys}: {fix}")
    for file in copy.files:
        fault = datasets.fault_of(target / file.name, file)
        if fault:
            damaged = f"is damaged ({file.name} {fault})"
            raise InputError(f"data_dir={str(target)!r}: {damaged}: {start_again}")
    return copy


def _check_target(target: Path) -> None:
    """Raises InputError if ``target`` has files that packing does not write."""
    if datasets.kind(target) != "folder":
        return
    ours = re.compile(r"\..*|lost\+found|packing\.(lock|json)|(train|val)(\.index|-\d{5}\.bin)")
    for name in sorted(os.listdir(target)):
        if not ours.fullmatch(name):
            where = f"data_dir={os.path.realpath(target)!r}"
            raise InputError(f"{where}: has other files ({name!r}): give another data_dir=")


def _write_split(
    split: str, listing: classfolder.Listing, target: Path, encode: Encode, workers: int, say: Say
) -> dict[str, Any]:
    """Writes a split's shards and index, and returns its part of index.json. Raises InputError if
    too many images are unreadable.
    """
    numbers = range(-(-len(listing) // SAMPLES_PER_SHARD))
    entries = []
    records = bytearray()
    skipped = []
    report = progress(split, len(listing), "images", say)
    stopped = threading.Event()
    pool = ThreadPoolExecutor(workers)
    try:
        write = partial(_write_shard, split, listing, target, encode, stopped)
        for entry, of_shard, left_out in pool.map(write, numbers):
            entries.append(entry)
            records += of_shard
            skipped += left_out
            report(min(len(entries) * SAMPLES_PER_SHARD, len(listing)))
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
    if len(skipped) > max(10, len(listing) // 100) or len(skipped) == len(listing):
        some = "; ".join(f"{skip['file']!r} {skip['why']}" for skip in skipped[:3])
        count = f"{len(skipped)} of {len(listing)} images of {split}/"
        raise InputError(f"source=: {count} cannot be used ({some}): repair or remove them")

    files.write_bytes(target / f"{split}.index", bytes(records))
    return {
        "samples": len(listing) - len(skipped),
        "index_sha256": hashlib.sha256(records).hexdigest(),
        "shards": entries,
        "skipped": skipped,
    }


def _write_shard(
    split: str,
    listing: classfolder.Listing,
    target: Path,
    encode: Encode,
    stopped: threading.Event,
    number: int,
) -> tuple[dict[str, Any], bytearray, list[dict[str, str]]]:
    """Writes a shard. Returns its part of index.json, its records, and the images left out. Raises
    CancelledError when ``stopped`` is set.
    """
    records = bytearray()
    digest = hashlib.sha256()
    skipped = []
    size = 0

    def fill(file: IO[bytes]) -> None:
        nonlocal size
        begin = number * SAMPLES_PER_SHARD
        for i in range(len(listing))[begin : begin + SAMPLES_PER_SHARD]:
            if stopped.is_set():
                raise CancelledError
            name = listing.name(i)
            try:
                data = pillow.read_file(listing.folder / name, trust.without_links_of_others)
                payload, height, width = encode(data)
            except pillow.Unreadable as error:
                skipped.append({"file": f"{split}/{name}", "why": str(error)})
                continue
            label = listing.label(i)
            records.extend(format.RECORD.pack(size, len(payload), number, label, height, width))
            size += file.write(payload)
            digest.update(payload)

    name = format.shard_name(split, number)
    files.write_whole(target / name, fill)
    return {"file": name, "bytes": size, "sha256": digest.hexdigest()}, records, skipped
