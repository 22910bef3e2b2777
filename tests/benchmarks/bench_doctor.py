"""The CPU time that the doctor's first rank spends on a node, in jobs of 16, 256 and 4,096 nodes:
it polls the folder of the reports, reads each node's files, judges them, and removes them.

The nodes' files are real, on a local file system. They arrive while the first rank sleeps between
two polls; writing them does not count. On a network file system each file costs some round trips
more: that is not measured here.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from recipes.core.doctor import examine
from recipes.core.doctor.reports import Reports, Stage
from recipes.core.place.ranks import RankInfo
from tests.benchmarks.measure import Figure, Size, interleaved
from tests.unit.doctor.test_verdict import healthy, hosts

SIZES = (16, 256, 4096)
AT_LEAST = 512  # nodes examined for a value, in several examinations of a small job
# in which all files of a kind arrive: five seconds, as long as nodes differ in their checks
POLLS = 16


def figures(size: Size) -> list[Figure]:
    values = interleaved(size.rounds, {str(count): partial(microseconds, count) for count in SIZES})
    return [
        Figure(
            f"doctor, {count} nodes",
            "us",
            "the first rank's CPU time for a node",
            f"in a job of {SIZES[0]}",
            "<= 1.5",
            values[str(count)],
            values[str(SIZES[0])],
            "with polling, reading and removing files in /dev/shm",
        )
        for count in SIZES[1:]
    ]


def microseconds(nodes: int) -> float:
    """CPU time of the first rank for one node."""
    texts = [json.dumps(report) for report in healthy(nodes)]
    turns = max(1, AT_LEAST // nodes)
    gc.disable()  # as recipes/doctor.py does
    try:
        return 1e6 * sum(examination(nodes, texts) for _ in range(turns)) / turns / nodes
    finally:
        gc.enable()
        gc.collect()


def examination(nodes: int, texts: list[str]) -> float:
    """CPU seconds of what `examine.run` does on the first node after its own checks, without the
    bandwidth test.
    """
    info = RankInfo(0, 0, 0, nodes, 1, nodes, hosts(nodes), "node0", 29400, False, "1", 0)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as run_dir,
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        reports = Reports(Path(run_dir, "reports"), 0)
        slept = 0.0
        arriving = arrivals(reports.folder, texts)

        def sleep(_: float) -> None:
            nonlocal slept
            begin = time.process_time()
            next(arriving)
            slept += time.process_time() - begin

        with mock.patch.object(time, "sleep", sleep):
            end = time.monotonic() + 600
            begin = time.process_time()
            mine = json.loads(texts[0])
            reports.write(mine, Stage.examined)
            members = examine._members(reports.collect(range(nodes), Stage.examined, end), info, 0)
            reports.write(mine, Stage.final)
            status = examine.give_verdict(reports, info.nodes, Path(run_dir), end)
            seconds = time.process_time() - begin - slept
    assert status == 0, out.getvalue()
    assert len(members["nodes"]) == nodes, out.getvalue()
    assert out.getvalue().splitlines()[-1] == f"healthy: {nodes} nodes"
    return seconds


def arrivals(folder: Path, texts: list[str]) -> Iterator[None]:
    """Each ``next`` lets some of the nodes write: their reports, and when all have, their final
    ones.
    """
    for stage in (Stage.examined, Stage.final):
        for part in range(POLLS):
            for node in range(1 + part, len(texts), POLLS):
                (folder / f"{node}.json").write_text(f'{texts[node][:-1]}, "stage": {stage:d}}}')
            yield
    raise AssertionError("the first node waits for a report that is there")
