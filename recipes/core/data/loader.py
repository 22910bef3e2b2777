"""Batches of decoded images: read by threads, a few batches ahead.

Crops and flips are drawn from (seed, epoch, batch) for the whole global batch: the same on any number of ranks and threads,
and after a resume in the middle of an epoch.
"""

import contextlib
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.core.data import decode
from recipes.core.data.decode import Crop, Decoder
from recipes.core.data.image_sets import Images
from recipes.core.data.pillow import Unreadable
from recipes.core.data.sampling import GlobalBatches, OfBatches, Shard, generator, share
from recipes.core.errors import InputError, MachineError
from recipes.core.run import watchdog

IGNORE = -100  # the label of an image that cannot be read: cross_entropy's ignore_index
CHUNK = 16  # images that a thread decodes as one task
AHEAD = 3  # batches that are decoded while one is used
STALL_S = 300.0  # for one chunk
# More unreadable images than this, and more than this fraction of those of the epoch or evaluation so far, end the run.
MOST_SKIPPED, FRACTION = 10, 0.01


@dataclass(frozen=True)
class LoadedShard(Shard):
    """A shard with its images, on the rank's device.

    images: uint8 (b, 3, S, S), in channels_last. labels: int64 (b,). An image that cannot be read is all 0, and its label is IGNORE.
    flip: bool (b,), which images are to be mirrored.
    """

    images: Tensor
    labels: Tensor
    flip: Tensor


class Loader(OfBatches):
    """`GlobalBatches` with their images, randomly cropped: a `Source` for the step loop.

    size: pixels of a side, by epoch. min_crop: smallest fraction of an image's area in a crop. workers: number of threads,
    which run in parallel since decoders release the interpreter's lock; 0 decodes each batch when it is requested.
    warn: gets lines about images that cannot be read.
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
        self.decoder, self._workers, self._warn = decode.make_decoder(decoder), workers, warn
        self._to = _Mover(device)
        # Of each sample that this rank could not read: whether it is for training, and its name.
        self.skipped: set[tuple[bool, str]] = set()

    def skipped_on_all(self, gather: Callable[[bytes], list[bytes]]) -> int:
        """Number of samples that some rank could not read, each counted once. gather: `World.gather`. Collective."""
        found = gather(json.dumps(sorted(self.skipped)).encode())
        return len({(is_training, name) for one in found for is_training, name in json.loads(one)})

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[LoadedShard]:
        """This rank's shards of ``epoch``, from batch ``first_batch`` on.

        Closing the generator ends its threads. Raises InputError if too many images are unreadable, MachineError if a
        read hangs.
        """
        size = self._size(epoch)

        def jobs() -> Iterator[_Job]:
            for shard in self._batches.epoch(epoch, first_batch):
                random = generator(self._batches.seed, epoch, stream=1, batch=shard.batch)
                uniform = torch.rand(shard.global_size, 2 * decode.TRIES + 3, dtype=torch.float64, generator=random)
                mine = uniform[share(shard.global_size, self._batches.rank, self._batches.world_size)]
                crop, flip = decode.random_crop(mine, self._min_crop), mine[:, -1] < 0.5
                samples = shard.indices.tolist()
                yield _Job(self._images, crop, samples, self._to.empty(len(samples), size), (shard, flip))

        with contextlib.closing(self._decoded(jobs())) as decoded:
            for (shard, flip), images, labels in decoded:
                yield LoadedShard(**vars(shard), images=images, labels=labels, flip=self._to(flip))

    def centres(
        self, images: Images, part: slice, size: int, resize: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The centre crops of the images of ``part``, in order: ``size`` pixels, after the shorter side is resized to ``resize``.

        Images and labels, as `LoadedShard` has them, on the rank's device. Raises as `epoch` does.
        """
        crop, samples = decode.centre_crop(resize), range(len(images))[part]
        parts = (samples[begin : begin + batch_size] for begin in range(0, len(samples), batch_size))
        jobs = (_Job(images, crop, some, self._to.empty(len(some), size)) for some in parts)
        with contextlib.closing(self._decoded(jobs)) as decoded:
            for _, pixels, labels in decoded:
                yield pixels, labels

    def _decoded(self, jobs: Iterable["_Job"]) -> Generator[tuple[Any, Tensor, Tensor], None, None]:
        """Yields each job's ``extra``, images and labels, as in `LoadedShard`. Raises InputError if too many samples are unreadable."""
        seen = bad = 0
        with contextlib.closing(_worked(jobs, self.decoder, self._workers)) as finished:
            for job in finished:
                source, samples = job.source, job.samples
                labels = torch.tensor([source.label(sample) for sample in samples], dtype=torch.int64)
                seen, bad = seen + len(samples), bad + len(job.bad)
                for i, reason in sorted(job.bad.items()):
                    labels[i] = IGNORE
                    name = source.name(samples[i])
                    if (known := (source is self._images, name)) not in self.skipped:
                        self.skipped.add(known)
                        self._warn(f"{name!r} cannot be read ({reason}) and is skipped")
                if job.bad and bad > max(MOST_SKIPPED, FRACTION * seen):
                    raise InputError(
                        f"data_dir: {bad} of {seen} images of {source.place!r} cannot be read (such as {name!r}: "
                        f"{reason}): check that the data is complete"
                    )
                yield job.extra, self._to(job.host.permute(0, 3, 1, 2)), self._to(labels)


