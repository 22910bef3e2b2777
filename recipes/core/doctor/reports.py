"""The reports of an examination: one file of each node in the run directory, since the network may
be broken.

A node writes its file again after each stage. Nothing in a report names a file.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from recipes.core import trust
from recipes.core.files import read_json, write_json

POLL_S = 0.3
Report = dict[str, Any]  # of a node, or a part of one that is an object in JSON
NodeReports = Mapping[int, Report]  # by node_rank


class Stage(IntEnum):
    """How far a node is: ``stage`` in its report."""

    listening = 0  # its server answers
    examined = 1  # its checks and links are done
    ready = 2  # of the first node: it has chosen the nodes that measure bandwidth
    final = 3


def stage_of(report: Report | None) -> int:
    return int(report["stage"]) if report else -1


class Reports:
    """The folder of an examination's reports, for one node, or for a judge (node -1)."""

    def __init__(self, folder: Path, node: int = -1) -> None:
        self.folder = folder
        self._file = f"{node}.json"

    def write(self, report: Report, stage: Stage) -> None:
        """Writes the report of this node. Raises OSError."""
        trust.own_folder(self.folder, is_listed=False)  # it has a file of each node
        write_json(self.folder / self._file, {**report, "stage": stage})

    def collect(self, nodes: Iterable[int], stage: Stage, end: float) -> dict[int, Report]:
        """The reports of ``nodes``, when all have reached ``stage``; at ``end`` (time.monotonic),
        those that exist.
        """
        node_of = {f"{node}.json": node for node in nodes}
        reports: dict[int, Report] = {}
        versions: dict[int, tuple[int, ...]] = {}  # of the files that were read
        while True:
            with contextlib.suppress(FileNotFoundError):  # the examination may be over
                for entry in os.scandir(self.folder):
                    node = node_of.get(entry.name)
                    if node is None:
                        continue
                    status = entry.stat()
                    # Lustre has the times of files in whole seconds
                    version = (status.st_mtime_ns, status.st_ino, status.st_size)
                    unchanged = version == versions.get(node)
                    report = {} if unchanged else read_json(Path(entry.path))
                    if report:
                        reports[node] = report
                        versions[node] = version
            are_there = all(stage_of(reports.get(node)) >= stage for node in node_of.values())
            if are_there or time.monotonic() > end:
                return reports
            time.sleep(POLL_S)

    def are_judged(self) -> bool:
        """Whether the reports were removed, which the judge does after its verdict."""
        with contextlib.suppress(FileNotFoundError):
            # a listing makes NFS refresh its cache
            return self._file not in os.listdir(self.folder)
        return True

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
