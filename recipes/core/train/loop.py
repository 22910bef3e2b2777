"""The step loop as a function. The code that can deadlock or lose data exists only here."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

from recipes.core.config.run_keys import Dtype, TrainKeys
from recipes.core.data.sampling import Shard
from recipes.core.errors import InputError, RunError
from recipes.core.run import watchdog
from recipes.core.run.watchdog import Pulse, RunningClock
from recipes.core.train import metrics
from recipes.core.train.session import Run

PROGRESS_EVERY_S = 0.5


class Batches(Protocol):
    """A source of shards: `GlobalBatches`, or `Loader`, which reads files in advance."""

    @property
    def num_samples(self) -> int: ...
    @property
    def global_batch_size(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def data(self) -> str: ...
    @property
    def per_epoch(self) -> int: ...
    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Shard]: ...


def total_steps(cfg: TrainKeys, batches: Batches) -> int:
    """Number of optimiser steps of the whole run."""
    steps = cfg.epochs * batches.per_epoch
    return min(steps, cfg.max_steps) if cfg.max_steps else steps


def autocast(run: Run, cfg: TrainKeys) -> torch.autocast:
    """The context of the forward pass: bfloat16 if ``dtype=bfloat16``, or if ``dtype=auto`` and the GPUs of all ranks support it.

    With auto, rank 0 logs the choice. A collective: every rank must call it.
    """
    device, lower, why = run.world.device, cfg.dtype is Dtype.bfloat16, "auto"
    has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    # Every rank takes part, whatever its keys: they have not been compared yet.
    with_it = int(run.world.sum(torch.tensor(int(has_it), device=device)))
    if cfg.dtype is Dtype.auto:
        lower = with_it == run.world.size
        why += f"; {with_it} of {run.world.size} GPUs have bfloat16" if with_it and not lower else ""
        run.say(f"dtype: {'bfloat16' if lower else 'float32'} ({why})")
    return torch.autocast(device.type, torch.bfloat16, enabled=lower)


def scaled_lr(run: Run, lr: float, lr_batch_size: int, batches: Batches) -> float:
    """The learning rate by the linear scaling rule (Goyal et al., 2017). Rank 0 logs a rate that was changed.

    lr: the rate for batches of ``lr_batch_size`` samples. With ``lr_batch_size`` 0 it applies to any size.
    """
    share = _of_batch(lr_batch_size, batches)
    if share != 1:
        run.say(
            f"lr: {lr * share:.4g} for batches of {share * lr_batch_size:g} ({lr:g} for {lr_batch_size}, in proportion)"
        )
    return lr * share


def averaged(
    run: Run, net: nn.Module, decay: float, of_batch_size: int, batches: Batches
) -> swa_utils.AveragedModel | None:
    """An exponential moving average of ``net``'s weights and buffers, for `State.ema`. `fit` updates it. None if decay is 0.

    decay: decay per step of ``of_batch_size`` samples (0: any size). It is scaled to the actual batch size, so that the average always
    covers the same number of samples.
    """
    if not decay:
        return None
    share = _of_batch(of_batch_size, batches)
    if share != 1:
        run.say(f"ema: {decay**share:.4g} a step of {share * of_batch_size:g} ({decay:g} for {of_batch_size})")
    return _Average(net, decay**share)


class _Average(swa_utils.AveragedModel):
    """torch's average of weights and buffers. Unlike torch's update, this one does not make the host wait for the GPU at each step.

    torch's update copies the step count to the GPU.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        super().__init__(net, use_buffers=True)
        self._decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        mine, its = ([*of.parameters(), *of.buffers()] for of in (self.module, model))
        blended = [bool(self.n_averaged) and one.is_floating_point() for one in mine]
        if any(blended):
            torch._foreach_lerp_(
                list(itertools.compress(mine, blended)), list(itertools.compress(its, blended)), 1 - self._decay
            )
        for one, other, is_done in zip(mine, its, blended, strict=True):
            if not is_done:
                one.copy_(other)
        self.n_averaged += 1


def seed_ranks(run: Run, seed: int) -> None:
    """Gives each rank a different random state, so that dropout differs between ranks. Call it after the weights are initialised."""
    torch.manual_seed((seed * 1_000_003 + run.world.rank + 1) % 2**63)


def _of_batch(size: int, batches: Batches) -> float:
    return min(batches.global_batch_size, batches.num_samples) / size if size else 1.0


