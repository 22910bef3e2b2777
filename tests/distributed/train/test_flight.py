"""Which collective of a flight record is named. The record is in the format of torch 2.15."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.core.train import flight


def entry(number: int, state: str, retired: bool, **more: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": "nccl:all_reduce",
        "input_dtypes": ["Float"],
        "input_sizes": [[number, 5]],
        "process_group": ["0", "default_pg"],
        "state": state,
        "retired": retired,
        **more,
    }


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        # of Gloo, `retired` alone says that one is complete
        (
            [entry(1, "scheduled", True), entry(2, "scheduled", True)],
            "all_reduce 2 of group 0 (['Float'] [[2, 5]], completed)",
        ),
        # of NCCL, the state can be ahead of it
        (
            [
                entry(1, "completed", False),
                entry(2, "started", False),
                entry(3, "scheduled", False),
            ],
            "all_reduce 2 of group 0 (['Float'] [[2, 5]], started)",
        ),
        (
            [
                entry(
                    7, "started", False, is_p2p=True, p2p_seq_id=4, profiling_name="nccl:send 0->1"
                )
            ],
            "send 0->1 4 of group 0 (['Float'] [[7, 5]], started)",
        ),
    ],
)
def test_the_first_collective_that_is_not_complete_is_named(
    entries: list[dict[str, Any]], expected: str
) -> None:
    assert flight.describe({"entries": entries}) == expected


def test_without_a_record_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flight.collective("mpi") == ""
    monkeypatch.setattr(flight, "DUMPS", {"gloo": "not in this version of torch"})
    assert flight.collective("gloo") == ""
    monkeypatch.setattr(flight, "DUMPS", {"gloo": "__doc__"})  # not a function
    assert flight.collective("gloo") == ""
