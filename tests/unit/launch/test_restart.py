"""Which failures start the ranks of a job again, and on which nodes."""

import dataclasses
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from recipes.core import files
from recipes.core.errors import EXIT_MACHINE, ConfigError, Kind
from recipes.core.launch import restart
from recipes.core.run import attempt as attempts
from recipes.core.run import command_line, saves
from recipes.core.run.attempt import Attempt
from recipes.core.run.judge import Outcome
from recipes.core.run.spec import Spec
from tests import helpers

ENVIRON = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURM_TASKS_PER_NODE": "2(x4)",
}


def spec_of(run_dir: Path, *words: str) -> Spec:
    settings = command_line.parse(
        [f"run_dir={run_dir}", "device=cpu", *words], recipe="mnist", environ={}
    )
    return Spec(settings, (), {})


def failed(run_dir: Path, steps: Sequence[int] = (0,)) -> Attempt:
    """The newest attempt of job 7, which resumes a run. steps: at which each of its attempts has
    begun.
    """
    helpers.attempt(run_dir, launch="6.0")
    for step in steps:
        newest = helpers.attempt(run_dir, launch="7.0", step=step)
    return newest


@pytest.fixture
def bad_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The nodes that a test calls bad."""
    bad: set[str] = set()
    monkeypatch.setattr(restart, "_bad_nodes", lambda nodes, *rest: bad & set(nodes))

    def requeue(nodes: str, most: int, run_dir: Path, environ: object) -> str:
        assert run_dir == tmp_path.parent  # an attempt may be inside it, for an evaluation
        return f"requeued without {nodes} at most {most} times"

    monkeypatch.setattr(restart.examination, "requeue_without", requeue)
    return bad


def planned(run_dir: Path, *words: str, kind: Kind = Kind.killed) -> restart.Restart:
    attempt = attempts.newest(run_dir)
    assert attempt
    outcome = Outcome("failed", kind)
    return restart.plan(attempt, outcome, spec_of(run_dir, *words), run_dir.parent, ENVIRON)


@pytest.mark.parametrize("kind", list(Kind))
def test_only_a_failure_that_may_not_come_again_is_started_again(
    tmp_path: Path, bad_nodes: set[str], kind: Kind
) -> None:
    failed(tmp_path)
    never = {Kind.input, Kind.out_of_memory, Kind.disk_full, Kind.run_error, Kind.stopped}
    following = planned(tmp_path, "restarts=1", kind=kind)
    assert (following.attempt is None) == (kind in never)
    assert following.line == ("" if kind in never else "started again (restart 1 of at most 1)")


@pytest.mark.parametrize(
    ("bad", "words", "nodes", "line"),
    [
        ("", (), None, "started again (restart"),
        ("", ("spare=1",), "node1,node2,node3", "started again (restart"),
        ("node2", ("spare=1",), "node1,node3,node4", "started again without node2 ("),
        ("node2 node3", ("spare=1", "min_nodes=2"), "node1,node4", "without node2, node3 ("),
        ("node4", ("min_nodes=1",), "node1,node2,node3", "started again without node4 ("),
        ("node2", (), "", "too few nodes are left without node2; requeued without node2 at"),
        ("node2 node3", ("spare=1", "min_nodes=3"), "", "too few nodes are left"),
    ],
)
def test_a_restart_uses_good_nodes(
    tmp_path: Path,
    bad_nodes: set[str],
    bad: str,
    words: Sequence[str],
    nodes: str | None,
    line: str,
) -> None:
    failed(tmp_path)
    bad_nodes |= set(bad.split())
    following = planned(tmp_path, "restarts=3", *words)
    assert line in following.line
    assert (following.attempt is None) == (nodes == "")
    # a node that does not answer still holds the tasks of the step before
    assert ("--overlap" in following.options) == (nodes != "")
    options = dict(option.partition("=")[::2] for option in following.options)
    assert options.get("--nodelist") == (nodes or None)
    if nodes:
        count = len(nodes.split(","))
        assert options["--nodes"] == str(count)
        assert options["--ntasks"] == str(2 * count)


def test_a_node_that_was_left_out_stays_out(tmp_path: Path, bad_nodes: set[str]) -> None:
    failed(tmp_path)
    words = ("restarts=3", "min_nodes=2")
    for node, nodes in (("node2", "node1,node3,node4"), ("node3", "node1,node4")):
        bad_nodes.clear()  # the one before answers again
        bad_nodes.add(node)
        following = planned(tmp_path, *words)
        assert f"--nodelist={nodes}" in following.options
        assert f"without {node} (" in following.line
        assert following.attempt
        attempts.describe(following.attempt, "mnist", ENVIRON, ("a",))
    bad_nodes.clear()
    without = planned(tmp_path, "restarts=3").line
    line = (
        "too few nodes are left without node2,node3; requeued without node2,node3 at most 2 times"
    )
    assert without == line
    third = planned(tmp_path, *words)
    assert "--nodelist=node1,node4" in third.options
    assert "restart 3 of at most 3" in third.line


def test_a_python_that_another_user_may_have_replaced_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cleaner of /tmp may have removed its folder. Neither the doctor nor the ranks start. A node
    that does not answer is not asked.
    """
    commands: list[list[str]] = []

    def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, EXIT_MACHINE, b"")

    monkeypatch.setattr(subprocess, "run", run)
    attempt = failed(tmp_path)
    monkeypatch.setattr(restart.client, "silent_nodes", lambda nodes: {"node2"})
    spec = spec_of(tmp_path, "restarts=1", "min_nodes=2", "environment=/e.tar")
    spec = dataclasses.replace(spec, inside=("/tmp/recipes-1/environment-2/bin/python",))
    outcome = Outcome("failed", Kind.killed)
    following = restart.plan(attempt, outcome, spec, tmp_path.parent, ENVIRON)
    assert following.attempt is None
    assert "since a node no longer has the files of environment=" in following.line
    [command] = commands
    assert "--nodelist=node1,node3,node4" in command
    assert command[-2:] == ["prepare", "/tmp/recipes-1/environment-2"]


