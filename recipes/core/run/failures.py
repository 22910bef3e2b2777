"""The records of failed ranks in a run directory, and which rank failed first. Standard library only."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from recipes.core import files
from recipes.core.errors import EXIT_CRASH, Kind, kind_of


def record(
    run_dir: Path,
    *,
    attempt: int,
    rank: int,
    host: str,
    kind: Kind,
    error: str,
    exit_status: int = EXIT_CRASH,
    behind: Mapping[str, Any] | None = None,
    moment: float | None = None,
) -> None:
    """Writes the error record of a rank.

    behind: the rank that did not arrive, with ``rank``, ``host`` and ``at`` (how far it was), as this rank sees it.
    moment: the time of the failure, as time.time(); None means now.
    """
    content = {
        "rank": rank,
        "host": host,
        "kind": kind,
        "error": error,
        "exit_status": exit_status,
        "behind": behind,
        "time": moment or time.time(),
    }
    files.write_json(_path(run_dir, attempt, rank), content)


def read(run_dir: Path, attempt: int, rank: int) -> dict[str, Any] | None:
    """The error record of a rank; None if the rank has not written one."""
    return files.read_json(_path(run_dir, attempt, rank))


def records(run_dir: Path, attempt: int) -> list[dict[str, Any]]:
    """The error records of an attempt, earliest first."""
    found = map(files.read_json, (run_dir / "failures").glob(f"attempt-{attempt}-rank-*.json"))
    return sorted(filter(None, found), key=lambda one: one["time"])


def _path(run_dir: Path, attempt: int, rank: int) -> Path:
    return run_dir / "failures" / f"attempt-{attempt}-rank-{rank}.json"


class Verdict(NamedTuple):
    """Why an attempt failed.

    reason: one line. first: the record of the first failing rank, which has at least its rank and host. kind: the
    failure kind.
    """

    reason: str
    first: dict[str, Any] | None
    kind: Kind


def verdict(run_dir: Path, attempt: Mapping[str, Any] | None) -> Verdict:
    """Why an attempt failed, according to the error records. attempt: its record in ``attempt.json``; None if there is none.

    The earliest failure that is not a consequence of another rank's failure takes precedence. Without one, the reason is the rank
    for which the others timed out, else the ranks without a record. These were killed from outside (SIGKILL, out of memory,
    failure of their node), and the other ranks lost the connection to them.
    """
    if not attempt:
        return Verdict("it failed before its first step; the log above says why", None, Kind.error)
    found = records(run_dir, attempt["attempt"])
    causes = [one for one in found if not _kind(one).is_consequence]
    if causes:
        alike = [one for one in causes if one["error"] == causes[0]["error"]]
        first = min(alike, key=lambda one: one["rank"])  # the lowest rank represents all ranks with the same error
        return Verdict(
            f"rank {first['rank']} on {first['host']} failed first: {first['error']}", first, _kind(causes[0])
        )
    if named := _late_rank(found) or _silent_ranks(found, attempt["hosts"]):
        return named
    # All ranks only lost the connection to others: a rank that timed out takes precedence, else the earliest.
    first = next((one for one in found if _kind(one) is Kind.timeout), found[0])
    return Verdict(f"rank {first['rank']} on {first['host']} lost its peers: {first['error']}", first, _kind(first))


def _kind(failure: Mapping[str, Any]) -> Kind:
    return kind_of(failure) or Kind.error


def _late_rank(found: list[dict[str, Any]]) -> Verdict | None:
    """The rank for which other ranks timed out; None if there is none."""
    reported: set[int] = set()
    for failure in found:
        # A rank that SIGSTOP has stopped, and that continues only to be ended, reports afterwards that it has lost its peers.
        if (late := failure.get("behind")) and late["rank"] not in reported:
            reason = f"rank {late['rank']} on {late['host']} got no further than {late['at']}, and the other ranks timed out waiting for it"
            return Verdict(reason, late, Kind.timeout)
        reported.add(failure["rank"])
    return None


def _silent_ranks(found: list[dict[str, Any]], hosts: list[str]) -> Verdict | None:
    """The ranks without a record; None if there is none."""
    reported = {failure["rank"] for failure in found}
    silent = [{"rank": rank, "host": host} for rank, host in enumerate(hosts) if rank not in reported]
    if not found:
        reason = "all ranks exited without an error record (killed from outside, or by NCCL: see their logs)"
        return Verdict(reason, None, Kind.killed)
    if not silent:
        return None
    named = ", ".join(f"rank {one['rank']} on {one['host']}" for one in silent[:4])
    more = f" and {len(silent) - 4} more" if len(silent) > 4 else ""
    reason = f"{named}{more} exited without an error record (killed, out of memory, or its node is gone)"
    return Verdict(reason, silent[0], Kind.killed)
