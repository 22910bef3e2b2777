"""launcher=local: the files of a run, resuming it, refusals, failures and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from recipes.core import errors
from recipes.core.launch import local
from recipes.core.launch.cli import local_layout
from recipes.core.run import command_line, signals
from tests import helpers
from tests.helpers import LOCAL, Ended

# 23 batches of 64 in an epoch: the run ends within the first.
WORDS = ("max_steps=10", "checkpoint_every_steps=4", "log_every_steps=3", "seed=3")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of the commands, outside the repository."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def first(elsewhere: Path) -> Ended:
    argv = [*LOCAL, *WORDS, "ranks_per_node=2", "run_dir=here/run"]
    return helpers.run_fork(argv, cwd=elsewhere).expect(0)


@pytest.fixture(scope="module")
def run_dir(elsewhere: Path, first: Ended) -> Path:
    return elsewhere / "here" / "run"


def test_a_run_prints_its_size_and_run_directory(first: Ended, run_dir: Path) -> None:
    assert "mnist: 2 ranks on 1 node, cpu, gloo" in first.lines
    assert f"run directory: {run_dir}" in first.lines
    steps = [line.split()[4] for line in first.lines if "  epoch 1/4  step " in line]
    assert steps == [f"{step}/10" for step in (1, 3, 4, 6, 8, 9, 10)]  # only rank 0 prints
    assert "Traceback" not in first.out


def test_the_files_in_the_run_directory(run_dir: Path) -> None:
    status = helpers.read(run_dir, "status")
    assert status["state"] == "done"
    assert status["attempt"] == 0
    assert status["step"] == 10
    assert status["reason"] == ""
    assert status["first_failing_rank"] is None
    folder = run_dir / "checkpoints"
    steps = [f"step-{step:08d}.pt" for step in (4, 8, 10)]
    assert sorted(path.name for path in folder.iterdir()) == ["best", "latest", *steps]
    assert (folder / "latest").read_text().strip() == "step-00000010.pt"
    logs = sorted(path.name for path in (run_dir / "logs").iterdir())
    assert logs == ["rank0.log", "rank1.log"]
    assert "epoch 1/4  step 10/10 " in (run_dir / "logs" / "rank0.log").read_text()
    assert not [p.name for p in run_dir.rglob(".*")], "temporary files are left"
    content = torch.load(folder / "step-00000010.pt", weights_only=True)
    assert set(content) == {"model", "optimizer", "scheduler", "ema", "sampler", "rng", "meta"}
    assert len(content["rng"]) == 2  # every rank's
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    # typed, and defaults
    assert config["max_steps"] == 10
    assert config["epochs"] == 4
    assert config["optimizer"] == "adamw"
    assert not {"run_dir", "launcher", "ranks_per_node"} & set(config)


def test_metrics_and_summary(run_dir: Path) -> None:
    rows = helpers.rows(run_dir)
    assert [row["step"] for row in rows] == [1, 3, 4, 6, 8, 9, 10]
    for row in rows:
        assert {"attempt", "step", "epoch", "loss", "lr", "samples_per_second"} <= row.keys()
        assert row["attempt"] == 0
        assert row["epoch"] == 0
        assert row["samples_per_second"] > 0
    summary = helpers.read(run_dir, "summary")
    expected = {
        "recipe": "mnist",
        "world_size": 2,
        "num_nodes": 1,
        "device": "cpu",
        "backend": "gloo",
        "epochs": 4,
        "steps": 10,
        "val_samples": 359,
        "resumed_from_step": None,
        "restarts": 0,
    }
    assert {k: summary[k] for k in expected} == expected
    assert 0 < summary["val_top1"] <= summary["val_top5"] <= 1
    assert summary["samples_per_second"] > 0
    assert summary["wall_seconds"] > 0
    assert summary["versions"]["torch"] == torch.__version__


# Without any rank


def test_visible_gpus_set_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3,5,7")

    def ranks(*words: str) -> tuple[int, ...]:
        typed = ["recipe=toy", "launcher=local", *words]
        return local_layout(command_line.parse(typed, environ={})).ranks

    assert ranks() == (4,)
    assert ranks("gpus_per_node=2") == (2,)
    with pytest.raises(errors.MachineError, match="5 ranks need one GPU each, and 4 are visible"):
        ranks("gpus_per_node=5")


# The launcher itself, with ranks that are no recipes: fast, and as unruly as need be.


def launch(
    code: str,
    ranks: int,
    run_dir: Path | None = None,
    together_s: float = signals.TOGETHER_S,
    stop_grace_s: float = local.STOP_GRACE_S,
) -> list[str]:
    """The command of a launcher that runs ``code`` on so many ranks and exits with their status."""
    program = (
        "import os, sys; from pathlib import Path; from recipes.core.launch import local; "
        "from recipes.core.run import signals\n"
        f"signals.TOGETHER_S = {together_s}\n"
        f"local.PEERS_GRACE_S = 0.3; local.STOP_GRACE_S = {stop_grace_s}\n"
        "code, ranks, run_dir = sys.argv[1:]\n"
        "command = [sys.executable, '-u', '-c', code]\n"
        "layout = local.Layout((int(ranks),))\n"
        "sys.exit(local.run(command, layout, Path(run_dir) if run_dir else None, 'mnist', "
        "os.environ))\n"
    )
    return [sys.executable, "-c", program, code, str(ranks), str(run_dir or "")]


STUBBORN = (
    "import os, signal, sys, time; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, "
    "signal.SIGINT, signal.SIGHUP)]; rank = int(os.environ['RANK'])\n"
)
SLEEP = "os.write(1, b'up %d %d\\n' % (rank, os.getpid())); time.sleep(30)"


@pytest.mark.parametrize(
    ("rank", "end", "status", "how"),
    [
        (0, "sys.exit(7)", 7, "ended with status 7"),
        (2, "os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
    ],
)
def test_a_failed_rank_ends_the_others_and_is_reported(
    rank: int, end: str, status: int, how: str
) -> None:
    code = STUBBORN + f"if rank == {rank}:\n    {end}\n" + SLEEP
    ended = helpers.finish(helpers.start(launch(code, 3)), timeout_s=20).expect(status)
    assert ended.lines[-1].startswith(f"failed: rank {rank} on "), ended.out
    assert how in ended.lines[-1]
    pids = [int(line.split()[2]) for line in ended.lines if line.startswith("up ")]
    assert len(pids) <= 2
    assert not any(helpers.alive(pid) for pid in pids)


def ups(process: Any, count: int) -> list[int]:
    """The process IDs that ``count`` ranks print after they have started."""
    lines = [process.stdout.readline().split() for _ in range(count)]
    for words in lines:
        assert words[:1] == ["up"], lines
    return [int(words[2]) for words in lines]


def test_no_rank_outlives_a_killed_launcher() -> None:
    process = helpers.start(launch(STUBBORN + SLEEP, 2))
    pids = ups(process, 2)
    assert all(helpers.alive(pid) for pid in pids)
    process.kill()
    process.wait()
    try:
        helpers.wait_for_the_end_of(pids, 5)
    finally:
        for pid in filter(helpers.alive, pids):
            os.kill(pid, signal.SIGKILL)
        helpers.finish(process)


def test_a_second_signal_ends_the_ranks_immediately() -> None:
    process = helpers.start(launch(STUBBORN + SLEEP, 2))
    pids = ups(process, 2)
    process.terminate()
    assert process.stdout
    assert "a second signal ends them at once" in process.stdout.readline()
    time.sleep(2 * signals.TOGETHER_S)
    assert all(helpers.alive(pid) for pid in pids)
    process.terminate()
    helpers.finish(process, timeout_s=5).expect(137)
    assert not any(helpers.alive(pid) for pid in pids)


def test_repeated_ctrl_c_leaves_a_valid_status(tmp_path: Path) -> None:
    """Ctrl-C is repeated until the launcher has ended."""
    code = """
