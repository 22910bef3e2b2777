"""What the log says about a running program: the signal that it gets, and what is wrong with its set-up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core.program import delivery
from recipes.core.program.delivery import Target
from recipes.core.run.stop_note import StopNote

LISTENING = "0A"  # state in /proc/net/tcp
LOOKS = 6  # so often in succession (for 30 s) something is missing before a line says so


@dataclass(frozen=True)
class Setup:
    """What is known of the ranks. name: of the program. in_slurm: whether the job has a time limit.

    wanted: the signal of stop_signal=; "" for any. port: MASTER_PORT, on which rank 0 listens when
    the ranks form a group; 0 if they need not. own_ranks: ranks of this node that Slurm started.
    """

    name: str
    in_slurm: bool
    wanted: str
    port: int
    own_ranks: int


class Remarks:
    """Called by the supervisor every few seconds. say: prints a line. keep: stores the names of the caught signals."""

    def __init__(
        self,
        setup: Setup,
        note: Callable[[], StopNote],
        say: Callable[[str], None],
        keep: Callable[[Sequence[str]], None],
    ) -> None:
        self._setup = setup
        self._note = note
        self._say = say
        self._keep = keep
        self._looks = 0
        self._silent_looks = 0
        self._said = ""
        self._has_group = not setup.port

    def __call__(self, root: int, targets: list[Target]) -> str:
        """Prints what has changed. Returns why the program must end; "" if it may continue."""
        self._looks += 1
        self._silent_looks = 0 if targets else self._silent_looks + 1
        names = sorted({target.signal.name for target in targets})
        line = self._on_signals(names, all(target.protects_workers for target in targets))
        if line != self._said and (targets or self._silent_looks == LOOKS):
            self._said = line
            self._say(line)
            self._keep(names)
        self._has_group = self._has_group or is_listening(self._setup.port)
        if self._looks == LOOKS and not self._has_group:
            self._say(no_group(self._setup.port))
        launcher = delivery.rank_launcher(root) if self._setup.own_ranks > 1 else ""
        if not launcher:
            return ""
        return (
            f"script={self._setup.name}: each of the {self._setup.own_ranks} ranks of a node has started {launcher}, "
            "which starts ranks itself: give through=torchrun or through=accelerate with your .py file, or through=node"
        )

    def _on_signals(self, names: Sequence[str], protects_workers: bool) -> str:
        before_s = self._note().before_s
        if not names:
            none_of = self._setup.wanted or "TERM, USR1, USR2"
            when = "at the time limit" if self._setup.in_slurm else "when the run is stopped"
            return f"warning: the program catches none of {none_of}: it ends {when} with what it has saved by then"
        event = "at the time limit" if before_s else "when the run is stopped"
        ahead = f" {before_s:g} s before the end" if before_s else ""
        workers = "" if protects_workers else "; workers are not protected from signals to all processes"
        which = " or ".join(names)
        return f"{event}, the program of each rank gets {which} (it catches it){ahead}{workers}"


def no_group(port: int) -> str:
    return (
        f"warning: the ranks have not formed a group, since nothing listens on MASTER_PORT={port}: each may train alone; "
        "on CPUs, accelerate and the Trainer form a group only with ACCELERATE_USE_CPU=true, which device=cpu sets"
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
