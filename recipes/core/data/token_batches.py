"""Batches whose size is counted in tokens: of examples of similar lengths, or of rows that are
packed with several examples.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recipes.core.data import sampling
from recipes.core.data.dialogues import Examples
from recipes.core.errors import InputError

UNIT = 16  # tokens


@dataclass(frozen=True)
class Part(sampling.Part):
    """One rank's part of one global batch of rows. indices: the first example of each row. members:
    its examples, one row of the tensor for each, then -1.
    """

    members: Tensor

    @property
    def rows(self) -> list[list[int]]:
        """The examples of each row."""
        return [row[row >= 0].tolist() for row in self.members]


class Rows(NamedTuple):
    """Rows of examples, each tensor (B, T). positions: from 0 in each example. counted: whether the
    loss counts the token as a target.
    """

    tokens: Tensor
    positions: Tensor
    counted: Tensor


def collate(examples: Examples, rows: Sequence[Sequence[int]], length: int = 0) -> Rows:
    """Rows of examples, padded to the longest, at least to ``length``. Without rows: a row of
    padding, since some models accept no empty batch.
    """
    longest = max((int(examples.lengths[row].sum()) for row in rows), default=2)
    shape = (max(1, len(rows)), max(longest, length))
    tokens = np.full(shape, examples.facts["pad"])
    positions = np.tile(np.arange(shape[1]), (shape[0], 1))
    counted = np.zeros(shape, bool)
    for number, row in enumerate(rows):
        begin = 0
        for example in row:
            end = begin + examples.lengths[example]
            place = (number, slice(begin, end))
            tokens[place], counted[place] = examples.take(example)
            positions[place] = np.arange(end - begin)
            begin = end
    return Rows(*map(torch.from_numpy, (tokens, positions, counted)))


class TokenBatches:
    """The batches of an epoch, the same on any number of ranks: a `sampling.Source`.

    A batch has up to ``global_batch_tokens`` tokens, at least one row. With ``pack``, rows of up to
    ``max_len`` tokens have several examples. Otherwise a row is an example, those of a batch have
    similar lengths, and their padding counts.

    Each epoch has the same groups of lengths, and so the same number of batches. The seed and the
    epoch select among examples of the same length, and determine the order.
    """

    def __init__(
        self,
        examples: Examples,
        global_batch_tokens: int,
        max_len: int,
        pack: bool,
        seed: int,
        rank: int,
        world_size: int,
        validation_data: str = "",
    ) -> None:
        """Raises InputError if an example is longer than ``max_len``."""
        longest = int(examples.lengths.max())
        if longest > max_len:
            fix = f"give max_len={longest}, or prepare the data again with max_len={max_len}"
            raise InputError(f"max_len={max_len}: an example has {longest} tokens: {fix}")
        self.order = {
            "num_samples": len(examples),
            "global_batch_tokens": global_batch_tokens,
            "max_len": max_len,
            "pack": pack,
            "seed": seed,
            "data": examples.digest,
            "validation_data": validation_data,
        }
        self._seed = seed
        self._place = slice(rank, None, world_size)
        self._pack = pack
        # If not packed, rounded up, so that more examples count as of the same length.
        rounded = np.minimum(-(-examples.lengths // UNIT) * UNIT, max_len)
        self._widths = examples.lengths if pack else rounded
        widths = np.sort(self._widths)[::-1].tolist()
        # of each row, the places of its examples in the order of descending widths
        self._rows = packed(widths, max_len) if pack else [[i] for i in range(len(widths))]

        count = len(self._rows)
        bounds = [0]
        while bounds[-1] < count:
            width = max_len if pack else widths[bounds[-1]]
            bounds.append(min(count, bounds[-1] + max(1, global_batch_tokens // width)))
        # The last two batches share their rows, so that the last one is not small.
        if len(bounds) > 2 and count - bounds[-2] < bounds[-2] - bounds[-3]:
            bounds[-2] = (bounds[-3] + count + 1) // 2
        self._bounds = bounds

    @property
    def per_epoch(self) -> int:
        return len(self._bounds) - 1

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Part]:
        """This rank's parts of ``epoch``, from batch ``first_batch`` on."""
        random = sampling.generator(self._seed, epoch)
        order = torch.randperm(len(self._widths), generator=random).numpy()
        order = order[np.argsort(-self._widths[order], kind="stable")]
        rows = self._rows
        if self._pack:  # these are all as long
            rows = [rows[i] for i in torch.randperm(len(rows), generator=random)]
        chosen = torch.randperm(self.per_epoch, generator=random).tolist()
        for batch, number in list(enumerate(chosen))[first_batch:]:
            begin, end = self._bounds[number : number + 2]
            mine = rows[begin:end][self._place]  # each rank has long and short ones
            members = np.full((len(mine), max(map(len, mine), default=1)), -1)
            for i, row in enumerate(mine):
                members[i, : len(row)] = order[row]
            table = torch.from_numpy(members)
            yield Part(epoch, batch, table[:, 0], end - begin, table)


def packed(lengths: Sequence[int], size: int) -> list[list[int]]:
    """The numbers of ``lengths`` in rows of up to ``size``, each with the longest that fit."""
    numbers = defaultdict[int, list[int]](list)
    for i, length in enumerate(lengths):
        numbers[length].append(i)
    known = sorted(numbers)
    rows = []
    while known:
        row = list[int]()
        space = size
        while at := bisect.bisect_right(known, space):
            length = known[at - 1]
            row.append(numbers[length].pop())
            space -= length
            if not numbers[length]:
                del known[at - 1]
        rows.append(row)
    return rows
