"""The samples of a rank: shares, batches and their order; and the augmentation of small sets in
memory.
"""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.core.data import sampling
from recipes.core.data.in_memory import AugmentedImages, ImageSet
from recipes.core.data.sampling import GlobalBatches, Part

COUNT = 60
HEIGHT = 9
WIDTH = 11


def images(channels: int = 3) -> torch.Tensor:
    shape = (COUNT, channels, HEIGHT, WIDTH)
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)


def test_the_digest_changes_with_images_and_labels() -> None:
    labels = torch.arange(COUNT)
    digest = ImageSet(images(), labels).digest()
    assert ImageSet(images(), labels.clone()).digest() == digest
    assert ImageSet(images().flip(0), labels).digest() != digest
    assert ImageSet(images(), labels.flip(0)).digest() != digest
    assert ImageSet(images()[:-1], labels[:-1]).digest() != digest


def test_what_determines_the_order_of_samples() -> None:
    order = GlobalBatches(10, 5, 3, 0, 1, "a digest", "another").order
    digests = {"data": "a digest", "validation_data": "another"}
    assert order == {"num_samples": 10, "global_batch_size": 5, "seed": 3, **digests}


def test_cutout_covers_one_square_in_each_image() -> None:
    whole = images().clamp(min=1)
    taken = AugmentedImages(whole, cutout=4, fill=0)
    touches_border = 0
    last_row = last_column = 0
    for epoch in range(20):
        taken.draw(0, epoch)
        for image, original in zip(taken.take(torch.arange(COUNT)), whole, strict=True):
            covered = (image == 0).all(0)
            rows = covered.any(1).nonzero().flatten()
            columns = covered.any(0).nonzero().flatten()
            height = len(rows)
            width = len(columns)
            assert 2 <= height <= 4
            assert 2 <= width <= 4
            square = covered[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            assert covered.sum() == height * width == square.sum()
            assert torch.equal(image[:, ~covered], original[:, ~covered])
            touches_border += height * width < 16
            last_row = max(last_row, int(rows[0]))
            last_column = max(last_column, int(columns[0]))
    assert 0.2 < touches_border / (20 * COUNT) < 0.8  # its middle may be anywhere
    assert (last_row, last_column) == (HEIGHT - 3, WIDTH - 3)


def test_augmentation_is_the_same_on_all_ranks_and_differs_between_epochs() -> None:
    first = AugmentedImages(images(), 2, reflect=True, flip=True, cutout=3)
    other = AugmentedImages(images(), 2, reflect=True, flip=True, cutout=3)
    first.draw(1, 0)
    other.draw(1, 0)
    everything = first.take(torch.arange(COUNT))
    assert everything.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(other.take(torch.arange(30, 60)), everything[30:])
    assert other.take(torch.empty(0, dtype=torch.int64)).shape == (0, 3, HEIGHT, WIDTH)
    for seed, epoch in ((2, 0), (1, 1)):
        other.draw(seed, epoch)
        assert not torch.equal(other.take(torch.arange(COUNT)), everything)


@settings(deadline=None)  # a busy machine may pause for a second
@given(samples=st.integers(1, 300), batch_size=st.integers(1, 400))
def test_the_last_two_batches_share_the_remaining_samples(samples: int, batch_size: int) -> None:
    batches = GlobalBatches(samples, batch_size, 0, 0, 1)
    sizes = [part.global_size for part in batches.epoch(0)]
    assert len(sizes) == batches.per_epoch
    assert sum(sizes) == samples
    for size in sizes[:-2]:
        assert size == batch_size
    assert max(sizes) <= batch_size
    if len(sizes) > 1:
        assert min(sizes) >= batch_size // 2
        assert 0 <= sizes[-2] - sizes[-1] <= 1


@settings(deadline=None)  # a busy machine may pause for a second
@given(length=st.integers(0, 20), count=st.integers(1, 30))
def test_pieces_of_a_part_are_complete_and_not_empty(length: int, count: int) -> None:
    part = Part(1, 2, torch.arange(length), 77)
    pieces = part.pieces(count)
    indices = []
    for piece in pieces:
        indices += piece.indices.tolist()
        assert piece.epoch == 1
        assert piece.batch == 2
        assert piece.global_size == 77
    assert indices == list(range(length))
    assert len(pieces) == max(1, min(count, length))


@settings(deadline=None)  # a busy machine may pause for a second
@given(count=st.integers(0, 500), world_size=st.integers(1, 40))
def test_shares_are_a_partition_of_sizes_that_differ_by_one(count: int, world_size: int) -> None:
    end = 0
    for rank in range(world_size):
        part = range(count)[sampling.share(count, rank, world_size)]
        assert part.start == end
        assert len(part) == count // world_size + (rank < count % world_size)
        end = part.stop
    assert end == count


@settings(deadline=None)  # a busy machine may pause for a second
@given(
    samples=st.integers(1, 300),
    batch_size=st.integers(1, 400),
    world_size=st.integers(1, 9),
    seed=st.integers(0, 2**62),
    epoch=st.integers(0, 10**6),
    from_batch=st.integers(0, 300),
)
def test_the_batches_of_an_epoch_do_not_depend_on_the_number_of_ranks(
    samples: int, batch_size: int, world_size: int, seed: int, epoch: int, from_batch: int
) -> None:
    def parts_of(rank: int, size: int, first_batch: int = 0) -> list[Part]:
        return list(GlobalBatches(samples, batch_size, seed, rank, size).epoch(epoch, first_batch))

    alone = parts_of(0, 1)
    order = torch.cat([part.indices for part in alone])
    assert sorted(order.tolist()) == list(range(samples))
    by_rank = [parts_of(r, world_size) for r in range(world_size)]
    for whole, *parts in zip(alone, *by_rank, strict=True):
        assert torch.equal(torch.cat([part.indices for part in parts]), whole.indices)
        assert {part.global_size for part in (whole, *parts)} == {len(whole.indices)}
    later = parts_of(0, world_size, from_batch)
    for resumed, full in zip(later, by_rank[0][from_batch:], strict=True):
        assert resumed.epoch == full.epoch
        assert resumed.batch == full.batch
        assert resumed.global_size == full.global_size
        assert torch.equal(resumed.indices, full.indices)


def test_each_seed_and_epoch_has_its_own_order() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return next(GlobalBatches(1000, 1000, seed, 0, 1).epoch(epoch)).indices.tolist()

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert orders[0] == order(0, 0)
    for first, second in itertools.combinations(orders, 2):
        assert first != second
    main = sampling.generator(3, 4)
    other = sampling.generator(3, 4, stream=1)
    assert main.initial_seed() != other.initial_seed()
