"""LARS, an optimiser for very large batches. torch does not include it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """SGD with momentum, in which each tensor has its own learning rate: ``trust`` times the norm of its weights over that of its gradient.

    lr: the global rate, much larger than that of plain SGD. trust: the factor above. A group with ``adapt`` False (norms and biases)
    uses plain SGD. Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017). Momentum has torch's form:
    ``lr`` multiplies the momentum buffer and is not accumulated in it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        adapt: bool = True,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapt": adapt}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Performs one step. A closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params)

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        gradients = [p.grad for p in params if p.grad is not None]
        updates = gradients
        if group["weight_decay"]:
            updates = list(torch._foreach_add(updates, params, alpha=group["weight_decay"]))
        if group["adapt"]:
            rates = _rates(params, gradients, group["trust"], group["weight_decay"])
            updates = [update * rate for update, rate in zip(updates, rates, strict=True)]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, updates, alpha=1)
        torch._foreach_add_(params, momenta, alpha=-group["lr"])


def _rates(params: list[Tensor], gradients: list[Tensor], trust: float, weight_decay: float) -> list[Tensor]:
    """The rate of each tensor; 1 if its weights or its gradient are all zero. Does not synchronise with the GPU."""
    weights, slopes = (torch.stack(list(torch._foreach_norm(tensors))) for tensors in (params, gradients))
    rates = trust * weights / (slopes + weight_decay * weights)
    return list(torch.where((weights > 0) & (slopes > 0), rates, torch.ones_like(rates)).unbind())
