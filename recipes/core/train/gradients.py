"""The gradients just before ``optimizer.step()``: float16's loss scale, and clipping."""

from typing import Any

import torch
from torch import Tensor, nn

from recipes.core.config.run_keys import Dtype, TrainKeys
from recipes.core.errors import RunError
from recipes.core.train.checkpoint import State
from recipes.core.train.run import Run

# The loss scale with dtype=float16, as in torch.amp.GradScaler: its start, and the steps without
# overflow after which it doubles.
FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000
# GradScaler itself is not used: it has to call optimizer.step(), which a recipe does.


def check_first_step(run: Run, model: nn.Module) -> None:
    """Before the first ``optimizer.step()``, looks for trained parameters without a gradient. Call
    it before `Gradients`.

    Raises RunError if there is one and DDP, which requires all gradients, runs on several ranks. On
    one rank, warns.
    """
    first = run.step

    def check(*call: Any) -> None:
        if run.step > first:
            return
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        unused = [name.removeprefix("module.") for name, p in trained if p.grad is None]
        if not unused:
            return
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        pronoun = "them" if unused[1:] else "it"
        fix = f"use {pronoun} in forward(), or call requires_grad_(False) on {pronoun}"
        line = f"{', '.join(unused[:3])}{more}: no gradient after step.backward(): {fix}"
        if run.world.size > 1:
            raise RunError(line)
        run.warn(f"{line}; this model cannot be trained on several ranks")

    run.state.optimizer.register_step_pre_hook(check)


def multiply(optimizer: torch.optim.Optimizer, factor: Tensor) -> None:
    """Multiplies all gradients by ``factor``, a scalar on their device."""
    gradients = [p.grad for p in _trained(optimizer) if p.grad is not None]
    torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))


def _trained(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class Gradients:
    """From now on, each ``optimizer.step()`` of ``state`` removes the loss scale from the gradients
    and clips their norm.

    With dtype=float16, a step whose gradients are not finite changes no weight: the gradients are
    removed, and the scale is halved. The host waits for the GPU then, as with torch's scaler. After
    DDP, every rank has the same gradients, so all decide the same.
    """

    def __init__(self, state: State, cfg: TrainKeys) -> None:
        self._most = cfg.clip_grad_norm
        self._meta = state.meta
        if cfg.dtype is Dtype.float16:
            self._meta.setdefault("loss_scale", [FIRST_SCALE, 0])
        if self._most or "loss_scale" in self._meta:
            state.optimizer.register_step_pre_hook(self._prepare)

    @property
    def scale(self) -> float:
        """The factor of the loss in the next backward pass."""
        return float(self._meta.get("loss_scale", [1.0])[0])

    @torch.no_grad()
    def _prepare(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        trained = _trained(optimizer)
        gradients = [p.grad for p in trained if p.grad is not None]
        if not gradients:
            return
        norm = torch.nn.utils.get_total_norm(gradients) / self.scale
        if "loss_scale" in self._meta:
            scale, steps = self._meta["loss_scale"]
            torch._foreach_mul_(gradients, 1 / scale)
            factor = 2.0 if steps + 1 == GROWTH_STEPS else 1.0
            if not norm.isfinite():
                optimizer.zero_grad(set_to_none=True)
                factor = 0.5
            steps = steps + 1 if factor == 1 else 0
            self._meta["loss_scale"] = [scale * factor, steps]  # of the next step
        if self._most:
            torch.nn.utils.clip_grads_with_norm_(trained, self._most, norm)
