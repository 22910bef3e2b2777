"""Any torch data set or stream of samples, read by the worker processes of a torch `DataLoader`: `Source`s for the step loop.

Which rank takes which sample follows from `GlobalBatches`, and the random numbers of a sample from (seed, epoch, sample). So the samples
are the same on any number of ranks and workers, and after a resume in the middle of an epoch. Slurm's signals do not end the workers.
"""

import contextlib
import dataclasses
import random
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from recipes.core.data.sampling import GlobalBatches, OfBatches, Shard, share
from recipes.core.errors import InputError, RunError

Collate = Callable[[list[Any]], Any]
Index = tuple[int, int]  # epoch and sample
EVALUATION = -1  # in place of an epoch


def unchanged(sample: Any) -> Any:  # not a lambda: workers that are spawned unpickle it
    return sample


@dataclass(frozen=True)
class LoadedBatch(Shard):
    """A shard with its samples. data: what ``collate`` has made of them, on the rank's device, with one row for each sample."""

    data: Any

    def pieces(self, count: int) -> list["LoadedBatch"]:
        """As `Shard.pieces`. Raises InputError if ``data`` has anything but tensors and would be cut."""
        others = {type(leaf).__name__ for leaf in tree_leaves(self.data) if not isinstance(leaf, Tensor)}
        if count > 1 and others:
            named = ", ".join(sorted(others))
            raise InputError(f"accumulate={count}: a batch has {named}, which cannot be cut: make tensors in collate=")
        return super().pieces(count)


class _Loaded(OfBatches):
    """A `Source` that puts its batches on a device."""

    def __init__(self, batches: GlobalBatches, device: torch.device) -> None:
        self._batches, self._device = batches, device

    def _loaded(self, shards: Iterable[Shard], found: Iterable[Any]) -> Iterator[LoadedBatch]:
        for shard, data in zip(shards, found, strict=True):
            here = _on(self._device, data)
            if not len(shard.indices):  # a sample was read for its shape
                here = tree_map_only(Tensor, lambda tensor: tensor[:0], here)
            yield LoadedBatch(shard.epoch, shard.batch, shard.indices, shard.global_size, here)


class TorchLoader(_Loaded):
    """The samples of a map-style ``dataset`` that ``batches`` selects, in worker processes that last as long as the loader.

    Within ``dataset[i]``, the global generators of torch, Python and NumPy are seeded for the sample: random transforms repeat exactly.
    An InputError there ends the run with its line. num_workers: processes per rank; 0 reads in the main process. collate: makes a batch
    of a list of samples. warn: gets a line if a sample differs between two reads.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batches: GlobalBatches,
        *,
        num_workers: int,
        device: torch.device,
        collate: Collate = default_collate,
        warn: Callable[[str], None] = print,
    ) -> None:
        super().__init__(batches, device)
        count = len(dataset)  # type: ignore[arg-type]
        if count != batches.num_samples:
            raise InputError(
                f"the data set has {count} samples: give GlobalBatches() this number, not {batches.num_samples}"
            )
        seeded = _Seeded(dataset, batches.seed)
        if batches.rank == 0 and not _repeats(seeded, num_workers, collate):
            warn(
                "dataset[0] differs between two reads with the same random numbers: a resumed run will see other samples. Draw them from "
                "the global generators of torch, random or numpy"
            )
        self._workers, self._collate = num_workers, collate
        self._training = _Reader(seeded, num_workers, device, collate)
        self._evaluated: tuple[Dataset[Any], _Reader] | None = None

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[LoadedBatch]:
        """This rank's shards of ``epoch``, from batch ``first_batch`` on. Raises the InputError of a sample."""
        shards = list(self._batches.epoch(epoch, first_batch))
        lists = ([(epoch, i) for i in shard.indices.tolist()] or [(epoch, 0)] for shard in shards)
        yield from self._loaded(shards, self._training.read(lists))

    def in_order(self, dataset: Dataset[Any], part: slice, batch_size: int) -> Iterator[Any]:
        """The samples ``part`` of ``dataset``, for an evaluation: batches on the rank's device. Raises the InputError of a sample."""
        if not self._evaluated or self._evaluated[0] is not dataset:
            reader = _Reader(_Seeded(dataset, self._batches.seed), self._workers, self._device, self._collate)
            self._evaluated = dataset, reader
        samples = range(len(dataset))[part]  # type: ignore[arg-type]
        starts = range(0, len(samples), batch_size)
        for data in self._evaluated[1].read([(EVALUATION, i) for i in samples[at : at + batch_size]] for at in starts):
            yield _on(self._device, data)


class StreamLoader(_Loaded):
    """The samples of a stream, such as a file that is read from its beginning: each worker passes over all, and keeps its own.

    samples: called with the epoch; returns the stream, the same on all ranks and at each call. ``batches.num_samples`` is its length.
    transform: for the samples that this rank keeps, seeded as in `TorchLoader`; decode here. A resumed run passes over what it has trained on.
    """

    def __init__(
        self,
        samples: Callable[[int], Iterable[Any]],
        batches: GlobalBatches,
        *,
        num_workers: int,
        device: torch.device,
        transform: Callable[[Any], Any] = unchanged,
        collate: Collate = default_collate,
    ) -> None:
        super().__init__(batches, device)
        self._samples, self._workers, self._transform, self._collate = samples, num_workers, transform, collate

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[LoadedBatch]:
        """This rank's shards of ``epoch``, from batch ``first_batch`` on. Raises InputError if the stream ends early."""
        part = _Part(self._samples, self._transform, self._collate, self._batches, epoch, first_batch)
        pin = self._device.type == "cuda"
        # With a generator, DataLoader draws nothing from torch's own, whose state a checkpoint keeps.
        loader: DataLoader[Any] = DataLoader(
            part, batch_size=None, num_workers=self._workers, pin_memory=pin, generator=torch.Generator()
        )
        yield from self._loaded(map(self._in_order, self._batches.epoch(epoch, first_batch)), loader)

    def _in_order(self, shard: Shard) -> Shard:
        """The shard with the positions of its samples in the stream."""
        begin = sum(self._batches.size(batch) for batch in range(shard.batch))
        part = share(shard.global_size, self._batches.rank, self._batches.world_size)
        return dataclasses.replace(shard, indices=torch.arange(begin + part.start, begin + part.stop))


