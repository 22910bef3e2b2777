"""Packs a folder of images, ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``, into few large files.

Invariants: no partial file has its final name, and a finished shard is not packed again.
"""

import collections
import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from recipes.core.data import classfolder, datasets, download, pillow
from recipes.core.data.classfolder import Listing
from recipes.core.data.datasets import DataFile
from recipes.core.files import size_text
from recipes.core.data.packed import format, workers
from recipes.core.data.packed.format import PackOptions
from recipes.core.data.packed.workers import Progress
from recipes.core.data.pillow import Unreadable
from recipes.core.errors import InputError, MachineError
from recipes.core.files import read_json, write_json, write_whole

MEASURED = 64  # images that the needed room is estimated from


def allowed(samples: int, options: PackOptions) -> int:
    """How many of a split's images may be unreadable: ``max_skipped``, else 1 % and at least 10."""
    return max(10, samples // 100) if options.max_skipped is None else options.max_skipped


def pack(
    source: Path,
    target: Path,
    options: PackOptions,
    say: Callable[[str], None] = print,
    progress: Callable[[Progress], None] = lambda state: None,
) -> dict[str, Any]:
    """Writes a packed copy of ``source`` (``train/``, ``val/`` or both) to ``target`` and gives its index.json's content.

    Goes on where an earlier run was broken off; a finished copy is verified. say: told what is worth a line; progress:
    called several times a second. Raises InputError (source, other parameters, a damaged copy, too many unreadable images)
    and MachineError (room, locks, a worker that is killed), one line each.
    """
    source, target = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    need = 0
    try:
        _check_places(source, target)
        listings = _listings(source)
        target.mkdir(parents=True, exist_ok=True)
        with exclusive(target / "packing.lock", say):
            sweep(target)
            plan = _plan(listings, options)
            _compare(target, plan)
            if format.is_finished(target):
                return _verified(target, options, say)
            need = _check_room(target, listings, options, say)
            write_json(target / "packing.json", plan)
            try:
                workers._run(source, target, listings, options, progress)
            finally:
                sweep(target)  # of the workers that were killed
            return _finish(target, listings, options)
    except OSError as error:
        raise MachineError(download.disk_words(error, target, need)) from error


def check(folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """What is wrong with a packed copy, a line each; none: every size and SHA-256 is right. progress: bytes, of how many."""
    try:
        index = json.loads((folder / "index.json").read_bytes())
        if (index["format"], index["version"]) != (format.FORMAT, format.VERSION):
            return [f"index.json: is of another format or version ({index['format']!r} {index['version']!r})"]
        files = []
        for name, split in index["splits"].items():
            files.append(DataFile(f"{name}.index", split["samples"] * format.RECORD.size, split["index_sha256"]))
            files += [DataFile(shard["file"], shard["bytes"], shard["sha256"]) for shard in split["shards"]]
    except FileNotFoundError:
        return ["index.json: is not there, packing was not finished"]
    except OSError as error:
        return [f"index.json: cannot be read ({error.strerror})"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return ["index.json: is damaged"]
    total, done, faults = sum(file.size for file in files), 0, []
    with ThreadPoolExecutor(min(8, workers._cpus())) as pool:  # hashing leaves the interpreter's lock
        try:
            for file, fault in zip(
                files, pool.map(lambda f: datasets.fault_of(folder / f.name, f), files), strict=True
            ):
                done += file.size
                progress(done, total)
                if fault:
                    faults.append(f"{file.name}: {fault}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return faults


@contextlib.contextmanager
def exclusive(lock: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock file, which stays. Raises MachineError, which names it, where another process holds it."""
    # Not through a link: its name is known, and a link would make a file wherever it leads.
    opened = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(opened, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MachineError(
                f"{str(lock)!r} is locked: another process is at work in this folder; wait for its end, or choose another data_dir="
            ) from None
        except OSError as error:
            say(f"{lock}: no locks on this file system ({error.strerror}): see to it that nobody else packs here")
        yield


def sweep(folder: Path) -> None:
    """Removes the temporary files that dead processes left of `rundir.write_whole`; for who holds the folder's lock."""
    for name in os.listdir(folder):
        if re.fullmatch(r"\..+\.\d+\.[0-9a-f]{8}", name):
            with contextlib.suppress(FileNotFoundError):
                (folder / name).unlink()


def _check_places(source: Path, target: Path) -> None:
    taken = {source, *(source / split for split in format.SPLITS)}
    if target in taken or taken & set(target.parents) - {source}:
        raise InputError(f"data_dir={str(target)!r}: is where the images of source= are; give a folder of its own")
    there = datasets.kind(target)
    if there == "file":
        raise InputError(f"data_dir={str(target)!r}: is no folder; choose another data_dir=")
    if there and not datasets.kind(target / "packing.json"):
        ours = ("packing.lock", "lost+found")
        others = [name for name in os.listdir(target) if name not in ours and not name.startswith(".")]
        if others:
            raise InputError(
                f"data_dir={str(target)!r}: holds other things ({min(others)!r}) and no packed copy; give a folder of its own"
            )


def _listings(source: Path) -> dict[str, Listing]:
    wants = "wants train/<class>/*.JPEG and val/<class>/*.JPEG in it"
    if datasets.kind(source, "source") != "folder":
        raise InputError(f"source={str(source)!r}: is no folder; {wants}")
    there = [split for split in format.SPLITS if datasets.kind(source / split, "source") == "folder"]
    if not there:
        raise InputError(f"source={str(source)!r}: has neither train/ nor val/; {wants}")
    listings: dict[str, Listing] = {}
    for split in there:
        classes = listings["train"].classes if listings else None
        listings[split] = classfolder.scan(source / split, classes)
    return listings


def _plan(listings: Mapping[str, Listing], options: PackOptions) -> dict[str, Any]:
    """What has to be the same for a later run to go on."""
    return {
        "format": format.FORMAT,
        "version": format.VERSION,
        "encoding": options.encoding,
        "size": options.size,
        "quality": options.quality if options.encoding == "jpeg" else None,
        "samples_per_shard": options.samples_per_shard,
        "splits": {
            split: {"samples": len(listing), "names_sha256": listing.digest()} for split, listing in listings.items()
        },
    }


def _compare(target: Path, plan: Mapping[str, Any]) -> None:
    """Raises InputError where the copy was begun otherwise than ``plan``."""
    path = target / "packing.json"
    if not path.exists():
        return
    before = read_json(path) or {}
    mend = f"another data_dir=, or remove {shlex.quote(str(target))} to begin anew"
    if (before.get("format"), before.get("version")) != (format.FORMAT, format.VERSION):
        raise InputError(
            f"{str(path)!r}: is not of the format {format.FORMAT!r}, version {format.VERSION}; give {mend}"
        )
    if differs := [name for name in format.SAME if before.get(name) != plan[name]]:
        sides = ([f"{name}={side[name]}" for name in differs if side.get(name) is not None] for side in (before, plan))
        then, now = (" ".join(words) for words in sides)
        raise InputError(f"data_dir={str(target)!r}: was begun with {then}, not {now}; give {then}, or {mend}")
    old, new = before.get("splits"), plan["splits"]
    if old != new:
        differs = [split for split in format.SPLITS if not isinstance(old, dict) or old.get(split) != new.get(split)]
        counts = [
            f"{split}/ ({(s or {}).get('samples', 0)} images, {(t or {}).get('samples', 0)} then)"
            for split in differs
            for s, t in [(new.get(split), old.get(split) if isinstance(old, dict) else None)]
        ]
        raise InputError(
            f"data_dir={str(target)!r}: was begun with another source=, whose file names differ in {', '.join(counts)}; "
            f"give that again, or {mend}"
        )


def _verified(target: Path, options: PackOptions, say: Callable[[str], None]) -> dict[str, Any]:
    for split in format.SPLITS:
        for note in target.glob(f"{split}-*.json"):
            note.unlink()
    say(f"verifying {size_text(sum(path.stat().st_size for path in target.glob('*.bin')))}")
    if faults := check(target):
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise InputError(
            f"data_dir={str(target)!r}: the packed copy is damaged ({faults[0]}{more}): "
            f"remove {shlex.quote(str(target / 'index.json'))} and run the same command to pack it anew"
        )
    index: dict[str, Any] = json.loads((target / "index.json").read_bytes())
    for split, content in index["splits"].items():
        if options.max_skipped is not None and len(content["skipped"]) > options.max_skipped:
            raise InputError(
                f"max_skipped={options.max_skipped}: the finished copy {str(target)!r} lacks {len(content['skipped'])} images of "
                f"{split}/: mend them in source= and remove {shlex.quote(str(target))} to begin anew, or give a larger one"
            )
    return index


def _check_room(target: Path, listings: Mapping[str, Listing], options: PackOptions, say: Callable[[str], None]) -> int:
    """The bytes that are still to be written, about, as measured from some images. Raises OSError where they do not fit."""
    total = sum(len(listing) for listing in listings.values())
    there = sum(path.stat().st_size for split in format.SPLITS for path in target.glob(f"{split}-*.bin"))
    need = max(0, int(total * (_mean_bytes(listings, options) + format.RECORD.size)) - there)
    usage = shutil.disk_usage(target)
    known = usage.total > 0  # some network file systems say 0 of 0
    say(f"{total} images, about {size_text(need)} to write, {size_text(usage.free) if known else 'unknown'} free")
    if known and usage.free < need:
        raise MachineError(download.disk_words(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), target, need))
    return need


def _mean_bytes(listings: Mapping[str, Listing], options: PackOptions) -> float:
    if importlib.util.find_spec("PIL") is None:
        raise MachineError(f"{sys.executable} has no Pillow: pip install pillow, or make install")
    largest = max(listings.values(), key=len)
    sizes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(0, len(largest), -(-len(largest) // MEASURED)):
            with contextlib.suppress(Unreadable):
                sizes.append(
                    len(pillow.encode(pillow.read(largest.path(i)), options.encoding, options.size, options.quality)[0])
                )
    return sum(sizes) / max(1, len(sizes))


def _finish(target: Path, listings: Mapping[str, Listing], options: PackOptions) -> dict[str, Any]:
    """Joins the records of all shards and writes index.json, last."""
    splits = {split: _join(target, split, workers._shards(listing, options)) for split, listing in listings.items()}
    for split, listing in listings.items():
        skipped = splits[split]["skipped"]
        most = allowed(len(listing), options)
        if len(skipped) > most or not splits[split]["samples"]:
            some = "; ".join(f"{skip['file']!r} {skip['why']}" for skip in skipped[:3])
            keys = f"raise max_skipped= (now {most})" if splits[split]["samples"] else "give another source="
            raise InputError(
                f"source=: {len(skipped)} of {len(listing)} images of {split}/ cannot be used ({some}): {keys} to go on; "
                f"or mend them, and remove {shlex.quote(str(target))} to begin anew"
            )
    index = {
        "format": format.FORMAT,
        "version": format.VERSION,
        "encoding": options.encoding,
        "size": options.size,
        "quality": options.quality if options.encoding == "jpeg" else None,
        "classes": list(next(iter(listings.values())).classes),
        "splits": splits,
    }
    write_json(target / "index.json", index)
    for split in splits:
        for note in target.glob(f"{split}-*.json"):
            note.unlink()
    return index


def _join(target: Path, split: str, shards: int) -> dict[str, Any]:
    """Writes the split's index; gives its part of index.json. One shard's records are in memory at a time."""
    digest, converted = hashlib.sha256(), collections.Counter[str]()
    files, skipped, size = [], [], 0

    def fill(file: IO[bytes]) -> None:
        nonlocal size
        for number in range(shards):
            note = json.loads((target / f"{format._stem(split, number)}.json").read_bytes())
            records = bytes.fromhex(note["records"])
            digest.update(records)
            size += file.write(records)
            files.append(
                {"file": f"{format._stem(split, number)}.bin", "bytes": note["bytes"], "sha256": note["sha256"]}
            )
            skipped.extend(note["skipped"])
            converted.update(note["converted"])

    write_whole(target / f"{split}.index", fill)
    return {
        "samples": size // format.RECORD.size,
        "index_sha256": digest.hexdigest(),
        "shards": files,
        "skipped": skipped,
        "converted": dict(sorted(converted.items())),
    }
