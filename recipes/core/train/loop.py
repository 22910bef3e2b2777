"""The step loop as a function. The code that can deadlock or lose data exists only here."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

from recipes.core.config.run_keys import TrainKeys
from recipes.core.data.sampling import GlobalBatches, Shard
from recipes.core.errors import InputError, RunError
from recipes.core.run import watchdog
from recipes.core.run.watchdog import Pulse, RunningClock
from recipes.core.train import metrics
from recipes.core.train.agreement import Agreement
from recipes.core.train.session import Run

PROGRESS_EVERY_S = 0.5


def total_steps(cfg: TrainKeys, batches: GlobalBatches) -> int:
    """Number of optimiser steps of the whole run."""
    steps = cfg.epochs * batches.per_epoch
    return min(steps, cfg.max_steps) if cfg.max_steps else steps


def seed_ranks(run: Run, seed: int) -> None:
    """Gives each rank a different random state, so that dropout differs between ranks.

    Call it after the weights are initialised and before ``run.resume``, which restores the random state of a checkpoint.
    """
    if run.begun:
        raise RuntimeError(
            "loop.seed_ranks replaces the random state that run.resume restored: call it before run.resume"
        )
    torch.manual_seed((seed * 1_000_003 + run.world.rank + 1) % 2**63)


@torch.inference_mode()
def accuracy(run: Run, answers: Callable[[nn.Module], Iterable[tuple[Tensor, Tensor]]]) -> dict[str, Any]:
    """Top-1 and top-5 accuracy over all ranks. Each rank counts its own samples, and the counts are summed.

    answers: gets the network to evaluate, and returns pairs of logits and labels. The result is empty if a rank was notified to stop
    meanwhile, since there may be no time to complete the evaluation. A collective: every rank must call it.
    """
    counts = torch.zeros(4, dtype=torch.int64, device=run.world.device)
    with evaluation(run) as net:
        for logits, labels in answers(net):
            if run.stop_is_near():
                counts[3] = 1
                break
            run.world.pulse.beat(watchdog.EVALUATION)
            counts[:3] += metrics.right(logits, labels)
    run.world.pulse.beat(watchdog.COUNT)
    *right, cut_short = run.world.sum(counts).tolist()
    return {} if cut_short else metrics.accuracy(*right)


def _evaluate(run: Run, evaluate: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """The results of ``evaluate``. If they are empty, it was cut short: then ``run.stopping`` is set. Called by all ranks."""
    run.world.pulse.beat(watchdog.TO_EVALUATE, run.step)
    results = evaluate()
    if not results:
        run.stopping = run.agree_to_stop()
    return results


@contextlib.contextmanager
def evaluation(run: Run) -> Iterator[nn.Module]:
    """The network to evaluate, in eval mode: the averaged weights if there are any. Called by all ranks.

    Rank 0's buffers are copied to all ranks, since the averages of batch normalisation differ: each rank computes them from its own
    samples. A checkpoint holds those of rank 0.
    """
    ema, net = run.state.ema, run.state.model
    chosen = ema.module if isinstance(ema, swa_utils.AveragedModel) else net
    run.world.pulse.beat(watchdog.EVALUATION)
    run.world.broadcast_buffers(chosen)
    training = chosen.training
    chosen.eval()
    try:
        yield chosen
    finally:
        chosen.train(training)


def fit(
    run: Run,
    cfg: TrainKeys,
    model: nn.Module,
    batches: GlobalBatches,
    loss_sum: Callable[[Any], Tensor],
    evaluate: Callable[[], Mapping[str, Any]],
    shards: Callable[[int, int], Iterator[Shard]] | None = None,
) -> Mapping[str, Any]:
    """Trains ``run.state`` until ``epochs`` or ``max_steps``, or until the ranks agree to stop. Returns the last evaluation.

    model: the result of `World.parallel`. loss_sum: forward pass through the model over a shard. It returns the *sum* of the samples'
    losses, a scalar that can be differentiated even if the shard is empty. With ``accumulate=`` it is called once for each piece of
    the shard. evaluate: called by all ranks at the end of each epoch and of the run. shards: this rank's shards of ``batches`` with more
    than indices, by epoch and first batch; default: ``batches.epoch``.

    DDP averages gradients over ranks, so each rank's sum is multiplied by ``world_size / global_size``. The result is the mean over the
    global batch, whatever the sizes of the ranks' shards. Raises RunError, on all ranks, if the loss is not finite.
    """
    state, world, total = run.state, run.world, total_steps(cfg, batches)
    results: Mapping[str, Any] = {}
    if state.meta.get("unevaluated") and not run.was_done:
        results = _evaluate_late(run, evaluate)
        if state.step < total:
            run.stopping = ""  # the run stops one step later, so even a job too short for an evaluation makes progress
    if state.step >= total:
        run.say(f"already finished: step {state.step} of {total}; raise epochs= to continue")
        return results if results or run.stopping or run.was_done else _evaluate(run, evaluate)
    sums: Agreement | None = None
    meter, pulse = _Meter(world.clock), world.pulse
    first_step = state.step + 1
    while state.step < total and not run.stopping:
        epoch, first_batch = divmod(state.step, batches.per_epoch)
        pulse.beat(watchdog.DATA, state.step)
        for shard in (shards or batches.epoch)(epoch, first_batch):
            lr = float(state.scheduler.get_last_lr()[0])
            state.optimizer.zero_grad(set_to_none=True)
            loss = _backward(model, loss_sum, shard.pieces(cfg.accumulate), world.size / shard.global_size, pulse)
            pulse.beat(watchdog.UPDATE)
            state.optimizer.step()
            state.scheduler.step()
            if isinstance(state.ema, swa_utils.AveragedModel):
                state.ema.update_parameters(state.model)
            state.step += 1
            meter.add(shard.global_size)

            # The ranks decide by the sums of the step before, so that no step waits for them. For a row of metrics they wait.
            before, sums = sums, run.sum_step(loss)
            total_loss, stop, save = before.read() if before else (0.0, "", False)
            _check_finite(total_loss, state.step - 1)
            last_of_epoch, last = shard.batch == batches.per_epoch - 1, state.step == total
            save = save or run.interval_ends()
            logs = state.step == first_step or state.step % cfg.log_every_steps == 0
            if last_of_epoch or last or stop or save or logs:
                total_loss, stop_now, _ = sums.read()
                _check_finite(total_loss, state.step)
                stop = stop or stop_now
                row: dict[str, Any] = {
                    "epoch": epoch,
                    "loss": total_loss / shard.global_size,
                    "lr": lr,
                    "speed": meter.lap(),
                }
                results = {}
                if (last_of_epoch or last) and not stop:
                    results = _evaluate(run, evaluate)
                    stop = run.stopping
                best = run.is_best(results) and run.keys.keep_best
                if run.saver:
                    run.saver.check()
                log_row(run, **row, results=results)
                state.meta["unevaluated"] = row if (last_of_epoch or last) and stop else None
                if save or stop or last or best:
                    run.save(best=best, wait=last or bool(stop))
                meter.lap()
            elif meter.progress_due():
                run.progress(f"epoch {epoch + 1}/{cfg.epochs}  step {state.step}/{total}  lr {lr:.2g}")
            if stop or last:
                run.stopping = run.stopping if last else stop
                pulse.beat(watchdog.TO_EVALUATE)  # a stop may have postponed an evaluation
                break
            pulse.beat(watchdog.DATA)
    run.samples, run.train_s = meter.samples, meter.train_s
    if state.meta.get("unevaluated") and not run.stopping:
        results = _evaluate_late(run, evaluate)
    return results


def _check_finite(loss: float, step: int) -> None:
    """Raises RunError if the loss of this step is not finite. The loss is a sum over all ranks, so all ranks raise it."""
    if not math.isfinite(loss):
        raise RunError(f"the loss at step {step} is {loss}: a lower lr, or the data, is where to look")


def _evaluate_late(run: Run, evaluate: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Runs an evaluation that a stop has postponed. Writes the row of that step again, with results, and saves if it is the best.

    Called by all ranks.
    """
    results = _evaluate(run, evaluate)
    if results:
        log_row(run, **run.state.meta["unevaluated"], results=results)
        run.state.meta["unevaluated"] = None
        if run.is_best(results) and run.keys.keep_best:
            run.save(best=True, wait=True)
    return results


