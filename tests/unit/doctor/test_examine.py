"""The parts of an examination: its reports, who measures bandwidth, who judges, and two nodes as
threads.
"""

import json
import os
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
    _measure,
    _members,
    _probe_peers,
    _stand_by,
    give_verdict,
    run,
)
from recipes.core.doctor.probes import Surroundings
from recipes.core.doctor.reports import Reports, Stage
from recipes.core.errors import Kind
from recipes.core.place import ranks
from recipes.core.run import attempt as attempts
from recipes.core.run import judge
from tests import helpers

BROKEN = {
    "what": "GPU 3 returns a wrong matrix product",
    "fix": "drain it",
    "bad": True,
    "leave_out": True,
}


def place(rank: int, size: int = 2) -> ranks.RankInfo:
    environ = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }
    return ranks.detect({name: str(value) for name, value in environ.items()})


def report(node: int, gpus: int = 0, **changes: Any) -> dict[str, Any]:
    facts = {"gpus": [{"correct": True}] * gpus}
    return {
        "host": f"node{node}",
        "facts": facts,
        "findings": [],
        "links": [],
        "stage": Stage.examined,
        **changes,
    }


def written(folder: Path, stage: Stage, *reports: dict[str, Any]) -> None:
    for contents in reports:
        Reports(folder, int(contents["host"].removeprefix("node"))).write(contents, stage)


def test_reports_are_read_again_after_each_stage(tmp_path: Path) -> None:
    first = Reports(tmp_path / "reports", 0)
    second = Reports(tmp_path / "reports", 1)
    assert second.collect([0, 1], Stage.listening, 0) == {}
    first.write({"port": 1}, Stage.listening)
    second.write({"port": 2}, Stage.listening)
    assert set(first.collect([0, 1], Stage.listening, time.monotonic() + 60)) == {0, 1}
    timer = threading.Timer(0.5, first.write, [{"port": 3}, Stage.final])
    timer.start()
    assert second.collect([0], Stage.final, time.monotonic() + 60)[0]["port"] == 3
    assert not second.are_judged()
    Reports(tmp_path / "reports").remove()
    assert second.are_judged()