@dataclass
class _Job:
    """One rank's part of a batch, to be decoded into ``host``, uint8 (b, S, S, 3).

    extra: a value for the caller. bad: why each unreadable image is so, by its position in the batch. chunks: the tasks, by their first
    position. at: the position that each task has reached.
    """

    source: Images
    crop: Crop
    samples: Sequence[int]
    host: Tensor
    extra: Any = None
    bad: dict[int, str] = field(default_factory=dict)
    chunks: dict[int, Future[None]] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)

    def run(self, decoder: Decoder, begin: int, end: int) -> None:
        """Decodes a chunk. Unreadable images become black and are noted in ``bad``."""
        out = self.host.numpy()
        for i in range(begin, end):
            self.at[begin] = i
            try:
                pixels = decode.decode_any(decoder, self.source.read(self.samples[i]))
                self.crop(decoder, pixels, i, out[i])
            except (OSError, Unreadable) as error:
                out[i] = 0
                self.bad[i] = (error.strerror if isinstance(error, OSError) else None) or str(error)


def _worked(jobs: Iterable[_Job], decoder: Decoder, workers: int) -> Generator[_Job, None, None]:
    """Yields the finished jobs in their order. With workers, further jobs are decoded meanwhile."""
    if not workers:
        for job in jobs:
            job.run(decoder, 0, len(job.samples))
            yield job
        return
    pool = ThreadPoolExecutor(workers, "images")
    waiting: deque[_Job] = deque()
    hung = False
    try:
        for job in jobs:
            count = len(job.samples)
            chunk = max(1, min(CHUNK, -(-count // workers)))
            for begin in range(0, count, chunk):
                job.chunks[begin] = pool.submit(job.run, decoder, begin, min(begin + chunk, count))
            waiting.append(job)
            if len(waiting) > max(AHEAD, 2 * workers // max(1, count)):
                yield _finished(waiting.popleft())
        while waiting:
            yield _finished(waiting.popleft())
    except MachineError:
        hung = True
        raise
    finally:
        pool.shutdown(wait=not hung, cancel_futures=True)


def _finished(job: _Job) -> _Job:
    """Waits for a job. Raises MachineError if a read hangs."""
    for begin, chunk in job.chunks.items():
        clock = watchdog.RunningClock()
        end = clock.now() + STALL_S
        while not wait([chunk], watchdog.POLL_S).done:
            if clock.now() > end:
                name = job.source.name(job.samples[job.at.get(begin, begin)])
                raise MachineError(
                    f"{job.source.place!r}: a read near {name!r} did not return for {STALL_S:g} s: "
                    "check the file system"
                )
        chunk.result()
    return job


class _Mover:
    """Copies a batch's tensors to the device: to a GPU from pinned memory, on its own stream, during computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def empty(self, count: int, size: int) -> Tensor:
        shape = (count, size, size, 3)
        if self._stream is None:
            return torch.from_numpy(np.empty(shape, np.uint8))  # NumPy requests huge pages: far fewer page faults
        # torch's cache of pinned memory reuses a block only after its copy has finished.
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
