"""Packs a folder of images, ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``, into few large files.

What may not happen: a half file under its final name, a finished shard done twice, a worker that outlives its parent.
Workers are processes of this module, one shard at a time each; tasks and answers are lines of JSON on their pipes.
"""

import collections
import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from recipes.core import errors
from recipes.core.data import classfolder, download
from recipes.core.data.classfolder import Listing
from recipes.core.data.download import DataFile, megabytes
from recipes.core.errors import InputError, MachineError
from recipes.core.files import ROOT, read_json, write_json, write_whole
from recipes.core.place import processes

if TYPE_CHECKING:
    from PIL import Image

FORMAT, VERSION = "packed images", 1
RECORD = struct.Struct("<QIIIHH")  # a sample: offset in its shard, length, shard, label, height, width
SPLITS = ("train", "val")
SAME = ("encoding", "size", "quality", "samples_per_shard")  # options of which a packed copy has one value
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP")
LONGEST = 65500  # pixels of a side: libjpeg's limit
UPRIGHT = 1
TRANSPOSED = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE"} | {
    6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90"}  # EXIF's orientation: Pillow's way back  # fmt: skip
MEASURED = 64  # images that the needed room is estimated from
TELL_S = 0.2


@dataclass(frozen=True)
class PackOptions:
    """How to pack. size: pixels of the shorter side; workers: 0 for all CPUs; max_skipped: of a split, None for `allowed`."""

    encoding: str = "jpeg"
    size: int = 256
    quality: int = 90
    workers: int = 0
    max_skipped: int | None = None
    samples_per_shard: int = 2048


@dataclass
class Progress:
    """Images: of how many, done now, kept from an earlier run, and how many of both were skipped."""

    total: int
    done: int = 0
    kept: int = 0
    skipped: int = 0


