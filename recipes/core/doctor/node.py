"""What the checks of a node get (`Surroundings`) and what they return (`Facts`, `Finding`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.core.place.ranks import RankInfo

Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """A fault of a node. what: one line that can stand after a host name. fix: what to type or do.

    bad: training cannot work, or not well. leave_out: leaving out this node fixes it; false where the job itself is at fault.
    """

    what: str
    fix: str
    bad: bool = True
    leave_out: bool = True


@dataclass(frozen=True)
class Surroundings:
    """This node, and what to examine on it."""

    environ: Mapping[str, str]
    info: RankInfo
    run_dir: Path
    data_dir: str = ""
    on_cpu: bool = False
    root: Path = Path("/")  # the folder that has ``proc`` and ``sys``

    @property
    def has_others(self) -> bool:
        """Whether there are other nodes. A node alone cannot be compared: what looks like its fault may be a mistyped key."""
        return self.info.num_nodes > 1


def small_text(path: Path) -> str:
    """The text of a small file without its line end; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
