"""Messages between nodes through a folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from recipes.core.doctor.meeting import Meeting


def test_messages_are_found_if_this_nodes_clock_is_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr("recipes.core.doctor.meeting.time.time", lambda: now + 3600)
    first, second = Meeting(tmp_path, True), Meeting(tmp_path, False)
    first.post("report-0", {"rank": 0})
    assert second.collect(["report-0"], 0) == {"report-0": {"rank": 0}}


def test_messages_of_a_killed_examination_are_ignored(tmp_path: Path) -> None:
    before = [Meeting(tmp_path, rank == 0) for rank in range(3)]
    for rank, meeting in enumerate(before):
        meeting.post(f"port-{rank}", {"port": 1})
    assert len(before[0].collect(["port-0", "port-1", "port-2"], 0)) == 3
    early = Meeting(tmp_path, False)  # the second rank comes before the first one
    early.post("port-1", {"port": 2})
    first = Meeting(tmp_path, True)
    first.post("port-0", {"port": 2})
    assert first.collect(["port-0", "port-1", "port-2"], 0) == {"port-0": {"port": 2}}
    assert early.collect(["port-0", "port-1", "port-2"], 0) == {"port-0": {"port": 2}, "port-1": {"port": 2}}
    assert first.collect(["port-1"], 0) == {"port-1": {"port": 2}}  # told again under the new name
    assert (first.tokens["port-0"], first.tokens["port-1"]) == (first.token, early.token)


def test_two_examinations_of_one_rank_in_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    one, other = Meeting(tmp_path, True), Meeting(tmp_path, True)
    one.post("final-0", {"is": "one"})
    other.post("final-0", {"is": "other"})
    assert one.collect(["final-0"], 0) == {"final-0": {"is": "one"}}
