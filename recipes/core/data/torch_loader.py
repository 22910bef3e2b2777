"""Any torch data set or stream of samples, read by the worker processes of a torch `DataLoader`:
`Source`s for the step loop.

Which rank takes which sample follows from `GlobalBatches`, and the random numbers of a sample from
(seed, epoch, sample). So the samples are the same on any number of ranks and workers, and after a
resume in the middle of an epoch. Slurm's signals do not end the workers.
"""

import contextlib
import json
import os
import random
import shutil
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from recipes.core.data.sampling import GlobalBatches, Part
from recipes.core.errors import InputError, RunError
from recipes.core.place import processes, stacks

Collate = Callable[[list[Any]], Any]
Index = tuple[int, Sequence[int]]  # the epoch and the samples of a batch
EVALUATION = -1  # in place of an epoch
# A rank ends the run if it skips more than MOST_SKIPPED samples, and more than FRACTION of all that
# it has read in an epoch or evaluation.
MOST_SKIPPED = 10
FRACTION = 0.01
WORKER_END_S = 1.0  # after an error of a worker's socket, its end is known within this time
# Bytes. If a worker fails with fewer free bytes in /dev/shm (it holds the batches), the message
# says so.
LITTLE_SHM = 256 << 20
# Bytes. Linux limits the path of a socket to 107; Python's multiprocessing (3.10 to 3.13) adds
# /pymp-XXXXXXXX/listener-XXXXXXXX.
LONGEST_TMPDIR = 107 - 32


class SkippedSample(Exception):
    """Raised by ``dataset[i]`` for a sample that cannot be read. The batch has ``instead``: give it
    a label that the loss ignores.
    """

    def __init__(self, name: str, reason: str, instead: Any) -> None:
        super().__init__(name, reason)
        self.instead = instead


def unchanged(sample: Any) -> Any:  # not a lambda: workers that are spawned unpickle it
    return sample


@dataclass(frozen=True)
class LoadedBatch(Part):
    """A part with its samples. data: what ``collate`` has made of them, on the rank's device, with
    one row for each sample.
    """

    data: Any

    def pieces(self, count: int, empty: bool = False) -> list["LoadedBatch"]:
        """As `Part.pieces`. Raises InputError if ``data`` has anything but tensors and would be
        cut.
        """
        others = {type(leaf) for leaf in tree_leaves(self.data) if not isinstance(leaf, Tensor)}
        if count > 1 and others:
            named = ", ".join(sorted(kind.__name__ for kind in others))
            fix = "collate= must return tensors"
            raise InputError(f"accumulate={count}: {named} cannot be divided: {fix}")
        return super().pieces(count, empty)


class _Loaded:
    """A `Source` that puts its batches on a device."""

    def __init__(
        self, batches: GlobalBatches, num_workers: int, device: torch.device, collate: Collate
    ) -> None:
        self.per_epoch = batches.per_epoch
        self.order = batches.order
        self._batches = batches
        self._workers = num_workers
        self._device = device
        self._collate = collate
        folder = tempfile.gettempdir()
        if num_workers and len(os.fsencode(folder)) > LONGEST_TMPDIR:
            fix = (
                f"set TMPDIR to a folder of at most {LONGEST_TMPDIR} bytes, such as /tmp, "
                "or give num_workers=0"
            )
            why = "too long for the sockets of the worker processes"
            raise InputError(f"TMPDIR={folder}: {why}: {fix}")

    def _loaded(self, parts: Iterable[Part], batches: Iterable[Any]) -> Iterator[LoadedBatch]:
        for part, data in zip(parts, batches, strict=True):
            data = _on(self._device, data)
            if not len(part.indices):  # a sample was read for its shape
                data = tree_map_only(Tensor, lambda tensor: tensor[:0], data)
            yield LoadedBatch(**vars(part), data=data)


