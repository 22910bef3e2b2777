"""The operations of networks against torch's own, with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.core.train.functional import rms_norm, squared_relu


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("ours", "torchs"),
    [(rms_norm, lambda x: F.rms_norm(x, x.shape[-1:])), (squared_relu, lambda x: F.relu(x).square())],
    ids=["rms_norm", "squared_relu"],
)
@pytest.mark.parametrize("scale", [1.0, 1e-3])  # the small values show the epsilon of rms_norm
def test_values_and_gradients(
    ours: Callable[[Tensor], Tensor], torchs: Callable[[Tensor], Tensor], scale: float, compiled: bool
) -> None:
    ours = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    torch.manual_seed(0)
    values, weights = torch.randn(3, 5, 64) * scale, torch.randn(3, 5, 64)
    values[0, 0] = 0
    found = []
    for function in (ours, torchs):
        x = values.clone().requires_grad_()
        y = function(x)
        (y * weights).sum().backward()
        found.append((y.detach(), x.grad))
    for mine, its in zip(*found, strict=True):
        assert mine is not None
        assert its is not None
        assert torch.allclose(mine, its, rtol=1e-4, atol=1e-6 * float(its.abs().max()))