def test_restarts_end_at_their_number_and_without_progress(
    tmp_path: Path, bad_nodes: set[str]
) -> None:
    failed(tmp_path / "number", (0, 5, 9))
    line = planned(tmp_path / "number", "restarts=2").line
    assert line == "not started again, since restarts=2 is reached"
    for name, steps, is_ended in (
        ("first", (0, 0), False),
        ("gain", (0, 5, 5), False),
        ("none", (0, 5, 5, 5), True),
    ):
        failed(tmp_path / name, steps)
        following = planned(tmp_path / name, "restarts=9")
        assert (following.attempt is None) == is_ended
        assert ("made no progress" in following.line) == is_ended


def test_a_program_gains_by_the_files_that_it_saves(tmp_path: Path, bad_nodes: set[str]) -> None:
    for _ in range(3):
        attempt = attempts.open_next(tmp_path, "script", {}, (), "7.0")
        attempts.begin(attempt, 0, own=False, of_program=True)
        saves.note(attempt, "")
    assert planned(tmp_path, "restarts=9").attempt is None
    (tmp_path / "model.pt").write_text("saved")
    assert planned(tmp_path, "restarts=9").attempt


def test_without_a_verdict_of_the_doctor_only_silent_nodes_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed(tmp_path)
    monkeypatch.setattr(restart.client, "silent_nodes", lambda nodes: {"node4"})
    monkeypatch.setattr(restart.examination, "examine_nodes", lambda *of: {})
    options = planned(tmp_path, "restarts=1", "min_nodes=1").options
    assert "--nodelist=node1,node2,node3" in options


