"""The parts of an examination: who measures bandwidth, who judges, and two nodes as threads."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.core.doctor import commands, probes, reach
from recipes.core.doctor.examine import (
    Plan,
    _end_step,
    _give_verdict,
    _go,
    _listen,
    _measure,
    _members,
    _probe_peers,
    _stand_by,
    run,
)
from recipes.core.doctor.meeting import Meeting
from recipes.core.doctor.node import Finding, Surroundings
from recipes.core.place import ranks
from tests import helpers


@pytest.mark.parametrize(
    ("step", "ended"),
    [("3", ["7.3"]), ("-5", []), ("-6", []), ("4294967290", []), ("", [])],  # the doctor's own step; Slurm 26.05; 22.05
)
def test_only_a_step_of_srun_is_ended(monkeypatch: pytest.MonkeyPatch, step: str, ended: list[str]) -> None:
    """Not the batch script, nor the shell that salloc has started."""
    started: list[str] = []
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **_: started.append(argv[-1]))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    if step:
        monkeypatch.setenv("SLURM_STEP_ID", step)
    _end_step()
    assert started == ended


def test_go_counts_for_ranks_whose_reports_were_read(tmp_path: Path) -> None:
    """A rank that comes before the first one finds an older examination's, with a port at which nobody listens any more."""
    rank = ranks.detect(
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    )
    first, early = Meeting(tmp_path, True), Meeting(tmp_path, False)
    first.post("go", {"ranks": [0, 1], "tokens": {"0": first.token, "1": "another's"}})
    assert _go(early, rank, time.monotonic()) == {}
    os.utime(tmp_path / "go.json", (0, time.time() - 60))
    began = time.monotonic()
    assert _go(early, rank, began + 0.2) == {}
    assert time.monotonic() > began + 0.2  # the right one may come yet
    now = {"ranks": [0, 1], "tokens": {"0": first.token, "1": early.token}}
    first.post("go", now)
    assert _go(early, rank, time.monotonic()) == now


def place(rank: int, size: int = 2, each: int = 1) -> ranks.RankInfo:
    environ = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1,
    }  # fmt: skip
    return ranks.detect({name: str(value) for name, value in environ.items()})


def report(rank: int, each: int = 1, gpus: int | None = None, **changes: Any) -> dict[str, Any]:
    facts = {
        "gpus": {"granted": gpus or 0, "ranks": each} | ({} if gpus is None else {"gpus": [{"correct": True}] * gpus})
    }
    node = rank // each
    return {
        "rank": rank, "node_rank": node, "local_rank": rank % each, "local_world_size": each, "host": f"node{node}", "facts": facts,
        "findings": [], "links": [], **changes,
    }  # fmt: skip


BROKEN = {"what": "GPU 3 computes a matrix product wrongly", "fix": "drain it", "bad": True}


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([report(rank) for rank in range(4)], [0, 1, 2, 3]),
        ([report(0), report(1), report(2, findings=[BROKEN]), report(3)], [0, 1, 3]),
        ([report(0), report(1), report(3)], [0, 1, 3]),  # node 2 has not answered
        ([report(0, findings=[BROKEN]), report(1), report(2), report(3)], []),  # the first one has the store
        ([report(0)], []),
    ],
)
def test_the_nodes_that_answered_and_are_not_bad_measure_bandwidth(
    tmp_path: Path, reports: list[dict[str, Any]], expected: list[int]
) -> None:
    meeting = Meeting(tmp_path, True)
    for one in reports:
        meeting.post(f"report-{one['rank']}", one)
    told = _members(meeting, place(0, 4), Plan(tmp_path), 4711, 0)
    assert (told["ranks"], told["nodes"], told["port"]) == (expected, expected, 4711)
    assert set(told["tokens"]) == {str(one["rank"]) for one in reports}
    assert _members(meeting, place(0, 4), Plan(tmp_path, bandwidth=False), 4711, 0)["ranks"] == []


@pytest.mark.parametrize(
    ("gpus", "backend"), [((2, 2), "nccl"), ((2, 1), "gloo"), ((0, 0), "gloo"), ((2, None), "gloo"), ((1, 2), "gloo")]
)
def test_nccl_is_measured_where_each_rank_has_a_gpu(
    tmp_path: Path, gpus: tuple[int | None, int | None], backend: str
) -> None:
    meeting = Meeting(tmp_path, True)
    for rank in range(4):
        node = rank // 2
        meeting.post(f"report-{rank}", report(rank, 2, gpus[node] if rank % 2 == 0 else None))
    told = _members(meeting, place(0, 4, 2), Plan(tmp_path), 1, 0)
    assert (told["ranks"], told["nodes"], told["backend"]) == ([0, 1, 2, 3], [0, 0, 1, 1], backend)


