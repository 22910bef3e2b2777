"""Measures what the recipes promise of speed, each figure beside its peer in one run.

    python -m tests.benchmarks [OUTDIR]     # OUTDIR/benchmarks.json; without OUTDIR, in a new temporary folder

A benchmark is a file bench_NAME.py here with a function ``figures(size)``, found without registering. Exit status: 0 when all
were measured, whether or not they met their targets; 2 a wrong argument.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.measure import FULL, Figure, Size, machine


def main(argv: list[str], size: Size = FULL) -> int:
    if len(argv) > 1 or (argv and argv[0].startswith("-")):
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(argv[0]) if argv else Path(tempfile.mkdtemp(prefix="benchmarks-"))
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / "benchmarks.json").open("w", encoding="utf-8")
    except OSError as error:
        print(f"{out}: cannot be written ({error.strerror}): give another folder", file=sys.stderr)
        return 2
    with file:
        about = machine()
        print("  ".join(f"{name} {value}" for name, value in about.items()), flush=True)
        measured: list[Figure] = []
        for name in benchmarks():
            for figure in importlib.import_module(f"tests.benchmarks.{name}").figures(size):
                print(figure, flush=True)
                measured.append(figure)
        content = {"machine": about, "figures": [dataclasses.asdict(figure) for figure in measured]}
        json.dump(content, file, indent=2, allow_nan=False)
        file.write("\n")
    print(file.name)
    return 0


def benchmarks() -> list[str]:
    """The names of the benchmarks' modules."""
    found = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    assert found
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
