"""What the doctor's verdict costs a node, in jobs of 16, 256 and 4,096 nodes."""

from __future__ import annotations

import gc
import json
import time

from recipes import doctor
from recipes.core import verdict
from recipes.core.verdict import Expected
from tests.benchmarks.measure import Figure, Size, interleaved
from tests.unit.test_verdict import healthy, hosts

SIZES = (16, 256, 4096)
AT_LEAST = 4096  # reports judged for a value, whatever the job's size


def figures(size: Size) -> list[Figure]:
    texts = {count: [json.dumps(report) for report in healthy(count)] for count in SIZES}

    def cost(count: int) -> float:
        """Microseconds a node: its report read from JSON, judged, and the verdict in lines."""
        turns = max(1, AT_LEAST // count)
        doctor.keep_all()
        begin = time.perf_counter()
        for _ in range(turns):
            found = verdict.judge(Expected(hosts(count), count), [json.loads(text) for text in texts[count]])
            assert verdict.lines(found)[-1] == f"healthy: {count} nodes"
        spent = time.perf_counter() - begin
        gc.enable()
        gc.collect()
        return 1e6 * spent / turns / count

    values = interleaved(size.rounds, {str(count): (lambda count=count: cost(count)) for count in SIZES})  # type: ignore[misc]
    return [
        Figure(
            f"doctor, a node's part of the verdict of {count}",
            "us",
            f"{count} nodes",
            "16 nodes",
            "<= 1.5",
            values[str(count)],
            values["16"],
        )
        for count in SIZES[1:]
    ]