def test_a_report_that_is_written_twice_in_a_second_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of files may be in whole seconds."""
    path = tmp_path / "0.json"

    def write(stage: Stage) -> None:
        Reports(tmp_path, 0).write({}, stage)
        os.utime(path, (7, 7))

    write(Stage.examined)
    monkeypatch.setattr(time, "sleep", lambda seconds: write(Stage.final))
    reports = Reports(tmp_path).collect([0], Stage.final, time.monotonic() + 2)
    assert reports[0]["stage"] == Stage.final


def test_an_invalid_report_counts_as_missing(tmp_path: Path) -> None:
    reports = Reports(tmp_path, 0)
    reports.write({}, Stage.listening)
    (tmp_path / "1.json").write_text("{")
    assert set(reports.collect(range(2), Stage.listening, 0)) == {0}


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([report(node) for node in range(4)], [0, 1, 2, 3]),
        ([report(0), report(1), report(2, findings=[BROKEN]), report(3)], [0, 1, 3]),
        ([report(0), report(1), report(2, stage=Stage.listening), report(3)], [0, 1, 3]),
        (
            [report(0, findings=[BROKEN]), report(1), report(2), report(3)],
            [],
        ),  # the first one has the store
        ([report(0)], []),
    ],
)
def test_nodes_that_answered_and_are_good_measure_bandwidth(
    reports: list[dict[str, Any]], expected: list[int]
) -> None:
    by_node = dict(enumerate(reports))
    chosen = _members(by_node, place(0, 4), 4711)
    assert chosen["nodes"] == expected
    assert chosen["port"] == 4711


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ((2, 3), ("nccl", 2)),
        ((2, 0), ("gloo", 1)),
        ((0, 0), ("gloo", 1)),
    ],
)
def test_nccl_is_measured_with_the_gpus_that_each_node_has(
    gpus: tuple[int, int], expected: tuple[str, int]
) -> None:
    members = _members({node: report(node, count) for node, count in enumerate(gpus)}, place(0), 1)
    assert (members["backend"], members["gpus"]) == expected


@pytest.mark.parametrize(
    ("gpus", "status", "exclude"),
    [
        ((8, 8, 8), 0, []),
        ((8, 8, 7), 3, ["node2"]),
        ((7, 8, 8), 3, ["node0"]),
    ],
)
def test_the_status_says_whether_a_node_is_bad_and_doctor_json_which(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    gpus: tuple[int, ...],
    status: int,
    exclude: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = helpers.attempt(tmp_path, hosts=(), step=None)  # by the batch script of recipe=doctor
    monkeypatch.setenv(attempts.VARIABLE, str(opened.folder))
    reports = [report(node, seen, findings=[BROKEN] * (seen < 8)) for node, seen in enumerate(gpus)]
    written(tmp_path / "reports", Stage.final, *reports)
    assert give_verdict(Reports(tmp_path / "reports"), [""] * 3, tmp_path, 0) == status
    verdict = helpers.read(tmp_path, "doctor")
    hosts = ["node0", "node1", "node2"]
    assert verdict["exclude"] == exclude
    assert verdict["healthy"] == (not status)
    assert verdict["hosts"] == hosts
    last = "healthy: 3 nodes"
    if status:
        last = f"bad nodes: 1 of 3; to exclude: sbatch --exclude={exclude[0]}"
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert not (tmp_path / "reports").exists()
    judged = judge.judge(opened, judge.End(status))
    assert judged.state == ("failed" if status else "done")
    assert judged.kind is (Kind.machine if status else None)
    assert judged.exit_status == status
    assert judged.line == (BROKEN["what"] if status else "")


def test_a_node_without_a_final_report_is_judged_by_its_first_or_named_as_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "reports"
    ended = list[str]()
    training = helpers.attempt(tmp_path / "training", step=None)  # with doctor=true
    monkeypatch.setenv(attempts.VARIABLE, str(training.folder))
    monkeypatch.setattr("recipes.core.doctor.examine.LEAVE_S", 0.0)
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **_: ended.append(argv[-1]))
    assert give_verdict(Reports(folder), [""] * 4, tmp_path, 0) == 3
    assert not (tmp_path / "doctor.json").exists()  # without any report there is no verdict
    written(folder, Stage.final, report(0), report(1))
    written(folder, Stage.examined, report(2))
    written(folder, Stage.listening, report(3))
    assert give_verdict(Reports(folder), [""] * 4, tmp_path, 0) == 3
    verdict = helpers.read(tmp_path, "doctor")
    second, third = [entry for entry in verdict["entries"] if entry["bad"]]
    assert second["nodes"] == [2]
    assert second["what"].startswith("answered at first, ")
    assert third["nodes"] == [3]
    assert third["what"].startswith("did not answer: it ")
    assert verdict["exclude"] == ["node2"]  # the name of the other one is unknown
    assert ended == ["7.7"]  # srun would wait for the other one
    assert attempts.records(training) == []  # its batch script decides


def test_two_nodes_measure_and_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes as threads; the processes that would import torch answer at once."""
    ask = commands.run
    measured: list[dict[str, Any]] = []

    def quick(
        command: Sequence[str],
        timeout_s: float,
        environ: Mapping[str, str] | None = None,
        *more: Any,
    ) -> tuple[str, str]:
        if "recipes.core.doctor.linkcheck" in command:
            test = json.loads(command[-1])
            measured.append(test)
            # not those of another start
            assert [path.name for path in (tmp_path / "reports").iterdir()] == ["now-0"]
            assert environ["GLOO_SOCKET_IFNAME"] == "lo"
            pair = [{"pair": [0, 1, 0, 5.0]}] if test["rank"] == 0 else []
            words = [
                {"at": "an all_reduce", "busbw": 7.0, "correct": True},
                *pair,
                {"at": "the end", "ended": True},
            ]
            return "\n".join(map(json.dumps, words)), ""
        if "versions" in command:
            return '{"torch": "2.15.0", "nccl": null}', ""
        return ask(command, timeout_s)

    monkeypatch.setattr(probes, "CHECKS", {name: probes.CHECKS[name] for name in ("torch",)})
    monkeypatch.setattr(commands, "run", quick)
    lo = SimpleNamespace(address="127.0.0.1", interface="lo")
    fake = SimpleNamespace(gethostname=lambda: threading.current_thread().name)
    monkeypatch.setattr("recipes.core.doctor.examine.socket", fake)
    monkeypatch.setattr("recipes.core.doctor.examine._interface", lambda info: lo)
    codes: dict[int, int] = {}

    def examined(rank: int) -> None:
        codes[rank] = run(Surroundings(os.environ, place(rank), tmp_path, on_cpu=True), 60)

    threads = [
        threading.Thread(target=examined, args=(rank,), name=f"node{rank}") for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert codes == {0: 0, 1: 0}
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "all_reduce busbw 7 GB/s; pairs of nodes, median 5 GB/s",
        "healthy: 2 nodes",
    ]
    assert [row["torch"] for row in helpers.read(tmp_path, "doctor")["table"]] == ["2.15.0"] * 2
    assert list(tmp_path.glob("reports/*")) == []
    first, second = sorted(measured, key=lambda test: test["rank"])
    assert first["rank"] == 0
    assert second["rank"] == 1
    assert first["nodes"] == second["nodes"] == [0, 1]
    assert first["port"] == second["port"]