def _backward(
    model: nn.Module, loss_sum: Callable[[Any], Tensor], pieces: list[Shard], scale: float, pulse: Pulse
) -> Tensor:
    """Computes gradients of ``scale`` times the losses of the pieces. Returns the sum of the losses, detached and not scaled.

    The gradients are averaged over the ranks once, at the last piece.
    """

    def one(piece: Shard) -> Tensor:
        pulse.beat(watchdog.FORWARD)
        loss = loss_sum(piece)
        pulse.beat(watchdog.BACKWARD)
        (loss * scale).backward()
        return loss.detach()

    with model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
        losses = [one(piece) for piece in pieces[:-1]]
    losses.append(one(pieces[-1]))
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def evaluate_only(run: Run, evaluate: Callable[[], Mapping[str, Any]], pretrained: bool = False) -> Mapping[str, Any]:
    """For evaluate=true: evaluates the checkpoint that was loaded. Raises InputError if there is none. Called by all ranks.

    pretrained: whether to evaluate the weights without a checkpoint.
    """
    if run.resumed_from_step is None and not pretrained:
        raise InputError(
            f"evaluate=true: {run.dir} has no checkpoint: give its run_dir=, or resume=PATH of a checkpoint"
        )
    run.end_rehearsal()
    results = _evaluate(run, evaluate)
    if results:
        run.say("  ".join(f"{name} {value:.4f}" for name, value in results.items() if isinstance(value, float)))
    return results