def decay_groups(net: nn.Module, weight_decay: float, others: float = 0.0) -> list[dict[str, Any]]:
    """Two parameter groups for an optimiser: weights have ``weight_decay``; norms and biases have the weight decay ``others``."""
    weights = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim <= 1]
    return [{"params": weights, "weight_decay": weight_decay}, {"params": rest, "weight_decay": others}]


def count_right(run: Run, answers: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Top-1 and top-5 accuracy over all ranks. Each rank counts its own samples, and the counts are summed.

    answers: pairs of logits and labels. The result is empty if a rank was told to stop meanwhile, since there may be no time to
    complete the evaluation. A collective: every rank must call it.
    """
    counts = torch.zeros(4, dtype=torch.int64, device=run.world.device)
    for logits, labels in answers:
        if run.stop_is_near():
            counts[3] = 1
            break
        run.world.pulse.beat(watchdog.EVALUATION)
        counts[:3] += metrics.right(logits, labels)
    run.world.pulse.beat(watchdog.COUNT)
    *right, stopped = run.world.sum(counts).tolist()
    return {} if stopped else metrics.accuracy(*right)


def _evaluate(run: Run, evaluate: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """The results of ``evaluate``. They are empty if a rank was told to stop; then ``run.stopping`` is set. Called by all ranks."""
    run.world.pulse.beat(watchdog.TO_EVALUATE, run.step)
    results = evaluate()
    if not results:
        run.stopping = run.told_to_stop()
    return results


@contextlib.contextmanager
def evaluated(run: Run) -> Iterator[nn.Module]:
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


class _Totals:
    """Sums over all ranks of one step: the loss, the stop flags and rank 0's request to save. The sum is asynchronous until `read`."""

    def __init__(self, loss_sum: Tensor, stop: bool, save: bool, step: int, global_size: int) -> None:
        self.step, self._global_size = step, global_size
        flags = torch.tensor([float(stop), float(save)], dtype=torch.float64).to(loss_sum.device, non_blocking=True)
        self._sums = torch.cat([loss_sum.detach().double().reshape(1), flags])
        alone = torch.distributed.get_world_size() == 1
        self._work = None if alone else torch.distributed.all_reduce(self._sums, async_op=True)
        self._arrived: torch.cuda.Event | None = None
        if self._sums.is_cuda:
            # The copy is queued after the sum, with an event to wait for. Reading the tensor would wait for all queued work, and the
            # GPU would be idle while the host prepares the next step.
            if self._work:
                self._work.wait()
            self._sums = torch.empty_like(self._sums, device="cpu", pin_memory=True).copy_(
                self._sums, non_blocking=True
            )
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record()

    def read(self) -> tuple[float, bool, bool]:
        """The mean loss over the global batch, whether a rank was told to stop, and whether to save. Equal on all ranks.

        Raises RunError, on all ranks, if the loss is not finite.
        """
        if self._arrived:
            self._arrived.synchronize()
        elif self._work:
            self._work.wait()
        loss, stop, save = self._sums.tolist()
        if not math.isfinite(loss):
            raise RunError(f"the loss at step {self.step} is {loss}: a lower lr, or the data, is where to look")
        return loss / self._global_size, stop > 0, save > 0


def fit(
    run: Run,
    cfg: TrainKeys,
    model: nn.Module,
    batches: Batches,
    loss_sum: Callable[[Any], Tensor],
    evaluate: Callable[[], Mapping[str, Any]],
) -> Mapping[str, Any]:
    """Trains ``run.state`` until ``epochs`` or ``max_steps``, or until the ranks agree to stop. Returns the last evaluation.

    model: the result of `World.parallel`. loss_sum: forward pass through the model over a shard. It returns the *sum* of the samples'
    losses, a scalar that can be differentiated even if the shard is empty. With ``accumulate=`` it is called once for each piece of
    the shard. evaluate: called by all ranks at the end of each epoch and of the run.

    DDP averages gradients over ranks, so each rank's sum is multiplied by ``world_size / global_size``. The result is the mean over the
    global batch, whatever the sizes of the ranks' shards. Raises RunError, on all ranks, if the loss is not finite.
    """
    state, world, total = run.state, run.world, total_steps(cfg, batches)
    results: Mapping[str, Any] = {}
    if state.meta.get("unevaluated") and not run.was_done:
        results = _evaluate_late(run, evaluate, batches)
        if state.step < total:
            run.stopping = ""  # a signal still set stops the run one step later, so even a job too short for an evaluation makes progress
    if state.step >= total:
        run.say(f"already finished: step {state.step} of {total}; more epochs= continue it")
        return results if results or run.stopping or run.was_done else _evaluate(run, evaluate)
    pending: _Totals | None = None
    clock, pulse = _Clock(world.clock), world.pulse
    first_step = state.step + 1
    while state.step < total and not run.stopping:
        epoch, first_batch = divmod(state.step, batches.per_epoch)
        pulse.beat(watchdog.DATA, state.step)
        for shard in batches.epoch(epoch, first_batch):
            lr = float(state.scheduler.get_last_lr()[0])
            state.optimizer.zero_grad(set_to_none=True)
            loss = _backward(model, loss_sum, shard.pieces(cfg.accumulate), world.size / shard.global_size, pulse)
            pulse.beat(watchdog.UPDATE)
            state.optimizer.step()
            state.scheduler.step()
            if isinstance(state.ema, swa_utils.AveragedModel):
                state.ema.update_parameters(state.model)
            state.step += 1
            clock.add(shard.global_size)
            pulse.beat(watchdog.SUM, state.step)

            due = world.rank == 0 and clock.save_due(run.keys.checkpoint_every_s)
            before, pending = pending, _Totals(loss, bool(run.stop), due, state.step, shard.global_size)
            # The ranks decide by sums that are one step old, so that no step waits for them. For a row of metrics they are read at once.
            _, stop, save = before.read() if before else (0.0, False, False)
            end_of_epoch, end = shard.batch == batches.per_epoch - 1, state.step == total
            save = save or run.interval_ends()
            if end_of_epoch or end or stop or save or state.step == first_step or state.step % cfg.log_every_steps == 0:
                mean_loss, stop_now, _ = pending.read()
                stop, speed = stop or stop_now, clock.lap()
                results = _evaluate(run, evaluate) if (end_of_epoch or end) and not stop else {}
                stop = stop or bool(run.stopping)
                best = run.is_best(results) and run.keys.keep_best
                run.check_saved()
                row: dict[str, Any] = {"epoch": epoch, "loss": mean_loss, "lr": lr, "speed": speed}
                log_row(run, **row, results=results)
                state.meta["unevaluated"] = row if (end_of_epoch or end) and stop else None
                if stop and not end:
                    run.stopping = run.told_to_stop()
                if save or stop or end or best:
                    run.save(sampler_state(batches), best=best, wait=stop or end)
                    clock.saved()
                clock.lap()
            elif clock.progress_due():
                run.progress(f"epoch {epoch + 1}/{cfg.epochs}  step {state.step}/{total}  lr {lr:.2g}")
            if run.stopping or end:
                pulse.beat(watchdog.TO_EVALUATE)  # a stop may have postponed an evaluation
                break
            pulse.beat(watchdog.DATA)
    run.samples, run.train_s = clock.samples, clock.train_s
    if state.meta.get("unevaluated") and not run.stopping:
        results = _evaluate_late(run, evaluate, batches)
    return results


def _evaluate_late(run: Run, evaluate: Callable[[], Mapping[str, Any]], batches: Batches) -> Mapping[str, Any]:
    """Runs an evaluation that a stop has postponed. Writes the row of that step again, with results, and saves if it is the best.

    Called by all ranks.
    """
    results = _evaluate(run, evaluate)
    if results:
        log_row(run, **run.state.meta["unevaluated"], results=results)
        run.state.meta["unevaluated"] = None
        if run.is_best(results) and run.keys.keep_best:
            run.save(sampler_state(batches), best=True, wait=True)
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


def want_full_batches(cfg: TrainKeys, batches: Batches, world_size: int) -> None:
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


def sampler_state(batches: Batches) -> dict[str, Any]:
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
    if not math.isfinite(loss):
        raise RunError(f"the loss at step {run.step} is {loss}: a lower lr, or the data, is where to look")
    if not run.rows:
        return
    run.check_mine()
    row = {
        "attempt": run.attempt,
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


class _Clock:
    """Counts samples and seconds of training, without evaluation, saving and suspension. It also tells when a save is due."""

    def __init__(self, running: RunningClock) -> None:
        self._now = running.now
        self.samples, self.train_s = 0, 0.0
        self._lap_samples, self._lap_start = 0, self._now()
        self._saved_at = self._progress_at = self._lap_start

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

    def save_due(self, every_s: float) -> bool:
        due = every_s > 0 and self._now() - self._saved_at >= every_s
        if due:
            self.saved()  # requested only once: the save happens a step later, when all ranks know of it
        return due

    def saved(self) -> None:
        self._saved_at = self._now()

    def progress_due(self) -> bool:
        due = self._now() - self._progress_at >= PROGRESS_EVERY_S
        self._progress_at = self._now() if due else self._progress_at
        return due
