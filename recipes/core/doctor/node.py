"""What the checks of a node look at, and what they find."""

from dataclasses import dataclass

import math
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Any
from recipes.core.place.ranks import RankInfo


@dataclass(frozen=True)
class Finding:
    """what: the matter, in a line that can stand behind a host's name. fix: what to type or do.

    bad: training cannot work, or not well. leave_out: that it does without this node; where it is the job's own fault, it does not.
    """

    what: str
    fix: str
    bad: bool = True
    leave_out: bool = True


Facts = dict[str, Any]


@dataclass
class Report:
    """What a rank says of its node, as it is written for who judges. links: what `reach` found between it and others."""

    rank: int
    node_rank: int
    local_rank: int
    local_world_size: int
    host: str
    facts: Facts = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    links: list[Facts] = field(default_factory=list)

    def as_json(self) -> Facts:
        return asdict(self)


@dataclass(frozen=True)
class Surroundings:
    """What the checks look at: the variables, this rank's place, the folders that the training will want, files of the kernel's
    (another folder in tests), and until when."""

    environ: Mapping[str, str]
    info: RankInfo
    run_dir: Path
    data_dir: str = ""
    on_cpu: bool = False
    root: Path = Path("/")
    end: float = math.inf  # by time.monotonic(): what has not come back then is not waited for

    @property
    def others(self) -> bool:
        """Whether there are nodes to compare this one with: where it is alone, what was typed wrongly looks like its own fault."""
        return self.info.num_nodes > 1


def small_text(path: Path) -> str:
    """A small file's text without its end of line; "" where there is none."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
