"""Prints the results of runs as a table. It reads run directories and does not import torch.

    python -m recipes.report                       # every run under runs/
    python -m recipes.report runs/cifar/1234_*     # the elements of a job array
    python -m recipes.report --json runs/cifar

The table shows the keys in which the runs differ. For a run whose status is running, it shows how long ago that status was updated.
"""

import json
import sys
import time
from pathlib import Path

from recipes.core import errors
from recipes.core.errors import InputError
from recipes.core.files import ROOT
from recipes.core.run import source, table
from recipes.core.run.queue import Queue


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print((__doc__ or "").strip())
        return errors.EXIT_DONE
    folders = [Path(word) for word in argv if word != "--json"] or [source.home(ROOT) / "runs"]
    try:
        queue = Queue()
        found = [
            table.read_run(path, time.time(), queue) for folder in folders for path in table.run_directories(folder)
        ]
    except OSError as error:
        raise InputError(
            f"{error.filename}: cannot be read ({error.strerror}): name a run directory, or a folder of them"
        ) from None
    if not found:
        raise InputError(f"{', '.join(map(str, folders))}: no run is there: name a run directory, or a folder of them")
    if "--json" in argv:
        lines = [json.dumps({**vars(run), "folder": str(run.folder)}, default=str) for run in found]
    else:
        lines = table.table(found)
    print("\n".join(lines))
    return errors.EXIT_DONE


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        print(f"report: {error}", file=sys.stderr)
        sys.exit(errors.EXIT_CONFIG)
