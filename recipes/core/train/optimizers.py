"""Optimisers that torch does not include: LARS for very large batches; Muon for filters, and with
AdamW for transformers.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from recipes.core.train import sharding

Tensors = list[Tensor] | tuple[Tensor, ...]

# of Muon's iteration, and the factors of its polynomial, from its source
STEPS = 3
A = 3.4445
B = -4.7750
C = 2.0315
# of MuonAdamW, from its source
MATRIX_STEPS = 5
ADAM_EPS = 1e-10


class _Grouped(torch.optim.Optimizer):
    """An optimiser whose step treats all tensors of a group at once."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Performs one step. A closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params, [p.grad for p in params])

    def _step_group(self, group: dict[str, Any], params: Tensors, gradients: Tensors) -> None:
        raise NotImplementedError

    def _momenta(self, params: Tensors, name: str = "momentum_buffer") -> list[Tensor]:
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p)
        return [self.state[p][name] for p in params]


class LARS(_Grouped):
    """SGD with momentum, in which each tensor has its own learning rate: ``trust`` times the norm
    of its weights over that of its gradient.

    lr: the global rate, much larger than that of plain SGD. A group may have its own
    ``weight_decay`` and ``trust``; one with ``adapt`` False (norms and biases) uses plain SGD.
    Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017). Momentum
    has torch's form: ``lr`` multiplies the momentum buffer and is not accumulated in it.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.9) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": 0.0,
            "trust": 0.001,
            "adapt": True,
        }
        super().__init__(params, defaults)

    def _step_group(self, group: dict[str, Any], params: Tensors, gradients: Tensors) -> None:
        updates = gradients
        if group["weight_decay"]:
            updates = torch._foreach_add(updates, params, alpha=group["weight_decay"])
        if group["adapt"]:
            # Without a wait for the GPU. A tensor whose weights or gradient are all zero has rate
            # 1.
            weights, slopes = (
                torch.stack(torch._foreach_norm(tensors)) for tensors in (params, gradients)
            )
            rates = group["trust"] * weights / (slopes + group["weight_decay"] * weights)
            rates = torch.where((weights > 0) & (slopes > 0), rates, torch.ones_like(rates))
            updates = [update * rate for update, rate in zip(updates, rates, strict=True)]
        momenta = self._momenta(params)
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, updates, alpha=1)
        torch._foreach_add_(params, momenta, alpha=-group["lr"])


class Muon(_Grouped):
    """Nesterov momentum whose update of a convolution's filters, as a matrix (N, -1), is roughly
    orthogonal: singular values of 0.4 to 1.4.

    params: filters (N, …) that a norm follows. Before each step they are scaled to the norm
    sqrt(N), so only their direction matters. lr: length of a step, for weights of this norm. A
    group with ``orthogonal`` False (biases, a head) uses plain SGD with Nesterov momentum, and may
    have a ``weight_decay``, which is added to the gradient. Source: K. Jordan et al., "Muon: an
    optimizer for hidden layers in neural networks" (2024), and its airbench94_muon.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.6) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "orthogonal": True}
        )

    def _step_group(self, group: dict[str, Any], params: Tensors, gradients: Tensors) -> None:
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, params, alpha=group["weight_decay"])
        momenta = self._momenta(params)
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, gradients)
        updates: Tensors = torch._foreach_add(gradients, momenta, alpha=group["momentum"])
        if group["orthogonal"]:
            updates = _orthogonal(updates, STEPS)
            scales = torch._foreach_reciprocal(torch._foreach_norm(params))
            torch._foreach_mul_(scales, [len(p) ** 0.5 for p in params])
            torch._foreach_mul_(params, scales)
        torch._foreach_add_(params, updates, alpha=-group["lr"])


class MuonAdamW(_Grouped):
    """For a transformer: Muon for its matrices, AdamW for groups that have ``betas`` (an embedding,
    a head). The decay is decoupled.

    The update of a matrix (rows, columns) is as in `Muon`, times sqrt(rows / columns) if that is
    more than 1; its weights are not scaled. Source: K. Jordan et al., "modded-nanogpt" (2024), and
    nanochat.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": (), "steps": 0},
        )

    def _step_group(self, group: dict[str, Any], params: Tensors, gradients: Tensors) -> None:
        group["steps"] += 1
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        if group["betas"]:
            steps = [torch.full((), group["steps"] - 1.0, device=p.device) for p in params]
            adamw(
                list(params),
                list(gradients),
                self._momenta(params),
                self._momenta(params, "squares"),
                [],
                steps,
                fused=True,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=ADAM_EPS,
                weight_decay=0.0,
                amsgrad=False,
                maximize=False,
            )
            return
        momenta = self._momenta(params)
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        # Not _foreach_lerp: in torch 2.11, divided tensors do not have it.
        updates: Tensors = torch._foreach_mul(gradients, 1 - group["momentum"])
        torch._foreach_add_(updates, momenta, alpha=group["momentum"])
        updates = _orthogonal(updates, MATRIX_STEPS)
        torch._foreach_mul_(updates, [max(1.0, p.shape[0] / p.shape[1]) ** 0.5 for p in params])
        torch._foreach_add_(params, updates, alpha=-group["lr"])


def _orthogonal(tensors: Tensors, steps: int) -> Tensors:
    """The roughly nearest orthogonal matrix to each tensor (N, …), taken as a matrix of N rows, by
    a Newton-Schulz iteration.

    With strategy=fsdp each rank computes it for the whole tensor, and returns its own part.
    """
    wholes = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    places = defaultdict(list)  # matrices of the same shape form one batch
    for place, whole in enumerate(wholes):
        places[whole.shape].append(place)
    for shape, batch in places.items():
        x = torch.stack([wholes[place].flatten(1) for place in batch])
        x = x.bfloat16() if x.is_cuda else x  # few CPUs have fast products in bfloat16
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        is_tall = x.shape[1] > x.shape[2]
        x = _iterated(x.mT, steps).mT if is_tall else _iterated(x, steps)
        for place, matrix in zip(batch, x.to(wholes[batch[0]].dtype), strict=True):
            wholes[place] = sharding.as_part(matrix.reshape(shape), tensors[place])
    return wholes


def _iterated(x: Tensor, steps: int) -> Tensor:
    """Newton-Schulz steps of matrices (n, rows, columns) that have at least as many columns as
    rows.
    """
    for _ in range(steps):
        a = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=B, alpha=C), x, beta=A)
    return x
