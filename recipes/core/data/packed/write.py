"""Packs a folder of images, ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``, into few large files.

No partial file has its final name, and a finished shard is not packed again.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from recipes.core import files
from recipes.core.data import classfolder, datasets
from recipes.core.data.classfolder import Listing
from recipes.core.data.packed import format, workers
from recipes.core.data.packed.format import PackedCopy, PackOptions
from recipes.core.errors import InputError, shown

LOCK = "packing.lock"


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
                workers.write_shards(source, target, listings, options, say)
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
    return {**format.header(options), "samples_per_shard": workers.SAMPLES_PER_SHARD, "splits": splits}


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
    splits = {split: _join(target, split, workers.number_of_shards(listing)) for split, listing in listings.items()}
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
