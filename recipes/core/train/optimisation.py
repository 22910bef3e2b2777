"""Parts of a recipe's optimisation: the precision, the learning rate for a batch size, weight decay, averaged weights."""

import itertools
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from recipes.core.config.run_keys import Dtype, TrainKeys
from recipes.core.data.sampling import GlobalBatches
from recipes.core.train.run import Run


def autocast(run: Run, cfg: TrainKeys) -> torch.autocast:
    """The forward pass in bfloat16 if ``dtype`` says so, or if it is auto and the GPUs of all ranks support it. A collective."""
    device, lower, why = run.world.device, cfg.dtype is Dtype.bfloat16, "auto"
    has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    # Every rank takes part, whatever its keys: they have not been compared yet.
    with_it = int(run.world.sum(torch.tensor(int(has_it), device=device)))
    if cfg.dtype is Dtype.auto:
        lower = with_it == run.world.size
        why += f"; {with_it} of {run.world.size} GPUs have bfloat16" if with_it and not lower else ""
        run.say(f"dtype: {'bfloat16' if lower else 'float32'} ({why})")
    return torch.autocast(device.type, torch.bfloat16, enabled=lower)


def scaled_lr(run: Run, lr: float, lr_batch_size: int, batches: GlobalBatches) -> float:
    """``lr``, which is for ``lr_batch_size`` samples (0: any number), in proportion to the batch size (Goyal et al., 2017)."""
    share = _of_batch(lr_batch_size, batches)
    if share != 1:
        run.say(
            f"lr: {lr * share:.4g} for batches of {share * lr_batch_size:g} ({lr:g} for {lr_batch_size}, in proportion)"
        )
    return lr * share


def decay_groups(net: nn.Module, weight_decay: float, others: float = 0.0) -> list[dict[str, Any]]:
    """Two parameter groups for an optimiser: weights have ``weight_decay``; norms and biases have the weight decay ``others``."""
    weights = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim <= 1]
    return [{"params": weights, "weight_decay": weight_decay}, {"params": rest, "weight_decay": others}]


def averaged(
    run: Run, net: nn.Module, decay: float, of_batch_size: int, batches: GlobalBatches
) -> swa_utils.AveragedModel | None:
    """An exponential moving average of ``net``'s weights and buffers, for `State.ema`. `loop.steps` updates it. None if decay is 0.

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
    """torch's average of weights and buffers. torch's own update copies the step count to the GPU: the host would wait at each step."""

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


def _of_batch(size: int, batches: GlobalBatches) -> float:
    return min(batches.global_batch_size, batches.num_samples) / size if size else 1.0
