"""``launch.py look``: where each rank of a running job is, and for which ranks the others
wait. Never torch.
"""

from pathlib import Path
from typing import Any

from recipes.core import trust
from recipes.core.errors import EXIT_DONE, InputError, MachineError, printable
from recipes.core.launch.runs import Run
from recipes.core.run import attempt as attempts
from recipes.core.run import positions
from recipes.core.run.record import State

RUNNING = (State.starting, State.running, State.unknown)


def look(run: Run, told: dict[str, Any]) -> int:
    """Prints where the ranks of ``run`` are, also into ``told``. Raises InputError if it does not
    run, and MachineError if it belongs to another user.
    """
    folder = Path(run.folder)
    if run.state not in RUNNING:
        raise InputError(f"{folder}: is not running: {run.state}")
    if not trust.is_own(folder):
        raise MachineError(f"{folder}: belongs to another user")
    has_begun = run.state is State.running
    attempt = attempts.owner(folder) if has_begun else attempts.newest(folder)
    hosts = attempts.hosts(attempt) if attempt else {}
    answers = positions.ask(folder, hosts)
    lines = positions.lines_of(answers, hosts)
    print("\n".join(map(printable, lines)))
    told |= {"run": run.folder, "lines": lines, "ranks": answers}
    return EXIT_DONE