@pytest.mark.parametrize(
    ("gpus", "status", "exclude"), [((8, 8, 8), 0, []), ((8, 8, 7), 3, ["node2"]), ((7, 8, 8), 3, ["node0"])]
)
def test_the_status_says_whether_a_node_is_bad_and_doctor_json_which(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[int, ...],
    status: int,
    exclude: list[str],
) -> None:
    monkeypatch.setattr("recipes.core.doctor.examine.LEAVE_S", 0.0)
    meeting = Meeting(tmp_path / "reports", True)
    for rank, seen in enumerate(gpus):
        few = {"what": f"Slurm granted 8 GPUs and torch sees {seen}", "fix": "nvidia-smi -L", "bad": True}
        meeting.post(f"final-{rank}", report(rank, gpus=seen, findings=[few] * (seen < 8)))
    assert _give_verdict(meeting, place(0, 3), Plan(tmp_path), 0) == status
    written = helpers.read(tmp_path, "doctor")
    assert (written["exclude"], written["healthy"], written["hosts"]) == (
        exclude,
        not status,
        ["node0", "node1", "node2"],
    )
    last = "healthy: 3 nodes" if not status else f"1 of 3 nodes bad: sbatch --exclude={exclude[0]} leaves them out"
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert not (tmp_path / "reports").exists()


def test_a_node_that_gave_no_last_report_is_judged_by_its_first_or_named_as_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.core.doctor.examine.LEAVE_S", 0.0)
    meeting = Meeting(tmp_path / "reports", True)
    for rank in (0, 1):
        meeting.post(f"final-{rank}", report(rank))
    meeting.post("report-2", report(2))
    meeting.post("report-0", report(0, findings=[BROKEN]))  # the last word counts
    assert _give_verdict(meeting, place(0, 4), Plan(tmp_path, as_json=True), 0) == 3
    found = json.loads(capsys.readouterr().out)
    assert [(entry["nodes"], entry["what"][:19]) for entry in found["entries"] if entry["bad"]] == [
        ([2], "answered at first, "), ([3], "did not answer: it "),
    ]  # fmt: skip
    assert found["exclude"] == ["node2"]  # of the other one not even the name is known


