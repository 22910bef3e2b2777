"""Measures the speed that the recipes promise, each figure beside its peer in one run.

    python -m tests.benchmarks [OUTDIR] [only=NAME[,NAME]]

Writes OUTDIR/benchmarks.json; without OUTDIR, in a new temporary folder. A benchmark is a file
bench_NAME.py in this folder with a function ``figures(size)``, found without registering. A
benchmark that sets ``LONG``, its duration, runs only if ``only=`` names it. Exit status: 0 if all
figures meet their targets; 1 if one misses its target, and the last lines name those that do; 2 for
an invalid argument or missing input.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from recipes.core.config.declare import nearest
from recipes.core.errors import InputError
from tests.benchmarks.measure import FULL, Figure, Size, machine


def main(argv: list[str], size: Size = FULL) -> int:
    only = [word.removeprefix("only=") for word in argv if word.startswith("only=")]
    folders = [word for word in argv if not word.startswith("only=")]
    if len(only) > 1 or len(folders) > 1 or any(word.startswith("-") for word in folders):
        print(__doc__, file=sys.stderr)
        return 2
    names = [name for name in ",".join(only).split(",") if name]
    strange = [name for name in names if name not in benchmarks()]
    if strange:
        print(
            (
                f"only={strange[0]}: must be some of "
                f"{','.join(benchmarks())}{nearest(strange[0], benchmarks())}"
            ),
            file=sys.stderr,
        )
        return 2
    out = Path(folders[0]) if folders else Path(tempfile.mkdtemp(prefix="benchmarks-"))
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
        for name, module in chosen(names).items():
            try:
                figures = module.figures(size)
            except InputError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 2
            for figure in figures:
                print(figure, flush=True)
                measured.append(figure)
        content = {"machine": about, "figures": [dataclasses.asdict(figure) for figure in measured]}
        json.dump(content, file, indent=2, allow_nan=False)
        file.write("\n")
    print(file.name)
    missed = [figure for figure in measured if not figure.met]
    for figure in missed:
        print(f"missed: {figure.name}: {figure.ratio:.3g}, target {figure.target}")
    return 1 if missed else 0


def benchmarks() -> list[str]:
    """The names of all benchmarks."""
    names = sorted(
        path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py")
    )
    assert names
    return names


def chosen(names: list[str]) -> dict[str, ModuleType]:
    """The modules of the benchmarks ``names``. Without names: all but the long ones, and a line
    says how to run those.
    """
    modules = {
        name: importlib.import_module(f"tests.benchmarks.bench_{name}")
        for name in names or benchmarks()
    }
    if names:
        return modules
    for name, module in modules.items():
        long = getattr(module, "LONG", "")
        if long:
            print(f"{name}: left out, it takes {long}: make bench ONLY={name}", flush=True)
    return {name: module for name, module in modules.items() if not hasattr(module, "LONG")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
