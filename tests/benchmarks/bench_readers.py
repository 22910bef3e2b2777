"""How the readers of run directories grow with the length and the number of runs: launch.py runs
and the page of recipes.report, against reading the same bytes or parsing the same rows alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from functools import partial
from pathlib import Path

from recipes import report
from recipes.core import files
from recipes.core.launch import run_commands
from recipes.core.run import attempt as attempts
from recipes.core.run import directory
from tests.benchmarks.measure import Figure, Size, interleaved

ROW = dict.fromkeys(("loss", "lr", "samples_per_second", "data_wait", "optimizer"), 0.5)


def figures(size: Size) -> list[Figure]:
    """The long run has 25 rows for each of ``small_files``, which is the number of short runs."""
    with tempfile.TemporaryDirectory() as folder:
        short, long, many = (Path(folder, name) for name in ("short", "long", "many"))
        make(short / "run", 100)
        make(long / "run", 25 * size.small_files)
        for number in range(size.small_files // 10):
            make(many / str(number), 10)
        values = interleaved(
            size.rounds,
            {
                "short": partial(seconds, run_commands.show, [str(short)], Path(folder)),
                "long": partial(seconds, run_commands.show, [str(long)], Path(folder)),
                "page": partial(seconds, report.main, [str(long), f"html={folder}/page.html"]),
                "parse": partial(seconds, parse, long / "run/metrics.jsonl"),
                "many": partial(seconds, run_commands.show, [str(many)], Path(folder)),
                "json": partial(seconds, read_status, many),
            },
        )
    sides = (
        ("readers, a long run in the list", "long", "a run of 100 rows", "short", "<= 3"),
        ("readers, the page of a long run", "page", "json.loads of its rows", "parse", "<= 2.5"),
        ("readers, a list of many runs", "many", "reading their status.json", "json", "<= 20"),
    )
    return [
        Figure(name, "s", "ours", other, target, values[ours], values[theirs])
        for name, ours, other, theirs, target in sides
    ]


def make(run_dir: Path, rows: int) -> None:
    """A finished run."""
    attempts.begin(attempts.open_next(run_dir, "mnist", {}), 0, own=False)
    with open(run_dir / "metrics.jsonl", "w") as file:
        for step in range(1, rows + 1):
            row = {"attempt": 0, "step": step, "time": 1e9 + step, "total_steps": rows, **ROW}
            print(json.dumps(row), file=file)
    directory.write_status(run_dir, "done", attempt=0, step=rows)
    files.write_json(run_dir / "job.yaml", {"recipe": "mnist"})


def seconds(call: object, *arguments: object) -> float:
    """Seconds of a call whose output is not shown."""
    assert callable(call)
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        call(*arguments)
    return time.perf_counter() - start


def parse(metrics: Path) -> None:
    with open(metrics, "rb") as file:
        for line in file:
            json.loads(line)


def read_status(folder: Path) -> None:
    for run_dir in folder.iterdir():
        json.loads((run_dir / "status.json").read_bytes())
