"""Batches of decoded images: read by threads, a few batches ahead.

Crops and flips are drawn from (seed, epoch, batch) for the whole global batch: the same on any number of ranks and threads,
and after a resume in the middle of an epoch.
"""

import contextlib
import errno
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from recipes.core.data import crops, decode
from recipes.core.data.crops import CentreCrop, Crop, RandomCrop
from recipes.core.data.decode import Decoder
from recipes.core.data.image_sets import Images
from recipes.core.data.pillow import Unreadable
from recipes.core.data.sampling import GlobalBatches, Shard, generator, share
from recipes.core.errors import InputError, MachineError
from recipes.core.run import watchdog

IGNORE = -100  # the label of an image that cannot be read: cross_entropy's ignore_index
AUGMENTATION = 1  # the stream of `generator`
CHUNK = 16  # images that a thread decodes in one go
AHEAD = 3  # batches that are worked on while one is used
STALL_S = 300.0  # for the images of one chunk
TOLD = 10  # unreadable images that are named; further ones are counted
IN_A_ROW = 10  # unreadable images that end a run where they are read in no order, and
SAMPLES, SHARE = 1000, 0.01  # such a share, of at least so many
MACHINES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # no image's fault


@dataclass(frozen=True)
class LoadedShard(Shard):
    """A shard with its images, all on the rank's device.

    images: uint8 (b, 3, S, S), in channels_last. labels: int64 (b,), IGNORE where the image cannot be read, which is 0 then.
    flip: bool (b,), which of them are to be mirrored.
    """

    images: Tensor
    labels: Tensor
    flip: Tensor