def require_full_batches(cfg: TrainKeys, batches: GlobalBatches, world_size: int) -> None:
    """Raises InputError if a rank, or one of its ``accumulate`` pieces, would have no sample of some batch.

    Batch normalisation cannot process an empty batch, and with sync_bn= the ranks would not call the same number of collectives.
    """
    last = batches.num_samples - (batches.per_epoch - 1) * batches.global_batch_size
    smallest = last if batches.per_epoch == 1 else (last + batches.global_batch_size) // 2
    least = world_size * cfg.accumulate
    if smallest < least:
        pieces = f" of {cfg.accumulate} pieces" if cfg.accumulate > 1 else ""
        raise InputError(
            f"global_batch_size={batches.global_batch_size}: a batch of {smallest} of {batches.num_samples} samples leaves some of "
            f"{world_size} ranks{pieces} without any; give at least {2 * least}, or fewer ranks"
        )


def sampler_state(batches: GlobalBatches) -> dict[str, Any]:
    """The values that determine the order of samples. The position in that order is the step."""
    return {
        "num_samples": batches.num_samples,
        "global_batch_size": batches.global_batch_size,
        "seed": batches.seed,
        "data": batches.data,
    }


def log_row(
    run: Run, epoch: int, loss: float, lr: float, speed: float, results: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Writes a row of ``metrics.jsonl`` and a log line, from rank 0. Called by all ranks.

    loss, speed (samples per second) and results are values over all ranks. Raises RunError, on all ranks, if the loss is not finite.
    """
    run.world.pulse.beat(watchdog.ROW, run.step)
    _check_finite(loss, run.step)
    if not run.rows:
        return
    row = {
        "attempt": run.attempt.number,
        "step": run.state.step,
        "epoch": epoch,
        "loss": loss,
        "lr": lr,
        "samples_per_second": round(speed, 1),
    }
    run.rows.add({**row, **results})
    told = "  ".join(f"{name} {value:.4f}" for name, value in results.items() if isinstance(value, float))
    run.say(
        f"epoch {epoch + 1}  step {run.state.step}  loss {loss:.4f}  lr {lr:.2g}  {speed:,.0f} samples/s  {told}".rstrip()
    )


class _Meter:
    """Counts samples and seconds of training, without evaluation, saving and suspension. Also paces the progress line."""

    def __init__(self, running: RunningClock) -> None:
        self._now = running.now
        self.samples, self.train_s = 0, 0.0
        self._lap_samples, self._lap_start = 0, self._now()
        self._progress_at = self._lap_start

    def add(self, samples: int) -> None:
        self._lap_samples += samples

    def lap(self) -> float:
        """Ends an interval of training and returns its samples per second. Called before and after work that is not training."""
        seconds = self._now() - self._lap_start
        speed = self._lap_samples / seconds if self._lap_samples else 0.0
        if self._lap_samples:
            self.samples, self.train_s = self.samples + self._lap_samples, self.train_s + seconds
        self._lap_samples, self._lap_start = 0, self._now()
        return speed

    def progress_due(self) -> bool:
        due = self._now() - self._progress_at >= PROGRESS_EVERY_S
        self._progress_at = self._now() if due else self._progress_at
        return due
