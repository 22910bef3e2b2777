"""The step loop and the start of a recipe, in this process: one rank, no launcher."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

from recipes.conf.mnist import Config
from recipes.core import errors
from recipes.core.config.run_keys import Dtype, Mode
from recipes.core.data.sampling import GlobalBatches, Part
from recipes.core.errors import InputError, Kind, MachineError, RunError
from recipes.core.launch import local
from recipes.core.launch.local import Layout
from recipes.core.place import keepalive
from recipes.core.place.keepalive import NodeLinks
from recipes.core.place.ranks import RankInfo
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, entry, signals, source, watchdog
from recipes.core.train import (
    agreement,
    checkpoint,
    failure,
    gradients,
    loop,
    metrics,
    optimisation,
    outcome,
    rendezvous,
    resume,
    saving,
    scores,
    session,
    torch_errors,
)
from recipes.core.train import run as runs
from recipes.core.train import world as worlds
from recipes.core.train.agreement import Agreement
from recipes.core.train.checkpoint import State
from recipes.core.train.run import Run
from tests import helpers


@pytest.fixture(autouse=True)
def _signals_and_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """entry.begin holds USR2 back and sets variables: undone after each test."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "RECIPES_", "NCCL_", "GLOO_")):
            monkeypatch.delenv(name)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})


