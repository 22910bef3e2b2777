"""Packs a folder of images, ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``, into few large files.

No partial file has its final name, and a finished shard is not packed again.
"""

import hashlib
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from recipes.core import files
from recipes.core.data import classfolder, datasets
from recipes.core.data.classfolder import Listing
from recipes.core.data.datasets import DataFile
from recipes.core.data.packed import format, workers
from recipes.core.data.packed.format import PackedCopy, PackOptions, Split
from recipes.core.data.progress import Progress
from recipes.core.errors import InputError, MachineError, shown

LOCK = "packing.lock"


def pack(
    source: Path,
    target: Path,
    options: PackOptions,
    say: Callable[[str], None] = print,
    progress: Callable[[Progress], None] = lambda state: None,
) -> PackedCopy:
    """Writes a packed copy of ``source`` (``train/``, ``val/`` or both) to ``target``.

    Continues what an earlier call left unfinished; verifies a finished copy. say: gets lines for the user. progress: called several
    times a second. Raises InputError (source, other options, a damaged copy, too many unreadable images) and MachineError
    (disk, lock, a worker that was killed), one line each.
    """
    source, target = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    try:
        _check_folders(source, target)
        listings = _listings(source)
        target.mkdir(parents=True, exist_ok=True)
        with files.locked(target / LOCK) as held:
            if not held:
                say(f"{target / LOCK}: this file system has no locks: start no second process for this folder")
            files.remove_temporary(target)
            plan = _plan(listings, options)
            _compare(target, plan)
            if format.is_finished(target):
                return _verified(target, options, say)
            if importlib.util.find_spec("PIL") is None:
                raise MachineError(f"{sys.executable} has no Pillow: pip install pillow, or make install")
            files.write_json(target / format.PLAN, plan)
            try:
                workers.write_shards(source, target, listings, options, progress)
            finally:
                files.remove_temporary(target)  # of workers that were killed
            _finish(target, listings, options)
            return format.read_index(target)
    except OSError as error:
        raise files.disk_error(error, "data_dir", target) from error


def verify(folder: Path, copy: PackedCopy) -> list[str]:
    """The faults of the files of a packed copy, one line for each file. Empty if all sizes and SHA-256 are correct."""
    with ThreadPoolExecutor(min(8, workers.cpus())) as pool:  # hashing releases the interpreter's lock
        faults = pool.map(lambda file: datasets.fault_of(folder / file.name, file), copy.files)
        return [f"{file.name} {fault}" for file, fault in zip(copy.files, faults, strict=True) if fault]


def _check_folders(source: Path, target: Path) -> None:
    taken = {source, *(source / split for split in format.SPLITS)}
    if target in taken or taken & set(target.parents) - {source}:
        raise InputError(f"data_dir={str(target)!r}: holds the images of source=; give another data_dir=")
    kind = datasets.kind(target)
    if kind == "file":
        raise InputError(f"data_dir={str(target)!r}: is not a folder; give another data_dir=")
    if kind and not datasets.kind(target / format.PLAN):
        others = [name for name in os.listdir(target) if name not in (LOCK, "lost+found") and not name.startswith(".")]
        if others:
            raise InputError(
                f"data_dir={str(target)!r}: has other files ({min(others)!r}) and no packed copy; give another data_dir="
            )


def _listings(source: Path) -> dict[str, Listing]:
    needs = "give a folder with train/<class>/*.JPEG and val/<class>/*.JPEG"
    if datasets.kind(source, "source") != "folder":
        raise InputError(f"source={str(source)!r}: is not a folder; {needs}")
    splits = [split for split in format.SPLITS if datasets.kind(source / split, "source") == "folder"]
    if not splits:
        raise InputError(f"source={str(source)!r}: has neither train/ nor val/; {needs}")
    listings: dict[str, Listing] = {}
    for split in splits:
        classes = listings["train"].classes if listings else None
        listings[split] = classfolder.scan(source / split, classes)
    return listings


