"""Muon: what its updates and its weights are, and plain SGD for the other groups."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from recipes.core.train.optimizers import Muon


def filters(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def update(optimizer: Muon, param: nn.Parameter) -> Tensor:
    """What one step has added to the weights of the norm that Muon sets."""
    before = param.detach() * len(param) ** 0.5 / param.detach().norm()
    optimizer.step()
    return param.detach() - before


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (40, 4, 3, 3)])  # a wide matrix and a tall one
def test_the_update_of_filters_is_orthogonal_and_along_the_gradient(shape: tuple[int, ...]) -> None:
    param = filters(*shape)
    param.grad = filters(*shape, seed=1).detach()
    change = update(Muon([param], lr=0.5), param).flatten(1) / -0.5
    sizes = torch.linalg.svdvals(change)
    assert 0.4 < sizes.min() < sizes.max() < 1.4  # of the gradient they are 4 to 8
    left, _, right = torch.linalg.svd(param.grad.flatten(1), full_matrices=False)
    assert (change - left @ right).norm() / (left @ right).norm() < 0.5
    assert (left.T @ change @ right.T).diagonal().min() > 0.4


def test_momentum_is_nesterovs() -> None:
    """After two steps with gradients a and b, the update is the one for (1 + m) b + m m a."""
    a, b = filters(4, 4, 1, 1, seed=1).detach(), filters(4, 4, 1, 1, seed=2).detach()
    one, other = filters(4, 4, 1, 1), filters(4, 4, 1, 1)
    muon = Muon([one], lr=0.1, momentum=0.6)
    one.grad = a
    muon.step()
    one.grad, other.grad = b, (1.6 * b + 0.36 * a) / 1.6
    assert torch.allclose(update(muon, one), update(Muon([other], lr=0.1, momentum=0.6), other), atol=1e-5)


def test_filters_of_one_shape_do_not_mix() -> None:
    params = [filters(4, 2, 3, 3, seed=seed) for seed in range(3)] + [filters(6, 2, 3, 3)]
    for seed, param in enumerate(params):
        param.grad = filters(*param.shape, seed=seed + 5).detach()
    alone = copy.deepcopy(params)
    for one, param in zip(alone, params, strict=True):
        one.grad = param.grad
        Muon([one], lr=0.1).step()
    Muon(params, lr=0.1).step()
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(alone, params, strict=True))


def test_other_groups_are_trained_by_sgd() -> None:
    ours, theirs = filters(5), filters(5)
    muon = Muon([{"params": [ours], "orthogonal": False}], lr=0.1, momentum=0.8, weight_decay=0.01)
    sgd = torch.optim.SGD([theirs], 0.1, momentum=0.8, weight_decay=0.01, nesterov=True)
    for seed in range(3):
        ours.grad = theirs.grad = filters(5, seed=seed + 1).detach()
        muon.step(), sgd.step()
    assert torch.allclose(ours, theirs)