@pytest.mark.parametrize("broken", [None, 1])
def test_two_nodes_meet_measure_and_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, broken: int | None
) -> None:
    """Two nodes as threads; the processes that would import torch answer at once."""
    ask = commands.run
    measured: list[dict[str, str]] = []

    def quick(
        command: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None, *more: Any
    ) -> tuple[str, str]:
        if "recipes.core.doctor.linkcheck" in command:
            assert environ
            measured.append(dict(environ))
            pair = [{"pair": [0, 1, 5.0]}] if environ["RANK"] == "0" else []
            words = [{"at": "an all_reduce", "busbw": 7.0, "correct": True}, *pair, {"at": "the end", "ended": True}]
            return "\n".join(map(json.dumps, words)), ""
        return ('{"torch": "2.15.0"}', "") if "versions" in command else ask(command, timeout_s)

    def gpus(here: Surroundings) -> tuple[dict[str, Any], list[Finding]]:
        few = Finding("Slurm granted 8 GPUs and torch sees 7", "nvidia-smi -L")
        return {"ranks": 1}, [few] if here.info.rank == broken else []

    checks = {name: probes.CHECKS[name] for name in ("system", "torch", "cpus", "disks")}
    monkeypatch.setattr(probes, "CHECKS", {**checks, "gpus": gpus})
    monkeypatch.setattr(commands, "run", quick)
    monkeypatch.setattr(probes, "socket", SimpleNamespace(gethostname=lambda: threading.current_thread().name))
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    plan = Plan(tmp_path, 60, on_cpu=True)
    codes: dict[int, int] = {}
    port = helpers.free_port()

    def examined(rank: int) -> None:
        codes[rank] = run(plan, replace(place(rank), master_port=port))

    threads = [threading.Thread(target=examined, args=(rank,), name=f"node{rank}") for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    lines = capsys.readouterr().out.splitlines()
    found = helpers.read(tmp_path, "doctor")
    assert found["hosts"] == ["node0", "node1"]
    assert [row["torch"] for row in found["table"]] == ["2.15.0"] * 2
    assert all(row["trip"].endswith(" us") for row in found["table"])  # each has asked the other
    assert list((tmp_path / "reports").iterdir()) == []
    if broken is None:
        assert codes == {0: 0, 1: 0}
        assert lines[-2:] == ["all_reduce busbw 7 GB/s; pairs of nodes, median 5 GB/s", "healthy: 2 nodes"]
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODES")
        there = [tuple(one[name] for name in names) for one in measured]
        assert sorted(there) == [("0", "2", "0", "[0, 1]"), ("1", "2", "0", "[0, 1]")]
        assert len({one["MASTER_PORT"] for one in measured}) == 1
    else:
        assert codes == {0: 3, 1: 0}  # one of them gives the status
        assert "BAD   node1: Slurm granted 8 GPUs and torch sees 7: nvidia-smi -L" in lines
        assert lines[-1] == "1 of 2 nodes bad: sbatch --exclude=node1 leaves them out"
        assert (found["exclude"], measured) == (["node1"], [])


def test_a_master_port_that_is_taken_is_the_first_nodes_fault(tmp_path: Path) -> None:
    server = reach.Server(0, "nonce")
    try:
        with reach.listener(0) as taken:
            port = taken.getsockname()[1]
            word, (found,) = _listen(server, replace(place(0), master_port=port))
            assert (word["master"], found.bad, found.leave_out) == (False, True, True)
            assert found.what == f"port {port}, at which the ranks meet, cannot be listened on (Address already in use)"
            assert _listen(server, replace(place(1), master_port=port))[1] == []  # the first one alone listens there
        word, found_now = _listen(server, replace(place(0), master_port=port))
        assert (word["master"], found_now) == (True, [])
        link = reach.probe(0, "127.0.0.1", word["port"], "nonce", 5, port)
        assert link.fault == ""
    finally:
        server.close()


def test_if_rank_0_hangs_the_next_rank_gives_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.core.doctor.examine.LEAVE_S", 0.0)
    one, two = (Meeting(tmp_path / "reports", False) for _ in range(2))
    one.post("final-1", report(1))
    two.post("final-2", report(2))
    assert _stand_by(two, place(2, 3), Plan(tmp_path), 0, 0) == 0
    assert capsys.readouterr().out == ""
    assert _stand_by(one, place(1, 3), Plan(tmp_path), 0, 0) == 3
    assert "BAD   node 0: did not answer: it hangs" in capsys.readouterr().out
    assert helpers.read(tmp_path, "doctor")["healthy"] is False


def test_each_node_probes_some_others_at_their_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def probe(peer: int, host: str, port: int, nonce: str, timeout_s: float, master_port: int = 0) -> reach.Link:
        asked.append((peer, host, port, nonce, master_port))
        return reach.Link(peer)

    monkeypatch.setattr(reach, "probe", probe)
    meeting = Meeting(tmp_path, True)
    meeting.post("port-0", {"port": 100, "host": "a", "master": True})
    meeting.post("port-3", {"port": 103, "host": "d", "master": False})
    info = replace(place(2, 6), master_port=29)
    links = _probe_peers(meeting, info, "nonce", 0, 0.1)
    assert sorted(asked) == [(0, "127.0.0.1", 100, "nonce", 29), (3, "d", 103, "nonce", 0)]
    assert [(link["peer"], link["fault"]) for link in links] == [(0, ""), (3, ""), (5, "silent")]
    asked.clear()
    _probe_peers(meeting, replace(info, nodes=("n0", "n1", "n2", "n3", "n4", "n5")), "nonce", 0, 0.1)
    assert sorted(asked) == [
        (0, "127.0.0.1", 100, "nonce", 29),
        (3, "n3", 103, "nonce", 0),
    ]  # Slurm's names, where it has given some


def test_the_bandwidth_test_runs_among_its_members_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0, 2, 3 and 5 of three nodes of two; this is rank 3."""
    asked: list[tuple[Any, ...]] = []

    def ask(
        command: Sequence[str], timeout_s: float, environ: Mapping[str, str], descriptors: Sequence[int]
    ) -> tuple[str, str]:
        asked.append(
            (
                command[-3:-1],
                {name: environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODES", "MASTER_PORT")},
            )
        )
        out = [{"at": "an all_reduce", "busbw": 40.0, "correct": True}, {"pair": [1, 2, 5.0]}, {"pair": [1, 0, 6.0]}]
        return "noise\n" + "\n".join(map(json.dumps, out)), "killed"

    monkeypatch.setattr(commands, "run", ask)
    info = place(3, 6, 2)
    first, mine = Meeting(tmp_path, True), Meeting(tmp_path, False)
    tokens = {"3": mine.token, "4": "x"}
    first.post("go", {"ranks": [0, 2, 3, 5], "nodes": [0, 1, 1, 2], "port": 99, "backend": "gloo", "tokens": tokens})
    found = _measure(mine, info, -1, time.monotonic() + 20, time.monotonic() + 30)
    assert found == {
        "at": "an all_reduce", "busbw": 40.0, "correct": True, "pairs": [[1, 2, 5.0], [1, 0, 6.0]], "error": "killed",
    }  # fmt: skip
    place_there = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODES": "[0, 1, 1, 2]", "MASTER_PORT": "99"}
    assert asked == [(["gloo", "-1"], place_there)]
    left_out = Meeting(tmp_path, False)
    first.post(
        "go",
        {"ranks": [0, 2, 3, 5], "nodes": [0, 1, 1, 2], "port": 99, "backend": "gloo", "tokens": {"4": left_out.token}},
    )
    assert _measure(left_out, place(4, 6, 2), -1, time.monotonic(), time.monotonic()) == {}


def test_a_rank_may_end_after_the_folder_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it does as soon as it sees the last one's word, before that one has made sure that it is on the disk."""
    rank = ranks.detect(
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    )
    first, second = Meeting(tmp_path / "reports", True), Meeting(tmp_path / "reports", False)
    first.post("verdict", {"healthy": True})
    rename = os.replace

    def seen(source: Path, target: Path) -> None:
        rename(source, target)
        shutil.rmtree(target.parent)

    monkeypatch.setattr(os, "replace", seen)
    assert _stand_by(second, rank, Plan(tmp_path), time.monotonic() + 1, time.monotonic() + 1) == 0
    assert not (tmp_path / "reports").exists()
