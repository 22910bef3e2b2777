"""Copies of tensors in host memory, which do not hold up the training."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class HostCopy:
    """Copies of tensors in host memory. The memory is allocated once and reused; it is pinned if
    the tensors are on a GPU.
    """

    def __init__(self) -> None:
        # by the position of the tensor in the content, and its type and shape
        self._copies: dict[tuple[object, ...], Tensor] = {}
        self._arrived: torch.cuda.Event | None = None

    def take(self, content: Any) -> Any:
        """``content`` with each tensor replaced by a copy, which is valid from `wait` until the
        next call.

        On a GPU the copies are queued behind the steps so far, and later steps behind the copies:
        the training does not wait for them.
        """
        positions = itertools.count()
        copied = tree_map_only(Tensor, lambda tensor: self._copy(tensor, next(positions)), content)
        if torch.cuda.is_initialized():
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record()
        return copied

    def wait(self) -> None:
        """Waits until the copies of the last `take` are complete."""
        if self._arrived:
            self._arrived.synchronize()

    def _copy(self, tensor: Tensor, position: int) -> Tensor:
        tensor = tensor.detach()
        layout = (position, tensor.dtype, tensor.shape, tensor.stride())
        if layout not in self._copies:
            self._copies[layout] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return self._copies[layout].copy_(tensor, non_blocking=True)
