"""``--json``: a command prints one JSON object to stdout, and its lines for people to stderr."""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from recipes.core.run import command_line

WORD = "--json"


def called(argv: Sequence[str], main: Callable[[list[str], dict[str, Any]], int]) -> int:
    """Calls ``main`` with ``argv`` and a dictionary for its results. ``--json`` prints these and ``exit_status``. Returns it."""
    told: dict[str, Any] = {}
    own = command_line.before_dashes(argv)
    if WORD not in own:
        return main(list(argv), told)
    with contextlib.redirect_stdout(sys.stderr):
        status = main([*(word for word in own if word != WORD), *argv[len(own) :]], told)
    print(json.dumps({**told, "exit_status": status}, default=str), flush=True)
    return status
