"""strategy=fsdp: weights, gradients and optimiser state are divided over the ranks by torch's
`fully_shard`, each tensor by its rows.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map, tree_map_only

NUMBER = "divided tensor"  # key of a dictionary that stands for a divided tensor in a checkpoint


def divide(model: nn.Module, device: torch.device, ranks: int, shard_size: int) -> None:
    """Divides ``model`` in place: each element of its lists of blocks on its own, then the rest. A
    collective.

    shard_size: ranks over which a copy is divided; each further group of that size has another
    copy. It must divide the number of ranks. 0: all ranks.
    """
    size = shard_size or ranks
    shape = (size,) if size == ranks else (ranks // size, size)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for parameter in model.parameters():  # fully_shard does not accept channels_last weights
        parameter.data = parameter.data.contiguous()
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The elements with weights of the outermost lists of modules."""
    if isinstance(model, nn.ModuleList | nn.Sequential):
        yield from (block for block in model if [*block.parameters()])
    else:
        for child in model.children():
            yield from blocks(child)


class Divided(list[Tensor]):
    """A tensor from a checkpoint of several ranks: the rows of each rank, in order."""


def taken_apart(content: Any) -> tuple[Any, list[Tensor]]:
    """``content`` with {NUMBER: i} in place of each divided tensor, and this rank's rows of these
    tensors.
    """
    rows: list[Tensor] = []

    def numbered(tensor: DTensor) -> dict[str, int]:
        rows.append(tensor.to_local())
        return {NUMBER: len(rows) - 1}

    return tree_map_only(DTensor, numbered, content), rows


def put_together(content: Any, of_ranks: Sequence[Sequence[Tensor]]) -> Any:
    """The opposite of `taken_apart`, with a `Divided` for each divided tensor. of_ranks: the rows
    that each rank had.
    """

    def is_number(part: Any) -> bool:
        return isinstance(part, dict) and part.keys() == {NUMBER}

    def joined(part: Any) -> Any:
        return Divided(rows[part[NUMBER]] for rows in of_ranks) if is_number(part) else part

    return tree_map(joined, content, is_leaf=is_number)


def whole(content: Any) -> Any:
    """``content`` with whole tensors in place of divided ones that were read from a checkpoint."""
    return tree_map_only(Divided, torch.cat, content)


def weights_of(model: nn.Module, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights from a checkpoint, divided as those of ``model`` are."""
    like = model.state_dict()
    return {name: as_part(value, like.get(name)) for name, value in saved.items()}


def state_of(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A state of ``optimizer`` from a checkpoint, with tensors of a parameter's shape divided as
    the parameter is.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        i: {name: as_part(value, parameters[i]) for name, value in values.items()}
        for i, values in saved["state"].items()
    }
    return {**saved, "state": state}


def as_part(value: Any, like: Tensor | None) -> Any:
    """This rank's rows of a tensor, if ``like`` is a divided one of the same shape; else the whole
    tensor.
    """
    value = torch.cat(value) if isinstance(value, Divided) else value
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    part = distribute_tensor(
        value.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
    return part.clone()  # not a view, which would keep the whole tensor


@contextlib.contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Within the block, each rank has all weights, so that ranks may make different numbers of
    forward passes. A collective.
    """
    with torch.inference_mode(False):  # the weights are trained afterwards
        for part in _parts(model):
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
    try:
        yield
    finally:
        # not the whole model, which keeps its own weights for the backward pass
        for part in _parts(model)[1:]:
            part.set_reshard_after_forward(True, recurse=False)
        reshard(model)


def reshard(model: nn.Module) -> None:
    """Frees the weights of other ranks, which stay after a forward pass without a backward pass."""
    for part in _parts(model):
        part.reshard()


def _parts(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
