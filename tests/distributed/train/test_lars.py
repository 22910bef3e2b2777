"""LARS: the published update on small tensors, plain SGD for groups without adaptation, and saved and loaded states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from recipes.core.train.optimizers import LARS


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def step(optimizer: torch.optim.Optimizer, param: nn.Parameter, grad: Tensor) -> None:
    param.grad = grad.clone()
    optimizer.step()


def test_two_steps_match_the_paper() -> None:
    param, grad = parameter(3.0, 4.0), torch.tensor([0.6, 0.8], dtype=torch.float64)
    optimizer = LARS([param], lr=2.0, momentum=0.9, weight_decay=0.1, trust=0.01)
    weights, momentum = param.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for _ in range(2):
        rate = 0.01 * weights.norm() / (grad.norm() + 0.1 * weights.norm())
        momentum = 0.9 * momentum + rate * (grad + 0.1 * weights)
        weights = weights - 2.0 * momentum
        step(optimizer, param, grad)
    assert torch.allclose(param.detach(), weights, rtol=1e-12)


def test_a_group_without_adaptation_is_plain_sgd() -> None:
    ours, theirs = parameter(1.0, -2.0), parameter(1.0, -2.0)
    lars = LARS([{"params": [ours], "adapt": False}], lr=0.1, momentum=0.9, weight_decay=0.01)
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.01)
    for seed in range(5):
        grad = torch.randn(2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        step(lars, ours, grad)
        step(sgd, theirs, grad)
    assert torch.allclose(ours.detach(), theirs.detach(), rtol=1e-12)


@pytest.mark.parametrize(("weights", "grad"), [((0.0, 0.0), (1.0, 1.0)), ((1.0, 1.0), (0.0, 0.0))])
def test_all_zero_weights_or_gradients_give_no_nan(weights: tuple[float, float], grad: tuple[float, float]) -> None:
    param = parameter(*weights)
    step(LARS([param], lr=0.1), param, torch.tensor(grad, dtype=torch.float64))
    expected = [w - 0.1 * g for w, g in zip(weights, grad, strict=True)]
    assert param.tolist() == pytest.approx(expected)


def test_a_parameter_without_a_gradient_is_unchanged() -> None:
    param, frozen = parameter(1.0), parameter(1.0)
    optimizer = LARS([param, frozen], lr=0.1)
    step(optimizer, param, torch.tensor([1.0], dtype=torch.float64))
    assert frozen.item() == 1.0 != param.item()
