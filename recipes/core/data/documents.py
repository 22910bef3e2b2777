"""Documents as shards: which files of a folder are read, their rows, and the processes that write
the shards. Without torch.

NNNNN.bin    a shard
NNNNN.json   its record: its SHA-256, a digest of what it was made from, its number of tokens
index.json   the records of all shards, and what is common to them; written last
"""

import contextlib
import glob
import hashlib
import json
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from recipes.core import errors, files, trust
from recipes.core.data import classfolder, datasets
from recipes.core.errors import InputError, MachineError
from recipes.core.place import processes

# Raise it whenever equal sources, with equal settings, become other shards than before: shards of
# earlier code are then written again. A test compares it with a digest of some shards.
RULES = 1
SHARD_BYTES = 1 << 27  # of source; a larger file is one group
LONGEST_LINE = 1 << 26  # bytes
ROWS_AT_ONCE = 1000  # of a .parquet; pyarrow's default is 65,536
Say = Callable[[str], None]
Record = dict[str, Any]
# Writes the content of some files as a shard, and returns what its record says about it.
Fill = Callable[[IO[bytes], Sequence[Path]], Record]
Array = np.ndarray[Any, np.dtype[Any]]


def find_groups(
    source: str,
    endings: Sequence[str],
    say: Say,
    without: Collection[str] = (),
    key: str = "source",
) -> list[list[Path]]:
    """The files of each shard, in the order of their names. source: a folder, a file or a pattern.
    endings: of the files to read, in any case. without: real paths of files that are not read. key:
    that names ``source``. Raises InputError if there are none.
    """
    root = Path(source).expanduser()
    candidates = list[Path]()
    seen = set[bytes]()
    roots = [root]
    if not root.exists():
        if "**" in source:  # glob would read the files one folder below, without a message
            fix = "give a folder, all of whose files are read"
            raise InputError(f"{key}={source!r}: ** is not supported: {fix}")
        roots = [Path(name) for name in sorted(glob.glob(str(root)))]
    for path in roots:
        if path.is_dir():  # also Spark's folder of part files, NAME.parquet/
            for place, _, names in classfolder.walk(os.fsencode(path), seen):
                candidates += [Path(os.fsdecode(place), os.fsdecode(name)) for name in names]
        else:
            candidates.append(path)

    paths = list[Path]()
    others = list[bytes]()
    for path in candidates:
        # is_file: not a named pipe or a device in another user's folder
        is_left_out = os.path.realpath(path) in without
        if path.suffix.lower() in endings and path.is_file() and not is_left_out:
            paths.append(path.absolute())
        else:
            others.append(os.fsencode(path.name))
    classfolder.say_left_out(source, others, say)
    if not paths:
        *first, last = endings
        besides = " besides the files of val=" if without else ""
        problem = f"has no {', '.join(first)} or {last}{besides}" if roots else "names no file"
        raise InputError(f"{key}={source!r} {problem}: give a folder, a file or a pattern")

    groups = defaultdict[int, list[Path]](list)
    end = 0
    for path in sorted(paths):
        end += path.stat().st_size
        groups[end // SHARD_BYTES].append(path)
    return [*groups.values()]


@dataclass
class Rows:
    """The rows of an open .jsonl or .parquet file. number: of the last row that was read, from 1.
    columns: those of a .parquet that are read; None: all.
    """

    file: IO[bytes]
    kind: str
    columns: Sequence[str] | None
    number: int = 0

    def __iter__(self) -> Iterator[Any]:
        if self.kind == ".parquet":
            from pyarrow import parquet

            table = parquet.ParquetFile(self.file, pre_buffer=False)  # not the whole file at once
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=self.columns):
                for row in batch.to_pylist():
                    self.number += 1
                    yield row
            return
        while line := self.file.readline(LONGEST_LINE):
            self.number += 1
            if len(line) == LONGEST_LINE:
                raise ValueError(f"it is longer than {files.size_text(LONGEST_LINE)}")
            if line.strip():
                yield json.loads(line.decode("utf-8-sig"))


@contextlib.contextmanager
def reading(path: Path, fix: str, columns: Sequence[str] | None = None) -> Iterator[Rows]:
    """Opens a file of documents. Raises InputError, with file, line and ``fix``, in place of errors
    within the ``with`` block.
    """
    rows = None
    try:
        with open(path, "rb", opener=trust.without_links_of_others) as file:
            rows = Rows(file, path.suffix.lower(), columns)
            yield rows
    except ModuleNotFoundError:
        raise InputError(f"{str(path)!r}: needs pyarrow: pip install '.[text]'") from None
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        line = f", line {rows.number}" if rows and rows.number else ""
        raise InputError(f"{str(path)!r}{line}: {errors.one_line(error, 120)}: {fix}") from None


