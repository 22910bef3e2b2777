"""The memory limit of this process, and what the kernel has killed for it, as its cgroup shows
them. Standard library only.

Slurm gives each task its own cgroup below that of the step, which has the limit.
"""

import contextlib
import os
import select
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes.core import files

ROOTS = {"memory": "sys/fs/cgroup/memory", "": "sys/fs/cgroup"}  # of cgroup v1 and v2
LIMITS = ("memory.limit_in_bytes", "memory.max")
PEAKS = ("memory.max_usage_in_bytes", "memory.peak")
EVENTS = ("memory.oom_control", "memory.events")
NO_LIMIT = 1 << 60  # cgroup v1 shows a larger number if there is no limit


def own_cgroup(root: Path = Path("/")) -> Path | None:
    """The folder of this process's memory cgroup; None if it is not mounted. root: the folder that
    contains proc and sys.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller, mounted in ROOTS.items():
                folder = root / mounted / path.lstrip("/")
                is_own = controller in controllers.split(",")
                if is_own and any((folder / name).exists() for name in EVENTS):
                    return folder
    return None


@dataclass(frozen=True)
class Memory:
    """The memory of this process's task. kills: processes of it that the kernel had killed when
    this was read.
    """

    cgroup: Path | None
    kills: int

    @property
    def is_exceeded(self) -> bool:
        """Whether the kernel has killed a process of this task since then."""
        return count_kills(self.cgroup) > self.kills

    def events(self) -> Iterator[None]:
        """Yields each time that the limit may be used up, before the kernel has ended a process.
        Raises OSError if cgroups do not tell it.
        """
        cgroup = self.cgroup or Path()
        is_v2 = (cgroup / EVENTS[1]).exists()
        poll = select.poll()
        if is_v2:
            descriptor = os.open(cgroup / EVENTS[1], os.O_RDONLY)
            poll.register(descriptor, select.POLLPRI)
        else:  # cgroup v1 allows this to root only
            descriptor = os.eventfd(0)
            poll.register(descriptor, select.POLLIN)
            with open(cgroup / EVENTS[0]) as control:
                (cgroup / "cgroup.event_control").write_text(f"{descriptor} {control.fileno()}")
        while True:
            poll.poll()
            # until an event is read, each poll returns at once
            if is_v2:
                os.pread(descriptor, 1, 0)
            else:
                os.eventfd_read(descriptor)
            yield

    def describe(self, rank: int | None = None) -> str:
        """The limit, and the largest memory that each task of this node has used.

        rank: of this process, if the tasks of its node are ranks that follow each other. Slurm
        numbers tasks by node or, as 26.05 does, over all nodes.
        """
        limit = min(limits(self.cgroup), default=None)
        memory = f"its limit of {files.size_text(limit)}" if limit else "the memory of its node"
        line = f"was killed since {memory} was used up"
        peaks = sorted(task_peaks(self.cgroup).items(), key=lambda peak: -peak[1])
        name = "task"
        before = 0
        own = _task(self.cgroup) if self.cgroup else None
        if peaks and rank is not None and own is not None:
            name = "rank"
            before = rank - own
        sizes = [f"{name} {before + task} {files.size_text(size)}" for task, size in peaks]
        return f"{line}; peak memory: {', '.join(sizes)}" if sizes else line


def read() -> Memory:
    """The memory of this process's task now."""
    cgroup = own_cgroup()
    return Memory(cgroup, count_kills(cgroup))


def count_kills(cgroup: Path | None) -> int:
    """How many processes of a cgroup the kernel has killed for want of memory; 0 if that is
    unknown.
    """
    for text in _texts(cgroup, EVENTS):
        counts = dict(line.split() for line in text.splitlines())
        return int(counts.get("oom_kill", 0))
    return 0


def limits(cgroup: Path | None) -> list[int]:
    """The limits of a cgroup and of those above it, in bytes."""
    above = [cgroup, *cgroup.parents] if cgroup else []
    texts = [text.strip() for folder in above for text in _texts(folder, LIMITS)]
    return [int(text) for text in texts if text.isdecimal() and int(text) < NO_LIMIT]


def task_peaks(cgroup: Path | None) -> dict[int, int]:
    """The largest memory of each task of this step on this node, in bytes, by the task's number."""
    peaks = dict[int, int]()
    for folder in cgroup.parent.glob("task_*") if cgroup else ():
        task = _task(folder)
        for text in _texts(folder, PEAKS):
            if task is not None:
                peaks[task] = int(text)
    return peaks


def _task(cgroup: Path) -> int | None:
    """The number of a task; None for task_special, in which Slurm puts processes of no task."""
    number = cgroup.name.removeprefix("task_")
    return int(number) if number.isdecimal() else None


def _texts(cgroup: Path | None, names: tuple[str, ...]) -> Iterator[str]:
    if not cgroup:
        return
    for name in names:
        with contextlib.suppress(OSError):
            yield (cgroup / name).read_text()
