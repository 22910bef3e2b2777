"""strategy=fsdp: weights, gradients and optimiser state are divided over the ranks by torch's
`fully_shard`, each tensor by its rows.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map, tree_map_only

NUMBER = "divided tensor"  # key of a dictionary that stands for a divided tensor in a checkpoint


def divide(
    model: nn.Module,
    device: torch.device,
    ranks: int,
    shard_size: int,
    half: torch.dtype | None = None,
) -> None:
    """Divides ``model`` in place: each element of its lists of blocks on its own, then the rest. A
    collective. A model on the CPU moves to ``device`` block by block, so that the device never
    holds the whole model. All ranks get the values of rank 0: on the others, tensors may be on the
    meta device.

    shard_size: ranks over which a copy is divided; each further group of that size has another
    copy. It must divide the number of ranks. 0: all ranks. half: the type in which a rank gathers
    the weights of a block; None: their own. Gradients are summed in float32.
    """
    size = shard_size or ranks
    shape = (size,) if size == ranks else (ranks // size, size)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    # The inputs of a block stay in float32, as with DDP: `torch.autocast` converts them. It would
    # also convert the weights, but keep all converted weights until the backward pass.
    policy = MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False)
    for block in blocks(model):
        _move_rank_0s(block, device)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    _move_rank_0s(model, device)
    fully_shard(model, mesh=mesh)


def _move_rank_0s(module: nn.Module, device: torch.device) -> None:
    """Moves what is not divided of ``module`` to ``device``, with the values of rank 0. A
    collective.
    """
    materialize(module, device)
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor):
            # fully_shard does not accept channels_last weights
            tensor.data = tensor.data.to(device).contiguous()
            dist.broadcast(tensor.data, 0)


def materialize(module: nn.Module, device: torch.device) -> None:
    """Replaces the tensors of ``module`` on the meta device by tensors on ``device`` without
    values. Shared ones stay shared, which ``to_empty`` does not ensure.
    """
    made = dict[Tensor, Tensor]()
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_meta:
            made[tensor] = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                made[tensor] = nn.Parameter(made[tensor], tensor.requires_grad)
    for part in module.modules():
        tensors: Any
        for tensors in (part._parameters, part._buffers):
            tensors.update({name: made.get(tensor, tensor) for name, tensor in tensors.items()})


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The elements with weights of the outermost lists of modules."""
    if isinstance(model, nn.ModuleList | nn.Sequential):
        yield from (block for block in model if [*block.parameters()])
    else:
        for child in model.children():
            yield from blocks(child)


def gathered_bytes(model: nn.Module, half: torch.dtype) -> int:
    """The most bytes of gathered weights and of whole gradients that a rank holds, if ``model`` is
    divided. half: as for `divide`.

    These are the weights outside the blocks, and two blocks: while one computes, a rank gathers
    the next one.
    """
    of_blocks = [counts(block) for block in blocks(model)]
    count, trained = (max(sizes) for sizes in zip(*of_blocks, strict=True))
    all_count, all_trained = counts(model)
    rest = all_count - sum(size for size, _ in of_blocks)
    rest_trained = all_trained - sum(size for _, size in of_blocks)
    return 2 * half.itemsize * count + 4 * trained + 4 * (rest + rest_trained)


def counts(module: nn.Module) -> tuple[int, int]:
    """Numbers of weights, and of those that are trained."""
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


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
