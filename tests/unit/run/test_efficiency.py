"""The first thing to change in a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from recipes.core.run import attempt as attempts
from recipes.core.run import efficiency

HEALTHY = {"data_wait": 0.02, "forward_backward": 0.8, "communication": 0.05, "optimizer": 0.1}
USED = {"rank_step_s": [0.10, 0.11], "memory_gb": 20.0, "cpus_used": 7.0}
ASKED = {"cpus": 16, "memory_mb": 32000}


def rows(**changed: Any) -> list[dict[str, Any]]:
    """Rows of a healthy run with changes. The first one has the start of the run in it, and does
    not count. The last one has only results of an evaluation.
    """
    odd = dict.fromkeys(HEALTHY, 1.0)
    evaluated = {"attempt": 0, "step": changed.get("step", 100), "val_top1": 0.5}
    usual = ({"attempt": 0, "step": n, **HEALTHY, **USED, **changed} for n in (50, 99, 100))
    return [{"attempt": 0, "step": 1, **odd}, *usual, evaluated]


@pytest.mark.parametrize(
    ("changed", "asked", "keys", "line"),
    [
        ({}, ASKED, {}, ""),
        ({}, {}, {}, ""),
        ({"data_wait": 0.14, "forward_backward": 0.7}, ASKED, {}, ""),
        (
            {"data_wait": 0.61, "forward_backward": 0.2},
            ASKED,
            {"num_workers": 3, "stage_dir": ""},
            "61% of each step waits for data: use num_workers=6, or a packed copy",
        ),
        (
            {"data_wait": 0.61, "forward_backward": 0.2},
            {"cpus": 1},
            {"num_workers": 0},
            "61% of each step waits for data: use more CPUs per rank and num_workers=2",
        ),
        (
            {"data_wait": 0.61, "forward_backward": 0.2},
            {},
            {},
            "61% of each step waits for data: use more CPUs per rank",
        ),
        (
            {"rank_step_s": [0.1, 0.16]},
            ASKED,
            {},
            "rank 1 on b needs 1.6 times as long per step as the median rank; "
            "the others wait for it",
        ),
        (
            {},
            ASKED,
            {"global_batch_size": 1},
            "each step has 1 samples for some ranks and 0 for others: make global_batch_size= a",
        ),
        ({}, ASKED, {"global_batch_size": 127}, ""),
        ({"rank_step_s": [0.1, 0.16], "step": 99}, ASKED, {}, ""),
        ({"rank_step_s": [0.1, "x"]}, ASKED, {}, ""),
        ({"rank_step_s": [0, 0, 5.0]}, ASKED, {}, ""),
        ({"rank_step_s": [0.01, 0.016], "communication": 0.4}, ASKED, {}, ""),  # too short to tell
        (
            {"communication": 0.4},
            ASKED,
            {},
            "40% of each step waits for the gradients of other ranks: "
            "use a larger global_batch_size=",
        ),
        (
            {"gpu_memory_gb": 9.0, "forward_backward": 0.3},
            ASKED,
            {},
            "the GPUs are idle for 60% of each step: use a larger global_batch",
        ),
        ({"gpu_memory_gb": 9.0}, ASKED, {}, ""),
        (
            {"data_wait": 0.19, "forward_backward": 0.87},
            ASKED,
            {},
            "",
        ),  # the GPU has work meanwhile
        ({"data_wait": 0.7, "forward_backward": 0.7}, ASKED, {}, "20% of each step waits for data"),
        (
            {"memory_gb": 3.0},
            ASKED,
            {},
            "3.0 of 32 GB of memory per node are used: --mem=5G is enough",
        ),
        (
            {"cpus_used": 2.0},
            ASKED,
            {},
            "2.0 of 16 CPUs per node are busy: fewer are enough (cpus_per_rank=)",
        ),
    ],
)
def test_the_first_thing_to_change_is_named(
    changed: dict[str, Any], asked: dict[str, int], keys: dict[str, Any], line: str
) -> None:
    facts = {**asked, "attempt": 0, "hosts": ["a", "b"]}
    advice = efficiency.verdict(rows(**changed), facts, keys)
    assert advice.startswith(line)
    assert bool(advice) == bool(line)
    assert ("packed copy" in advice) == ("stage_dir" in keys)


def test_the_cpus_of_a_node_are_shared_by_its_own_ranks() -> None:
    facts = {"cpus": 32, "attempt": 0, "hosts": ["a"] * 4 + ["b"] * 4}
    waiting = rows(data_wait=0.6, forward_backward=0.2, rank_step_s=[0.1] * 8)
    assert "use num_workers=8" in efficiency.verdict(waiting, facts, {"num_workers": 4})


def test_rows_of_an_earlier_attempt_say_nothing_about_the_hosts_of_the_newest(
    tmp_path: Path,
) -> None:
    for number, hosts in ((0, ["good", "slow"]), (1, ["good", "new"])):
        opened = attempts.open_next(tmp_path, "mnist", {}, hosts)
        attempts.begin(opened, step=100 * number, own=True)
        facts = attempts.facts(tmp_path)
        advice = efficiency.verdict(rows(rank_step_s=[0.1, 0.3]), facts, {})
        assert ("rank 1 on slow" in advice) == (number == 0)
    assert advice == ""
    again = [{**row, "attempt": 1} for row in rows(rank_step_s=[0.3, 0.1])]
    assert "rank 0 on good" in efficiency.verdict([*rows(), *again], facts, {})


def test_a_share_is_that_of_the_usual_rows() -> None:
    """Neither of the first row of an attempt, nor of a value that is not finite."""
    waits = [(0, 0.9), (0, 0.2), (0, math.nan), (0, 0.2), (1, 0.9)]
    every = [{"attempt": attempt, "data_wait": share} for attempt, share in waits]
    assert efficiency.shares(every) == {"data_wait": 0.2}
    assert efficiency.shares(every[-1:]) == {}
    faster = [0.9] * 60 + [0.2] * efficiency.RECENT
    every = [{"attempt": 0, "data_wait": share} for share in faster]
    assert efficiency.shares(every) == {"data_wait": 0.2}
