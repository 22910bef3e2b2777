"""What the log says about a running program: the signal that it gets, and what is wrong with its
set-up.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core import files
from recipes.core.program import delivery
from recipes.core.program.watch import Watch
from recipes.core.run.attempt import CATCHES, Attempt
from recipes.core.run.stop_note import StopNote

LISTENING = "0A"  # state in /proc/net/tcp
LOOKS = 12  # so often in succession (for a minute) something is missing before a line says so


@dataclass
class Remarks:
    """Called by the supervisor every few seconds.

    attempt: of the run. watch: None for a rank whose node has a wrapper of its own. prints: whether
    this wrapper prints, as only the first one does. name: of the program. in_slurm: whether the job
    has a time limit. wanted: the signal of stop_signal=; "" for any. port: MASTER_PORT, on which
    rank 0 listens when the ranks form a group; 0 if they need not. own_ranks: ranks of this node
    that Slurm started; 0 if they may start launchers.
    """

    attempt: Attempt
    watch: Watch | None
    prints: bool
    name: str
    in_slurm: bool
    wanted: str
    port: int
    own_ranks: int
    _looks: int = 0
    _silent_looks: int = 0
    _said: str = ""

    def __call__(self, root: int, targets: list[delivery.Target]) -> str:
        """Prints what has changed. Returns why the program must end; "" if it may continue."""
        self._looks += 1
        self._silent_looks = 0 if targets else self._silent_looks + 1
        names = sorted({target.signal.name for target in targets})
        note = self.watch.note if self.watch else StopNote()
        protects_workers = all(target.protects_workers for target in targets)
        line = self._on_signals(names, protects_workers, note.before_s)
        is_new = line != self._said and not note.reason
        if self.prints and is_new and (targets or self._silent_looks == LOOKS):
            self._said = line
            print(line, flush=True)
            with contextlib.suppress(OSError):
                files.write_json(self.attempt.folder / CATCHES, {"signals": names})
        if self.port and is_listening(self.port):
            self.port = 0
        if self.port and self._looks == LOOKS:
            print(no_group(self.port), flush=True)
        launcher = delivery.rank_launcher(root) if self.own_ranks > 1 else ""
        if not launcher:
            return ""
        return (
            f"script={self.name}: each of the {self.own_ranks} ranks of a node has started "
            f"{launcher}, which starts ranks itself: give through=torchrun or through=accelerate "
            "with your .py file, or through=node"
        )

    def _on_signals(
        self, names: Sequence[str], protects_workers: bool, before_s: float | None
    ) -> str:
        if not names:
            none_of = self.wanted or "TERM, USR1, USR2"
            when = "at the time limit" if self.in_slurm else "when the run is stopped"
            return (
                f"warning: the program catches none of {none_of}: "
                f"it ends {when} with what it has saved by then"
            )
        event = "at the time limit" if before_s else "when the run is stopped"
        ahead = f" {before_s:g} s before the end" if before_s else ""
        line = f"{event}, the program of each rank gets {' or '.join(names)} (it catches it){ahead}"
        if not protects_workers:
            line += "; workers are not protected from signals to all processes"
        return line


def no_group(port: int) -> str:
    return (
        f"warning: the ranks have not formed a group, since nothing listens on MASTER_PORT={port}: "
        "each may train alone; on CPUs, accelerate and the Trainer form a group only with "
        "ACCELERATE_USE_CPU=true, which device=cpu sets"
    )


def is_listening(port: int) -> bool:
    """Whether a process of this host listens on a TCP port."""
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        rows = path.read_text().splitlines()[1:] if path.exists() else []
        for row in rows:
            _, local, _, state = row.split()[:4]
            if state == LISTENING and int(local.rpartition(":")[2], 16) == port:
                return True
    return False
