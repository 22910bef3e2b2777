"""Makes the records again: see the docstring of the package."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests import goldens

RUNS = ("done", "preempted", "failed")


def main(argv: list[str]) -> int:
    names = [*goldens.TRAININGS, *RUNS]
    if argv[:1] != ["write"] or not set(argv[1:]) <= set(names):
        print(
            f"usage: python -m tests.goldens write [NAME ...]; the names are {', '.join(names)}",
            file=sys.stderr,
        )
        return 2
    for name in argv[1:] or names:
        with tempfile.TemporaryDirectory(prefix="goldens-") as folder:
            if name in RUNS:
                goldens.make_run(name, Path(folder, name))
                shutil.rmtree(goldens.RUNS / name, ignore_errors=True)
                shutil.copytree(Path(folder, name), goldens.RUNS / name)
            else:
                lines = ",\n".join(
                    f" {json.dumps(row)}" for row in goldens.train(name, Path(folder))
                )
                (goldens.FOLDER / f"{name}.json").write_text(f"[\n{lines}\n]\n")
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
