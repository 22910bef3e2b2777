"""The processes that pack shards: the parent's side and the worker's side.

Tasks and answers are lines of JSON on a worker's pipes. A worker packs one shard at a time and does not outlive its parent.
"""

import collections
import contextlib
import hashlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from recipes.core.errors import InputError, MachineError
from recipes.core.files import ROOT
from recipes.core.place import processes

REPORT_S = 0.2


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
    """Writes every shard that is not there yet. progress: called several times a second.

    Raises InputError (an image's folder is gone), MachineError (a worker was killed or has no memory) and OSError (the disk).
    """
    state = Progress(sum(len(listing) for listing in listings.values()))
    tasks = _tasks(listings, options)
    shards = sum(number_of_shards(listing, options) for listing in listings.values())
    setup = {
        "source": str(source),
        "target": str(target),
        "size": options.size,
        "quality": options.quality,
    }
    workers: list[_Worker] = []
    with selectors.DefaultSelector() as selector:
        try:
            for _ in range(min(options.workers or cpus(), shards)):
                workers.append(_Worker(setup))
            # After all have started: a task fills the pipe, and the write blocks until it is read.
            for worker in workers:
                worker.give(next(tasks))
                selector.register(worker.answers, selectors.EVENT_READ, worker)
            while selector.get_map():
                for chosen, _ in selector.select(REPORT_S):
                    worker = chosen.data
                    for answer in worker.receive():
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
        for number in range(number_of_shards(listing, options)):
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
            # Its own session: Ctrl-C reaches the parent alone.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "recipes.core.data.packed.workers", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                start_new_session=True,
            )
        except OSError as error:
            raise MachineError(f"a worker cannot be started ({error.strerror}): give a smaller workers=") from None
        assert self._process.stdin and self._process.stdout
        self._tasks, self.answers = self._process.stdin, self._process.stdout
        self._rest = b""
        self._shard = "its start"
        self._send(setup)

    def give(self, task: Mapping[str, Any]) -> None:
        self._shard = format.shard_name(task["split"], task["number"])
        self._send(task)

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._tasks.write(json.dumps(message).encode() + b"\n")
            self._tasks.flush()
        except BrokenPipeError:
            raise self._death() from None

    def receive(self) -> Iterator[dict[str, Any]]:
        """The answers that have arrived. Raises the worker's error."""
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
                    raise MachineError(f"a worker has no memory left for {self._shard}: give a smaller workers=")
                case _:
                    raise RuntimeError(f"a worker failed at {self._shard}:\n{answer['text']}")

    def _death(self) -> Exception:
        status = self._process.wait()
        if status == -signal.SIGKILL:
            return MachineError(
                f"a worker was killed (SIGKILL) at {self._shard}, most likely for lack of memory: "
                "give a smaller workers=; the same command continues"
            )
        if status < 0:
            return MachineError(
                f"a worker ended by {signal.Signals(-status).name} at {self._shard}: run the same command to continue"
            )
        return RuntimeError(f"a worker ended with status {status} at {self._shard}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._tasks.close()
        self.answers.close()


def work(parent: int) -> None:
    """Packs the shards whose tasks arrive on stdin, until stdin is closed or the parent dies."""
    processes.die_with(parent)()
    answers = os.fdopen(os.dup(1), "wb")
    for opened in (1, 2):  # libraries must not print into the answers
        os.dup2(os.open(os.devnull, os.O_WRONLY), opened)
    warnings.simplefilter("ignore")

    def report(**answer: Any) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    setup = json.loads(sys.stdin.buffer.readline())
    for line in sys.stdin.buffer:
        try:
            _pack_shard(json.loads(line), setup, report)
        except InputError as error:
            report(error="input", text=str(error))
        except MemoryError:
            report(error="memory")
        except OSError as error:
            report(error="disk", errno=error.errno, text=error.strerror)
        except Exception:
            report(error="bug", text=traceback.format_exc())


def _pack_shard(task: Mapping[str, Any], setup: Mapping[str, Any], report: Callable[..., None]) -> None:
    """Writes a shard, then the note that says it is complete; nothing where both are there and valid."""
    folder, split, number = Path(setup["target"]), task["split"], task["number"]
    count = len(task["names"])
    shard, note_path = folder / format.shard_name(split, number), format.note_path(folder, split, number)
    note = files.read_json(note_path)
    if note and _is_complete(shard, note, count):
        report(ended=True, done=0, kept=count, skipped=len(note["skipped"]))
        return
    records, digest, converted = bytearray(), hashlib.sha256(), collections.Counter[str]()
    skipped: list[dict[str, str]] = []
    offset = done = reported = reported_skipped = 0

    def fill(file: IO[bytes]) -> None:
        nonlocal offset, done, reported, reported_skipped
        last = time.monotonic()
        for name, label in zip(task["names"], task["labels"], strict=True):
            relative = f"{split}/{name}"
            try:
                data = pillow.read_file(Path(setup["source"], relative))
                payload, height, width, kinds = pillow.encode(data, setup["size"], setup["quality"])
            except Unreadable as error:
                skipped.append({"file": relative, "why": str(error)})
            else:
                file.write(payload)
                digest.update(payload)
                records.extend(Record(offset, len(payload), number, label, height, width).pack())
                offset += len(payload)
                converted.update(kinds)
            done += 1
            if time.monotonic() - last > REPORT_S:
                last = time.monotonic()
                report(ended=False, done=done - reported, kept=0, skipped=len(skipped) - reported_skipped)
                reported, reported_skipped = done, len(skipped)

    files.write_whole(shard, fill)
    content = {
        "bytes": offset,
        "sha256": digest.hexdigest(),
        "records": records.hex(),
        "skipped": skipped,
        "converted": converted,
    }
    files.write_json(note_path, content)
    report(ended=True, done=done - reported, kept=0, skipped=len(skipped) - reported_skipped)


def _is_complete(shard: Path, note: Mapping[str, Any], count: int) -> bool:
    try:
        known = DataFile(shard.name, note["bytes"], note["sha256"])
        samples = len(bytes.fromhex(note["records"])) / format.RECORD.size + len(note["skipped"])
        return samples == count and isinstance(note["converted"], dict) and datasets.fault_of(shard, known) is None
    except (KeyError, TypeError, ValueError):
        return False


if __name__ == "__main__":
    work(int(sys.argv[1]))