def _plan(listings: Mapping[str, Listing], options: PackOptions) -> dict[str, Any]:
    """What must be the same in a later call that continues this one."""
    splits = {split: {"samples": len(listing), "names_sha256": listing.digest()} for split, listing in listings.items()}
    return {**format.header(options), "samples_per_shard": options.samples_per_shard, "splits": splits}


def _compare(target: Path, plan: Mapping[str, Any]) -> None:
    """Raises InputError if packing was started with another plan, or if packing.json is damaged."""
    path = target / format.PLAN
    if not path.exists():
        return
    before = files.read_json(path) or {}
    format.check_version(before, path)
    fix = f"another data_dir=, or remove {shlex.quote(str(target))} to start again"
    if differs := [name for name in format.OPTIONS if before.get(name) != plan[name]]:
        then, now = (" ".join(f"{name}={shown(side.get(name))}" for name in differs) for side in (before, plan))
        raise InputError(f"data_dir={str(target)!r}: was started with {then}, not {now}; give {then}, or {fix}")
    if before.get("splits") != plan["splits"]:
        raise InputError(
            f"data_dir={str(target)!r}: was started with another source=: the names or the number of images differ; "
            f"give the first source= again, or {fix}"
        )


def _verified(target: Path, options: PackOptions, say: Callable[[str], None]) -> PackedCopy:
    """The finished copy in ``target``. Raises InputError where it is damaged or lacks too many images."""
    copy = format.read_index(target)
    _remove_notes(target, copy.splits)
    say(f"verifying {files.size_text(sum(file.size for file in copy.files))}")
    if faults := verify(target, copy):
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise InputError(
            f"data_dir={str(target)!r}: the packed copy is damaged ({faults[0]}{more}): "
            f"remove {shlex.quote(str(target / format.INDEX))} and run the same command to repair it"
        )
    for name, split in copy.splits.items():
        if options.max_skipped is not None and len(split.skipped) > options.max_skipped:
            raise InputError(
                f"max_skipped={options.max_skipped}: the finished copy {str(target)!r} lacks {len(split.skipped)} images of "
                f"{name}/: repair them in source= and remove {shlex.quote(str(target))} to start again, or give a larger value"
            )
    return copy


def _finish(target: Path, listings: Mapping[str, Listing], options: PackOptions) -> None:
    """Joins the records of all shards and writes index.json, last."""
    splits = {
        split: _join(target, split, workers.number_of_shards(listing, options)) for split, listing in listings.items()
    }
    for name, listing in listings.items():
        split, most = splits[name], classfolder.allowed(len(listing), options.max_skipped)
        if len(split.skipped) > most or not split.samples:
            some = "; ".join(f"{skip['file']!r} {skip['why']}" for skip in split.skipped[:3])
            fix = f"raise max_skipped= (now {most}) to continue" if split.samples else "give another source="
            raise InputError(
                f"source=: {len(split.skipped)} of {len(listing)} images of {name}/ cannot be used ({some}): {fix}; "
                f"or repair them, and remove {shlex.quote(str(target))} to start again"
            )
    format.write_index(target, options, next(iter(listings.values())).classes, splits)
    _remove_notes(target, splits)


def _remove_notes(target: Path, splits: Mapping[str, Split]) -> None:
    for split in splits:
        for note in target.glob(f"{split}-*.json"):
            note.unlink()


def _join(target: Path, split: str, shards: int) -> Split:
    """Writes the split's index from the shards' notes. One shard's records are in memory at a time."""
    digest = hashlib.sha256()
    written: list[DataFile] = []
    skipped: list[Mapping[str, str]] = []
    size = 0

    def fill(file: IO[bytes]) -> None:
        nonlocal size
        for number in range(shards):
            note = json.loads(format.note_path(target, split, number).read_bytes())
            records = bytes.fromhex(note["records"])
            digest.update(records)
            size += file.write(records)
            written.append(DataFile(format.shard_name(split, number), note["bytes"], note["sha256"]))
            skipped.extend(note["skipped"])

    path = target / f"{split}.index"
    files.write_whole(path, fill)
    index = DataFile(path.name, size, digest.hexdigest())
    return Split(size // format.RECORD.size, index, tuple(written), tuple(skipped))