def test_without_bandwidths_a_node_still_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers their probes until they have all ended."""
    monkeypatch.setattr(probes, "CHECKS", {"variables": lambda here, facts: ()})
    monkeypatch.setattr("recipes.core.doctor.examine._measure", lambda *arguments: 1 / 0)
    monkeypatch.setattr(
        "recipes.core.doctor.examine._probe_peers",
        lambda reports, info, *rest: time.sleep(info.node_rank) or [],
    )
    ended: dict[int, float] = {}

    def examined(rank: int) -> None:
        here = Surroundings(os.environ, place(rank), tmp_path, on_cpu=True)
        assert run(here, 60, judge_later=True, bandwidth=False) == 0
        ended[rank] = time.monotonic()

    began = time.monotonic()
    threads = [threading.Thread(target=examined, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert min(ended.values()) - began >= 1.0


def test_only_the_first_rank_of_a_node_examines_it(tmp_path: Path) -> None:
    info = replace(place(1), local_rank=1, node_rank=0)
    assert run(Surroundings(os.environ, info, tmp_path), 60) == 0
    assert list(tmp_path.iterdir()) == []


def test_if_node_0_hangs_the_next_one_gives_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "reports"
    written(folder, Stage.listening, report(0))
    written(folder, Stage.final, report(1), report(2))
    assert _stand_by(Reports(folder, 2), place(2, 3), tmp_path, 0, time.monotonic() + 0.5) == 0
    assert capsys.readouterr().out == ""
    assert _stand_by(Reports(folder, 1), place(1, 3), tmp_path, 0, time.monotonic() + 0.5) == 3
    assert "BAD   node 0: did not answer: it hangs" in capsys.readouterr().out
    assert helpers.read(tmp_path, "doctor")["healthy"] is False


def test_each_node_probes_some_others_at_their_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def probe(host: str, port: int, timeout_s: float) -> tuple[str, str]:
        asked.append((host, port))
        return "", ""

    monkeypatch.setattr(reach, "probe", probe)
    Reports(tmp_path, 0).write({"port": 100, "address": "a"}, Stage.listening)
    Reports(tmp_path, 3).write({"port": 103, "address": "d"}, Stage.listening)
    info = place(2, 6)
    end = time.monotonic() + 5
    links = _probe_peers(Reports(tmp_path, 2), info, end, 2)  # node 5 has written nothing
    assert sorted(asked) == [("127.0.0.1", 100), ("d", 103)]
    assert sorted((link["peer"], link["fault"]) for link in links) == [(0, ""), (3, "")]
    asked.clear()
    named = replace(info, nodes=tuple(f"n{node}" for node in range(6)))
    _probe_peers(Reports(tmp_path, 2), named, end, 2)
    assert ("n3", 103) in asked  # Slurm's names take precedence
    monkeypatch.setattr(reach, "probe", lambda *_: time.sleep(3))  # as a resolver that hangs
    links = _probe_peers(Reports(tmp_path, 2), info, time.monotonic() + 0.5, 2)
    assert [(link["fault"], link["why"]) for link in links] == [("connect", "timed out")] * 2


def test_the_bandwidth_test_runs_among_its_members_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def ask(
        command: Sequence[str],
        timeout_s: float,
        environ: Mapping[str, str],
        descriptors: Sequence[int],
    ) -> tuple[str, str]:
        asked.append((json.loads(command[-1]), descriptors))
        out = [{"at": "an all_reduce", "busbw": 40.0, "correct": True}, {"pair": [3, 5, 0, 5.0]}]
        for busbw, correct in ((30.0, False), (50.0, True)):
            out.append({"at": "an all_reduce", "busbw": busbw, "correct": correct})
        return 'noise\n5\n[]\n"text"\n' + "\n".join(map(json.dumps, out)), "killed"

    monkeypatch.setattr(commands, "run", ask)
    members = {"nodes": [0, 3, 5], "port": 99, "backend": "nccl", "gpus": 4}
    figures = _measure(members, replace(place(3, 6), master_addr="n0"), 7, time.monotonic() + 30)
    assert figures == {
        "at": "an all_reduce",
        "busbw": 30.0,
        "correct": False,
        "pairs": [[3, 5, 0, 5.0]],
        "error": "killed",
    }
    test = {**members, "rank": 1, "host": "n0", "listener": 7, "timeout_s": 30}
    assert asked == [(test, (7,))]
    assert _measure(members, place(4, 6), None, 0) == {}
    assert _measure({}, place(3, 6), None, 0) == {}
