"""The step loop as an iterator: recipes write their own step; what can deadlock or lose data exists
only here.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recipes.core.config.run_keys import TrainKeys
from recipes.core.data.sampling import S, Part, Source
from recipes.core.errors import InputError, RunError, Stopped
from recipes.core.run import ledger, trackers, watchdog
from recipes.core.train import gradients, lines, metrics, outcome
from recipes.core.train.agreement import Agreement
from recipes.core.train.meter import Flops, Meter, achieved
from recipes.core.train.profiling import profiling
from recipes.core.train.run import Results, Run
from recipes.core.train.step import Common, Step

# Maximum distance of two sums over the ranks (the shorter one counts; at least one step). A sum
# costs up to a millisecond.
AGREE_EVERY_S = 0.25
AGREE_EVERY_STEPS = 8
EARLIER_ROW = {"total_steps": 0, "samples_per_second": 0.0}  # of a checkpoint of an earlier version
Evaluate = Callable[[], Results]


def total_steps(cfg: TrainKeys, batches: Source[Part]) -> int:
    """Number of optimiser steps of the whole run."""
    steps = cfg.epochs * batches.per_epoch
    return min(steps, cfg.max_steps) if cfg.max_steps else steps


def steps(
    run: Run,
    cfg: TrainKeys,
    model: nn.Module,
    batches: Source[S],
    evaluate: Evaluate,
    pretrained: bool = False,
) -> Iterator[Step[S]]:
    """Yields the steps from ``run.state`` until ``epochs`` or ``max_steps``, or until the ranks
    agree to stop.

    model: the result of `World.parallel`. evaluate: called by all ranks at the end of each epoch
    and of the run; it may end early if `Run.stop_is_near`. The last evaluation is ``run.results``.
    With evaluate=true there are no steps: it evaluates the loaded checkpoint, or with
    ``pretrained`` the weights without one.

    The body of the loop calls ``step.backward`` for each part, then ``optimizer.step()`` and
    ``scheduler.step()`` once, which first clips the gradients (clip_grad_norm=) and removes
    float16's loss scale. What follows a step happens here: averaged weights, the sum over ranks,
    the row of metrics, evaluation, checkpoint, stop. Raises RunError, on all ranks, if the loss is
    not finite or the body leaves out a call.
    """
    if not run.is_running:
        raise RunError("loop.steps(): call run.resume() before it")
    state = run.state
    pulse = run.world.pulse
    ends = _StepEnds(run, cfg, model, batches, evaluate)
    if not ends.before_steps(pretrained):
        run.complete = True
        pulse.beat(watchdog.OUTSIDE)
        return
    gradients.check_first_step(run, model)
    scaled = gradients.Gradients(state, cfg)
    meter = ends.meter
    common = Common(run, model, cfg.accumulate, meter)
    flops = Flops()
    with profiling(run, cfg.profile) as profile_step, contextlib.ExitStack() as first_step:
        if not cfg.compile:
            first_step.enter_context(flops)
        while state.step < ends.total and not run.stopping:
            epoch, first_batch = divmod(state.step, batches.per_epoch)
            pulse.beat(watchdog.DATA, state.step)
            meter.mark("loop")
            for part in batches.epoch(epoch, first_batch):
                ends_epoch = part.batch == batches.per_epoch - 1
                if ends.is_row(state.step + 1, ends_epoch):
                    meter.sample()
                meter.mark("data_wait")
                state.optimizer.zero_grad(set_to_none=True)
                step = Step(common, part, ends_epoch, scaled.scale)
                yield step
                step.check()
                meter.mark("optimizer")
                first_step.close()
                ends.flops = ends.flops or flops.count / max(1, len(part.indices))
                if ends.end(step):
                    break
                profile_step()
                pulse.beat(watchdog.DATA)
                meter.mark("loop")
    run.samples = meter.samples
    run.train_s = meter.train_s
    if state.meta.get("unevaluated") and not run.stopping:
        ends.evaluate_late()
    run.complete = True
    pulse.beat(watchdog.OUTSIDE)


@dataclass
class _StepEnds:
    """What happens before, between and after the steps of a run. All ranks call every method."""

    run: Run
    cfg: TrainKeys
    model: nn.Module
    batches: Source[Part]
    evaluate: Evaluate

    def __post_init__(self) -> None:
        run = self.run
        self.meter = Meter(run.world.clock, run.world.device)
        self.first_step = run.step + 1
        self.suspended_s = run.world.clock.stopped_s
        self.total = total_steps(self.cfg, self.batches)
        self.has_stalled = partial(outcome.has_stalled, run, self.batches.per_epoch)
        if self.has_stalled():
            self.total = run.step
        self.sums: Agreement | None = None  # the last sum, until it is read
        self.losses: list[Tensor] = []  # of the steps since then
        self.row: dict[str, Any] = {}  # the last one; the first step has a row
        self.flops = 0.0  # of a sample; 0 if unknown
        self.agreed_at = run.step
        self.agreed_s = run.world.clock.now()
        self.every = 1

    def before_steps(self, pretrained: bool) -> bool:
        """Does what precedes the first step: evaluate=true, a postponed evaluation. Returns whether
        there are steps to do.
        """
        run = self.run
        state = run.state
        if self.cfg.evaluate and run.checkpoints.resumed_from_step is None and not pretrained:
            raise InputError(
                f"evaluate=true: {run.checkpoints.folder.parent} has no checkpoint: "
                "give the run_dir= of a run, or resume=PATH of a checkpoint"
            )
        if self.cfg.tensorboard:
            trackers.require("tensorboard.compat.proto.event_pb2")
        run.end_dry_run()
        size = self.cfg.global_batch_size
        per_gpu = size / (run.world.data.size * self.cfg.accumulate)
        if run.world.device.type == "cuda" and per_gpu < self.cfg.small_part:
            run.say(
                f"warning: global_batch_size={size} leaves {per_gpu:g} per GPU "
                "and forward pass, so the GPUs mostly wait for the CPU: "
                "use a larger batch size, or fewer GPUs"
            )
        if self.cfg.evaluate:
            if self._evaluate():
                run.say(lines.of_results(run.results))
            return False
        late = state.meta.get("unevaluated") and not run.was_done
        if late:
            self.evaluate_late()
            if self.has_stalled():
                self.total = state.step
            if state.step < self.total:
                # do one step first: a job too short for an evaluation makes progress
                run.stopping = ""
        if state.step < self.total:
            return True
        longer = "max_steps" if 0 < self.cfg.max_steps == self.total else "epochs"
        fix = "give patience=0" if self.has_stalled() else f"raise {longer}="
        run.say(f"already finished: step {state.step} of {self.total}; {fix} to continue")
        if not late and not run.was_done:
            self._evaluate()
        return False

    def end(self, step: Step[Any]) -> bool:
        """Ends a step. Returns whether it was the last one."""
        run = self.run
        state = run.state
        if state.ema:
            state.ema.update_parameters(state.model)
        state.step += 1
        self.meter.step_ends(step.part.global_size)
        run.world.pulse.beat(watchdog.WAITING, state.step)
        self.losses.append(step.loss)
        # The ranks decide by the sums of an earlier step, so that no step waits for them. Only a
        # row of metrics waits.
        _, stop, save = self._read()
        last = state.step == self.total
        ends_epoch = last or step.ends_epoch
        intervals = (run.keys.checkpoint_every_steps, run.keys.keep_every_steps)
        save = save or step.save or any(every and state.step % every == 0 for every in intervals)
        is_row = self.is_row(state.step, ends_epoch)
        must = is_row or save or bool(stop)
        self._agree(must)
        if must:
            loss, stop_now, save_now = self._read()
            stop = self._record(step, loss, stop or stop_now, ends_epoch, save or save_now)
            last = state.step == self.total  # also if it has ended early
        elif self.meter.progress_due():
            now = {"epoch": step.part.epoch, "step": state.step}
            row = {**self.row, **now, "samples_per_second": self.meter.speed()}
            per_step = step.part.global_size
            run.console.progress(partial(lines.progress, row, self.cfg.epochs, per_step))
        if stop or last:
            # After the last step the run is complete: only an evaluation that was cut short still
            # counts as stopped.
            if not last:
                run.stopping = stop
            run.world.pulse.beat(watchdog.EVALUATION)  # a stop may have postponed an evaluation
        return bool(stop) or last

    def is_row(self, step: int, ends_epoch: bool) -> bool:
        """Whether metrics.jsonl has a row for the step with this number."""
        return (
            ends_epoch
            or step in (self.first_step, self.total)
            or step % self.cfg.log_every_steps == 0
        )

    def _agree(self, must: bool) -> None:
        """Starts a sum over the ranks: if ``must``, or `every` steps after the last one. All ranks
        do so at the same steps.
        """
        run = self.run
        steps = run.step - self.agreed_at
        if not must and steps < self.every:
            return

        now = run.world.clock.now()
        every = AGREE_EVERY_S * steps / (now - self.agreed_s) if run.world.size > 1 else 1.0
        self.sums = Agreement(run.world, run.stop, self.losses, run.checkpoints.is_due(), every)
        self.losses = []
        self.agreed_at = run.step
        self.agreed_s = now

    def _read(self) -> tuple[float, str, bool]:
        """The last loss of `sums`, why to stop, whether to save. Raises RunError, on all ranks, if
        a loss is not finite.
        """
        if not self.sums:
            return 0.0, "", False
        losses, stop, save, every = self.sums.read()
        self.sums = None
        for step, loss in enumerate(losses, self.agreed_at - len(losses) + 1):
            if not math.isfinite(loss):
                raise RunError(f"the loss at step {step} is {loss}: check lr= and the data")
        self.every = max(1, min(AGREE_EVERY_STEPS, int(every)))
        return losses[-1], stop, save

    def _record(self, step: Step[Any], loss: float, stop: str, ends_epoch: bool, save: bool) -> str:
        """Evaluates, writes a row and saves, as this step requires. Returns why the run stops, ""
        if it does not.
        """
        run = self.run
        part = step.part
        measured = self.meter.lap(_unhidden_s(self.model))
        spent = self.meter.spent
        if self.cfg.compile and run.step == self.first_step:
            spent["compile"] = self.meter.train_s - spent["data"]
        self.row = row = {
            "total_steps": self.total,
            "epoch": part.epoch,
            "loss": loss / part.global_size,
            "lr": step.lr,
            **measured,
        }
        speed = self.flops * measured["samples_per_second"] / run.world.data.size
        if speed:
            row |= achieved(speed, run.world.device)
        run.results = {}
        if ends_epoch and not stop:
            row |= self.meter.of_ranks(run.world)
            self._evaluate()
            stop = run.stopping
        try:
            best = outcome.is_best(run) and run.keys.keep_best
        except InputError:  # on all ranks: the epoch is not lost
            run.checkpoints.save(wait=True)
            raise
        if run.checkpoints.saver:
            run.checkpoints.saver.check()
        self._log_row(row, self.cfg.global_batch_size)
        if run.rows and run.step == self.first_step:
            parts = ledger.recovery(run.attempt)
            if parts:
                took = f"{sum(parts.values()):.1f} s after the failure"
                run.say(f"first step {took}: {ledger.text(parts)}")
        run.state.meta["unevaluated"] = row if ends_epoch and stop else None
        if ends_epoch and run.step < self.total and self.has_stalled():
            run.say(f"no better result for patience={self.cfg.patience} epochs: the run ends")
            self.total = run.step
        last = run.step == self.total
        if save or stop or last or best:
            with self.meter.spending("checkpoint"):
                run.checkpoints.save(best=best, wait=last or bool(stop))
        self.meter.lap()
        return stop

    def _evaluate(self) -> bool:
        """Sets ``run.results``. Returns False, and sets ``run.stopping``, if a stop has cut the
        evaluation short.

        It was cut short if it has raised Stopped, on all ranks, or if `Run.stop_is_near` has
        returned True to it on any rank; its results are then ignored. A collective.
        """
        run = self.run
        run.world.pulse.beat(watchdog.EVALUATION, run.step)
        run.cut_short = False
        with self.meter.spending("evaluation"):
            try:
                results = metrics.require_results("evaluate()", self.evaluate(), metrics.RESERVED)
            except Stopped:
                run.cut_short = True
                results = {}
        # The ranks must agree on the best evaluation, whatever each of them has returned: the score
        # is that of rank 0.
        name = outcome.metric(self.cfg)
        score = results.get(name) if run.world.rank == 0 else None
        of_rank_0 = [1.0, float(score)] if isinstance(score, float | int) else [0.0, 0.0]
        values = torch.tensor([float(run.cut_short), *of_rank_0], dtype=torch.float64)
        sums, reason, _, _ = Agreement(run.world, run.stop, list(values)).read()
        cut_short, has_score, score = sums
        if has_score:
            results = {**results, name: score}
        run.results = {} if cut_short else results
        run.stopping = reason if cut_short else ""
        return not cut_short

    def evaluate_late(self) -> None:
        """Runs an evaluation that a stop has postponed: writes the row of its step again; saves if
        it is the best.
        """
        run = self.run
        if self._evaluate():
            is_best = outcome.is_best(run)
            self._log_row({**EARLIER_ROW, **run.state.meta["unevaluated"]})
            run.state.meta["unevaluated"] = None
            if is_best and run.keys.keep_best:
                run.checkpoints.save(best=True, wait=True)

    def _log_row(self, of_step: Mapping[str, Any], per_step: int = 0) -> None:
        """Writes a row of ``metrics.jsonl``, a log line, and one for an evaluation, on rank 0.

        of_step: the row without its place, time and results. per_step: samples of a step; with it,
        the log line has the time left.
        """
        run = self.run
        run.world.pulse.beat(watchdog.SAVING, run.step)
        if not run.rows:
            return
        suspended_s = run.world.clock.stopped_s - self.suspended_s
        spent = {**self.meter.spent, "hang": suspended_s}
        row = {
            "attempt": run.attempt.number,
            "step": run.step,
            "time": round(time.time(), 3),
            **of_step,
            "best": run.state.meta.get("best"),
            "spent_s": {cause: round(seconds, 3) for cause, seconds in spent.items()},
        }
        results = {name: value for name, value in run.results.items() if name not in row}
        run.rows.add({**row, **results})
        run.say(lines.of_row(row, self.cfg.epochs, per_step))
        numbers = lines.of_results(results)
        if numbers:
            run.say(f"evaluation at step {run.step}:  {numbers}")


def _unhidden_s(model: nn.Module) -> float:
    """Seconds of a step in which the backward pass was over and gradients were still averaged, from
    DDP's own timers; 0 without DDP.

    DDP measures each of its first ten steps, and then one of a hundred. The value is that of the
    last measured one.
    """
    if not isinstance(model, DistributedDataParallel):
        return 0.0
    timers = model._get_ddp_logging_data()
    overlap = timers.get("backward_compute_comm_overlap_time", 0)
    return max(0.0, timers.get("backward_comm_time", 0) - overlap) / 1e9
