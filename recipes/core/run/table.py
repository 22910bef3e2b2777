"""A table of runs from their run directories. Does not import torch."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipes.core import errors, files
from recipes.core.run import directory, judge, resumed

DEPTH = 3  # levels of folders to search below the given folder: runs/RECIPE/ID
INSIDE = {"attempts", "checkpoints", "logs", "doctor", directory.EVALUATION}  # folders in a run directory, not runs
RESULTS = ("val_top1", "val_top5", "val_loss", "loss", "samples_per_second")
OF_TRAINING = ("loss", "samples_per_second")  # results that are not of an evaluation
NO_RESULTS = {"epoch", "lr", "data_wait", "wall_seconds", "time"}  # other numbers in summary.json and metrics.jsonl
MAX_YAML = 1 << 20  # bytes of a config.yaml
LONGEST_PATH = 4096
WIDEST, LONGEST_NOTE = 60, 300  # maximum number of characters of a value, and of a note, in the table


@dataclass(frozen=True)
class Run:
    """A row. values: the keys of recipe and submission. results: from summary.json, else from the last row of metrics.jsonl."""

    folder: Path
    recipe: str
    state: str
    step: int
    note: str
    values: dict[str, Any]
    results: dict[str, Any]


def run_directories(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The run directories in ``folder``, oldest first. ``folder`` itself may be one.

    Run directories of pending jobs are included. Raises OSError if ``folder`` cannot be read. A folder below it that
    cannot be read is skipped and reported with one line.
    """
    if any((folder / name).exists() for name in ("attempts", "attempt.json", "job.yaml")):
        yield folder
    elif depth:
        inside = [entry for entry in os.scandir(folder) if entry.is_dir() and entry.name not in INSIDE]
        for entry in sorted(inside, key=lambda entry: entry.stat().st_mtime):
            try:
                yield from run_directories(Path(entry.path), depth - 1)
            except OSError as error:
                print(f"{entry.path}: cannot be read ({error.strerror}): skipped", file=sys.stderr)


def read_run(folder: Path, now: float) -> Run:
    """Reads one run directory, and does not ask Slurm. now: time.time()."""
    status, job = directory.read_status(folder) or {}, files.read_json(folder / "job.yaml") or {}
    # A summary of an earlier attempt stays until the run is done again.
    summary = (files.read_json(folder / "summary.json") or {}) if status.get("state") == "done" else {}
    row = {} if summary else last_row(folder / "metrics.jsonl")
    notes = [str(status[name]) for name in ("reason", "next") if status.get(name)]
    if status.get("state") == "running":
        notes.append(f"status written {ago(now - (status.get('updated') or now))} ago")
    if refused := judge.why_not_begun(folder):
        notes.append(f"the newest launch did not begin: {refused}")
    arguments = job.get("arguments")
    typed = (str(word).partition("=") for word in (arguments if isinstance(arguments, list) else ()))
    return Run(
        folder=folder,
        recipe=str(job.get("recipe") or resumed.recipe_of(folder)),
        state=str(status.get("state", "not begun")),
        step=row.get("step") or status.get("step") or 0,
        note="; ".join(notes),
        values={**{name: value for name, _, value in typed if name != "run_dir"}, **_keys(folder / "config.yaml")},
        results=results({**row, **summary}),
    )


def results(found: dict[str, Any]) -> dict[str, Any]:
    """The results in a summary or a row: those of RESULTS first, then the other numbers with a fraction."""
    own = [name for name, value in found.items() if isinstance(value, float) and name not in (*RESULTS, *NO_RESULTS)]
    return {name: found[name] for name in (*RESULTS, *own) if found.get(name) is not None}


def _keys(path: Path) -> dict[str, Any]:
    try:
        found = OmegaConf.to_container(OmegaConf.create(files.read_bounded(path, MAX_YAML).decode()), resolve=False)
    except Exception:  # a refused run has no config.yaml; a damaged file only makes its keys unknown
        return {}
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


def last_row(path: Path) -> dict[str, Any]:
    """The last complete row of metrics.jsonl; {} if there is none in the last 64 KiB of the file."""
    lines: list[bytes] = []
    with contextlib.suppress(OSError), open(path, "rb", opener=files.without_waiting) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:  # the line is being written, or a kill has cut it
            continue
        if isinstance(row, dict):
            return row
    return {}


def ago(seconds: float) -> str:
    """A duration as text, for example 0:10:00."""
    return str(timedelta(seconds=round(max(0.0, seconds))))


def table(runs: Sequence[Run]) -> list[str]:
    """The lines of a table with one row per run: the keys in which runs of a recipe differ, and the results."""
    seen: dict[tuple[str, str], set[str]] = {}  # by recipe and key
    for run in runs:
        for name, value in run.values.items():
            seen.setdefault((run.recipe, name), set()).add(str(value))
    keys = list(dict.fromkeys(name for (_, name), values in seen.items() if len(values) > 1))
    every = dict.fromkeys(name for run in runs for name in run.results)
    shown = [*(name for name in RESULTS if name in every), *(name for name in every if name not in RESULTS)]
    head = ["run", "state", "step", *keys, *shown, "note"]
    rows = [
        [
            errors.shown(run.folder, LONGEST_PATH), errors.shown(run.state), str(run.step), *(_text(run.values.get(name)) for name in keys),
            *(_text(run.results.get(name)) for name in shown), errors.shown(run.note, LONGEST_NOTE),
        ]
        for run in runs
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else errors.shown(value, WIDEST)
