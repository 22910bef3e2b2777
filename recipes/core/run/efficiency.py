"""What a run does with its time and its resources, from its own files, and the first thing to
change. Standard library only.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from recipes.core.files import Json
from recipes.core.run import rows as all_rows
from recipes.core.run.rows import Row, number

# communication is a part of forward_backward
SHARES = (
    "data_wait",
    "forward_backward",
    "communication",
    "optimizer",
)
RECENT = 50  # rows that are judged
# Thresholds: a cause is reported from this value on.
# shares of a step
WAITS = 0.15
COMMUNICATES = 0.25
IDLE_GPU = 0.3
UNEVEN = 1.3  # most samples of a rank, relative to the fewest
# a slow rank's time per step, relative to the median rank's; judged after so many steps
SLOW_RANK = 1.5
STEPS = 100
# in shorter steps, chance and the launch of operations decide how long ranks wait for each other
SHORT_S = 0.02
# judged if so much is requested, and a smaller share used
MEMORY_GB = 8.0
MEMORY_USED = 0.33
CPUS = 4
CPUS_USED = 0.25


def shares(rows: Sequence[Row]) -> dict[str, float]:
    """The median share of each part of a step in the last rows; {} if they have none. The first row
    of an attempt does not count.
    """
    usual = [
        row for before, row in pairwise([{}, *rows]) if row.get("attempt") == before.get("attempt")
    ][-RECENT:]
    medians = {}
    for name in SHARES:
        values = [number(row.get(name)) for row in usual]
        known = [value for value in values if math.isfinite(value)]
        if known:
            medians[name] = statistics.median(known)
    return medians


def verdict(rows: Sequence[Row], facts: Json, keys: Json) -> str:
    """The first thing to change in a run in one line; "" if nothing stands out.

    facts: of its attempt: ``hosts`` of the ranks, and ``cpus`` and ``memory_mb`` per node that the
    job has asked for. Rows of other attempts do not count: they may be of other nodes. keys: of the
    run.
    """
    rows = [row for row in rows if row.get("attempt") == facts.get("attempt")]
    hosts = facts["hosts"] if isinstance(facts.get("hosts"), list) else []
    part = shares(rows)
    steps = number(rows[-1].get("step")) if rows else 0.0
    last = next((row for row in reversed(rows) if "rank_step_s" in row), Row())
    used_memory = number(last.get("memory_gb"))
    used_cpus = number(last.get("cpus_used"))
    has_gpus = math.isfinite(number(last.get("gpu_memory_gb")))
    busy = part.get("forward_backward", 0.0) + part.get("optimizer", 0.0)
    # the host may wait for data while a GPU still has work
    waits = min(part.get("data_wait", 0.0), 1 - busy)
    if waits >= WAITS:
        return f"{waits:.0%} of each step waits for data: {_faster_data(facts, keys, hosts)}"
    seconds = all_rows.numbers(last.get("rank_step_s"))
    seconds = seconds if all(value >= 0 for value in seconds) else []  # not NaN
    is_short = not seconds or statistics.median_low(seconds) < SHORT_S
    batch = number(keys.get("global_batch_size"))
    line = _of_ranks(seconds, batch, hosts, steps >= STEPS and not is_short)
    if line:
        return line
    if part and has_gpus and 1 - busy >= IDLE_GPU:
        return (
            f"the GPUs are idle for {1 - busy:.0%} of each step: use a larger global_batch_size=, "
            "or compile=true"
        )
    if part.get("communication", 0.0) >= COMMUNICATES and not is_short:
        return (
            f"{part['communication']:.0%} of each step waits for the gradients of other ranks: "
            "use a larger global_batch_size=, fewer ranks, "
            "or a faster network (python -m recipes.doctor measures it)"
        )
    memory = number(facts.get("memory_mb")) / 1e3
    cpus = number(facts.get("cpus"))
    if memory >= MEMORY_GB and used_memory < MEMORY_USED * memory:
        enough = math.ceil(1.5 * used_memory)
        return (
            f"{used_memory:.1f} of {memory:.0f} GB of memory per node are used: "
            f"--mem={enough}G is enough"
        )
    if cpus >= CPUS and used_cpus < CPUS_USED * cpus:
        return (
            f"{used_cpus:.1f} of {cpus:.0f} CPUs per node are busy: "
            "fewer are enough (cpus_per_rank=)"
        )
    return ""


def _faster_data(facts: Json, keys: Json, hosts: Sequence[str]) -> str:
    """What makes the data arrive sooner."""
    cpus = number(facts.get("cpus"))
    ranks = max(Counter(hosts).values(), default=1)
    workers = number(keys.get("num_workers"))
    most = cpus // ranks if cpus > 0 else math.inf
    more = 2 * max(1.0, workers)
    fix = "use more CPUs per rank"
    if workers >= 0:
        cpus_too = "" if more <= most else "more CPUs per rank and "
        fix = f"use {cpus_too}num_workers={more:.0f}"
    if "stage_dir" in keys:  # a recipe that reads packed copies
        fix += ", or a packed copy of the data (python -m recipes.prepare --help)"
    return fix


def _of_ranks(seconds: Sequence[float], batch: float, hosts: Sequence[str], by_time: bool) -> str:
    """Why some ranks wait for others: an uneven ``batch``, or a rank whose steps take much longer
    than those of the median rank; "" if none do.
    """
    ranks = len(seconds)
    if ranks < 2:
        return ""
    most = math.ceil(batch / ranks) if batch > 0 else 1
    least = batch // ranks if batch > 0 else 1
    if most >= UNEVEN * least:
        return (
            f"each step has {most:.0f} samples for some ranks and {least:.0f} for others: "
            f"make global_batch_size= a multiple of {ranks}"
        )
    longest, rank = max((value, rank) for rank, value in enumerate(seconds))
    usual = statistics.median_low(seconds)
    if longest < SLOW_RANK * usual or not by_time:
        return ""
    name = f"rank {rank}"
    if rank < len(hosts):
        name += f" on {hosts[rank]}"
    fix = "the others wait for it: python -m recipes.doctor examines its node"
    return f"{name} needs {longest / usual:.1f} times as long per step as the median rank; {fix}"
