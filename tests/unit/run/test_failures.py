"""Which rank failed first, according to the error records of a run directory."""

from pathlib import Path
from typing import Any

import pytest

from recipes.core.errors import Kind
from recipes.core.run import failures

HOSTS = ["a", "a", "b", "b"]
LOST = (Kind.peer_lost, "RuntimeError: connection closed")


def verdict(
    run_dir: Path, *records: tuple[int, Kind, str], hosts: list[str] = HOSTS, attempt: int = 0, **of_all: Any
) -> failures.Verdict:
    """The verdict on an attempt whose ranks have left these records, in this order."""
    (run_dir / "failures").mkdir(exist_ok=True)
    for moment, (rank, kind, error) in enumerate(records, start=1):
        failures.record(
            run_dir,
            attempt=attempt,
            rank=rank,
            host=hosts[rank],
            kind=kind,
            error=error,
            moment=float(moment),
            **of_all,
        )
    return failures.verdict(run_dir, {"attempt": attempt, "hosts": hosts})


@pytest.mark.parametrize(
    ("records", "reason", "rank", "kind"),
    [
        ([(0, *LOST), (2, Kind.error, "boom"), (3, Kind.error, "late")], "rank 2 on b failed first: boom", 2, Kind.error),
        ([(3, Kind.error, "boom"), (1, Kind.error, "boom")], "rank 1 on a failed first: boom", 1, Kind.error),
        ([(0, *LOST), (3, Kind.disk_full, "full"), (2, Kind.error, "x")], "rank 3 on b failed first: full", 3, Kind.disk_full),
        ([(0, *LOST), (1, Kind.exited, "left")], "rank 1 on a failed first: left", 1, Kind.exited),
        ([(1, Kind.hang, "hangs"), (0, Kind.timeout, "x")], "rank 1 on a failed first: hangs", 1, Kind.hang),
        ([(0, *LOST), (1, *LOST), (3, Kind.timeout, "x")], "rank 2 on b exited without an error record", 2, Kind.killed),
        ([(3, Kind.timeout, "x"), (2, *LOST), (1, *LOST), (0, *LOST)], "rank 3 on b lost its peers: x", 3, Kind.timeout),
        ([(2, *LOST), (3, Kind.timeout, "x"), (1, *LOST), (0, *LOST)], "rank 3 on b lost its peers: x", 3, Kind.timeout),
        ([], "all ranks exited without an error record", None, Kind.killed),
    ],
)  # fmt: skip
def test_the_first_failure_is_the_earliest_that_no_other_rank_caused(
    tmp_path: Path, records: list[tuple[int, Kind, str]], reason: str, rank: int | None, kind: Kind
) -> None:
    found = verdict(tmp_path, *records)
    assert found.reason.startswith(reason)
    assert found.kind is kind
    assert (found.first or {}).get("rank") == rank
    assert rank is None or (found.first or {})["host"] == HOSTS[rank]


def test_a_rank_for_which_the_others_timed_out_is_named(tmp_path: Path) -> None:
    late = {"rank": 2, "host": "b", "at": "step 7 (backward)"}
    expected = "rank 2 on b got no further than step 7 (backward), and the other ranks timed out waiting for it"
    assert verdict(tmp_path, (0, Kind.timeout, "x"), behind=late) == (expected, late, Kind.timeout)


def test_four_ranks_without_a_record_are_named_and_the_others_counted(tmp_path: Path) -> None:
    found = verdict(tmp_path, (1, *LOST), hosts=[f"h{i}" for i in range(8)])
    assert found.reason.startswith("rank 0 on h0, rank 2 on h2, rank 3 on h3, rank 4 on h4 and 3 more exited")
    assert found.first == {"rank": 0, "host": "h0"}


def test_a_run_without_an_attempt_failed_before_its_first_step(tmp_path: Path) -> None:
    found = failures.verdict(tmp_path, None)
    assert "before its first step" in found.reason
    assert found.first is None


def test_records_of_other_attempts_and_damaged_records_are_ignored(tmp_path: Path) -> None:
    verdict(tmp_path, (2, Kind.error, "old"))
    (tmp_path / "failures" / "attempt-1-rank-0.json").write_text('{"rank": 0, "ho')
    assert verdict(tmp_path, attempt=1).reason.startswith("all ranks exited without an error record")
    assert verdict(tmp_path, (1, Kind.error, "new"), attempt=1).reason == "rank 1 on a failed first: new"


def test_failed_ranks_are_those_of_one_attempt(tmp_path: Path) -> None:
    for attempt, rank in ((0, 3), (1, 2), (10, 1)):
        verdict(tmp_path, (rank, *LOST), attempt=attempt)
    assert [[one["rank"] for one in failures.records(tmp_path, attempt)] for attempt in (0, 1, 2)] == [[3], [2], []]
