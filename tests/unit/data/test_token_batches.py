"""Batches counted in tokens: which rows they have, on any number of ranks, and their tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipes.core.data.dialogues import COUNTED, Examples
from recipes.core.data.token_batches import UNIT, Part, TokenBatches, collate
from recipes.core.errors import InputError

LONGEST = 200
BUDGET = 1000


def examples(lengths: np.ndarray) -> Examples:
    """Example i has the tokens i * 1000, i * 1000 + 1, …; the loss counts the last half of them."""
    content = [
        i * 1000 + np.arange(length) + COUNTED * (np.arange(length) >= length // 2)
        for i, length in enumerate(lengths)
    ]
    begins = lengths.cumsum() - lengths
    places = np.column_stack([0 * lengths, begins, lengths, lengths - lengths // 2])
    facts = {"vocabulary": 1 << 30, "pad": 7}
    return Examples([np.concatenate(content).astype("<u4")], places, facts, "digest")


def drawn(count: int = 300, seed: int = 0) -> Examples:
    return examples(np.random.default_rng(seed).integers(2, LONGEST - 40, count))


def batches(
    data: Examples, pack: bool, rank: int = 0, size: int = 1, seed: int = 0
) -> TokenBatches:
    return TokenBatches(data, BUDGET, LONGEST, pack, seed, rank, size)


def rows_of(parts: list[Part]) -> list[list[list[int]]]:
    return [part.rows for part in parts]


@pytest.mark.parametrize("pack", [False, True])
def test_each_example_is_in_one_row_of_an_epoch(pack: bool) -> None:
    """A batch has up to the budget of tokens, with the padding unless it is packed, and not much
    less.
    """
    data = drawn()
    source = batches(data, pack)
    for epoch in range(2):
        parts = list(source.epoch(epoch))
        assert len(parts) == source.per_epoch
        assert [part.batch for part in parts] == list(range(len(parts)))
        seen = [i for part in parts for row in part.rows for i in row]
        assert sorted(seen) == list(range(len(data)))
        sizes = []
        for part in parts:
            of_rows = [int(data.lengths[row].sum()) for row in part.rows]
            assert max(of_rows) <= LONGEST
            assert part.indices.tolist() == [row[0] for row in part.rows]
            assert part.global_size == len(part.rows)
            sizes.append(len(of_rows) * max(of_rows))
        assert max(sizes) <= BUDGET
        assert np.median(sizes) > 0.85 * BUDGET
    total = int(data.lengths.sum())
    if pack:
        assert sum(map(len, rows_of(parts))) <= 1.05 * total / LONGEST
        assert any(len(row) > 1 for part in parts for row in part.rows)
    else:
        padded = sum(len(part.rows) * int(data.lengths[part.rows].max()) for part in parts)
        assert padded < 1.15 * total


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_batches_do_not_depend_on_the_number_of_ranks(pack: bool, size: int) -> None:
    data = drawn()
    alone = list(batches(data, pack).epoch(3))
    of_ranks = [list(batches(data, pack, rank, size).epoch(3)) for rank in range(size)]
    for part, *shares in zip(alone, *of_ranks, strict=True):
        assert sorted(part.rows) == sorted(row for share in shares for row in share.rows)
        assert {share.global_size for share in shares} == {part.global_size}
        counts = [len(share.rows) for share in shares]
        assert max(counts) - min(counts) <= 1
        work = [sum(data.lengths[row].sum() for row in share.rows) for share in shares]
        assert max(work) - min(work) <= 1.5 * LONGEST
    for share in of_ranks[-1]:
        pieces = share.pieces(2)
        assert [row for piece in pieces for row in piece.rows] == share.rows
        assert [len(piece.indices) for piece in pieces] == [len(piece.rows) for piece in pieces]


@pytest.mark.parametrize("pack", [False, True])
def test_the_seed_and_the_epoch_determine_the_order(pack: bool) -> None:
    data = drawn()
    orders = [
        rows_of(list(batches(data, pack, seed=seed).epoch(epoch)))
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] == rows_of(list(batches(data, pack).epoch(0)))
    assert orders[0] != orders[1] != orders[2] != orders[0]
    together = [{frozenset(i for row in batch for i in row) for batch in order} for order in orders]
    assert not together[0] & together[1]  # also which examples are in a batch
    if not pack:  # long and short batches alternate
        widths = [-(-int(data.lengths[batch].max()) // UNIT) for batch in orders[0]]
        assert widths != sorted(widths, reverse=True)
    rest = list(batches(data, pack).epoch(1, 4))
    assert rows_of(rest) == orders[1][4:]
    assert rest[0].batch == 4


@pytest.mark.parametrize(("rows", "sizes"), [(8, [4, 4]), (12, [3, 4, 5])])
def test_the_last_batch_is_not_small(rows: int, sizes: list[int]) -> None:
    source = batches(examples(np.full(rows, 200)), False)
    assert sorted(part.global_size for part in source.epoch(0)) == sizes


def test_order_has_what_determines_it() -> None:
    data = drawn(5)
    assert TokenBatches(data, BUDGET, LONGEST, True, 3, 1, 2, "another").order == {
        "num_samples": 5,
        "global_batch_tokens": BUDGET,
        "max_len": LONGEST,
        "pack": True,
        "seed": 3,
        "data": "digest",
        "validation_data": "another",
    }


def test_an_example_longer_than_a_row_is_refused() -> None:
    data = examples(np.array([5, 9, 7]))
    with pytest.raises(InputError, match="max_len=8: an example has 9 tokens: give max_len=9, or"):
        TokenBatches(data, 100, 8, False, 0, 0, 1)
    assert TokenBatches(data, 1, 9, True, 0, 0, 1).per_epoch == 3  # at least a row


def test_rows_have_positions_in_each_example() -> None:
    rows = collate(examples(np.array([3, 2, 4])), [[2, 1], [0]], length=8)
    assert [tensor.shape for tensor in rows] == [(2, 8)] * 3
    assert [rows.tokens.dtype, rows.positions.dtype] == [torch.int64] * 2
    assert rows.tokens.tolist() == [
        [2000, 2001, 2002, 2003, 1000, 1001, 7, 7],
        [0, 1, 2, 7, 7, 7, 7, 7],
    ]
    assert rows.positions[:, :6].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert rows.counted.int().tolist() == [[0, 0, 1, 1, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]]


def test_no_rows_are_a_row_of_padding() -> None:
    """Of a rank that has no row of a batch."""
    source = batches(examples(np.array([5, 9])), False, 2, 3)
    [part] = source.epoch(0)
    assert part.rows == []
    assert part.indices.shape == (0,)
    rows = collate(examples(np.array([5])), part.rows)
    assert rows.tokens.tolist() == [[7, 7]]
    assert rows.positions.tolist() == [[0, 1]]
    assert not rows.counted.any()