@contextlib.contextmanager
def preparing(folder: Path) -> Iterator[Path]:
    """Locks ``folder``, a data set below data_dir, and yields its path as of `trust.data_folder`.
    Raises MachineError.
    """
    with (
        files.writing_to(folder, "data_dir"),
        trust.data_folder(folder) as place,
        files.locked(place / "preparing.lock"),
    ):
        files.remove_temporary(place)
        yield place


def write_all(
    folder: Path,
    groups: Sequence[Sequence[Path]],
    how: Any,
    fill: Fill,
    workers: int,
    say: Say,
) -> list[Record]:
    """Writes a shard of each group of files, in processes, and returns their records.

    how, fill: as in `write_one`; ``fill`` must be a function of a module, or a `partial` of one.
    workers: number of processes, 0: one for each CPU. Raises MachineError, and what ``fill``
    raises.
    """
    paths = [folder / f"{number:05d}.bin" for number in range(len(groups))]
    count = min(workers or len(os.sched_getaffinity(0)), len(paths))
    spawn = multiprocessing.get_context("spawn")
    # an unfinished set must not look complete
    (folder / "index.json").unlink(missing_ok=True)
    records = list[Record]()
    try:
        # An error or Ctrl-C ends map(), which cancels what has not begun.
        with ProcessPoolExecutor(count, spawn, _start, (os.getpid(),)) as pool:
            for record in pool.map(partial(write_one, how, fill), paths, groups):
                records.append(record)
                say(f"shard {len(records)} of {len(paths)}: {record['tokens']:,} tokens")
    except BrokenProcessPool:
        why = "a worker process died, probably for lack of memory"
        raise MachineError(f"{why}: reduce workers=") from None
    return records


def _start(parent: int) -> None:
    processes.die_with(parent)()


def digest_of(content: Any) -> str:
    """SHA-256, in hexadecimal, of what JSON can represent."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def write_one(how: Any, fill: Fill, path: Path, sources: Sequence[Path]) -> Record:
    """Writes a shard and, beside it, its record, unless both exist and were made from the same
    ``sources`` in the same way, by the same `RULES`.

    how: what, besides the sources, determines the content. fill: writes it into a file, and returns
    what the record says about it. Raises InputError if a source is missing, and as ``fill``.
    """
    try:
        facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        raise InputError(f"{error.filename!r} {why}: run the same command again") from None
    identity = digest_of([RULES, how, facts])
    record = files.read_json(path.with_suffix(".json"))
    is_made = record.get("source") == identity and path.is_file()
    if is_made and files.sha256(path) == record["sha256"]:
        return record

    record = {}
    files.write_whole(path, lambda file: record.update(fill(file, sources)))
    record |= {"sha256": files.sha256(path), "source": identity}
    files.write_json(path.with_suffix(".json"), record)
    return record


def opened(
    dataset: datasets.Dataset, version: Record, data_dir: str, count: Callable[[Record], int]
) -> tuple[Record, list[Array]]:
    """index.json of a data set, and its shards, mapped into memory. Checks their sizes, but not
    their SHA-256, as it would read all of them. Raises InputError.

    count: the number of numbers in a shard, by its record.
    """
    folder = datasets.find_files(dataset, data_dir)[0].parent
    again = f"run {dataset.prepare(datasets.folder_of(data_dir))} again"
    path = folder / "index.json"
    index = files.read_json(path, files.without_waiting)
    dtype = index.get("dtype", "<u4")
    try:
        if not version.items() <= index.items() or dtype not in ("<u2", "<u4"):
            raise ValueError
        counts = list(map(count, index["shards"]))
    except (KeyError, ValueError, TypeError):
        why = f"is damaged, or does not describe {dataset.name}"
        raise InputError(f"{str(path)!r} {why}: {again}") from None

    shards = list[Array]()
    for number, size in enumerate(counts):
        path = folder / f"{number:05d}.bin"
        bytes_ = size * np.dtype(dtype).itemsize
        if not path.is_file() or path.stat().st_size != bytes_:
            raise InputError(f"{str(path)!r} is not a file of {bytes_} bytes: {again}")
        shards.append(np.memmap(path, dtype, "r") if size else np.empty(0, dtype))
    return index, shards