class TorchLoader(_Loaded):
    """The samples of a map-style ``dataset`` that ``batches`` selects, in worker processes that
    last as long as the loader.

    Within ``dataset[i]``, the global generators of torch, Python and NumPy are seeded for the
    sample: random transforms repeat exactly. An InputError there ends the run with its line. A
    `SkippedSample` is counted and replaced; the run fails if there are too many.
    ``dataset.set_epoch``, if it exists, is called with the epoch (-1 in an evaluation) before each
    batch. num_workers: processes per rank, which also end with the thread that took the first
    batch; 0 reads in the main process. collate: makes a batch of a list of samples. warn: gets a
    line if a sample differs between two reads, and for each skipped one.
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
        super().__init__(batches, num_workers, device, collate)
        self._warn = warn
        self.skipped: set[str] = set()  # names of the samples that this rank could not read
        count = len(dataset)  # type: ignore[arg-type]
        if count != batches.num_samples:
            fix = f"give GlobalBatches() this, not {batches.num_samples}"
            raise InputError(f"the data set has {count} samples: {fix}")
        self._training = self._reader(dataset)
        self._evaluation: Any = None
        if batches.rank == 0 and not self._repeats():
            warn(
                "dataset[0] differs between two reads with the same seed, "
                "so a resumed run sees other samples; "
                "draw random numbers only from the global generators of torch, random and numpy"
            )

    def _reader(self, dataset: Dataset[Any]) -> Any:
        """A `DataLoader` of `_Collated`, for `_read`. Its worker processes stay alive between two
        calls.
        """
        batches = _Collated(dataset, self._batches.seed, self._collate)
        return _whole_batches(batches, self._workers, self._device, _Wanted())

    def _repeats(self) -> bool:
        """Whether two reads of the first sample are equal. With workers, one reads it: they would
        share a file that this process opens.
        """
        cpu = torch.device("cpu")
        batches = self._training.dataset
        twice = _whole_batches(batches, min(1, self._workers), cpu, [(0, [0])] * 2)
        return all(map(_equal, *map(tree_leaves, twice)))

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[LoadedBatch]:
        """This rank's parts of ``epoch``, from ``first_batch`` on. Raises InputError: that of a
        sample, or if too many are skipped.
        """
        parts = list(self._batches.epoch(epoch, first_batch))
        wanted = ((epoch, part.indices.tolist() or [0]) for part in parts)
        yield from self._loaded(parts, self._read(self._training, wanted))

    def in_order(self, dataset: Dataset[Any], part: slice, batch_size: int) -> Iterator[Any]:
        """The samples ``part`` of ``dataset``, for an evaluation: batches on the rank's device.
        Raises as `epoch` does.
        """
        if self._evaluation is None or self._evaluation.dataset.dataset is not dataset:
            self._evaluation = self._reader(dataset)
        samples = range(len(dataset))[part]  # type: ignore[arg-type]
        begins = range(0, len(samples), batch_size)
        wanted = ((EVALUATION, samples[begin : begin + batch_size]) for begin in begins)
        for data in self._read(self._evaluation, wanted):
            yield _on(self._device, data)

    def skipped_on_all(self, gather: Callable[[bytes], list[bytes]]) -> int:
        """Number of samples that some rank could not read, each counted once. gather:
        `World.gather`. Collective.
        """
        names = set[str]()
        for of_rank in gather(json.dumps(sorted(self.skipped)).encode()):
            names.update(json.loads(of_rank))
        return len(names)

    def _read(self, reader: Any, wanted: Iterable[Index]) -> Iterator[Any]:
        """The batches on the CPU. Raises InputError if too many samples are skipped."""
        seen = 0
        bad = set[str]()
        reader.sampler.indices = wanted
        for data, size, skipped in _results(reader):
            seen += size
            for name, why in skipped:
                bad.add(name)
                if name not in self.skipped:
                    self.skipped.add(name)
                    self._warn(f"{name!r} cannot be read ({why}) and is skipped")
            if skipped and len(bad) > max(MOST_SKIPPED, FRACTION * seen):
                count = f"{len(bad)} of {seen} samples cannot be read ({name!r}: {why})"
                raise InputError(f"{count}: check that the data is complete")
            yield data


class StreamLoader(_Loaded):
    """The samples of a stream, such as a file that is read from its beginning. Each worker reads
    the whole stream and keeps only its own samples.

    samples: called with the epoch; returns the stream, the same on all ranks and at each call.
    ``batches.num_samples`` is its length. transform: for the samples that this rank keeps, seeded
    as in `TorchLoader`; decode here. A resumed run skips the samples that it has trained on.
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
        super().__init__(batches, num_workers, device, collate)
        self._samples = samples
        self._transform = transform

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[LoadedBatch]:
        """This rank's parts of ``epoch``, from batch ``first_batch`` on. Raises InputError if the
        stream ends early.
        """
        parts = list(self._batches.epoch(epoch, first_batch, in_order=True))
        dataset = _OfRank(self, epoch, [part.indices.tolist() for part in parts])
        yield from self._loaded(
            parts, _results(_whole_batches(dataset, self._workers, self._device))
        )


@dataclass
class _OfRank(IterableDataset[Any]):
    """This rank's batches of one epoch of a stream. With n workers, each makes every n-th batch,
    and `DataLoader` takes them in turn.

    lists: the positions of the samples of each batch, in the order of the stream.
    """

    of: StreamLoader
    epoch: int
    lists: list[list[int]]

    def __iter__(self) -> Iterator[Any]:
        batches = self._own_batches()
        while (batch := _or_error(lambda: next(batches, None))) is not None:
            yield batch

    def _own_batches(self) -> Iterator[Any]:
        worker = get_worker_info()
        batches = self.of._batches
        stream = iter(self.of._samples(self.epoch))
        passed = 0
        for part in self.lists[worker.id :: worker.num_workers] if worker else self.lists:
            mine = part or [passed]  # a sample for its shape
            samples = list(islice(stream, mine[0] - passed, mine[-1] + 1 - passed))
            if len(samples) < len(mine):
                count = f"fewer than {batches.num_samples} samples"
                raise InputError(f"the stream has {count}: give GlobalBatches() their number")
            passed = mine[-1] + 1

            for i, position in enumerate(mine):
                with seeded(batches.seed, self.epoch, position):
                    samples[i] = self.of._transform(samples[i])
            yield self.of._collate(samples)


