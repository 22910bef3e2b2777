"""Operations of networks that take fewer passes over memory than torch's own. A compiled model uses torch's, which the compiler merges."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def rms_norm(x: Tensor) -> Tensor:
    """RMSNorm of the last dimension, without a trained gain. torch has one kernel for it on GPUs, and several operations on CPUs.

    Other types than float32 use torch's own operation on CPUs too.
    """
    if x.is_cuda or x.dtype is not torch.float32 or torch.compiler.is_compiling():
        return F.rms_norm(x, x.shape[-1:])
    return cast(Tensor, _RMSNorm.apply(x))


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)**2. Its gradient is one operation; as a product of torch's operations it would be four."""
    if torch.compiler.is_compiling():
        positive = x.relu()
        return positive * positive
    return cast(Tensor, _SquaredReLU.apply(x))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale.add_(torch.finfo(x.dtype).eps).rsqrt_()
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        y, scale = ctx.saved_tensors
        common = torch.linalg.vecdot(gradient, y)[..., None]
        return torch.addcmul(gradient, y, common, value=-1 / y.shape[-1]).mul_(scale)


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return torch.addcmul(gradient.new_zeros(()), gradient, positive, value=2)
