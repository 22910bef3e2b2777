"""Finds out that a program hangs: for ``silent_s=`` seconds, no rank has written a line or saved a
file. Standard library only.
"""

import contextlib
import os
import time

from recipes.core.errors import Kind, MachineError, shown
from recipes.core.program.watch import Watch
from recipes.core.run import attempt as attempts
from recipes.core.run import positions, saves
from recipes.core.run.logs import say

LOOKS = 10  # in silent_s
LONGEST = 600  # characters of the reason


def wait(attempt: attempts.Attempt, watch: Watch, silent_s: float, folder: str) -> None:
    """Run in a thread of the first task: waits until the program hangs, reports where its ranks
    are, and lets all wrappers end it. A program that was asked to stop does not hang.

    folder: in which the program saves; "" is the run directory. The logs and metrics.jsonl count
    too.
    """
    logs = str(attempt.run_dir / "logs")
    metrics = attempt.run_dir / "metrics.jsonl"
    before: tuple[object, ...] = ()
    since = watch.clock()
    while watch.clock() - since < silent_s:
        time.sleep(silent_s / LOOKS)
        written = os.path.exists(metrics) and os.path.getmtime(metrics)
        now = (saves.digest(attempt, folder), saves.digest(attempt, logs), written)
        if now != before or watch.is_stopping:
            before = now
            since = watch.clock()
    report(attempt, silent_s)
    watch.hangs = True


def report(attempt: attempts.Attempt, silent_s: float) -> None:
    """Prints and records that the program is ended, and where its ranks are."""
    progress = time.time() - silent_s
    why = f"no output and no new file for {silent_s:g} s (silent_s=)"
    say(f"script: {why}: the program is ended")
    late = None
    host = ""
    with contextlib.suppress(OSError, MachineError):
        hosts = attempts.hosts(attempt)
        lines, behind = positions.report(attempt, hosts)
        late = min(behind, default=None)
        host = hosts.get(late, "") if late is not None else ""
        why = shown("; ".join([why, *lines]), LONGEST)
    with contextlib.suppress(OSError):
        attempts.record(
            attempt,
            rank=late,
            host=host,
            kind=Kind.hang,
            error=why,
            progress=progress,
            name="hang",
        )