@dataclass(frozen=True)
class _Collated(Dataset[Any]):
    """The batches of ``dataset``. The random numbers of a sample are those of (seed, epoch,
    sample).
    """

    dataset: Dataset[Any]
    seed: int
    collate: Collate

    def __getitem__(self, index: Index) -> Any:
        """A batch, its size, and the name and reason of each skipped sample; or an error."""
        return _or_error(lambda: self._batch(*index))

    def _batch(self, epoch: int, numbers: Sequence[int]) -> tuple[Any, int, list[Any]]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        samples = []
        skipped = []
        with _kept_generators():  # once for all samples, since it takes 0.1 ms
            for i in numbers:
                _seed(self.seed, epoch, i)
                try:
                    samples.append(self.dataset[i])
                except SkippedSample as skip:
                    samples.append(skip.instead)
                    skipped.append(skip.args)
        return self.collate(samples), len(samples), skipped


@dataclass
class _Wanted:
    """The sampler of a `DataLoader` that is used again with other indices."""

    indices: Iterable[Index] = ()

    def __iter__(self) -> Iterator[Index]:
        return iter(self.indices)


def _whole_batches(
    dataset: Dataset[Any], workers: int, device: torch.device, wanted: Iterable[Index] | None = None
) -> DataLoader[Any]:
    """A `DataLoader` of a data set whose items are batches. wanted: the indices of the batches;
    None for a stream.
    """
    # Each rank would repeat its advice on the number of workers.
    warnings.filterwarnings(
        "ignore", category=UserWarning, module=r"torch\.utils\.data\.dataloader"
    )
    # With a generator, DataLoader draws nothing from torch's own, whose state a checkpoint keeps.
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=wanted,
        num_workers=workers,
        collate_fn=unchanged,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0 and wanted is not None,
        generator=torch.Generator(),
        worker_init_fn=partial(_end_with, os.getpid()),
    )


def _end_with(rank: int, worker: int) -> None:
    """The kernel ends a worker whose rank has ended, since one that hangs in a read does not notice
    it.
    """
    stacks.register()
    if os.getppid() == rank:  # a fork server may have started it
        processes.die_with(rank)()


def _results(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches up to the first error, which it raises."""
    try:
        for batch in batches:
            if isinstance(batch, Exception):
                raise batch
            yield batch
    except (EOFError, OSError):
        # A worker that was killed while it passed on a batch: torch's handler of SIGCHLD names it.
        time.sleep(WORKER_END_S)
        raise


def _or_error(make: Callable[[], Any]) -> Any:
    """The result of ``make``, or its error in one line, since `DataLoader` would add a traceback to
    an error that a worker raises.
    """
    try:
        return make()
    except InputError as error:
        return error
    except Exception as error:
        if not get_worker_info():
            raise
        traceback.print_exception(error)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
        free = shutil.disk_usage("/dev/shm").free
        if free < LITTLE_SHM:
            fix = "in a container, use --shm-size=16g or --ipc=host; or lower num_workers="
            text = f"{text}; /dev/shm has only {free / 1e6:.0f} MB free: {fix}"
        return RunError(text)


def _equal(leaf: Any, other: Any) -> bool:
    if isinstance(leaf, Tensor) and isinstance(other, Tensor):
        return leaf.shape == other.shape and torch.allclose(leaf, other, 0, 0, equal_nan=True)
    return not isinstance(leaf, int | float | str) or leaf == other


@contextlib.contextmanager
def seeded(seed: int, epoch: int, number: int) -> Iterator[None]:
    """Seeds the global generators of torch (CPU), Python and NumPy within the ``with`` block.
    Afterwards they continue as before.
    """
    with _kept_generators():
        _seed(seed, epoch, number)
        yield


def _seed(seed: int, epoch: int, number: int) -> None:
    mixed = zlib.crc32(f"{seed} {epoch} {number}".encode())  # torch's generator uses 32 bits
    torch.default_generator.manual_seed(mixed)  # not torch.manual_seed, which seeds the GPU too
    random.seed(mixed)
    np.random.seed(mixed)


@contextlib.contextmanager
def _kept_generators() -> Iterator[None]:
    of_torch = torch.get_rng_state()
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _on(device: torch.device, data: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), data)