class Loader:
    """`data.GlobalBatches` with the images, cropped at random. Where workers is 0, they are decoded when they are asked for.

    size: pixels of a side, by epoch. min_crop: the least share of an image's area that a crop has. workers: threads; the
    decoders leave the interpreter's lock, so that they run side by side. warn: told what cannot be read.
    """

    def __init__(
        self,
        images: Images,
        batches: GlobalBatches,
        *,
        size: Callable[[int], int],
        decoder: str,
        workers: int,
        device: torch.device,
        warn: Callable[[str], None],
        min_crop: float = 0.08,
    ) -> None:
        assert len(images) == batches.num_samples
        self._images, self._batches, self._size, self._min_crop = images, batches, size, min_crop
        self._decoder, self._workers, self._warn = decode.make_decoder(decoder), workers, warn
        self._to = _Mover(device)
        self._tally = _Tally(images, self._decoder.name, warn, IN_A_ROW)
        self._centre_tallies: dict[int, _Tally] = {}
        self.num_samples = batches.num_samples
        self.global_batch_size = batches.global_batch_size
        self.seed, self.data = batches.seed, batches.data
        self.per_epoch = batches.per_epoch

    @property
    def skipped(self) -> int:
        """How many samples of this rank could not be read so far, each counted once."""
        return sum(len(tally.skipped) for tally in self._tallies())

    @property
    def by_pillow(self) -> int:
        """How many images of this rank Pillow has read, because the decoder does not."""
        return sum(tally.by_pillow for tally in self._tallies())

    def skipped_on_all(self) -> int:
        """How many samples could not be read on any rank, each counted once; every rank has to call it."""
        found: list[list[set[int]]] = [[]] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, [tally.skipped for tally in self._tallies()])
        return sum(len(set().union(*of_one_set)) for of_one_set in zip(*found, strict=True))

    def _tallies(self) -> "list[_Tally]":
        return [self._tally, *self._centre_tallies.values()]

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[LoadedShard]:
        """This rank's shards of ``epoch``, from batch ``first_batch`` on.

        A generator that is closed leaves no thread. Raises InputError where too much cannot be read, MachineError where a
        read does not come back.
        """
        size = self._size(epoch)

        def jobs() -> Iterator[_Job]:
            for shard in self._batches.epoch(epoch, first_batch):
                random = generator(self.seed, epoch, AUGMENTATION, shard.batch)
                uniform = torch.rand(shard.global_size, 2 * crops.TRIES + 3, dtype=torch.float64, generator=random)
                mine = uniform[share(shard.global_size, self._batches.rank, self._batches.world_size)]
                crop = RandomCrop(mine, self._min_crop)
                samples = shard.indices.tolist()
                yield _Job(
                    self._images,
                    self._decoder,
                    crop,
                    samples,
                    self._to.empty(len(samples), size),
                    shard,
                    mine[:, -1] < 0.5,
                )

        with contextlib.closing(_worked(jobs(), self._workers)) as finished:
            for job in finished:
                shard = job.shard
                assert shard is not None and job.flip is not None
                yield LoadedShard(
                    shard.epoch, shard.batch, shard.indices, shard.global_size,
                    self._to(job.images), self._to(self._tally.labels(job)), self._to(job.flip),
                )  # fmt: skip

    def centres(
        self, images: Images, part: slice, size: int, resize: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The middle, ``size`` pixels of a shorter side of ``resize``, of the images of ``part``, in order.

        Images and labels, as `LoadedShard` has them, on the rank's device. Raises as `epoch` does.
        """
        crop, samples = CentreCrop(resize), range(len(images))[part]
        tally = self._centre_tallies.setdefault(id(images), _Tally(images, self._decoder.name, self._warn))

        def jobs() -> Iterator[_Job]:
            for begin in range(0, len(samples), batch_size):
                some = list(samples[begin : begin + batch_size])
                yield _Job(images, self._decoder, crop, some, self._to.empty(len(some), size))

        with contextlib.closing(_worked(jobs(), self._workers)) as finished:
            for job in finished:
                yield self._to(job.images), self._to(tally.labels(job))


@dataclass
class _Job:
    """One rank's part of a batch, to be decoded into ``host``, uint8 (b, S, S, 3). bad, odd: why, by position in the batch."""

    source: Images
    decoder: Decoder
    crop: Crop
    samples: list[int]
    host: Tensor
    shard: Shard | None = None
    flip: Tensor | None = None
    bad: dict[int, str] = field(default_factory=dict)
    odd: dict[int, str] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)  # by chunk, where it is

    @property
    def images(self) -> Tensor:
        return self.host.permute(0, 3, 1, 2)

    def run(self, begin: int, end: int) -> None:
        """Decodes a chunk. What cannot be read is black and noted."""
        out, samples, crop = self.host.numpy(), self.samples, self.crop
        for i in range(begin, end):
            self.at[begin] = i
            try:
                if odd := crop(self.source, self.decoder, samples[i], i, out[i]):
                    self.odd[i] = odd
            except (OSError, Unreadable) as error:
                if isinstance(error, OSError) and error.errno in MACHINES:
                    name = self.source.name(samples[i])
                    raise MachineError(
                        f"{self.source.place!r}: {name!r} cannot be read ({error.strerror}): "
                        "look at this machine's memory and ulimit -n"
                    ) from None
                out[i] = 0
                self.bad[i] = (error.strerror if isinstance(error, OSError) else None) or str(error)


