"""Where the ranks of a run are, according to their answers."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.core import files
from recipes.core.run import positions, watchdog
from recipes.core.run.attempt import Attempt
from tests import helpers

OF_TORCH = '  File "/env/lib/python3.11/site-packages/torch/x.py", line 9 in all_reduce\n'
OWN = '  File "recipes/mnist.py", line 118 in main\n'
READS = '  File "data.py", line 31 in __getitem__\n'
HOSTS = {rank: f"node{rank // 4 + 1}" for rank in range(8)}


def process(stack: str = "", state: str = "S") -> dict[str, Any]:
    return {"pid": 7, "command": "sleep 60", "state": state, "kernel": "do_nap", "stack": stack}


def rank(
    number: int, step: int, phase: int, seconds: float, *processes: dict[str, Any]
) -> dict[str, Any]:
    facts = {"rank": number, "host": HOSTS[number], "processes": list(processes)}
    at = watchdog.place(step, phase)
    may_wait = phase > watchdog.START
    progress = {"step": step, "phase": phase, "at": at, "may_wait": may_wait}
    return {**facts, **progress, "unchanged_s": seconds}


@pytest.mark.parametrize(("ranks", "polls"), [((0, 2, 1), 3), ((0, 1, 7), 40), ((), 40)])
def test_the_answers_of_all_ranks_are_awaited_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...], polls: int
) -> None:
    """Three ranks answer, one after the other. Before the ranks have met, nobody knows them."""
    count = 0

    def sleep(seconds: float) -> None:
        nonlocal count
        count += 1
        [request] = (tmp_path / "attempts").glob("look-*")
        files.write_json(request / f"rank{count % 3}.json", {"rank": count % 3})

    clock = SimpleNamespace(monotonic=lambda: count * positions.POLL_S, sleep=sleep)
    monkeypatch.setattr(positions, "time", clock)
    (tmp_path / "attempts").mkdir()
    answers = positions.ask(tmp_path, ranks)
    assert {answer["rank"] for answer in answers} == {0, 1, 2}
    assert count == polls


def heads(answers: list[dict[str, Any]], hosts: dict[int, str]) -> list[str]:
    """The lines without the stacks."""
    return [head for head, _ in positions.places_of(answers, hosts)]


def waiting(number: int) -> dict[str, Any]:
    return rank(number, 31, watchdog.BACKWARD, 12.3, process(OF_TORCH + OWN))


def test_ranks_at_one_place_are_one_line_and_wait_for_the_rank_that_is_behind() -> None:
    answers = [waiting(number) for number in (7, 6, 5, 3, 2, 1, 0)]
    answers.append(rank(4, 31, watchdog.DATA, 312.0, process(READS + OF_TORCH + OWN)))
    assert positions.lines_of(answers, HOSTS) == [
        "rank 4 on node2: in __getitem__ at data.py:31 for 312 s, at step 32 (data)",
        *(READS + OF_TORCH + OWN).splitlines(),
        "ranks 0-3, 5-7: waiting for rank 4 on node2, in all_reduce at recipes/mnist.py:118 "
        "for 12 s, at step 32 (backward)",
        *(OF_TORCH + OWN).splitlines(),
    ]


def test_a_stopped_rank_is_awaited_wherever_it_is() -> None:
    stopped = rank(2, 31, watchdog.BACKWARD, 3.4, process(state="T"))
    moves = rank(3, 31, watchdog.BACKWARD, 0.3, process(OF_TORCH + OWN))
    prepares = rank(5, 40, watchdog.OUTSIDE, 5.0, process(OWN))
    assert heads([waiting(0), waiting(1), prepares, moves, stopped], {}) == [
        "rank 2 on node1: stopped by a signal for 3 s, at step 32 (backward)",
        "ranks 0-1 on node1: waiting for rank 2 on node1, in all_reduce at recipes/mnist.py:118 "
        "for 12 s, at step 32 (backward)",
        "rank 3 on node1: in all_reduce at recipes/mnist.py:118",
        "rank 5 on node2: in main at recipes/mnist.py:118 for 5 s, at step 40 (outside the steps)",
    ]


def test_a_rank_that_does_not_answer_is_awaited() -> None:
    first, second = heads([waiting(0), waiting(1)], {0: "node1", 1: "node1", 4: "node2"})
    assert first.startswith("rank 4 on node2: no answer within 8 s: the job is suspended, ")
    assert second.startswith("ranks 0-1 on node1: waiting for rank 4 on node2, in all_reduce ")
    [line] = positions.lines_of([], {})
    assert line.startswith("ranks of this run: no answer within 8 s: they are still starting, ")


def test_ranks_that_move_wait_for_nobody_and_may_be_at_any_step() -> None:
    frames = process(OF_TORCH + OWN)
    answers = [rank(number, 31 + number, watchdog.FORWARD, 0.3, frames) for number in range(4)]
    assert heads(answers, {}) == ["ranks 0-3 on node1: in all_reduce at recipes/mnist.py:118"]


def test_workers_and_programs_of_any_kind_are_shown() -> None:
    facts = {"rank": 5, "host": "node2"}
    worker = process('  File "/usr/lib/python3.11/a.py", line 1 in get\n' + OF_TORCH)
    programs = [
        {**facts, "cpus": 1.5, "processes": [process(OWN), worker, worker]},
        {**facts, "rank": 4, "processes": [process(state="D")]},
    ]
    assert heads(programs, {}) == [
        "rank 5 on node2: in main at recipes/mnist.py:118, 1.5 CPUs per rank",
        "workers of rank 5 on node2: in get at /usr/lib/python3.11/a.py:1",
        "rank 4 on node2: no Python stack of sleep 60 (state D, do_nap)",
    ]


def test_ranks_of_a_program_in_a_collective_wait_for_those_that_are_not() -> None:
    collective = OF_TORCH.replace("x.py", "distributed/c10d.py")
    answers = [
        {"rank": number, "host": "node1", "cpus": 1.2, "processes": [process(collective + OWN)]}
        for number in (0, 2, 3)
    ]
    assert heads(answers, {}) == [
        "ranks 0, 2-3 on node1: in all_reduce at recipes/mnist.py:118, 1.2 CPUs per rank"
    ]
    for place, cpus in ((process(READS), 0.0), (process(READS + collective), 0.4)):
        late = {"rank": 1, "host": "node1", "cpus": cpus, "processes": [place]}
        assert heads([*answers, late], {}) == [
            f"rank 1 on node1: in __getitem__ at data.py:31, {cpus} CPUs per rank",
            "ranks 0, 2-3 on node1: waiting for rank 1 on node1, "
            "in all_reduce at recipes/mnist.py:118, 1.2 CPUs per rank",
        ]


def test_a_rank_does_not_end_before_another_one_has_kept_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that asks waits all of WAIT_S if a rank does not answer."""

    def ask(folder: Path, ranks: object) -> list[dict[str, Any]]:
        time.sleep(0.5)
        return [waiting(0)]

    monkeypatch.setattr(positions, "WAIT_S", 0.1)
    monkeypatch.setattr(positions, "ask", ask)
    (tmp_path / "logs").mkdir()
    attempt = Attempt(tmp_path, 0)
    asking = threading.Thread(target=positions.report, args=(attempt, HOSTS))
    asking.start()
    helpers.wait_until(positions.file_of(attempt).exists, 10, "the file")
    assert positions.report(attempt, HOSTS) == ([], set())
    assert positions.file_of(attempt).stat().st_size
    asking.join()


def test_nothing_is_left_of_a_request_that_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "WAIT_S", 0.5)
    helpers.attempt(tmp_path)
    assert positions.ask(tmp_path, [0]) == []
    assert os.listdir(tmp_path / "attempts") == ["0000"]
