"""A table of runs from their run directories. Does not import torch."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from recipes.core import errors, files, trust
from recipes.core.errors import InputError, printable
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, efficiency
from recipes.core.run.record import Record

DEPTH = 3  # levels of folders to search below the given folder: runs/RECIPE/ID
# folders in a run directory, not runs
INSIDE = {"attempts", "checkpoints", "logs", directory.DOCTOR, directory.EVALUATION}
RESULTS = ("val_top1", "val_top5", "val_loss", "loss", "samples_per_second")
OF_TRAINING = ("loss", "samples_per_second")  # results that are not of an evaluation
NO_RESULTS = {  # other numbers in summary.json and metrics.jsonl
    "epoch",
    "lr",
    "wall_seconds",
    "time",
    "tflops",
    "mfu",
    "memory_gb",
    "cpus_used",
    "gpu_memory_gb",
    "gpu_energy_kj",
    *efficiency.SHARES,
}
FIX = "give a run directory, or a folder of run directories"
LONGEST_PATH = 4096
LAST = "last"  # in place of a run: see `last`
T = TypeVar("T")
# maximum number of characters of a value, and of a note, in the table
WIDEST = 60
LONGEST_NOTE = 300


def last(folder: Path) -> list[Path]:
    """The run in ``folder`` whose directory has changed last, as a list; empty if there is none."""
    return sorted(_inside(folder), key=lambda path: path.stat().st_mtime)[-1:]


def of_job(folder: Path, job: str) -> list[Path]:
    """The runs in ``folder`` of a job, all elements of an array included: by their names, else by
    job.yaml, for those with run_dir=, or by their attempts, for those without a batch script.
    """
    names = {path: path.name for path in _inside(folder)}
    by_name = [path for path, name in names.items() if _is_of(name, job)]
    if by_name:
        return by_name
    described = {
        path: files.read_json(path / "job.yaml") or {"job_id": attempts.facts(path).get("job")}
        for path in names
    }
    # a ready script in an array of the user: %j in the name of the log is the element's own number
    log = f"-{job}.out"
    return [
        path
        for path, facts in described.items()
        if _is_of(str(facts.get("job_id")), job) or str(facts.get("log")).endswith(log)
    ]


def _is_of(job_id: str, job: str) -> bool:
    return job in (job_id, job_id.partition("_")[0])


def _inside(folder: Path) -> list[Path]:
    return find([folder], may_be_empty=True) if folder.exists() else []


def run_directories(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The run directories in ``folder``, oldest first. ``folder`` itself may be one.

    Run directories of pending jobs are included. Links of other users are not followed. Raises
    OSError if ``folder`` cannot be read. A folder below it that cannot be read is skipped and
    reported with one line.
    """
    if any(os.path.exists(folder / name) for name in ("attempts", "attempt.json", "job.yaml")):
        yield folder
    elif depth:
        with os.scandir(folder) as entries:  # knows which are folders without a call for each
            inside = [entry for entry in entries if entry.is_dir() and entry.name not in INSIDE]
        for entry in sorted(inside, key=lambda entry: entry.stat().st_mtime):
            path = Path(entry.path)
            is_link = entry.is_symlink()  # as in runs/jobs
            # another user's link could lead to any run of this user
            if is_link and not trust.is_own(path, follow_symlinks=False):
                continue
            try:
                yield from run_directories(path.resolve() if is_link else path, depth - 1)
            except OSError as error:
                name = errors.shown(path, LONGEST_PATH)
                print(f"{name}: cannot be read ({error.strerror}): skipped", file=sys.stderr)


def find(folders: Sequence[Path], may_be_empty: bool = False) -> list[Path]:
    """The run directories in ``folders``. Raises InputError if a folder cannot be read, or if
    there is none and ``may_be_empty`` is False.
    """
    try:
        runs = [path for folder in folders for path in run_directories(folder)]
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror}): {FIX}") from None
    if not runs and not may_be_empty:
        raise InputError(f"{', '.join(map(str, folders))}: no run was found: {FIX}")
    return runs


def read_one(folder: Path, read: Callable[[Path], T]) -> T:
    """``read`` of a run directory. Raises InputError if a file in it has other content than this
    project writes.
    """
    try:
        return read(folder)
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: cannot be read ({errors.one_line(error, 120)})") from None


def read_each(folders: Sequence[Path], read: Callable[[Path], T]) -> list[T]:
    """`read_one` of each folder. One that cannot be read is skipped, and reported with one line."""
    results = list[T]()
    for folder in folders:
        try:
            results.append(read_one(folder, read))
        except InputError as error:
            print(printable(f"{error}: skipped"), file=sys.stderr)
    return results


def entry(run: Record) -> dict[str, Any]:
    """A run in the table: the fields of its object in JSON. results: those of RESULTS first, then
    the other numbers with a fraction.
    """
    return {
        "folder": run.folder,
        "recipe": run.recipe,
        "state": run.state.value,
        "step": run.step,
        "note": run.note,
        "values": run.values,
        "results": results({**run.row, **run.summary}),
    }


def results(row: Mapping[str, Any]) -> dict[str, Any]:
    """The results in a summary or a row."""
    of_recipe = [
        name for name, value in row.items() if isinstance(value, float) and name not in NO_RESULTS
    ]
    return {name: row[name] for name in (*RESULTS, *of_recipe) if row.get(name) is not None}


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells as text, with columns of equal width. Control characters are escaped: runs may
    belong to other users.
    """
    shown = [[printable(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in shown]


def cells(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The cells of a table with one row per `entry`: the keys in which runs of a recipe differ, and
    the results. The first line is its head.
    """
    seen: dict[tuple[str, str], set[str]] = {}  # by recipe and key
    for run in runs:
        for name, value in run["values"].items():
            seen.setdefault((run["recipe"], name), set()).add(str(value))
    differing = dict.fromkeys(name for (_, name), values in seen.items() if len(values) > 1)
    every = dict.fromkeys(name for run in runs for name in run["results"])
    chosen = [name for name in dict.fromkeys([*RESULTS, *every]) if name in every]
    head = [errors.shown(name) for name in ("run", "state", "step", *differing, *chosen, "note")]
    lines = [
        [
            errors.shown(run["folder"], LONGEST_PATH),
            run["state"],
            str(run["step"]),
            *(text(run["values"].get(name)) for name in differing),
            *(text(run["results"].get(name)) for name in chosen),
            errors.shown(run["note"], LONGEST_NOTE),
        ]
        for run in runs
    ]
    return [head, *lines]


def text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else errors.shown(value, WIDEST)
