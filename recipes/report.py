"""Prints the results of runs as a table. It reads run directories and does not import torch.

    python -m recipes.report                       # every run under runs/
    python -m recipes.report runs/cifar/1234_*     # the elements of a job array
    python -m recipes.report --json runs/cifar
    python -m recipes.report runs/cifar html=runs.html     # figures and failures, in one HTML file

The table shows the keys in which the runs differ. For a run whose status is running, it shows how
long ago that status was updated. `python -m recipes.doctor explain` also shows the state of its job
in Slurm.
"""

import os
import sys
from pathlib import Path

from recipes.core import errors, files, trust
from recipes.core.report import page as html
from recipes.core.run import record, source, table


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print((__doc__ or "").strip())
        return errors.EXIT_DONE
    page = next((word.removeprefix("html=") for word in argv if word.startswith("html=")), "")
    words = [word for word in argv if word != "--json" and not word.startswith("html=")]
    every_run = os.path.relpath(source.home(files.ROOT) / "runs")
    folders = [Path(word) for word in words or [every_run]]
    paths = table.find(folders)
    if page:
        out = Path(page).expanduser()
        content, count = html.page(paths)
        if not count:
            return errors.EXIT_CONFIG
        with files.writing_to(out, "html"):
            files.write_bytes(trust.resolved(out.parent) / out.name, content.encode())
        print(f"{page}: {count} run{'s' if count > 1 else ''}")
        return errors.EXIT_DONE
    runs = table.read_each(paths, lambda path: table.entry(record.read(path)))
    if not runs:
        return errors.EXIT_CONFIG
    if "--json" in argv:
        lines = [files.json_line(run) for run in runs]
    else:
        lines = table.aligned(table.cells(runs))
    print("\n".join(lines))
    return errors.EXIT_DONE


if __name__ == "__main__":
    sys.exit(errors.status_of("report", main))
