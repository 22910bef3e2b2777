"""The first thing to change in a run, and where the time of its attempts went."""

from __future__ import annotations

import json
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
    not count.
    """
    odd = dict.fromkeys(HEALTHY, 1.0)
    usual = ({"attempt": 0, "step": n, **HEALTHY, **USED, **changed} for n in (50, 99, 100))
    return [{"attempt": 0, "step": 1, **odd}, *usual]


@pytest.mark.parametrize(
    ("changed", "asked", "keys", "line"),
    [
        ({}, ASKED, {}, ""),
        ({}, {}, {}, ""),
        ({"data_wait": 0.14, "forward_backward": 0.7}, ASKED, {}, ""),
        (
            {"data_wait": 0.61, "forward_backward": 0.2},
            ASKED,
            {"num_workers": 3},
            "61% of each step waits for data: use num_workers=6, or a packed copy",
        ),
        (
            {"data_wait": 0.61, "forward_backward": 0.2},
            {"cpus": 5},
            {"num_workers": 3},
            "61% of each step waits for data: use more CPUs per rank, or a packed copy",
        ),
        (
            {"data_wait": 0.61, "forward_backward": 0.2},
            {},
            {},
            "61% of each step waits for data: use more CPUs per rank, or a packed copy",
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


def attempt(run_dir: Path, number: int, at: float, step: int | None) -> None:
    folder = run_dir / "attempts" / f"{number:04d}"
    folder.mkdir(parents=True)
    (folder / "opened.json").write_text(json.dumps({"time": at}))
    if step is not None:
        (folder / "begun.json").write_text(json.dumps({"step": step}))


def write(run_dir: Path, *steps: tuple[int, int, float]) -> None:
    with open(run_dir / "metrics.jsonl", "w") as file:
        for number, step, moment in steps:
            print(json.dumps({"attempt": number, "step": step, "time": moment}), file=file)
        file.write('{"attempt": 1, "st')


def test_time_of_all_attempts_by_what_it_was_spent_on(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 100.0, 0)
    attempt(tmp_path, 1, 200.0, None)  # it did not begin
    attempt(tmp_path, 2, 300.0, 20)
    write(tmp_path, (0, 1, 110.0), (0, 20, 130.0), (0, 30, 150.0), (2, 21, 305.0), (2, 40, 325.0))
    spent = {"start": 10.0 + 5.0, "training": 20.0 + 20.0, "lost": 20.0, "waiting": 150.0 + 2.0}
    assert efficiency.time_spent(tmp_path, 327.0) == spent


def test_no_times_if_a_clock_was_set_back_or_nothing_was_trained(tmp_path: Path) -> None:
    assert efficiency.time_spent(tmp_path, 1.0) == {}
    attempt(tmp_path, 0, 100.0, 0)
    assert efficiency.time_spent(tmp_path, 200.0) == {}
    write(tmp_path, (0, 1, 90.0))
    assert efficiency.time_spent(tmp_path, 200.0) == {}