class Trained:
    """A linear model on 10 samples in batches of 5: two steps an epoch. Evaluations give 1,
    2, 3, …
    """

    def __init__(self, folder: Path, **changed: Any) -> None:
        self.folder = folder
        self.evaluations = 0
        self.stop_at = 0
        self.samples = 10
        self.ranks = 1
        self.metric = "val_top1"
        self.values: list[float | None] = []  # 0: no results; None: a stop comes meanwhile
        self.now = 0.0  # a clock: 2 s for a step, 100 s for an evaluation
        # of each step, if held wrong
        self.calls = {"backward": 1, "optimizer": 1, "scheduler": 1}
        self.leave_at = 0
        self.reduction: Callable[[Tensor], Tensor] = lambda losses: losses[:, 0]
        self.weights: Callable[[int], Tensor | None] = lambda samples: None
        vars(self).update(changed)
        for name in ("logs", "checkpoints"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def run(self, resumes: bool = False, **keys: Any) -> tuple[dict[str, Any], Run]:
        of_run = []
        for key in list(keys):
            if key.startswith(("checkpoint_", "keep_", "resume")):
                of_run.append(f"{key}={keys.pop(key)}")
        start = entry.begin("mnist", ["device=cpu", "dataset=fake", "cpu_threads=1", *of_run])
        cfg = Config(dataset="fake", **{"log_every_steps": 100, **keys})
        with (
            rendezvous.process_group(start, torch.device("cpu")) as world,
            signals.stop_flag() as stop,
        ):
            net = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            batches = GlobalBatches(self.samples, 5, 0, 0, self.ranks)
            attempt = helpers.attempt(self.folder, step=None)
            state = State(net, optimizer, scheduler)
            settings = dataclasses.replace(start.settings, config=cfg)
            run = Run(settings, world, attempt, stop, None)

            def evaluate() -> dict[str, float]:
                self.evaluations += 1
                self.now += 100.0
                value: float | None = float(self.evaluations)
                if self.values:
                    value = self.values[self.evaluations - 1]
                if value is None:
                    os.kill(os.getpid(), signal.SIGUSR2)
                    assert run.stop_is_near()
                    return {"val_top1": 0.99}  # does not count
                return {self.metric: value} if value else {}

            try:
                if resumes:
                    run.resume(state, batches)
                else:
                    attempts.begin(attempt, 0, own=False)
                    run.checkpoints.state = state
                    run.checkpoints.order = batches.order
                    run.is_running = True
                    run.rows = metrics.Rows(self.folder / "metrics.jsonl")
                for step in loop.steps(run, cfg, net, batches, evaluate):
                    self.now += 2.0
                    if run.step + 1 == self.stop_at:
                        os.kill(os.getpid(), signal.SIGUSR2)
                    for part in step.parts:
                        losses = net(torch.ones(len(part.indices), 1))
                        for _ in range(self.calls["backward"]):
                            step.backward(self.reduction(losses), self.weights(len(losses)))
                    for _ in range(self.calls["optimizer"]):
                        optimizer.step()
                    for _ in range(self.calls["scheduler"]):
                        scheduler.step()
                    if run.step + 1 == self.leave_at:
                        break
                if resumes:
                    outcome.finish(run, run.results)
            finally:
                run.close_rows()
                assert run.checkpoints.saver
                run.checkpoints.saver.wait()
        return dict(run.results), run


def test_the_best_checkpoint_is_that_of_best_metric(tmp_path: Path) -> None:
    trained = Trained(tmp_path, metric="val_loss", values=[0.5, 0.2, math.nan, -math.inf])
    _, run = trained.run(resumes=True, epochs=4, best_metric="val_loss", best_mode=Mode.min)
    assert run.state.meta["best"] == {"val_loss": 0.2, "step": 4}
    assert checkpoint.named(tmp_path / "checkpoints", "best") == "step-00000004.pt"
    assert helpers.read(tmp_path, "summary")["best"] == {"val_loss": 0.2, "step": 4}


def test_an_evaluation_without_best_metric_ends_the_run(tmp_path: Path) -> None:
    line = r"best_metric=f1: must be one of the numbers that the evaluation returns \(val_top1\)$"
    with pytest.raises(InputError, match=line):
        Trained(tmp_path).run(best_metric="f1")


def test_a_run_ends_patience_epochs_after_its_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = Trained(tmp_path, values=[0.5, 0.7, 0.6, 0.7, 0.9])
    _, run = trained.run(resumes=True, epochs=9, patience=2)
    assert run.state.step == 8
    assert helpers.read(tmp_path, "status")["state"] == "done"
    assert "no better result for patience=2 epochs: the run ends" in capsys.readouterr().out
    _, run = trained.run(resumes=True, epochs=9, patience=2)
    assert run.state.step == 8  # already finished
    trained.values = [0.9] * 20
    _, run = trained.run(resumes=True, epochs=9, patience=5)
    assert run.state.step == 18


def test_patience_counts_from_the_best_evaluation_if_it_is_not_saved(tmp_path: Path) -> None:
    trained = Trained(tmp_path, values=[0.5, 0.7, 0.6, 0.7, 0.9], stop_at=4)
    for trained.stop_at in (4, 0):  # the best evaluation is postponed
        _, run = trained.run(resumes=True, epochs=9, patience=2, keep_best="false")
    assert (run.step, run.state.meta["best"]) == (8, {"val_top1": 0.7, "step": 4})
    assert not (tmp_path / "checkpoints/best").exists()


def test_patience_waits_for_an_evaluation_that_a_stop_has_postponed(tmp_path: Path) -> None:
    trained = Trained(tmp_path, values=[0.5, 0.9, 0.95, 0.99, 0.9], stop_at=4)
    _, run = trained.run(resumes=True, epochs=4, patience=1)
    assert run.step == 4
    assert run.stopping
    trained.stop_at = 0
    results, run = trained.run(resumes=True, epochs=4, patience=1)
    assert run.step == 8
    assert results == {"val_top1": 0.99}


def test_patience_and_a_best_metric_need_a_result_and_the_epoch_is_saved(tmp_path: Path) -> None:
    line = (
        r"best_metric=val_top1: must be one of the numbers that the evaluation returns "
        r"\(val_loss\)$"
    )
    with pytest.raises(InputError, match=line):
        Trained(tmp_path, metric="val_loss").run(resumes=True, patience=1)
    assert checkpoint.named(tmp_path / "checkpoints", "latest") == "step-00000002.pt"


def test_another_best_metric_on_a_resume_begins_anew(tmp_path: Path) -> None:
    trained = Trained(tmp_path, values=[0.5, 0.4, 0.3])
    trained.run(resumes=True, epochs=9, patience=1)
    trained.metric = "val_f1"
    _, run = trained.run(resumes=True, epochs=3, patience=1, best_metric="val_f1")
    assert run.step == 6
    assert run.state.meta["best"] == {"val_f1": 0.3, "step": 6}


def test_a_result_must_not_have_the_name_of_another_value_of_its_row(tmp_path: Path) -> None:
    line = r"evaluate\(\) returned loss=: metrics.jsonl already uses this name: rename it"
    with pytest.raises(RunError, match=line):
        Trained(tmp_path, metric="loss").run(epochs=1)


def test_a_gradient_is_clipped_in_the_loop_and_float16_scales_it_back(tmp_path: Path) -> None:
    def weights(name: str, **keys: Any) -> list[float]:
        torch.manual_seed(0)
        _, run = Trained(tmp_path / name).run(max_steps=1, **keys)
        return [p.item() for p in run.state.model.parameters()]

    clipped = weights("clipped", clip_grad_norm=0.01)
    scaled = weights("scaled", clip_grad_norm=0.01, dtype=Dtype.float16)
    assert scaled == pytest.approx(clipped, rel=1e-6)
    assert weights("free") != pytest.approx(clipped, rel=1e-3)


def test_a_resume_continues_the_loss_scale_of_float16(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    for steps in (2, 4):
        _, run = trained.run(resumes=True, epochs=steps // 2, dtype=Dtype.float16)
        assert run.state.meta["loss_scale"] == [gradients.FIRST_SCALE, steps]


def test_a_long_loop_asks_the_store_for_a_stop_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And at once after a signal to this rank, which it tells the others."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: clock.now))
    told: dict[str, str] = {}
    asked: list[float] = []

    def check(names: list[str]) -> bool:
        asked.append(clock.now)
        return names[0] in told

    store = SimpleNamespace(check=check, compare_set=lambda name, _, why: told.update({name: why}))
    stop = signals.StopFlag()
    run: Any = SimpleNamespace(stop=stop, world=SimpleNamespace(store=store), _store_asked_at=0.0)
    for clock.now in (100.0, 100.9, 101.5):
        assert not Run.stop_is_near(run)
    assert asked == [100.0, 101.5]
    stop.note("SIGTERM")
    assert Run.stop_is_near(run)
    assert told == {agreement.STOP: "SIGTERM"}


@pytest.mark.parametrize(
    ("call", "times", "line"),
    [
        (
            "backward",
            0,
            (
                r"^step\.backward\(\): called 0 times in step 1: call it once for each part of "
                r"step\.parts$"
            ),
        ),
        ("backward", 2, r"^step\.backward\(\): called again for the same part: call it once "),
        (
            "optimizer",
            0,
            r"^optimizer\.step\(\): called 0 times in step 1: call it once in each step",
        ),
        ("optimizer", 2, r"^optimizer\.step\(\): called 2 times in step 1"),
        (
            "scheduler",
            0,
            r"^scheduler\.step\(\): called 0 times in step 1: call it once in each step",
        ),
        ("scheduler", 2, r"^scheduler\.step\(\): called 2 times in step 1"),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_call_left_out_or_made_twice_ends_the_run(
    tmp_path: Path, call: str, times: int, line: str
) -> None:
    trained = Trained(tmp_path)
    trained.calls[call] = times
    with pytest.raises(RunError, match=line):
        trained.run(accumulate=2)


@pytest.mark.parametrize("reduction", [torch.mean, lambda losses: losses], ids=["mean", "(B, 1)"])
def test_other_losses_than_one_for_each_sample_are_refused(tmp_path: Path, reduction: Any) -> None:
    line = r'losses of shape \(.*\), not \(5,\): give one loss per sample, reduction="none"'
    with pytest.raises(RunError, match=line):
        Trained(tmp_path, reduction=reduction).run()


@pytest.mark.parametrize(
    ("weights", "line"),
    [
        (
            lambda samples: torch.ones(samples, 1),
            r"weights of shape \(3, 1\), not \(3,\): give one weight per sample$",
        ),
        (
            lambda samples: torch.ones(3) if samples == 3 else None,
            r"give weights for each part of a step, or for none$",
        ),
        (
            lambda samples: torch.ones(2) if samples == 2 else None,
            r"give weights for each part of a step, or for none$",
        ),
    ],
    ids=["(B, 1)", "first", "second"],
)
def test_weights_other_than_one_for_each_sample_are_refused(
    tmp_path: Path, weights: Any, line: str
) -> None:
    """A batch of 5 has pieces of 3 and 2."""
    with pytest.raises(RunError, match=r"^step\.backward\(\): " + line):
        Trained(tmp_path, weights=weights).run(accumulate=2)


def test_wrong_calls_of_a_recipe_end_the_run_with_the_fix() -> None:
    nothing: Any = None
    begun: Any = SimpleNamespace(is_running=True)
    new: Any = SimpleNamespace(is_running=False)
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    wrapped: Any = SimpleNamespace(model=model)
    with pytest.raises(RunError, match=r"^loop\.steps\(\): call run\.resume\(\) before it"):
        next(loop.steps(new, nothing, nothing, nothing, nothing))
    with pytest.raises(RunError, match=r"^run\.resume\(\): called twice"):
        Run.resume(begun, nothing, nothing)
    with pytest.raises(RunError, match=r"^State\(\): give it the network itself"):
        Run.resume(new, wrapped, nothing)
    with pytest.raises(RunError, match=r"^main\(\) returned NoneType: return a dict"):
        metrics.require_results("main()", None)
    with pytest.raises(RunError, match=r"^evaluate\(\) returned net=Linear: return numbers"):
        metrics.require_results("evaluate()", {"net": nn.Linear(1, 1)})


def test_a_loop_that_is_left_early_does_not_finish_the_run(tmp_path: Path) -> None:
    line = r"^main\(\) has left the loop over loop\.steps\(\) before its end: remove the break"
    with pytest.raises(RunError, match=line):
        Trained(tmp_path, leave_at=3).run(resumes=True, epochs=3)
    assert helpers.read(tmp_path, "status")["state"] == "running"


def test_an_evaluation_without_results_is_complete(tmp_path: Path) -> None:
    results, run = Trained(tmp_path, values=[0.0, 0.0]).run(resumes=True, epochs=2)
    assert results == {}
    assert run.stopping == ""
    assert run.state.meta["unevaluated"] is None
    assert run.step == 4
    assert helpers.read(tmp_path, "status")["state"] == "done"
    assert helpers.read(tmp_path, "summary")["steps"] == 4


def test_best_and_latest_can_be_resumed_from_in_another_run_directory(tmp_path: Path) -> None:
    Trained(tmp_path / "first", values=[0.9, 0.5]).run(resumes=True, epochs=2)
    for pointer, step in (("best", 2), ("latest", 4)):
        again = Trained(tmp_path / pointer, values=[0.1, 0.2])
        _, run = again.run(resumes=True, epochs=3, resume=f"{tmp_path}/first/checkpoints/{pointer}")
        assert run.checkpoints.resumed_from_step == step
        assert run.state.step == 6
        # The first run's best checkpoint is in another folder, so this run starts without a best
        # result.
        best = {"val_top1": again.values[again.evaluations - 1], "step": 6}
        assert run.state.meta["best"] == best
        for name in ("best", "latest"):
            assert checkpoint.named(tmp_path / pointer / "checkpoints", name) == "step-00000006.pt"


def test_a_resume_from_an_earlier_step_goes_back_to_the_best_until_then(tmp_path: Path) -> None:
    trained = Trained(tmp_path, values=[0.5, 0.9, 0.4])
    trained.run(resumes=True, epochs=2)
    resume = f"{tmp_path}/checkpoints/step-00000002.pt"
    _, run = trained.run(resumes=True, epochs=2, resume=resume)
    assert run.state.meta["best"] == {"val_top1": 0.5, "step": 2}
    assert checkpoint.named(tmp_path / "checkpoints", "best") == "step-00000002.pt"


def test_a_stop_before_the_first_step_is_not_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = Trained(tmp_path).run(resumes=True, epochs=1)
    directory.write_status(tmp_path, "preempted", attempt=0, step=500)  # by the attempt before
    assert failure.fail(run, errors.Stopped("SIGTERM")) == 75
    status = helpers.read(tmp_path, "status")
    assert status["state"] == "preempted"
    assert status["step"] == 500
    assert status["reason"] == "SIGTERM"
    assert attempts.records(run.attempt) == []
    assert "stopped by SIGTERM before its first step" in capsys.readouterr().out


WAITING = watchdog.WAITING
FORWARD = watchdog.FORWARD
BACKWARD = watchdog.BACKWARD
DATA = watchdog.DATA


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        # Each rank's number of reports, steps and phase, read twice. This is rank 0, at the sum of
        # step 7.
        ([(5, 7, WAITING)] * 3, [(5, 7, WAITING), (6, 7, WAITING), (6, 8, DATA)], None),
        (
            [(5, 7, WAITING), (5, 7, WAITING), (5, 6, FORWARD)],
            [(6, 7, WAITING), (6, 6, BACKWARD), (6, 6, FORWARD)],
            {"rank": 2, "host": "c", "at": "step 7 (forward)"},
        ),
        (  # a rank that no longer reports counts before a slow one
            [(5, 7, WAITING), (5, 7, WAITING), (5, 6, FORWARD)],
            [(6, 7, WAITING), (5, 7, WAITING), (6, 6, FORWARD)],
            {"rank": 1, "host": "b", "at": "step 7 (waiting)"},
        ),
    ],
)
def test_the_rank_that_is_behind_is_named(
    first: Any, second: Any, named: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "BEHIND_S", 0.25)
    answers = []
    for reports in (first, second):
        answers.append([" ".join(map(str, report)).encode() for report in reports])
    store: Any = SimpleNamespace(multi_get=lambda names: answers.pop(0))
    info = RankInfo(0, 0, 0, 3, 3, 1, (), "127.0.0.1", 1, False, None, 0)
    pulse = watchdog.Pulse()
    pulse.beat(watchdog.WAITING, 7)
    world = worlds.World(info, torch.device("cpu"), "gloo", ("a", "b", "c"), store, pulse=pulse)
    assert world.behind() == named


def test_rows_and_summary_have_rate_speed_and_wait_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all ranks: this one has three samples of five."""
    trained = Trained(tmp_path, ranks=2)
    begin = time.monotonic()
    epoch = GlobalBatches.epoch

    def slow(batches: GlobalBatches, number: int, first_batch: int = 0) -> Iterator[Part]:
        for part in epoch(batches, number, first_batch):
            trained.now += 0.5
            yield part

    monkeypatch.setattr(watchdog.RunningClock, "now", lambda clock: trained.now)
    monkeypatch.setattr(GlobalBatches, "epoch", slow)
    _, run = trained.run(resumes=True, epochs=3, log_every_steps=1, checkpoint_every_steps=1)
    took_s = time.monotonic() - begin
    rows = helpers.rows(tmp_path)
    for index, row in enumerate(rows):
        assert row["step"] == index + 1
        assert row["epoch"] == index // 2
        assert row["lr"] == 0.1 * 0.5**index
        assert row["samples_per_second"] == 2.0
        assert row["data_wait"] == 0.2
    assert [row.get("val_top1") for row in rows] == [None, 1.0, None, 2.0, None, 3.0]
    assert run.samples == 30
    assert run.train_s == 15.0
    summary = helpers.read(tmp_path, "summary")
    expected = {
        "steps": 6,
        "samples_per_second": 2.0,
        "restarts": 0,
        "resumed_from_step": None,
        "val_top1": 3.0,
    }
    assert expected.items() <= summary.items()
    assert 0 < summary["wall_seconds"] < took_s
    status = helpers.read(tmp_path, "status")
    assert status["state"] == "done"
    assert status["attempt"] == 0
    assert status["step"] == 6
    assert status["reason"] == ""


def test_the_best_evaluation_of_an_earlier_attempt_remains_the_best(tmp_path: Path) -> None:
    trained = Trained(tmp_path, values=[0.9, 0.5])
    trained.run(resumes=True, epochs=1)
    _, run = trained.run(resumes=True, epochs=2)
    assert run.checkpoints.resumed_from_step == 2
    assert run.state.meta["best"] == {"val_top1": 0.9, "step": 2}
    assert checkpoint.named(tmp_path / "checkpoints", "best") == "step-00000002.pt"


@pytest.mark.parametrize(("stop_at", "step", "count"), [(3, 4, 1), (4, 4, 1), (6, 6, 3)])
def test_a_stop_saves_at_its_step_without_an_older_evaluation(
    tmp_path: Path, stop_at: int, step: int, count: int
) -> None:
    trained = Trained(tmp_path, stop_at=stop_at)
    results, run = trained.run(epochs=3)
    assert run.state.step == step
    assert bool(run.stopping) == (stop_at != 6)
    assert (tmp_path / "checkpoints" / "latest").read_text() == f"step-{step:08d}.pt\n"
    assert trained.evaluations == count
    if stop_at == 6:  # the run is over all the same
        assert results == {"val_top1": 3.0}
    else:
        assert "val_top1" not in helpers.rows(tmp_path)[-1]


@pytest.mark.parametrize(("step", "values"), [(4, [0.1, 0.9, 0.5]), (6, [0.1, 0.2, None, 0.9])])
def test_a_postponed_evaluation_runs_first_on_a_resume(
    tmp_path: Path, step: int, values: list[float | None]
) -> None:
    """The row of its step is written again with the results, and the best evaluation has its
    checkpoint.
    """
    trained = Trained(tmp_path, values=values, stop_at=4 if step == 4 else 0)
    _, run = trained.run(resumes=True, epochs=3)
    assert run.state.step == step
    assert run.stopping
    trained.stop_at = 0
    results, run = trained.run(resumes=True, epochs=3)
    assert run.state.step == 6
    assert run.stopping == ""
    assert results["val_top1"] == values[-1]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    before, late = [row for row in written if row["step"] == step]
    assert late.pop("spent_s") != before.pop("spent_s")  # they are of different attempts
    assert late.pop("best") == {"val_top1": 0.9, "step": step}
    assert before.pop("best") != {"val_top1": 0.9, "step": step}
    assert late == before | {"val_top1": 0.9, "attempt": 1, "time": late["time"]}
    steps = [row["step"] for row in written]
    assert steps == sorted(steps)
    scores_of_steps = {row["step"]: row["val_top1"] for row in written if "val_top1" in row}
    assert scores_of_steps == dict(
        zip((2, 4, 6), (value for value in values if value), strict=True)
    )
    assert run.state.meta["best"] == {"val_top1": 0.9, "step": step}
    assert (tmp_path / "checkpoints" / "best").read_text() == f"step-{step:08d}.pt\n"


def test_a_rank_0_that_fails_awaits_its_last_save_and_reports_its_own_error(tmp_path: Path) -> None:
    _, run = Trained(tmp_path).run(epochs=1)
    assert run.checkpoints.saver
    pulse = run.world.pulse
    beats, *progress = pulse.read()
    waited: list[tuple[int, ...]] = []

    def save() -> None:
        time.sleep(0.3)
        waited.append(pulse.read())
        raise MemoryError  # want of memory may well end both

    run.checkpoints.saver._writing = run.checkpoints.saver._pool.submit(save)
    assert failure.fail(run, RuntimeError("this")) == 1
    assert waited == [(beats + 1, *progress)]  # its watchdog grants the time for it
    assert attempts.records(run.attempt)[0]["error"] == "RuntimeError: this"
    status = helpers.read(tmp_path, "status")
    assert status["state"] == "failed"
    assert status["reason"].partition(" failed first: ")[2] == "RuntimeError: this"


def test_a_rank_that_cannot_write_its_record_prints_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its parent prints the line of each other rank."""
    _, run = Trained(tmp_path).run(epochs=1)
    second = dataclasses.replace(run.world.ranks, rank=1, world_size=2)
    run.world = dataclasses.replace(run.world, ranks=second, hosts=("a", "b"))
    monkeypatch.setenv(attempts.VARIABLE, str(run.attempt.folder))
    capsys.readouterr()
    assert failure.fail(run, errors.DiskFull("the disk is full")) == 3
    assert capsys.readouterr().err == ""
    run.attempt = attempts.Attempt(tmp_path / "unseen", 0)
    assert failure.fail(run, errors.DiskFull("the disk is full")) == 3
    assert capsys.readouterr().err == "mnist: the disk is full\n"


def test_a_postponed_evaluation_that_is_interrupted_again_is_skipped(tmp_path: Path) -> None:
    """A job that is too short for an evaluation still makes progress."""
    trained = Trained(tmp_path, values=[0.1, None, 0.3], stop_at=4)
    trained.run(resumes=True, epochs=3)
    trained.stop_at = 0
    _, run = trained.run(resumes=True, epochs=3)
    assert run.state.step == 5
    assert run.stopping == "SIGUSR2"
    assert trained.run(resumes=True, epochs=3)[0] == {"val_top1": 0.3}
    scores_of_steps = {row["step"]: row.get("val_top1") for row in helpers.rows(tmp_path)}
    assert scores_of_steps == {1: None, 2: 0.1, 4: None, 5: None, 6: 0.3}


def test_an_evaluation_cut_short_elsewhere_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = Trained(tmp_path).run(epochs=1)
    net = nn.Linear(1, 1)
    batches = GlobalBatches(10, 5, 0, 0, 1)
    ends = loop._StepEnds(run, run.settings.config, net, batches, lambda: {"val_top1": 0.9})
    theirs = SimpleNamespace(read=lambda: ([1.0, 0.0, 0.0], "SIGUSR2", False, 1.0))
    monkeypatch.setattr(loop, "Agreement", lambda *arguments: theirs)
    assert not ends._evaluate()
    assert run.results == {}
    assert run.stopping == "SIGUSR2"
    run.results = {"loss": 9.0, "val_loss": 0.5}
    run.rows = metrics.Rows(tmp_path / "metrics.jsonl")
    # it has been closed
    run.console.terminal = cast(Any, SimpleNamespace(fileno=lambda: os.open("/nosuch", 0)))
    ends._log_row({**loop.EARLIER_ROW, "epoch": 0, "loss": 1.0, "lr": 0.1})
    last = helpers.rows(tmp_path)[-1]
    assert last["loss"] == 1.0
    assert last["val_loss"] == 0.5


@pytest.mark.parametrize(("reason", "fails"), [("SIGTERM", False), ("SIGTERM", True), ("", True)])
def test_a_metric_is_not_computed_if_a_stop_ends_its_samples(
    tmp_path: Path, reason: str, fails: bool
) -> None:
    """Otherwise the ranks may disagree: one fails, and others wait for it in the metric."""
    _, run = Trained(tmp_path).run(epochs=1)
    batches = GlobalBatches(10, 5, 0, 0, 1)
    computed: list[float] = []

    def answers(net: nn.Module) -> scores.Pairs:
        yield torch.ones(1), torch.ones(1)
        run.stop.reason = reason
        if fails:
            raise OSError("a process that reads samples has ended")
        yield torch.ones(1), torch.ones(1)

    def evaluate() -> dict[str, float]:
        computed.append(sum(float(first) for first, _ in scores.answered(run, answers)))
        return {"val_top1": computed[0]}

    ends = loop._StepEnds(run, run.settings.config, nn.Linear(1, 1), batches, evaluate)
    if not reason:
        with pytest.raises(OSError, match="has ended"):
            ends._evaluate()
        return
    assert not ends._evaluate()
    assert run.stopping == reason
    assert run.results == {}
    assert computed == []


def test_an_attempt_keeps_its_code_and_removes_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(tmp_path)
    half = tmp_path / "checkpoints/.latest.a.7.0123abcd"
    monkeypatch.setattr(source, "commit", lambda root: "c0ffee")
    for difference, expected in ((b"mine", [b"mine"] * 2), (b"", [])):
        half.touch()
        monkeypatch.setattr(source, "difference", lambda root, now=difference: now)
        _, run = trained.run(resumes=True, epochs=1)
        there = [folder / "code.diff" for folder in (run.dir, run.attempt.folder)]
        assert [path.read_bytes() for path in there if path.exists()] == expected
        assert not half.exists()
    assert helpers.read(tmp_path, "summary")["git_commit"] == "c0ffee"
    line = r"^resume=never: .* has a checkpoint \(step-00000002\.pt\): give"
    with pytest.raises(InputError, match=line):
        trained.run(resumes=True, resume="never")
    line = f"^evaluate=true: {tmp_path} has no checkpoint: give the run_dir="
    with pytest.raises(InputError, match=line):
        Trained(tmp_path).run(evaluate=True)


def test_an_evaluation_beside_copied_checkpoints_does_not_change_latest(tmp_path: Path) -> None:
    """A folder without config.yaml has no run whose folder evaluation/ it could use."""
    trained = Trained(tmp_path, values=[0.9, 0.5, 0.9])
    trained.run(resumes=True, epochs=2)
    (tmp_path / "config.yaml").unlink()
    _, run = trained.run(resumes=True, evaluate=True, resume="best")
    assert run.checkpoints.resumed_from_step == 2
    assert checkpoint.named(tmp_path / "checkpoints", "latest") == "step-00000004.pt"
    assert not (tmp_path / "config.yaml").exists()


def test_a_start_that_is_refused_changes_no_file_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another step of the job begins the attempt while this one reads its checkpoint."""
    trained = Trained(tmp_path, values=[0.9, 0.5])
    trained.run(resumes=True, epochs=2)
    (tmp_path / "code.diff").touch()
    (tmp_path / "checkpoints/.latest.a.7.0123abcd").touch()  # it is being written
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in paths}

    def begin(root: Path) -> None:
        newest = attempts.newest(tmp_path)
        assert newest
        (newest.folder / "begun.json").touch()

    monkeypatch.setattr(source, "commit", begin)
    with pytest.raises(MachineError, match="another Slurm step of this job has begun"):
        trained.run(resumes=True, epochs=3, resume="best")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("chosen", ["never", "best", "checkpoints/step-00000002.pt"])
def test_ranks_that_are_started_again_continue_from_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    """Whatever resume= says: it was for the first start of the job."""
    trained = Trained(tmp_path, values=[0.9, 0.5, 0.5])
    trained.run(resumes=True, epochs=2)
    assert checkpoint.named(tmp_path / "checkpoints", "best") == "step-00000002.pt"
    monkeypatch.setattr(attempts.Attempt, "is_restart", True)
    resume = f"{tmp_path}/{chosen}" if "/" in chosen else chosen
    _, run = trained.run(resumes=True, epochs=3, resume=resume)
    assert run.checkpoints.resumed_from_step == 4
    assert run.step == 6


def test_a_failed_save_ends_the_run_before_its_next_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[int] = []

    def save(saver: Any, content: Any, best: bool, checkpoint_id: str) -> None:
        # a slow disk is no wait for other ranks
        phases.append(saver.saved.__self__.world.pulse.read()[2])
        saver._writing = Future()
        saver._writing.set_exception(MemoryError())

    monkeypatch.setattr(checkpoint.Saver, "save", save)
    with pytest.raises(MemoryError):
        Trained(tmp_path).run(epochs=2, checkpoint_every_steps=1, log_every_steps=1)
    assert [row["step"] for row in helpers.rows(tmp_path)] == [1]
    assert phases == [watchdog.SAVING]


@pytest.mark.parametrize("epochs", [1, 0])
def test_what_a_recipe_does_after_its_loop_is_outside_the_steps(
    tmp_path: Path, epochs: int
) -> None:
    """The watchdog then waits six times as long, for example for a text that gpt generates."""
    _, run = Trained(tmp_path).run(epochs=epochs)
    assert run.world.pulse.read()[2] == watchdog.OUTSIDE


def test_a_lengthened_run_does_not_keep_the_old_summary(tmp_path: Path) -> None:
    """Even if the resumed run has no step left to train."""
    trained = Trained(tmp_path, values=[0.1, 0.2, None, 0.9])
    trained.run(resumes=True, epochs=1)
    assert helpers.read(tmp_path, "summary")["steps"] == 2
    trained.run(resumes=True, epochs=3)
    assert helpers.read(tmp_path, "status")["state"] == "preempted"
    trained.run(resumes=True, epochs=3)
    summary = helpers.read(tmp_path, "summary")
    assert summary["steps"] == 6
    assert summary["resumed_from_step"] == 6
    assert summary["val_top1"] == 0.9


def test_only_rank_0_asks_for_the_saves_by_time(tmp_path: Path) -> None:
    keys = {"checkpoint_every_s": 0, "keep_checkpoints": 0, "keep_best": "false"}
    Trained(tmp_path / "never").run(epochs=2, **keys)
    saved = [path.name for path in (tmp_path / "never/checkpoints").glob("step-*")]
    assert saved == ["step-00000004.pt"]
    _, run = Trained(tmp_path).run(checkpoint_every_s=0.001)
    time.sleep(0.01)
    assert run.checkpoints.is_due()
    time.sleep(0.01)
    second = dataclasses.replace(run.world.ranks, rank=1)
    run.checkpoints.world = dataclasses.replace(run.world, ranks=second)
    assert not run.checkpoints.is_due()


def test_any_save_postpones_the_next_save_by_time(tmp_path: Path) -> None:
    _, run = Trained(tmp_path).run(checkpoint_every_s=60.0)
    run.checkpoints._saved_at -= 59.0
    with pytest.raises(ValueError, match="process group"):  # the run has ended
        run.checkpoints.save()
    run.checkpoints._saved_at -= 2.0
    assert not run.checkpoints.is_due()
    run.checkpoints._saved_at -= 60.0
    assert run.checkpoints.is_due()
    assert not run.checkpoints.is_due()  # a save is requested once


def test_an_error_names_the_line_of_the_recipe() -> None:
    with pytest.raises(AttributeError) as caught:
        scores.accuracy(cast(Run, None), cast(Any, None))
    line = failure.cause_of(caught.value).line
    assert re.search(r" \(recipes/core/train/scores\.py, line \d+\)$", line)


@pytest.mark.parametrize(("every", "expected"), [(0, [4, 6]), (3, [3, 6])])
def test_a_save_by_time_is_at_the_next_step_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, expected: list[int]
) -> None:
    """At the same step if that is saved anyway."""
    monkeypatch.setattr(saving.Checkpoints, "is_due", lambda of: of.state.step == 3)
    keys = {"keep_checkpoints": 0, "keep_best": "false"}
    Trained(tmp_path, samples=30).run(epochs=1, checkpoint_every_steps=every, **keys)
    saved = (tmp_path / "checkpoints").glob("step-*.pt")
    assert sorted(map(checkpoint.step_of, saved)) == expected


def test_the_best_evaluation_is_saved_as_best(tmp_path: Path) -> None:
    trained = Trained(tmp_path, values=[0.5, 0.75, 0.25, 0.75, 0.125])
    _, run = trained.run(epochs=5, keep_checkpoints=1)
    assert checkpoint.named(tmp_path / "checkpoints", "best") == "step-00000004.pt"
    left = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert left == ["step-00000004.pt", "step-00000010.pt"]
    assert run.state.meta["best"] == {"val_top1": 0.75, "step": 4}


def test_a_signal_before_the_handlers_are_installed_is_not_lost() -> None:
    code = """
import os, signal
from recipes.core.run import entry; from recipes.core.run import signals
entry.begin("mnist", ["device=cpu"])
os.kill(os.getpid(), signal.SIGUSR2)  # would end the process
with signals.stop_flag() as stop:
    print(stop.reason)
"""
    ended = helpers.run([sys.executable, "-c", code])
    assert ended.status == 0
    assert ended.lines == ["SIGUSR2"]


def test_a_single_machine_listens_on_the_given_master_port() -> None:
    port = helpers.free_port()
    with local.listen(Layout((2,), 0, socket.gethostname(), port)) as listener:
        assert listener.getsockname()[:2] in (("::", port), ("0.0.0.0", port))
    with local.listen(Layout((2,))) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_the_row_of_a_stop_has_the_loss_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks agree after every second step; they stop at a step that has no row and no agreement
    otherwise.
    """
    read = Agreement.read
    monkeypatch.setattr(Agreement, "read", lambda sums: (*read(sums)[:3], 2.0))
    _, run = Trained(tmp_path, samples=30, stop_at=3).run()
    [*_, last] = helpers.rows(tmp_path)
    assert last["step"] == 4
    assert run.stopping == "SIGUSR2"
    assert abs(last["loss"]) > 0.01


def test_averaged_weights_equal_torchs_average() -> None:
    """For floating-point values. Integers, whose average torch would truncate, are those of the
    network.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    run: Any = SimpleNamespace(say=print)
    batches: Any = SimpleNamespace(global_batch_size=8, num_samples=8)
    ours = optimisation.averaged(run, net, 0.9, 0, batches)
    rule = swa_utils.get_ema_multi_avg_fn(0.9)
    theirs = swa_utils.AveragedModel(net, multi_avg_fn=rule, use_buffers=True)
    assert ours
    assert list(ours.state_dict()) == list(theirs.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.randn(8, 3)).sum().backward()
        optimizer.step()
        ours.update_parameters(net)
        theirs.update_parameters(net)
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        if name.endswith("num_batches_tracked"):
            assert value == 4
        else:
            assert torch.equal(value, expected[name]), name


def test_ranks_of_another_job_or_attempt_do_not_meet_and_rank_0_waits_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeouts = list[float]()
    names = list[str]()
    store = torch.distributed.HashStore()

    def make_store(*place: Any, timeout: timedelta, **options: Any) -> Any:
        timeouts.append(timeout.total_seconds())
        return store

    def prefixed(name: str, store: Any) -> Any:
        names.append(name)
        return store

    monkeypatch.setattr(torch.distributed, "TCPStore", make_store)
    monkeypatch.setattr(torch.distributed, "PrefixStore", prefixed)
    for rank in (0, 1):
        info = RankInfo(rank, rank, 0, 2, 2, 1, (), "127.0.0.1", 1, True, "7.1", 2)
        for timeout_s in (20.0, 600.0):
            rendezvous._meet(info, info.master_addr, "gloo", timeout_s)
    assert timeouts == [20, 600, 15, 590]  # rank 1 ends first, and reports why
    # torch counts the time in which a job is suspended
    assert store.timeout == worlds.TORCH_TIMEOUT
    assert set(names) == {"7-attempt-2-gloo"}
    info = dataclasses.replace(info, master_addr="fe80::1%none")  # whose interface does not exist
    line = r"cannot resolve fe80::1%none, the host of rank 0 \(.*: set MASTER_ADDR"
    with pytest.raises(errors.MachineError, match=line):
        rendezvous._meet(info, info.master_addr, "gloo", 40.0)


def test_a_node_that_does_not_see_the_run_directory_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a job that is requeued there would begin again."""
    helpers.attempt(tmp_path / "seen")

    def open_run_dir(name: str, local_rank: int = 0, in_slurm: bool = True) -> None:
        info = RankInfo(0, local_rank, 0, 1, 1, 2, (), "127.0.0.1", 1, in_slurm, None, 0)
        store = torch.distributed.HashStore()
        world = worlds.World(info, torch.device("cpu"), "gloo", ("a",), store, timeout_s=0.2)
        run_dir = str(tmp_path / name)
        sent = [run_dir, False, 0, False]
        monkeypatch.setattr(worlds.World, "from_rank_0", lambda self, name, work: sent)
        settings = SimpleNamespace(run=SimpleNamespace(run_dir=run_dir), recipe="toy")
        start: Any = SimpleNamespace(settings=settings, ranks=info)
        session.open_run_dir(start, world)

    open_run_dir("seen")
    open_run_dir("unseen", local_rank=1)  # the first rank of a node looks
    open_run_dir("unseen", in_slurm=False)
    unseen = "this node does not see the files that rank 0 on a writes"
    line = f"^a: run_dir=.*: {unseen}: give a folder that all nodes share"
    with pytest.raises(errors.MachineError, match=line):
        open_run_dir("unseen")


@pytest.mark.parametrize("problem", ["No such file or directory", "Is a directory"])
def test_a_node_that_cannot_write_to_the_run_directory_ends_the_run(
    tmp_path: Path, problem: str
) -> None:
    """All ranks know the reason: `World.together` raises its error on each of them."""
    names: list[str] = []
    run_dir = "/proc/run"
    if problem == "Is a directory":
        run_dir = str(tmp_path)
        (tmp_path / "logs/rank1.log").mkdir(parents=True)

    def together(name: str, work: Any) -> Any:
        names.append(name)
        return work(lambda progress: None)

    settings = SimpleNamespace(run=SimpleNamespace(run_dir=run_dir), recipe="toy")
    ranks = SimpleNamespace(rank=1, run_id=None, num_nodes=2, in_slurm=False)
    sent = [run_dir, False, 0, False]
    world: Any = SimpleNamespace(rank=1, from_rank_0=lambda name, work: sent, together=together)
    start: Any = SimpleNamespace(settings=settings, ranks=ranks)
    line = rf"^run_dir='{run_dir}': cannot be written \({problem}\): give another"
    with pytest.raises(errors.MachineError, match=line):
        session.open_run_dir(start, world)
    assert names == ["run directory"]


FULL = """
from recipes.core.run import entry
from recipes.core.train import session

def full(start, world):
    raise OSError(122, "Disk quota exceeded", "/home")

START = entry.begin("toy")
session.open_run_dir = full
session.run(None, START)
"""


def test_an_error_of_the_system_before_the_run_begins_is_one_line(tmp_path: Path) -> None:
    attempt = helpers.attempt(tmp_path, step=None)
    environ = helpers.clean_environment(**{attempts.VARIABLE: str(attempt.folder)})
    argv = [sys.executable, "-c", FULL, "device=cpu"]
    ended = helpers.run_fork(argv, environ=environ).expect(3)
    line = f"{socket.gethostname()}: OSError: [Errno 122] Disk quota exceeded: '/home'"
    # gloo of torch 2.10 says how many ranks are connected
    assert [text for text in ended.lines if "[Gloo]" not in text] == [f"toy: {line}"]
    assert helpers.failure(tmp_path, 0)["error"] == line


def test_an_evaluation_of_another_model_is_refused() -> None:
    settings = SimpleNamespace(recipe="cifar", config=SimpleNamespace(evaluate=True))
    before = {"arch": "airbench94", "ema": 0.9, "lr": 0.1}
    saved = {"meta": {"recipe": "cifar", "config": before}}

    def check(now: dict[str, Any]) -> None:
        state = SimpleNamespace(meta={"config": now})
        checkpoints: Any = SimpleNamespace(settings=settings, state=state, order={})
        resume._check_keys(checkpoints, Path("x.pt"), saved)

    check({**before, "lr": 0})
    for key in ("arch", "ema"):
        with pytest.raises(InputError, match=f"{key}={before[key]} becomes 0"):
            check({**before, key: 0})


@pytest.mark.parametrize(
    ("phase", "behind", "lost", "ends"),
    [
        (watchdog.WAITING, None, set(), True),
        (watchdog.FORWARD, None, set(), False),
        (watchdog.FORWARD, {"rank": 1}, set(), True),
        (watchdog.OUTSIDE, {"rank": 1}, set(), False),
        (watchdog.FORWARD, {"rank": 1}, {1}, True),
    ],
)
def test_a_wait_without_a_rank_behind_times_out_as_a_network_problem(
    monkeypatch: pytest.MonkeyPatch, phase: int, behind: Any, lost: set[int], ends: bool
) -> None:
    """If no rank is behind, the network is the cause. A rank whose node is lost is awaited for a
    shorter time.
    """
    said: list[Any] = []
    over = threading.Event()

    def fail(run: Run, error: Exception, behind: Any, asked: dict[int, str]) -> int:
        said.extend((error, behind, asked))
        return 1

    def leave(code: int) -> None:
        said.append(code)
        over.set()

    monkeypatch.setattr(failure, "fail", fail)
    monkeypatch.setattr(failure, "leave", leave)
    pulse = watchdog.Pulse()
    pulse.beat(phase, 7)
    links = NodeLinks()
    links.lost = lost
    world = SimpleNamespace(pulse=pulse, clock=pulse.clock, size=3, backend="gloo", links=links)
    world.hosts = ("a", "b", "b")
    world.behind = lambda: behind
    monkeypatch.setattr(keepalive, "LOST_S", 1.0)
    keys = SimpleNamespace(timeout_s=60.0 if lost else 1.0)
    run: Any = SimpleNamespace(world=world, keys=keys, failing=threading.Lock())
    ended = threading.Timer(2.0, over.set)
    ended.start()
    failure.watch_peers(run, over)
    ended.cancel()
    assert bool(said) == ends
    if ends:
        error, named, asked, code = said
        assert named == behind
        assert code == 1
        assert torch_errors.peer_kind(error) == Kind.timeout
        expected = "b: it has died or lost its network" if lost else "the other ranks for 1 s"
        assert expected in str(error)
        assert asked == ({0: "a"} if lost else {0: "a", 1: "b", 2: "b"})
    keys.timeout_s = 0.5
    assert failure._patience_s(run) == 0.5  # also if a node is lost


def test_a_wait_ends_after_timeout_s_although_the_question_who_is_behind_takes_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time_s = 0.0

    def later(seconds: float) -> bool:
        nonlocal time_s
        time_s += seconds
        return False

    def behind() -> dict[str, int]:
        later(worlds.BEHIND_S)
        return {"rank": 1}

    def end(run: Run, behind: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(failure, "_time_out", end)
    world = SimpleNamespace(size=2, behind=behind, links=NodeLinks())
    world.pulse = SimpleNamespace(read=lambda: (1, 7, watchdog.FORWARD))
    world.clock = SimpleNamespace(now=lambda: time_s)
    keys = SimpleNamespace(timeout_s=60.0)
    run: Any = SimpleNamespace(world=world, keys=keys, failing=threading.Lock())
    over: Any = SimpleNamespace(wait=later)
    with pytest.raises(TimeoutError):
        failure.watch_peers(run, over)
    assert 60.0 < time_s <= 60.0 + worlds.POLL_S * 2


def test_of_several_losses_the_one_that_is_not_finite_has_its_step() -> None:
    ends: Any = object.__new__(loop._StepEnds)
    ends.sums = SimpleNamespace(read=lambda: ([1.0, math.nan, 1.0, 1.0], "", False, 4.0))
    ends.agreed_at = 8
    with pytest.raises(RunError, match="the loss at step 6 is nan"):
        ends._read()


@pytest.mark.parametrize(("every", "expected"), [(0.2, 1), (3.9, 3), (250.0, 8)])
def test_one_sum_over_the_ranks_serves_at_most_eight_steps(every: float, expected: int) -> None:
    """every: what rank 0 has computed from the time of a step. The run stops that much later."""
    ends: Any = object.__new__(loop._StepEnds)
    ends.sums = SimpleNamespace(read=lambda: ([1.0], "", False, every))
    ends.agreed_at = 8
    ends._read()
    assert ends.every == expected


def test_the_distance_of_two_sums_follows_from_the_steps_since_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sum after four steps of 0.05 s, and one after two of 0.025 s, which a row requires."""
    now = 0.0
    sums: list[tuple[int, float]] = []

    def agree(world: Any, stop: Any, losses: list[Any], save: bool, every: float) -> None:
        sums.append((len(losses), pytest.approx(every)))

    monkeypatch.setattr(loop, "Agreement", agree)
    world = SimpleNamespace(size=2, clock=SimpleNamespace(now=lambda: now))
    checkpoints = SimpleNamespace(is_due=lambda: False)
    ends: Any = object.__new__(loop._StepEnds)
    ends.run = SimpleNamespace(world=world, stop=None, checkpoints=checkpoints)
    vars(ends).update(every=4, agreed_at=0, agreed_s=0.0, losses=[])
    for ends.run.step in range(1, 7):
        now += 0.05 if ends.run.step <= 4 else 0.025
        ends.losses.append(1.0)
        ends._agree(ends.run.step == 6)
    assert sums == [(4, 5.0), (2, 10.0)]


def test_only_rank_0_says_when_the_ranks_agree_next(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[list[float]] = []

    def all_reduce(values: Tensor, async_op: bool) -> None:
        sums.append(values.tolist())

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    for rank in (0, 1):
        world: Any = SimpleNamespace(rank=rank, size=2, device=torch.device("cpu"))
        Agreement(world, signals.StopFlag(), [torch.tensor(7.0)], True, 3.0)
    assert sums == [[7.0, 0.0, 1.0, 3.0], [7.0, 0.0, 1.0, 0.0]]