@pytest.mark.parametrize("word", ["spare=1", "min_nodes=1"])
def test_spare_nodes_and_fewer_nodes_without_restarts_are_refused(
    tmp_path: Path, word: str
) -> None:
    line = rf"^{word}: is used only by a restart: give restarts=1 or more$"
    with pytest.raises(ConfigError, match=line):
        spec_of(tmp_path, word)


def test_spare_nodes_must_be_there(tmp_path: Path) -> None:
    options = restart.first_nodes(spec_of(tmp_path, "restarts=1", "spare=1"), ENVIRON)
    assert options == ["--nodes=3", "--ntasks=6", "--nodelist=node1,node2,node3"]
    assert restart.first_nodes(spec_of(tmp_path), ENVIRON) == []
    with pytest.raises(ConfigError, match=r"^spare=4: the job has only 4 nodes: request more$"):
        restart.first_nodes(spec_of(tmp_path, "restarts=1", "spare=4"), ENVIRON)
    uneven = {**ENVIRON, "SLURM_TASKS_PER_NODE": "2(x3),1"}
    with pytest.raises(ConfigError, match="the same number of ranks on each node"):
        restart.first_nodes(spec_of(tmp_path, "restarts=1", "spare=1"), uneven)


def test_nodes_are_asked_only_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = failed(tmp_path)
    monkeypatch.setattr(restart.client, "silent_nodes", lambda nodes: set())
    attempts.record(attempt, rank=0, host="a", kind=Kind.stopped, error="SIGTERM", moment=1.0)
    with helpers.start(["sleep", "1"]) as srun:
        restart.watch(attempt, srun.pid, ENVIRON)
    assert not (attempt.folder / restart.SILENT).exists()


def test_the_watcher_gives_srun_time_if_all_nodes_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = failed(tmp_path)
    monkeypatch.setattr(restart, "WATCH_S", 0.02)
    monkeypatch.setattr(restart, "SILENT_LAG_S", 0.0)
    monkeypatch.setattr(restart.client, "silent_nodes", lambda nodes: set())
    monkeypatch.setattr(restart.client, "kill_steps", lambda job_id: pytest.fail("kill_steps"))
    attempts.record(attempt, rank=0, host="a", kind=Kind.error, error="x", moment=1.0)
    with helpers.start(["sleep", "0.3"]) as srun:
        restart.watch(attempt, srun.pid, ENVIRON)
        assert srun.wait(5) == 0


def test_the_watcher_ends_a_step_whose_srun_waits_for_a_node_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = failed(tmp_path)
    files.write_json(attempt.folder / attempts.RESTART, {"excluded": ["node3"]})
    killed: list[str] = []
    monkeypatch.setattr(restart.client, "kill_steps", killed.append)
    asked: list[list[str]] = []
    silent = {"node2"}
    monkeypatch.setattr(
        restart.client, "silent_nodes", lambda nodes: (asked.append(list(nodes)), silent)[1]
    )
    for is_ending, status in ((True, 0), (False, -9)):
        attempts.record(
            attempt,
            rank=0,
            host="a",
            kind=Kind.timeout,
            error="x",
            moment=1.0,
            is_ending=is_ending,
        )
        with helpers.start(["sleep", "2" if is_ending else "60"]) as srun:
            restart.watch(attempt, srun.pid, ENVIRON)
            assert srun.wait(5) == status
    assert killed == ["7"]
    assert asked == [["node1", "node2", "node4"]] * 2
    # the restart does not ask again
    examined: list[list[str]] = []

    def examine(
        spec: Spec, folder: Path, nodes: list[str], environ: object
    ) -> dict[str, list[str]]:
        examined.append(nodes)
        return {"exclude": ["node4"]}

    monkeypatch.setattr(restart.examination, "examine_nodes", examine)
    line = planned(tmp_path, "restarts=1", "min_nodes=1").line
    assert line.startswith("started again without node2, node4 (")
    assert examined == [["node1", "node4"]]
    assert len(asked) == 2
