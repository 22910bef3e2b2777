"""LARS and Muon: their updates on small tensors against the papers, and plain SGD or AdamW for the
other groups.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.core.train.optimizers import LARS, Muon, MuonAdamW


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def step(optimizer: torch.optim.Optimizer, param: nn.Parameter, grad: Tensor) -> None:
    param.grad = grad.clone()
    optimizer.step()


def test_two_steps_of_lars_match_the_paper() -> None:
    params = [parameter(3.0, 4.0), parameter(0.1, 0.2)]
    grads = [torch.tensor(values, dtype=torch.float64) for values in ([0.8, -0.1], [2.0, 3.0])]
    group = {"params": params, "lr": 2.0, "weight_decay": 0.1, "trust": 0.01}
    optimizer = LARS([group], lr=7.0, momentum=0.9)
    expected = [param.detach().clone() for param in params]
    momenta = [torch.zeros(2, dtype=torch.float64) for _ in params]
    for _ in range(2):
        for weights, momentum, grad in zip(expected, momenta, grads, strict=True):
            rate = 0.01 * weights.norm() / (grad.norm() + 0.1 * weights.norm())
            momentum.mul_(0.9).add_(rate * (grad + 0.1 * weights))
            weights.sub_(2.0 * momentum)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    for param, weights in zip(params, expected, strict=True):
        assert torch.allclose(param.detach(), weights, rtol=1e-12)


@pytest.mark.parametrize(("weights", "grad"), [((0.0, 0.0), (1.0, 1.0)), ((1.0, 1.0), (0.0, 0.0))])
def test_all_zero_weights_or_gradients_give_no_nan(
    weights: tuple[float, float], grad: tuple[float, float]
) -> None:
    param = parameter(*weights)
    step(LARS([param], lr=0.1), param, torch.tensor(grad, dtype=torch.float64))
    expected = [w - 0.1 * g for w, g in zip(weights, grad, strict=True)]
    assert param.tolist() == pytest.approx(expected)


def test_a_parameter_without_a_gradient_is_unchanged() -> None:
    param = parameter(1.0)
    frozen = parameter(1.0)
    optimizer = LARS([param, frozen], lr=0.1)
    step(optimizer, param, torch.tensor([1.0], dtype=torch.float64))
    assert frozen.item() == 1.0 != param.item()


def filters(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def update(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> Tensor:
    """What one step has added to the weights; with Muon, of the norm that it sets."""
    before = param.detach().clone()
    if isinstance(optimizer, Muon):
        before *= len(param) ** 0.5 / before.norm()
    optimizer.step()
    return param.detach() - before


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (40, 4, 3, 3)])  # a wide matrix and a tall one
def test_muons_update_of_filters_is_orthogonal_and_along_the_gradient(
    shape: tuple[int, ...],
) -> None:
    param = filters(*shape)
    param.grad = filters(*shape, seed=1).detach()
    change = update(Muon([param], lr=0.5), param).flatten(1) / -0.5
    sizes = torch.linalg.svdvals(change)
    assert 0.4 < sizes.min() < sizes.max() < 1.4  # of the gradient they are 4 to 8
    left, _, right = torch.linalg.svd(param.grad.flatten(1), full_matrices=False)
    nearest = left @ right
    assert (change - nearest).norm() / nearest.norm() < 0.5
    assert (left.T @ change @ right.T).diagonal().min() > 0.4


@pytest.mark.parametrize("kind", [Muon, MuonAdamW])
def test_the_momentum_of_muon_is_nesterovs(kind: Any) -> None:
    """After two steps with gradients a and b, the update is the one for (1 + m) b + m m a."""

    def optimizer(param: nn.Parameter) -> torch.optim.Optimizer:
        """The rates of its group are other ones than its defaults."""
        group = {"params": [param], "lr": 0.1, "momentum": 0.6}
        made: torch.optim.Optimizer = kind([group], lr=0.3, momentum=0.9)
        return made

    a = filters(4, 4, 1, 1, seed=1).detach()
    b = filters(4, 4, 1, 1, seed=2).detach()
    param = filters(4, 4, 1, 1)
    other = filters(4, 4, 1, 1)
    muon = optimizer(param)
    param.grad = a
    muon.step()
    param.grad = b
    other.grad = (1.6 * b + 0.36 * a) / 1.6
    change = update(muon, param)
    assert torch.allclose(change, update(optimizer(other), other), atol=1e-5)
    assert change.norm() == pytest.approx(0.1 * 4**0.5, rel=0.3)


def test_filters_of_one_shape_do_not_mix() -> None:
    params = [filters(4, 2, 3, 3, seed=seed) for seed in range(3)] + [filters(6, 2, 3, 3)]
    for seed, param in enumerate(params):
        param.grad = filters(*param.shape, seed=seed + 5).detach()
    alone = copy.deepcopy(params)
    for copied, param in zip(alone, params, strict=True):
        copied.grad = param.grad
        Muon([copied], lr=0.1).step()
    Muon(params, lr=0.1).step()
    for pair in zip(alone, params, strict=True):
        assert torch.allclose(*pair, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "other", "nesterov"),
    [(LARS, {"adapt": False}, False), (Muon, {"orthogonal": False}, True)],
)
def test_other_groups_are_trained_by_sgd(kind: Any, other: dict[str, bool], nesterov: bool) -> None:
    ours = filters(5)
    theirs = filters(5)
    optimizer = kind([{"params": [ours], "weight_decay": 0.01, **other}], lr=0.1, momentum=0.8)
    sgd = torch.optim.SGD([theirs], 0.1, momentum=0.8, weight_decay=0.01, nesterov=nesterov)
    for seed in range(3):
        ours.grad = theirs.grad = filters(5, seed=seed + 1).detach()
        optimizer.step()
        sgd.step()
    assert torch.allclose(ours, theirs)


@pytest.mark.parametrize("shape", [(8, 16), (32, 8)])
def test_matrices_of_a_transformer_are_not_scaled_and_decay_by_themselves(
    shape: tuple[int, int],
) -> None:
    param = filters(*shape)
    before = param.detach().clone()
    gradient = filters(*shape, seed=1).detach()
    param.grad = gradient
    square = filters(4, 4)
    square.grad = filters(4, 4, seed=2).detach()
    MuonAdamW([square, param], lr=0.5, weight_decay=0.1).step()
    decayed = before * (1 - 0.5 * 0.1)
    scale = max(1, shape[0] / shape[1]) ** 0.5
    change = (param.detach() - decayed) / -0.5 / scale
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    nearest = left @ right
    assert (change - nearest).norm() / nearest.norm() < 0.35
    sizes = torch.linalg.svdvals(change)
    assert 0.5 < sizes.min() < sizes.max() < 1.3


def test_groups_with_betas_are_trained_by_adamw() -> None:
    ours = filters(6, 4)
    theirs = filters(6, 4)
    group = {"params": [ours], "betas": (0.8, 0.95), "lr": 0.01, "weight_decay": 0.1}
    mixed = MuonAdamW([{"params": [filters(4, 4)]}, group], lr=0.1)
    adamw = torch.optim.AdamW([theirs], 0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1)
    for seed in range(4):
        ours.grad = theirs.grad = filters(6, 4, seed=seed + 1).detach()
        mixed.step()
        adamw.step()
    assert torch.allclose(ours, theirs, atol=1e-7)
