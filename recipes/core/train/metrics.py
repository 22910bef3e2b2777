"""metrics.jsonl, and what a recipe may return as results."""

import contextlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from recipes.core import files
from recipes.core.errors import RunError
from recipes.core.run import table

# Names of a row of metrics.jsonl that are not results of an evaluation.
RESERVED = table.NO_RESULTS | {
    "attempt",
    "step",
    "total_steps",
    "loss",
    "samples_per_second",
    "best",
    "steps",
    "rank_step_s",
    "spent_s",
    "efficiency",
}


class Rows:
    """``metrics.jsonl``: one JSON object per line, append only. Only rank 0 has a Rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with files.writing_to(path.parent, "run_dir"):
            self._file = open(path, "a+b", opener=files.without_links)  # noqa: SIM115
            # A killed attempt may have left an incomplete last line. A line end is added, so that
            # the next row is valid.
            self._file.seek(max(0, self._file.tell() - 1))
            if self._file.read(1) not in (b"", b"\n"):
                self._file.write(b"\n")

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends a row. Raises MachineError (one line) if it cannot be written."""
        with files.writing_to(self._path.parent, "run_dir"):
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        # `add` has already raised the error that ends the run
        with contextlib.suppress(OSError), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


def require_results(
    call: str, results: object, reserved: Collection[str] = ()
) -> Mapping[str, Any]:
    """``results``, if they can be written as JSON. Raises RunError, which names ``call``, the
    function that returned them.

    reserved: names that they must not have.
    """
    if not isinstance(results, Mapping):
        fix = "return a dict of results, such as run.results or {}"
        raise RunError(f"{call} returned {type(results).__name__}: {fix}")
    for name, value in results.items():
        try:
            json.dumps({name: value})
        except TypeError:
            fix = "return numbers, strings or lists of them, and convert a tensor x with float(x)"
            raise RunError(f"{call} returned {name}={type(value).__name__}: {fix}") from None
        if name in reserved:
            fix = f"rename it, for example to val_{name}"
            raise RunError(f"{call} returned {name}=: metrics.jsonl already uses this name: {fix}")
    return results
