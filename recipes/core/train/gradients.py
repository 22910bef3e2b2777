"""The gradients just before ``optimizer.step()``: float16's loss scale, and clipping."""

from typing import Any

import torch
from torch import Tensor, nn

from recipes.core.config.run_keys import Dtype, TrainKeys
from recipes.core.errors import RunError
from recipes.core.train.checkpoint import State
from recipes.core.train.run import Run

# Of the loss with dtype=float16, as in torch.amp.GradScaler: its start, and the steps without overflow after which it doubles.
FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000
# GradScaler itself is not used: it has to call optimizer.step(), which a recipe does.


def check_first_step(run: Run, model: nn.Module) -> None:
    """Before the first ``optimizer.step()``, looks for trained parameters without a gradient, as `_require_all`. Call it before `Gradients`."""

    first = run.step

    def check(*call: Any) -> None:
        if run.step == first:
            _require_all(run, model)

    run.state.optimizer.register_step_pre_hook(check)


def _require_all(run: Run, model: nn.Module) -> None:
    """Raises RunError for a parameter without a gradient if DDP, which requires all of them, runs on several ranks. On one rank, warns."""
    unused = [
        name.removeprefix("module.") for name, p in model.named_parameters() if p.requires_grad and p.grad is None
    ]
    if unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        line = f"{', '.join(unused[:3])}{more}: no gradient after step.backward(): use it in forward(), or call requires_grad_(False)"
        if run.world.size > 1:
            raise RunError(line)
        run.warn(f"{line}; several ranks cannot train this model")


class Gradients:
    """From now on, each ``optimizer.step()`` of ``state`` removes the loss scale from the gradients and clips their norm.

    With dtype=float16, a step whose gradients are not finite changes no weight: the gradients are removed, and the scale is halved. The
    host waits for the GPU then, as with torch's scaler. After DDP, every rank has the same gradients, so all decide the same.
    """

    def __init__(self, state: State, cfg: TrainKeys) -> None:
        self._most, self._meta = cfg.clip_grad_norm, state.meta
        if cfg.dtype is Dtype.float16:
            self._meta.setdefault("loss_scale", [FIRST_SCALE, 0])
        else:
            self._meta.pop("loss_scale", None)
        if self._most or "loss_scale" in self._meta:
            state.optimizer.register_step_pre_hook(self._prepare)

    @property
    def scale(self) -> float:
        """The factor of the loss in the next backward pass."""
        return float(self._meta.get("loss_scale", [1.0])[0])

    @torch.no_grad()
    def _prepare(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in trained if p.grad is not None]
        if not gradients:
            return
        norm = torch.nn.utils.get_total_norm(gradients) / self.scale
        if "loss_scale" in self._meta:
            torch._foreach_mul_(gradients, 1 / self.scale)
            if not self._is_finite(norm):
                optimizer.zero_grad(set_to_none=True)
        if self._most:
            torch.nn.utils.clip_grads_with_norm_(trained, self._most, norm)

    def _is_finite(self, norm: Tensor) -> bool:
        """Whether the gradients of a step are finite. Changes the scale for the next step."""
        scale, steps = self._meta["loss_scale"]
        if not (finite := bool(norm.isfinite())):
            self._meta["loss_scale"] = [scale / 2, 0]
        elif steps + 1 == GROWTH_STEPS:
            self._meta["loss_scale"] = [scale * 2, 0]
        else:
            self._meta["loss_scale"] = [scale, steps + 1]
        return finite