def allowed(samples: int, options: PackOptions) -> int:
    """How many of a split's images may be unreadable: ``max_skipped``, else 1 % and at least 10."""
    return max(10, samples // 100) if options.max_skipped is None else options.max_skipped


def is_finished(folder: Path) -> bool:
    return download.kind(folder / "index.json") == "file"


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
            if is_finished(target):
                return _verified(target, options, say)
            need = _check_room(target, listings, options, say)
            write_json(target / "packing.json", plan)
            try:
                _run(source, target, listings, options, progress)
            finally:
                sweep(target)  # of the workers that were killed
            return _finish(target, listings, options)
    except OSError as error:
        raise MachineError(download.disk_words(error, target, need)) from error


def check(folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """What is wrong with a packed copy, a line each; none: every size and SHA-256 is right. progress: bytes, of how many."""
    try:
        index = json.loads((folder / "index.json").read_bytes())
        if (index["format"], index["version"]) != (FORMAT, VERSION):
            return [f"index.json: is of another format or version ({index['format']!r} {index['version']!r})"]
        files = []
        for name, split in index["splits"].items():
            files.append(DataFile(f"{name}.index", split["samples"] * RECORD.size, split["index_sha256"]))
            files += [DataFile(shard["file"], shard["bytes"], shard["sha256"]) for shard in split["shards"]]
    except FileNotFoundError:
        return ["index.json: is not there, packing was not finished"]
    except OSError as error:
        return [f"index.json: cannot be read ({error.strerror})"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return ["index.json: is damaged"]
    total, done, faults = sum(file.size for file in files), 0, []
    with ThreadPoolExecutor(min(8, _cpus())) as pool:  # hashing leaves the interpreter's lock
        try:
            for file, fault in zip(
                files, pool.map(lambda f: download.fault_of(folder / f.name, f), files), strict=True
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


# ---------------------------------------------------------------- what is to be done


def _check_places(source: Path, target: Path) -> None:
    taken = {source, *(source / split for split in SPLITS)}
    if target in taken or taken & set(target.parents) - {source}:
        raise InputError(f"data_dir={str(target)!r}: is where the images of source= are; give a folder of its own")
    there = download.kind(target)
    if there == "file":
        raise InputError(f"data_dir={str(target)!r}: is no folder; choose another data_dir=")
    if there and not download.kind(target / "packing.json"):
        ours = ("packing.lock", "lost+found")
        others = [name for name in os.listdir(target) if name not in ours and not name.startswith(".")]
        if others:
            raise InputError(
                f"data_dir={str(target)!r}: holds other things ({min(others)!r}) and no packed copy; give a folder of its own"
            )


def _listings(source: Path) -> dict[str, Listing]:
    wants = "wants train/<class>/*.JPEG and val/<class>/*.JPEG in it"
    if download.kind(source, "source") != "folder":
        raise InputError(f"source={str(source)!r}: is no folder; {wants}")
    there = [split for split in SPLITS if download.kind(source / split, "source") == "folder"]
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
        "format": FORMAT,
        "version": VERSION,
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
    if (before.get("format"), before.get("version")) != (FORMAT, VERSION):
        raise InputError(f"{str(path)!r}: is not of the format {FORMAT!r}, version {VERSION}; give {mend}")
    if differs := [name for name in SAME if before.get(name) != plan[name]]:
        sides = ([f"{name}={side[name]}" for name in differs if side.get(name) is not None] for side in (before, plan))
        then, now = (" ".join(words) for words in sides)
        raise InputError(f"data_dir={str(target)!r}: was begun with {then}, not {now}; give {then}, or {mend}")
    old, new = before.get("splits"), plan["splits"]
    if old != new:
        differs = [split for split in SPLITS if not isinstance(old, dict) or old.get(split) != new.get(split)]
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
    for split in SPLITS:
        for note in target.glob(f"{split}-*.json"):
            note.unlink()
    say(f"verifying {megabytes(sum(path.stat().st_size for path in target.glob('*.bin')))}")
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
    there = sum(path.stat().st_size for split in SPLITS for path in target.glob(f"{split}-*.bin"))
    need = max(0, int(total * (_mean_bytes(listings, options) + RECORD.size)) - there)
    usage = shutil.disk_usage(target)
    known = usage.total > 0  # some network file systems say 0 of 0
    say(f"{total} images, about {megabytes(need)} to write, {megabytes(usage.free) if known else 'unknown'} free")
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
                sizes.append(len(encode(read(largest.path(i)), options.encoding, options.size, options.quality)[0]))
    return sum(sizes) / max(1, len(sizes))


def _finish(target: Path, listings: Mapping[str, Listing], options: PackOptions) -> dict[str, Any]:
    """Joins the records of all shards and writes index.json, last."""
    splits = {split: _join(target, split, _shards(listing, options)) for split, listing in listings.items()}
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
        "format": FORMAT,
        "version": VERSION,
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
            note = json.loads((target / f"{_stem(split, number)}.json").read_bytes())
            records = bytes.fromhex(note["records"])
            digest.update(records)
            size += file.write(records)
            files.append({"file": f"{_stem(split, number)}.bin", "bytes": note["bytes"], "sha256": note["sha256"]})
            skipped.extend(note["skipped"])
            converted.update(note["converted"])

    write_whole(target / f"{split}.index", fill)
    return {
        "samples": size // RECORD.size,
        "index_sha256": digest.hexdigest(),
        "shards": files,
        "skipped": skipped,
        "converted": dict(sorted(converted.items())),
    }


def _shards(listing: Listing, options: PackOptions) -> int:
    return -(-len(listing) // options.samples_per_shard)


def _stem(split: str, number: int) -> str:
    return f"{split}-{number:05d}"


# ---------------------------------------------------------------- the workers, seen from the parent


def _run(
    source: Path,
    target: Path,
    listings: Mapping[str, Listing],
    options: PackOptions,
    progress: Callable[[Progress], None],
) -> None:
    """Has every shard written, or found whole."""
    state = Progress(sum(len(listing) for listing in listings.values()))
    tasks = _tasks(listings, options)
    shards = sum(_shards(listing, options) for listing in listings.values())
    setup = {
        "source": str(source),
        "target": str(target),
        "encoding": options.encoding,
        "size": options.size,
        "quality": options.quality,
    }
    workers: list[_Worker] = []
    with selectors.DefaultSelector() as selector:
        try:
            for _ in range(min(options.workers or _cpus(), shards)):
                workers.append(_Worker(setup))
            for worker in workers:  # all are started by now: a task is more than a pipe holds, and waits for its reader
                worker.give(next(tasks))
                selector.register(worker.answers, selectors.EVENT_READ, worker)
            while selector.get_map():
                for chosen, _ in selector.select(TELL_S):
                    worker = chosen.data
                    for answer in worker.hear():
                        state.done += answer["done"]
                        state.kept += answer["kept"]
                        state.skipped += answer["skipped"]
                        if answer["ended"] and (task := next(tasks, None)):
                            worker.give(task)
                        elif answer["ended"]:
                            selector.unregister(worker.answers)
                progress(state)
        finally:
            for worker in workers:
                worker.end()


def _tasks(listings: Mapping[str, Listing], options: PackOptions) -> Iterator[dict[str, Any]]:
    for split, listing in listings.items():
        for number in range(_shards(listing, options)):
            start = number * options.samples_per_shard
            samples = range(start, min(start + options.samples_per_shard, len(listing)))
            yield {
                "split": split,
                "number": number,
                "names": [listing.name(i) for i in samples],
                "labels": [listing.label(i) for i in samples],
            }


class _Worker:
    """A process that packs one shard after another."""

    def __init__(self, setup: Mapping[str, Any]):
        try:
            # A session of its own: Ctrl-C is the parent's to handle.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "recipes.core.data.packed.packing", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                start_new_session=True,
            )
        except OSError as error:
            raise MachineError(f"a worker cannot be started ({error.strerror}): give fewer, workers=N") from None
        assert self._process.stdin and self._process.stdout
        self._tasks, self.answers = self._process.stdin, self._process.stdout
        self._rest = b""
        self._shard = "its start"
        self._send(setup)

    def give(self, task: Mapping[str, Any]) -> None:
        self._shard = f"{_stem(task['split'], task['number'])}.bin"
        self._send(task)

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._tasks.write(json.dumps(message).encode() + b"\n")
            self._tasks.flush()
        except BrokenPipeError:
            raise self._death() from None

    def hear(self) -> Iterator[dict[str, Any]]:
        """The answers that have come. Raises what the worker met."""
        data = os.read(self.answers.fileno(), 1 << 16)
        if not data:
            raise self._death()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for answer in map(json.loads, lines):
            match answer.get("error"):
                case None:
                    yield answer
                case "input":
                    raise InputError(answer["text"])
                case "disk":
                    raise OSError(answer["errno"], answer["text"])
                case "memory":
                    raise MachineError(f"a worker has no memory left for {self._shard}: give fewer, workers=N")
                case _:
                    raise RuntimeError(f"a worker failed at {self._shard}:\n{answer['text']}")

    def _death(self) -> Exception:
        status = self._process.wait()
        if status == -signal.SIGKILL:
            return MachineError(
                f"a worker was killed (SIGKILL) at {self._shard}, most likely for want of memory: "
                "give fewer, workers=N; the same command goes on"
            )
        if status < 0:
            return MachineError(
                f"a worker ended by {signal.Signals(-status).name} at {self._shard}; the same command goes on"
            )
        return RuntimeError(f"a worker ended with status {status} at {self._shard}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._tasks.close()
        self.answers.close()


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


# ---------------------------------------------------------------- in a worker


class Unreadable(Exception):
    """An image that is left out; the message goes behind its name."""


def work(parent: int) -> None:
    """Packs the shards that come on stdin until it is closed, or the parent dies however that happens."""
    processes.die_with(parent)()
    answers = os.fdopen(os.dup(1), "wb")
    for opened in (1, 2):  # what a library prints is no answer, nor about a user's setting
        os.dup2(os.open(os.devnull, os.O_WRONLY), opened)
    warnings.simplefilter("ignore")

    def tell(**answer: Any) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    setup = json.loads(sys.stdin.buffer.readline())
    for line in sys.stdin.buffer:
        try:
            _pack_shard(json.loads(line), setup, tell)
        except InputError as error:
            tell(error="input", text=str(error))
        except MemoryError:
            tell(error="memory")
        except OSError as error:
            tell(error="disk", errno=error.errno, text=error.strerror)
        except Exception:
            tell(error="bug", text=traceback.format_exc())


def _pack_shard(task: Mapping[str, Any], setup: Mapping[str, Any], tell: Callable[..., None]) -> None:
    """Writes a shard, and behind it the note that says it is whole; or finds that both are there."""
    target, stem = Path(setup["target"]), _stem(task["split"], task["number"])
    count = len(task["names"])
    note = read_json(target / f"{stem}.json")
    if note and _is_whole(target / f"{stem}.bin", note, count):
        tell(ended=True, done=0, kept=count, skipped=len(note["skipped"]))
        return
    records, digest, converted = bytearray(), hashlib.sha256(), collections.Counter[str]()
    skipped: list[dict[str, str]] = []
    offset = done = told = missed = 0

    def fill(file: IO[bytes]) -> None:
        nonlocal offset, done, told, missed
        last = time.monotonic()
        for name, label in zip(task["names"], task["labels"], strict=True):
            relative = f"{task['split']}/{name}"
            try:
                data = read(Path(setup["source"], relative))
                payload, height, width, kinds = encode(data, setup["encoding"], setup["size"], setup["quality"])
            except Unreadable as error:
                skipped.append({"file": relative, "why": str(error)})
            else:
                file.write(payload)
                digest.update(payload)
                records.extend(RECORD.pack(offset, len(payload), task["number"], label, height, width))
                offset += len(payload)
                converted.update(kinds)
            done += 1
            if time.monotonic() - last > TELL_S:
                last = time.monotonic()
                tell(ended=False, done=done - told, kept=0, skipped=len(skipped) - missed)
                told, missed = done, len(skipped)

    write_whole(target / f"{stem}.bin", fill)
    content = {
        "bytes": offset,
        "sha256": digest.hexdigest(),
        "records": records.hex(),
        "skipped": skipped,
        "converted": converted,
    }
    write_json(target / f"{stem}.json", content)
    tell(ended=True, done=done - told, kept=0, skipped=len(skipped) - missed)


def _is_whole(shard: Path, note: Mapping[str, Any], count: int) -> bool:
    try:
        known = DataFile(shard.name, note["bytes"], note["sha256"])
        samples = len(bytes.fromhex(note["records"])) / RECORD.size + len(note["skipped"])
        return samples == count and isinstance(note["converted"], dict) and download.fault_of(shard, known) is None
    except (KeyError, TypeError, ValueError):
        return False


def read(path: Path) -> bytes:
    """The file's bytes. Raises Unreadable when it is this one's fault; InputError when the folder may be gone."""
    try:
        return path.read_bytes()
    except OSError as error:
        if isinstance(error, PermissionError | IsADirectoryError) or path.is_symlink():
            raise Unreadable(f"cannot be read ({error.strerror})") from None
        raise InputError(
            f"source=: {str(path)!r} cannot be read ({error.strerror}): bring it back, the same command goes on"
        ) from None


def encode(data: bytes, encoding: str, size: int, quality: int) -> tuple[bytes, int, int, list[str]]:
    """A file's image as it is stored: payload, height, width, and the kinds of conversion that it took.

    An upright RGB JPEG that is not larger stays as it is, byte for byte. Raises Unreadable.
    """
    image, kinds, plain = _decode(data)
    small = _reduced(image, size)
    if max(small.size) > LONGEST:
        raise Unreadable(f"is {image.width} x {image.height} pixels: too long for its width")
    if encoding == "raw":
        payload = small.tobytes()
    elif plain and small is image:
        payload = data
    else:
        small.info = {}  # its comment would be stored too
        buffer = io.BytesIO()
        small.save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
        payload = buffer.getvalue()
    return payload, small.height, small.width, kinds


def _decode(data: bytes) -> tuple["Image.Image", list[str], bool]:
    """The image upright in RGB, the kinds of conversion that it took, and whether it is a JPEG that took none."""
    from PIL import Image

    image = open_image(data)
    kinds = [] if image.format in ("JPEG", "MPO") else [str(image.format).lower()]
    plain = image.format == "JPEG" and image.mode == "RGB"
    kinds += _mode_kinds(image)
    way = TRANSPOSED.get(_orientation(image))
    image = to_rgb(image)
    if way:
        image = image.transpose(Image.Transpose[way])
        kinds.append("rotated")
        plain = False
    return image, kinds, plain


def open_image(data: bytes) -> "Image.Image":
    """The first image of a file's bytes, all of it decoded, in its own mode. Raises Unreadable."""
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise Unreadable("is empty")
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        deep = ";16" in str(getattr(image, "tile", [])[:1])
        image.load()
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise Unreadable("is no image") from None
    except Image.DecompressionBombError:
        raise Unreadable("has more than 178 million pixels") from None
    except Exception as error:  # Pillow's decoders raise nearly everything for damaged bytes
        raise Unreadable(f"is damaged ({errors.one_line(error)})") from None
    if deep:  # Pillow reads 16-bit colour as 8-bit: only the raw mode of its tiles tells, and they are gone once loaded
        image.info["deep"] = True
    return image


def _mode_kinds(image: "Image.Image") -> list[str]:
    mode = image.mode
    kinds = ["16-bit"] if "deep" in image.info or mode.startswith("I") else []
    if mode in ("1", "L", "LA", "La", "F") or mode.startswith("I"):
        kinds.append("grey")
    elif mode in ("P", "PA"):
        kinds.append("palette")
    elif mode not in ("RGB", "RGBA", "RGBa", "RGBX"):
        kinds.append(mode.lower())  # cmyk, or a TIFF's lab
    if mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        kinds.append("alpha")
    return kinds


def to_rgb(image: "Image.Image") -> "Image.Image":
    """Its pixels in RGB; of 16 bits the upper 8."""
    from PIL import Image

    if image.mode.startswith("I;16"):  # Pillow's own conversion clips at 255
        high = slice(0, None, 2) if image.mode == "I;16B" else slice(1, None, 2)
        return Image.frombytes("L", image.size, image.tobytes()[high]).convert("RGB")
    if image.mode == "I":
        return image.point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _orientation(image: "Image.Image") -> int:
    try:
        return int(image.getexif().get(0x0112, UPRIGHT))
    except Exception:  # damaged EXIF data: the pixels are good all the same
        return UPRIGHT


def _reduced(image: "Image.Image", size: int) -> "Image.Image":
    from PIL import Image

    width, height = image.size
    short = min(width, height)
    if short <= size:
        return image
    wanted = (size, int(size * height / width)) if width <= height else (int(size * width / height), size)
    return image.resize(wanted, Image.Resampling.LANCZOS)


if __name__ == "__main__":
    work(int(sys.argv[1]))
