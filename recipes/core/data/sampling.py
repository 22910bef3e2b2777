"""Which samples each rank takes at each step, and the random generators of an epoch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from recipes.core.errors import InputError

S = TypeVar("S", bound="Part")
S_co = TypeVar("S_co", bound="Part", covariant=True)


@dataclass(frozen=True)
class Part:
    """One rank's part of one global batch.

    epoch, batch: from 0. indices: this rank's samples, int64. global_size: samples of the batch
    over all ranks. A subclass adds tensors, or tuples, lists and dicts of them, with one row for
    each sample.
    """

    epoch: int
    batch: int
    indices: Tensor
    global_size: int

    def pieces(self: S, count: int, empty: bool = False) -> list[S]:
        """The part in ``count`` pieces, for gradient accumulation. If it has fewer samples: one for
        each, or with ``empty`` also empty pieces.
        """
        count = count if empty else max(1, min(count, len(self.indices)))
        if count == 1:
            return [self]
        leaves, structure = tree_flatten(vars(self))
        cut = [
            leaf.tensor_split(count) if isinstance(leaf, Tensor) else [leaf] * count
            for leaf in leaves
        ]
        pieces = (tree_unflatten(list(piece), structure) for piece in zip(*cut, strict=True))
        return [type(self)(**piece) for piece in pieces]


class Source(Protocol[S_co]):
    """This rank's parts of the batches of each epoch, for the step loop: `GlobalBatches`, or a
    `TorchLoader` of them.

    per_epoch: batches of an epoch. order: the values that determine the order of samples; a
    checkpoint keeps them, and a run with other values does not resume from it.
    """

    @property
    def per_epoch(self) -> int: ...
    @property
    def order(self) -> dict[str, Any]: ...
    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[S_co]:
        """This rank's parts of ``epoch``, from batch ``first_batch`` on."""
        ...


def share(count: int, rank: int, world_size: int) -> slice:
    """Rank's contiguous part of ``count`` items; the first ``count % world_size`` ranks take one
    more.
    """
    each, more = divmod(count, world_size)
    begin = rank * each + min(rank, more)
    return slice(begin, begin + each + (rank < more))


@dataclass(frozen=True)
class GlobalBatches:
    """The batches of an epoch: a permutation drawn from (seed, epoch), the same on any number of
    ranks.

    Every sample occurs once in an epoch. The last two batches share the samples that do not fill a
    batch, so that neither is so small that a rank has no sample of it, or that batch normalisation
    has too few. data, validation_data: digests of the set and of the one that evaluations use, by
    which a resumed run detects other ones.
    """

    num_samples: int
    global_batch_size: int
    seed: int
    rank: int
    world_size: int
    data: str = ""
    validation_data: str = ""

    @property
    def per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch_size)

    @property
    def order(self) -> dict[str, Any]:
        names = ("num_samples", "global_batch_size", "seed", "data", "validation_data")
        return {name: getattr(self, name) for name in names}

    def size(self, batch: int) -> int:
        """Number of samples of a batch, over all ranks."""
        from_end = self.per_epoch - batch
        if from_end > 2 or self.per_epoch == 1:
            return min(self.num_samples, self.global_batch_size)
        both = self.num_samples - (self.per_epoch - 2) * self.global_batch_size
        return (both + 1) // 2 if from_end == 2 else both // 2

    def require_full(self, ranks: int, accumulate: int) -> None:
        """Raises InputError if a rank, or one of its ``accumulate`` pieces, would have no sample of
        some batch.

        Batch normalisation cannot process an empty batch, and with sync_bn= the ranks would not
        call the same number of collectives.
        """
        smallest = self.size(self.per_epoch - 1)
        least = ranks * accumulate
        if smallest < least:
            part = "of the parts (accumulate=) of each rank" if accumulate > 1 else "rank"
            fix = "use fewer ranks"
            if self.num_samples >= least:
                fix = f"give at least {2 * least}, or {fix}"
            raise InputError(
                f"global_batch_size={self.global_batch_size}: with {self.num_samples} samples, "
                f"the last batch has {smallest}, but it needs {least}, one for each {part}; {fix}"
            )

    def epoch(self, epoch: int, first_batch: int = 0, in_order: bool = False) -> Iterator[Part]:
        """This rank's parts of ``epoch``, from batch ``first_batch`` on. in_order: without the
        permutation.
        """
        order = torch.arange(self.num_samples)
        if not in_order:
            order = torch.randperm(self.num_samples, generator=generator(self.seed, epoch))
        begin = 0
        for batch in range(self.per_epoch):
            size = self.size(batch)
            if batch >= first_batch:
                mine = share(size, self.rank, self.world_size)
                yield Part(epoch, batch, order[begin + mine.start : begin + mine.stop], size)
            begin += size


def generator(seed: int, epoch: int, stream: int = 0) -> torch.Generator:
    """A generator for each (seed, epoch, stream), the same on every rank. stream: 0 order, 1
    augmentation, 2 recipes, 3 flips.
    """
    return torch.Generator().manual_seed(((seed * 1_000_003 + epoch) * 1_000_003 + stream) % 2**63)