@dataclass
class _Part(IterableDataset[Any]):
    """This rank's batches of one epoch of a stream. Of several workers, each makes every n-th batch; `DataLoader` takes them in turn."""

    samples: Callable[[int], Iterable[Any]]
    transform: Callable[[Any], Any]
    collate: Collate
    batches: GlobalBatches
    epoch: int
    first_batch: int

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._own_batches()
        except InputError as error:
            yield error
        except Exception as error:
            if not get_worker_info():
                raise
            yield _in_one_line(error)

    def _own_batches(self) -> Iterator[Any]:
        worker, batches = get_worker_info(), self.batches
        own, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        stream, begin = iter(self.samples(self.epoch)), 0
        for batch in range(batches.per_epoch):
            size = batches.size(batch)
            found = list(islice(stream, size))
            if len(found) < size:
                number = begin + len(found)
                raise InputError(
                    f"the stream ends after {number} samples: give GlobalBatches() this number, not {batches.num_samples}"
                )
            if batch >= self.first_batch and (batch - self.first_batch) % workers == own:
                mine = range(size)[share(size, batches.rank, batches.world_size)] or range(1)
                yield self.collate([self._made(begin + i, found[i]) for i in mine])
            begin += size

    def _made(self, position: int, sample: Any) -> Any:
        with seeded(self.batches.seed, self.epoch, position):
            return self.transform(sample)


@dataclass
class _Lists:
    """A batch sampler: the lists of samples of the next epoch."""

    lists: Iterable[list[Index]] = ()

    def __iter__(self) -> Iterator[list[Index]]:
        return iter(self.lists)


class _Reader:
    """Batches of ``dataset``, by the lists of samples given to `read`. The workers stay from one call to the next."""

    def __init__(self, dataset: "_Seeded", workers: int, device: torch.device, collate: Collate) -> None:
        # Not this object itself: in a circle of references, the queues would end before the workers, whose end then takes 5 s each.
        self._lists = _Lists()
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=self._lists, num_workers=workers, collate_fn=_OrError(collate),
            pin_memory=device.type == "cuda", persistent_workers=workers > 0, generator=torch.Generator(),
        )  # fmt: skip

    def read(self, lists: Iterable[list[Index]]) -> Iterator[Any]:
        self._lists.lists = lists
        return iter(self._loader)


@dataclass(frozen=True)
class _OrError:
    collate: Collate

    def __call__(self, samples: list[Any] | Exception) -> Any:
        return samples if isinstance(samples, Exception) else self.collate(samples)


@dataclass(frozen=True)
class _Seeded(Dataset[Any]):
    """``dataset`` with random numbers of (seed, epoch, sample). An InputError is returned, since `DataLoader` would add a traceback to it."""

    dataset: Dataset[Any]
    seed: int

    def __getitems__(self, samples: list[Index]) -> list[Any] | Exception:
        try:
            return [self._one(*index) for index in samples]
        except InputError as error:
            return error
        except Exception as error:
            if not get_worker_info():
                raise
            return _in_one_line(error)

    def _one(self, epoch: int, i: int) -> Any:
        with seeded(self.seed, epoch, i):
            return self.dataset[i]


def _in_one_line(error: Exception) -> RunError:
    """An error of a worker with its place, since `DataLoader` would make many lines of it. The worker prints its traceback."""
    traceback.print_exception(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return RunError(f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})")


def _repeats(dataset: _Seeded, workers: int, collate: Collate) -> bool:
    """Whether two reads of the first sample are equal. In a worker, if there are any: they must not share a file that the main process opens."""
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_sampler=[[(0, 0)], [(0, 0)]], num_workers=min(1, workers), collate_fn=_OrError(collate),
        generator=torch.Generator(),
    )  # fmt: skip
    first, second = map(tree_leaves, loader)
    return all(_equal(one, other) for one, other in zip(first, second, strict=False))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one == other).logical_or((one != one) & (other != other)).all())
    return not isinstance(one, int | float | str) or one == other


@contextlib.contextmanager
def seeded(seed: int, epoch: int, number: int) -> Iterator[None]:
    """Seeds the global generators of torch (CPU), Python and NumPy within the ``with`` block. Afterwards they continue as before."""
    mixed = zlib.crc32(f"{seed} {epoch} {number}".encode())  # torch's generator uses 32 bits
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        torch.default_generator.manual_seed(mixed)  # not torch.manual_seed, which seeds the GPU too
        random.seed(mixed)
        np.random.seed(mixed)
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _on(device: torch.device, data: Any) -> Any:
    """The batch on the device. Raises it if it is an error of a sample."""
    if isinstance(data, Exception):
        raise data
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), data)
