"""The step loop, once, as a function: what can deadlock or lose data stands here and nowhere else."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from recipes.core.config import TrainKeys
from recipes.core.data import GlobalBatches, Shard
from recipes.core.rundir import InputError
from recipes.core.session import Run

PROGRESS_EVERY_S = 0.5


def total_steps(cfg: TrainKeys, batches: GlobalBatches) -> int:
    """Optimiser steps of the whole run."""
    steps = cfg.epochs * batches.per_epoch
    return min(steps, cfg.max_steps) if cfg.max_steps else steps


class _Totals:
    """Sums over all ranks of one step's loss, stop flags and rank 0's wish to save: on their way, read when they are needed."""

    def __init__(self, loss_sum: Tensor, stop: bool, save: bool, step: int, global_size: int) -> None:
        self.step, self._global_size = step, global_size
        flags = torch.tensor([float(stop), float(save)], dtype=torch.float64).to(loss_sum.device, non_blocking=True)
        self._sums = torch.cat([loss_sum.detach().double().reshape(1), flags])
        self._work = torch.distributed.all_reduce(self._sums, async_op=True)
        self._arrived: torch.cuda.Event | None = None
        if self._sums.is_cuda:
            # Copied behind the sum, with an event to wait for: reading the tensor would wait for all that is queued, and the
            # GPU would stand idle while the next step is put together.
            self._work.wait()
            self._sums = torch.empty_like(self._sums, device="cpu", pin_memory=True).copy_(
                self._sums, non_blocking=True
            )
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> tuple[float, bool, bool]:
        """The mean loss over the global batch, whether a rank was told to stop, whether to save; equal on all ranks."""
        if self._arrived:
            self._arrived.synchronize()
        else:
            self._work.wait()
        loss, stop, save = self._sums.tolist()
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss at step {self.step} is {loss}: a lower lr, or the data, is where to look")
        return loss / self._global_size, stop > 0, save > 0


def fit(
    run: Run,
    cfg: TrainKeys,
    batches: GlobalBatches,
    loss_sum: Callable[[Shard], Tensor],
    evaluate: Callable[[], Mapping[str, Any]],
) -> Mapping[str, Any]:
    """Trains ``run.state`` until ``epochs`` or ``max_steps``, or until the ranks agree to stop; gives the last evaluation.

    loss_sum: forward pass over a shard, the *sum* of its samples' losses, a scalar that can be differentiated also where the
    shard is empty. evaluate: called by all ranks at the end of each epoch and of the run.

    Gradients are averaged over ranks, so a rank's sum counts ``world_size / global_size``: the result is the mean over the
    global batch, whatever share of it a rank had. Raises RuntimeError, on all ranks alike, when the loss is not finite.
    """
    state, world, total = run.state, run.world, total_steps(cfg, batches)
    if state.step >= total:
        run.say(f"already finished: step {state.step} of {total}; more epochs= continue it")
        return {} if run.was_done else evaluate()
    results: Mapping[str, Any] = {}
    pending: _Totals | None = None
    clock = _Clock()
    first_step = state.step + 1
    while state.step < total and not run.stopping:
        epoch, first_batch = divmod(state.step, batches.per_epoch)
        for shard in batches.epoch(epoch, first_batch):
            lr = float(state.scheduler.get_last_lr()[0])
            state.optimizer.zero_grad(set_to_none=True)
            loss = loss_sum(shard)
            (loss * (world.size / shard.global_size)).backward()
            state.optimizer.step()
            state.scheduler.step()
            state.step += 1
            clock.add(shard.global_size)

            due = world.rank == 0 and clock.save_due(run.keys.checkpoint_every_s)
            before, pending = pending, _Totals(loss, bool(run.stop), due, state.step, shard.global_size)
            # What all ranks decide by is one step old, so that no step waits for it; at a row it is read at once.
            _, stop, save = before.read() if before else (0.0, False, False)
            every = run.keys.checkpoint_every_steps
            end_of_epoch, end = shard.batch == batches.per_epoch - 1, state.step == total
            save = save or (every > 0 and state.step % every == 0)
            if end_of_epoch or end or stop or save or state.step == first_step or state.step % cfg.log_every_steps == 0:
                mean_loss, stop_now, _ = pending.read()
                stop, speed = stop or stop_now, clock.lap()
                results = evaluate() if (end_of_epoch or end) and not stop else {}
                _row(run, epoch, mean_loss, lr, speed, results)
                if stop and not end:
                    reasons = [""] * world.size
                    torch.distributed.all_gather_object(reasons, run.stop.reason)
                    run.stopping = next(reason for reason in reasons if reason)
                if save or stop or end:
                    run.save(sampler_state(batches))
                    clock.saved()
                clock.lap()
            elif clock.progress_due():
                run.progress(f"epoch {epoch + 1}/{cfg.epochs}  step {state.step}/{total}  lr {lr:.2g}")
            if run.stopping or end:
                break
    run.samples, run.train_s = clock.samples, clock.train_s
    return results if results or run.stopping else evaluate()


def evaluate_only(run: Run, evaluate: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """evaluate=true: the results of the checkpoint that was resumed from. Raises InputError where there was none."""
    if run.resumed_from_step is None:
        raise InputError(
            f"evaluate=true: {run.dir} has no checkpoint: give its run_dir=, or resume=PATH of a checkpoint"
        )
    results = evaluate()
    run.say("  ".join(f"{name} {value:.4f}" for name, value in results.items() if isinstance(value, float)))
    return results


def sampler_state(batches: GlobalBatches) -> dict[str, Any]:
    """What the order of samples depends on; the position in it is the step."""
    return {"num_samples": batches.num_samples, "global_batch_size": batches.global_batch_size, "seed": batches.seed}


def _row(run: Run, epoch: int, loss: float, lr: float, speed: float, results: Mapping[str, Any]) -> None:
    if not run.rows:
        return
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
    """Samples and seconds of training, evaluation and saving left out; and when something is due."""

    def __init__(self) -> None:
        self.samples, self.train_s = 0, 0.0
        self._lap_samples, self._lap_start = 0, time.monotonic()
        self._saved_at = self._progress_at = self._lap_start

    def add(self, samples: int) -> None:
        self._lap_samples += samples

    def lap(self) -> float:
        """Ends a stretch of training: its samples per second. Called twice around what is not training."""
        seconds = time.monotonic() - self._lap_start
        speed = self._lap_samples / seconds if self._lap_samples else 0.0
        if self._lap_samples:
            self.samples, self.train_s = self.samples + self._lap_samples, self.train_s + seconds
        self._lap_samples, self._lap_start = 0, time.monotonic()
        return speed

    def save_due(self, every_s: float) -> bool:
        return every_s > 0 and time.monotonic() - self._saved_at >= every_s

    def saved(self) -> None:
        self._saved_at = time.monotonic()

    def progress_due(self) -> bool:
        due = time.monotonic() - self._progress_at >= PROGRESS_EVERY_S
        self._progress_at = time.monotonic() if due else self._progress_at
        return due