from recipes.core.run import attempt, directory
own = attempt.given(os.environ)
attempt.begin(own, 0, own=False)
directory.write_status(own.run_dir, "running", attempt=0, step=7)
"""
    process = helpers.start(
        launch("from pathlib import Path\n" + STUBBORN + code + SLEEP, 1, tmp_path)
    )
    ups(process, 1)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.03)
    ended = helpers.finish(process)
    assert ended.status != 0, ended.out
    assert helpers.read(tmp_path, "status")["state"] == "failed"


def test_signals_at_the_same_time_are_one_stop() -> None:
    """Hangups: the kernel sends one where a terminal goes, and the shell passes its own on when it
    ends. Signals that come together: `timeout 1h python launch.py …` sends its own to the launcher,
    and then to its group, which the launcher is in.
    """
    ranks = STUBBORN + SLEEP.replace("30", "3")
    usual = signals.TOGETHER_S
    cases = ((signal.SIGHUP, 0.1, usual), (signal.SIGTERM, 0.1, 60), (signal.SIGHUP, 0.6, usual))
    started = [helpers.start(launch(ranks, 1, together_s=together_s)) for _, _, together_s in cases]
    for process in started:
        ups(process, 1)
    for process, (number, apart_s, _) in zip(started, cases, strict=True):
        for _ in range(3):
            process.send_signal(number)
            time.sleep(apart_s)  # for the handler to be called for each
    for process in started:
        helpers.finish(process, timeout_s=20).expect(0)


def test_ranks_that_do_not_end_after_a_stop_are_killed() -> None:
    process = helpers.start(launch(STUBBORN + SLEEP, 1, stop_grace_s=0.3))
    ups(process, 1)
    process.terminate()
    helpers.finish(process, timeout_s=20).expect(137)


def test_children_of_a_rank_that_dies_during_the_check_are_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This was seen once in some thousand kills on busy cores."""
    command = "sleep 60 & echo $!; exec sleep 60"
    with subprocess.Popen(
        ["sh", "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as rank:
        assert rank.stdout
        left = int(rank.stdout.readline())
        looked = os.waitid

        def late(*arguments: Any) -> Any:
            answer = looked(*arguments)
            monkeypatch.setattr(os, "waitid", looked)
            rank.kill()
            assert looked(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
            return answer

        monkeypatch.setattr(os, "waitid", late)
        ended = [local.has_ended(rank), local.has_ended(rank)]
        helpers.wait_for_the_end_of([left], 5)
        assert ended == [False, True]


def test_a_stop_saves_although_stderr_is_closed(tmp_path: Path) -> None:
    """With ``launch.py … 2>&1 | tee log``, Ctrl-C also ends tee."""
    save = (
        f"trap 'sleep 0.5; echo saved > {tmp_path}/saved; exit 75' TERM; touch {tmp_path}/up; "
        "while :; do sleep 0.1; done"
    )
    code = f"""
import os, signal, sys, threading, time
from pathlib import Path
from recipes.core.launch import local
theirs, mine = os.pipe()
os.dup2(mine, 2)
def stop():
    while not Path({str(tmp_path)!r}, "up").exists():
        time.sleep(0.02)
    os.close(theirs)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=stop).start()
sys.exit(local.run(["bash", "-c", {save!r}], local.Layout((1,)), None, "mnist", os.environ))
"""
    ended = helpers.run([sys.executable, "-c", code])
    assert (tmp_path / "saved").exists(), ended.out
    assert ended.status == 75, ended.out
