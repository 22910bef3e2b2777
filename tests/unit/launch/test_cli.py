"""The commands of launch.py, from the command line to the exit status, with stubs for Slurm."""

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import launch
from recipes import report
from recipes.core import errors
from recipes.core.errors import MachineError
from recipes.core.launch import bad_nodes, checks, cli, local, submit
from recipes.core.run import command_line
from recipes.core.run.dryrun import Found
from tests import helpers
from tests.unit.launch.stand_ins import Stubs


def test_a_submission_takes_a_snapshot_and_prints_its_paths(
    tmp_path: Path,
    stubs: Stubs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/toy.py").write_text("as submitted")
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    stubs.add("sbatch", "env > $NOTES/env; echo Submitted batch job 7")
    stubs.add("sinfo", "echo n1")
    stubs.add("scontrol", "[ $SLURM_CLUSTERS = far ] && echo JobId=7 JobState=FAILED ExitCode=3:0")
    monkeypatch.setenv("SLURM_NTASKS", "9")  # launch.py runs in another allocation
    monkeypatch.setenv("SBATCH_CLUSTERS", "far")
    monkeypatch.setenv("RECIPES_DATA", "other")
    # so that what launch.py sets is undone at the end of the test
    monkeypatch.setenv("SLURM_CLUSTERS", "x")
    monkeypatch.delenv("SLURM_CLUSTERS")
    words = ["recipe=mnist", "data_dir=d", "epochs=1", "umask=027"]
    assert launch.main(words) == 0
    assert "SLURM_NTASKS" not in (tmp_path / "env").read_text()
    assert (tmp_path / "runs/mnist/7/job.yaml").stat().st_mode & 0o777 == 0o640
    output = capsys.readouterr().out.splitlines()
    log = f"{tmp_path}/runs/submitit/7_0_log.out"
    assert output == [
        "job 7: submitted",
        f"run directory: {tmp_path}/runs/mnist/7",
        f"log: tail -F {log}",
    ]
    [copy] = (tmp_path / "runs/code").iterdir()
    assert (copy / "recipes/toy.py").read_text() == "as submitted"
    described = json.loads((tmp_path / "runs/mnist/7/job.yaml").read_text())
    assert described["arguments"] == [f"data_dir={tmp_path}/here/d", *words[2:]]
    assert described["code"] == str(copy)
    assert described["variables"]["RECIPES_DATA"] == f"{tmp_path}/here/other"
    script = tmp_path / "runs/mnist/7/job.sh"
    assert "--exclude" not in script.read_text()
    exported = {f"export RECIPES_CODE={copy}", f"export RECIPES_PYTHON={sys.executable}"}
    assert {*exported, f". {copy}/sbatch/job.sh || exit"} <= set(script.read_text().splitlines())
    bad_nodes.remember(tmp_path, "", ["n1"])
    assert launch.main([*words, "wait=true", "snapshot=false"]) == 3
    assert str(copy) not in script.read_text()
    assert "#SBATCH --exclude=n1\n" in script.read_text()
    assert launch.main([*words, "forget=n1"]) == 0
    assert bad_nodes.known(tmp_path, "") == {}
    assert "--exclude" not in script.read_text()
    assert launch.main([*words, "sweep.lr=0.1,0.2", "wait=true"]) == 3
    output = capsys.readouterr().out.splitlines()
    assert {"job 7: submitted", "7_0: lr=0.1", "7_1: lr=0.2"} <= set(output)
    monkeypatch.setattr(submit, "wait", lambda *arguments: signal.raise_signal(signal.SIGINT))
    assert launch.main([*words, "wait=true"]) == 130
    assert "job 7 continues; cancel it with: scancel 7" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_prints_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a new recipe in an administrator's clone."""
    monkeypatch.setattr(cli.new, "new", lambda *words: (tmp_path / "no/mine.py").write_text(""))
    assert cli.main(["new", "mine"], sys.executable) == errors.EXIT_MACHINE
    line = f"launch.py: [Errno 2] No such file or directory: '{tmp_path}/no/mine.py'\n"
    assert capsys.readouterr().err == line


def test_commands_on_runs_ask_the_cluster_to_which_jobs_are_submitted(
    tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "runs/mnist/7"
    run_dir.mkdir(parents=True)
    (run_dir / "job.yaml").write_text('{"job_id": "7"}')
    monkeypatch.setenv("SBATCH_CLUSTERS", "far")
    monkeypatch.setenv("SLURM_CLUSTERS", "x")
    monkeypatch.delenv("SLURM_CLUSTERS")
    stubs.add("squeue", 'echo "$SLURM_CLUSTERS" > "$NOTES/asked"')
    assert launch.main(["runs", str(run_dir)]) == 0
    assert (tmp_path / "asked").read_text() == "far\n"


def test_a_job_whose_data_is_missing_is_not_submitted(
    tmp_path: Path,
    stubs: Stubs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stubs.add("sbatch", "echo Submitted batch job 7")
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    for folder in ("empty", "runs"):
        (tmp_path / folder).mkdir()
    empty = f"{tmp_path}/empty"
    elsewhere = f"{tmp_path}/elsewhere"
    for data, words, named in (
        ("", ["recipe=mnist"], f"data_dir='{tmp_path}/data' lacks train-images-idx3-ubyte, "),
        (empty, ["recipe=cifar"], f"data_dir='{empty}' lacks train-images-idx4-ubyte, "),
        (
            "",
            ["recipe=imagenet", f"data_dir={empty}"],
            f"data_dir='{empty}' has neither train/<class>/*.JPEG",
        ),
    ):
        monkeypatch.setenv("RECIPES_DATA", data)
        assert launch.main(words) == errors.EXIT_CONFIG
        assert capsys.readouterr().err.startswith(f"launch.py: {named}")
    assert stubs.calls("sbatch") == []
    for data, words, named in (
        ("", [f"data_dir={elsewhere}"], "data_dir"),
        (elsewhere, [], "RECIPES_DATA"),
    ):
        monkeypatch.setenv("RECIPES_DATA", data)
        assert launch.main(["recipe=imagenet", "snapshot=false", *words]) == 0
        line = f"launch.py: {named}={elsewhere} does not exist on this machine"
        assert line in capsys.readouterr().err
    mounts = [f"data_dir={empty}", "container=docker://x", "container_mounts=/a:/b"]
    assert launch.main(["recipe=imagenet", "snapshot=false", *mounts]) == 0


@pytest.mark.parametrize(
    ("failing", "error", "status"),
    [
        ("", None, 0),
        ("start", errors.InputError("x"), 2),
        ("start", errors.RunError("x"), 1),
        ("memory", errors.ConfigError("x"), 2),
        ("disk_space", MachineError("x"), 3),
        ("expected_start", MachineError("x"), 3),
    ],
)
def test_check_returns_the_status_of_the_failed_part(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: str,
    error: Exception,
    status: int,
) -> None:
    for name in ("start", "memory", "disk_space", "expected_start"):

        def answer(*arguments: Any, name: str = name) -> Found:
            if name == failing:
                raise error
            return Found(rank_bytes=1)

        monkeypatch.setattr(checks, name, answer)
    words = ["recipe=mnist", "nodes=2", "gpus_per_node=8", "gpu_memory_gb=1"]
    assert launch.main(["check", *words]) == status
    output = capsys.readouterr()
    assert output.out.startswith("keys:   ok: mnist, 16 ranks\n")
    assert output.out.endswith("nothing was submitted\n")
    assert output.err.count("failed: x") == bool(failing)


def test_check_of_a_sweep_checks_its_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked: list[Path] = []
    monkeypatch.setattr(checks, "start", lambda settings, run_dir, *_: checked.append(run_dir))
    monkeypatch.setattr(checks, "disk_space", lambda run_dir, *_: checked.append(run_dir))
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["recipe=mnist", "gpus=10", "sweep.lr=0.5,0.1", f"run_dir={tmp_path}/s"]
    assert launch.main(["check", "launcher=print", *words]) == 0
    assert checked == [tmp_path / "s/0"] * 2
    output = capsys.readouterr().out.splitlines()
    assert output[:2] == [
        "keys:   ok: mnist, 10 ranks",
        "sweep:  the first of 2 runs is checked: lr=0.5",
    ]
    assert launch.main(["check", "launcher=print", "container=docker://x", *words]) == 0
    assert len(checked) == 3  # the recipe was not tried
    assert launch.main(["check", *words]) == 3
    assert "No such file or directory: 'sbatch'" in capsys.readouterr().err


def test_local_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(command: Sequence[str], layout: Any, run_dir: Path, root: Path, environ: Any) -> int:
        seen.update(command=command, run_dir=run_dir, environ=environ)
        return 0

    monkeypatch.setattr(local, "run", run)
    monkeypatch.setenv("RECIPES_DATA", "data")
    monkeypatch.chdir(tmp_path)
    words = ["recipe=mnist", "launcher=local", "device=cpu", "data_dir=d", "cluster=example"]
    assert launch.main([*words, "run_dir=r"]) == 0
    assert seen["run_dir"] == tmp_path / "r"
    # The ranks start in the repository.
    assert {f"run_dir={tmp_path}/r", f"data_dir={tmp_path}/d", "device=cpu"} <= set(seen["command"])
    assert seen["environ"]["RECIPES_DATA"] == f"{tmp_path}/data"
    assert seen["environ"]["RECIPES_CLUSTER"] == "example"
    # an evaluation beside a training has its own status
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.yaml").write_text("")
    assert launch.main([*words, "run_dir=r", "evaluate=true"]) == 0
    assert seen["run_dir"] == tmp_path / "r/evaluation"


def test_local_reports_keys_without_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "run", lambda *arguments: 0)
    words = ["recipe=mnist", "launcher=local", "device=cpu", f"run_dir={tmp_path}/r"]
    assert launch.main([*words, "ranks_per_node=2", "epochs=1"]) == 0
    assert capsys.readouterr().err == ""
    unused = ["partition=gpu", "doctor=true", "restarts=1", "container=docker://x"]
    assert launch.main([*words, *unused, "epochs=1"]) == 0
    names = "partition=, doctor=, restarts=, container=docker://x"
    assert capsys.readouterr().err == f"launch.py: launcher=local does not use {names}\n"


def test_the_second_machine_creates_no_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: Sequence[str], layout: Any, run_dir: Path | None, *_: Any) -> int:
        assert run_dir is None
        assert "run_dir=" not in " ".join(command)
        return 7

    monkeypatch.setattr(local, "run", run)
    words = ("launcher=local", "gpus=2,1", "master=h:29400", "node_rank=1", "device=cpu")
    assert launch.main(["recipe=mnist", *words]) == 7


def test_each_machine_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["recipe=mnist", "launcher=local", "gpus=2,1", "master=[fd00::1]:29400"]

    def layout(*more: str) -> local.Layout:
        return cli.local_layout(command_line.parse([*words, *more], environ={}))

    expected = local.Layout((2, 1), 1, "fd00::1", 29400)
    assert layout("device=cpu", "node_rank=1") == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert layout("node_rank=1") == expected
    with pytest.raises(MachineError, match="2 ranks need one GPU each, and 1 are visible"):
        layout()


def test_json_has_the_results_and_nothing_else_is_on_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["recipe=toy", "launcher=print", "--json"], sys.executable) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["script"].splitlines()[0] == "#!/bin/bash"
    assert told["exit_status"] == 0
    assert cli.main(["check", "recipe=toy", "epoch=1", "--json"], sys.executable) == 2
    out, err = capsys.readouterr()
    line = "epoch=1: recipe toy has no key 'epoch'; did you mean 'epochs'?"
    assert json.loads(out) == {"error": line, "exit_status": 2}
    assert err.endswith("nothing was submitted\n")
    assert cli.main(["logs", "last", "--json"], sys.executable) == 2
    line = json.loads(capsys.readouterr().out)["error"]
    assert line.startswith("--json: launch.py logs does not support it")


def test_json_has_null_for_a_number_that_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other programs refuse NaN and Infinity, which Python writes and reads."""
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        helpers.attempt(Path(folder))
        Path(folder, "metrics.jsonl").write_text('{"step": 1, "loss": NaN, "val_bpb": Infinity}\n')
    assert report.main(["--json", *folders]) == 0
    results = [json.loads(line)["results"] for line in capsys.readouterr().out.splitlines()]
    assert cli.main(["compare", "--json", *folders], sys.executable) == 0
    results += [run["results"] for run in json.loads(capsys.readouterr().out)["runs"]]
    assert results == [{"loss": None, "val_bpb": None}] * 4