def _worked(jobs: Iterable[_Job], workers: int) -> Generator[_Job, None, None]:
    """The jobs, done, in their order; with workers, some of them ahead."""
    if not workers:
        for job in jobs:
            job.run(0, len(job.samples))
            yield job
        return
    pool = ThreadPoolExecutor(workers, "images")
    waiting: deque[tuple[_Job, dict[int, Future[None]]]] = deque()
    hung = False
    try:
        for job in jobs:
            count = len(job.samples)
            chunk = max(1, min(CHUNK, -(-count // workers)))
            chunks = range(0, count, chunk)
            waiting.append((job, {begin: pool.submit(job.run, begin, min(begin + chunk, count)) for begin in chunks}))
            if len(waiting) > max(AHEAD, 2 * workers // max(1, count)):
                yield _finished(*waiting.popleft())
        while waiting:
            yield _finished(*waiting.popleft())
    except MachineError:
        hung = True
        raise
    finally:
        pool.shutdown(wait=not hung, cancel_futures=True)


def _finished(job: _Job, chunks: dict[int, "Future[None]"]) -> _Job:
    """chunks: by where they begin."""
    for begin, chunk in chunks.items():
        clock = watchdog.RunningClock()
        end = clock.now() + STALL_S
        while not wait([chunk], watchdog.POLL_S).done and clock.now() < end:
            pass
        try:
            chunk.result(0)
        except FutureTimeout:
            name = job.source.name(job.samples[job.at.get(begin, begin)])
            raise MachineError(
                f"{job.source.place!r}: reading has not come back in {STALL_S:g} s, near {name!r}: look at its file system"
            ) from None
    return job


class _Tally:
    """Counts what of a set cannot be read, or not by the decoder, and says so; labels of a batch are made beside it.

    in_a_row: so many that cannot be read end the run; None where neighbours in the set are read one after the other.
    """

    def __init__(self, images: Images, decoder: str, warn: Callable[[str], None], in_a_row: int | None = None) -> None:
        self._images, self._decoder, self._warn, self._most_in_a_row = images, decoder, warn, in_a_row
        self._seen = self._bad = self._in_a_row = 0
        self.skipped: set[int] = set()
        self.by_pillow = 0

    def labels(self, job: _Job) -> Tensor:
        """int64 (b,), IGNORE where a sample could not be read. Raises InputError where that are too many."""
        labels = torch.tensor([self._images.label(sample) for sample in job.samples], dtype=torch.int64)
        for i in job.bad:
            labels[i] = IGNORE
        for i in sorted(job.odd):
            self._tell_odd(job.samples[i], job.odd[i])
        if not job.bad:
            self._in_a_row = 0 if job.samples else self._in_a_row
            self._seen += len(job.samples)
            return labels
        for i, sample in enumerate(job.samples):
            self._seen += 1
            self._in_a_row = self._in_a_row + 1 if i in job.bad else 0
            if i in job.bad:
                self._note(sample, job.bad[i])
        return labels

    def _tell_odd(self, sample: int, odd: str) -> None:
        self.by_pillow += 1
        if self.by_pillow == 1:
            name = self._images.name(sample)
            self._warn(
                f"{name!r} is read by Pillow ({odd}), as all that decoder={self._decoder} cannot read: slower; told once"
            )

    def _note(self, sample: int, reason: str) -> None:
        self._bad += 1
        name = self._images.name(sample)
        if sample not in self.skipped:
            self.skipped.add(sample)
            if len(self.skipped) <= TOLD:
                last = "; further ones are counted only" if len(self.skipped) == TOLD else ""
                self._warn(f"{name!r} cannot be read ({reason}) and is left out{last}")
        too_many = self._seen >= SAMPLES and self._bad > SHARE * self._seen
        if too_many or self._in_a_row == self._most_in_a_row:
            many = f"{self._bad} of {self._seen} images" if too_many else f"{self._in_a_row} images in a row"
            raise InputError(
                f"data_dir: {many} of {self._images.place!r} cannot be read (the last: {name!r}: {reason}): "
                "see that it is there and whole"
            )


class _Mover:
    """Brings a batch's tensors to the device: to a GPU from pinned memory, on a stream of its own, beside what runs there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def empty(self, count: int, size: int) -> Tensor:
        shape = (count, size, size, 3)
        if self._stream is None:
            return torch.from_numpy(np.empty(shape, np.uint8))  # NumPy asks for huge pages: far fewer faults
        # Pinned memory comes from torch's cache, which gives a block out again when its copy has been made.
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def __call__(self, tensor: Tensor) -> Tensor:
        if self._stream is None:
            return tensor.to(self._device)
        with torch.cuda.stream(self._stream):
            moved = (tensor if tensor.is_pinned() else tensor.pin_memory()).to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        moved.record_stream(current)
        return moved
