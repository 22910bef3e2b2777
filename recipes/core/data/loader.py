"""Batches of decoded images: read by worker processes, a few batches ahead.

Decoding threads would compete with the main thread for the interpreter's lock, and so delay its work for a GPU. On an H100, a step of
ResNet-50 took 3.9 times as long beside 14 threads, and 1.3 times beside 14 processes. The workers are forked. They write into memory that
they share with this process.

Crops and flips are drawn from (seed, epoch, batch) for the whole global batch: the same on any number of ranks and workers,
and after a resume in the middle of an epoch.
"""

import contextlib
import itertools
import json
import math
import mmap
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.synchronize import Semaphore
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recipes.core.data import decode
from recipes.core.data.decode import Crop, Decoder, Pixels
from recipes.core.data.image_sets import Images
from recipes.core.data.pillow import Unreadable
from recipes.core.data.sampling import GlobalBatches, OfBatches, Shard, generator, share
from recipes.core.errors import InputError, MachineError
from recipes.core.place import processes
from recipes.core.run import watchdog

IGNORE = -100  # the label of an image that cannot be read: cross_entropy's ignore_index
CHUNK = 16  # images that a worker decodes as one task
AHEAD = 3  # batches that are decoded while one is used
STALL_S = 300.0  # for one chunk
START_S, STARTS = 15.0, 3  # for the start of the workers, and how often it is tried
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

    size: pixels of a side, by epoch. min_crop: smallest fraction of an image's area in a crop. workers: number of processes;
    0 decodes each batch in this one when it is requested. warn: gets lines about images that cannot be read.
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

        Closing the generator ends its workers. They also end with the thread that took the first shard. Raises InputError if too many
        images are unreadable, MachineError if a read hangs or a worker is killed.
        """
        size = self._size(epoch)

        def jobs() -> Iterator[_Job]:
            for shard in self._batches.epoch(epoch, first_batch):
                random = generator(self._batches.seed, epoch, stream=1, batch=shard.batch)
                uniform = torch.rand(shard.global_size, 2 * decode.TRIES + 3, dtype=torch.float64, generator=random)
                mine = uniform[share(shard.global_size, self._batches.rank, self._batches.world_size)]
                crops = [partial(decode.random_crop, row, self._min_crop) for row in mine.tolist()]
                flip = mine[:, -1] < 0.5
                samples = shard.indices.tolist()
                yield _Job(self._images, crops, samples, size, (shard, flip))

        with contextlib.closing(self._decoded(jobs())) as decoded:
            for (shard, flip), images, labels in decoded:
                yield LoadedShard(**vars(shard), images=images, labels=labels, flip=self._to(flip))

    def centres(
        self, images: Images, part: slice, size: int, resize: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The centre crops of the images of ``part``, in order: ``size`` pixels, after the shorter side is resized to ``resize``.

        Images and labels, as `LoadedShard` has them, on the rank's device. Raises as `epoch` does.
        """
        crop, samples = partial(decode.centre_crop, resize), range(len(images))[part]
        parts = (samples[begin : begin + batch_size] for begin in range(0, len(samples), batch_size))
        jobs = (_Job(images, [crop] * len(some), some, size) for some in parts)
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
                    found = f"{bad} of {seen} images of {source.place!r} cannot be read (such as {name!r}: {reason})"
                    raise InputError(f"data_dir: {found}: check that the data is complete")
                pixels = torch.from_numpy(job.host).permute(0, 3, 1, 2)
                yield job.extra, self._to(pixels, used_again=self._workers > 0), self._to(labels)


@dataclass
class _Job:
    """One rank's part of a batch: its samples of ``source``, and the crop of each.

    extra: a value for the caller. host: its pixels, (b, S, S, 3), when it is finished. bad: why each unreadable image is so, by its
    position in the batch.
    """

    source: Images
    crops: Sequence[Crop]
    samples: Sequence[int]
    size: int
    extra: Any = None
    host: Pixels = field(default_factory=lambda: np.empty(0, np.uint8))
    bad: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Shared:
    """What the workers of one iteration share with this process.

    slots: each holds the pixels of a batch that is being decoded. at: the position that each task has reached, by its slot and first
    position.
    """

    source: Images
    decoder: Decoder
    slots: Pixels
    at: npt.NDArray[np.int64]

    def decode(self, slot: int, begin: int, samples: Sequence[int], crops: Sequence[Crop]) -> dict[int, str]:
        """Decodes a part of a batch, from position ``begin`` on. Unreadable images become black; returns why, by position."""
        bad = {}
        for i, (sample, crop) in enumerate(zip(samples, crops, strict=True), begin):
            self.at[slot, begin], out = i, self.slots[slot, i]
            try:
                crop(self.decoder, decode.decode_any(self.decoder, self.source.read(sample)), out)
            except (OSError, Unreadable) as error:
                out[...] = 0
                bad[i] = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return bad


_shared: _Shared  # of a worker process


def _become_worker(shared: _Shared, stay: Callable[[], None], begun: Semaphore) -> None:
    global _shared
    stay()
    _shared = shared
    torch.set_num_threads(1)
    begun.release()


def _started(shared: _Shared, workers: int) -> ProcessPoolExecutor:
    """Workers that have all begun. Raises MachineError.

    A process that is forked while another thread holds a lock of the C library can hang at once (seen once in about 200 pools, with glibc
    2.36). The workers are then killed, and forked again.
    """
    context = multiprocessing.get_context("fork")
    for _ in range(STARTS):
        others, begun = multiprocessing.active_children(), context.Semaphore(0)
        pool = ProcessPoolExecutor(workers, context, _become_worker, (shared, processes.die_with(os.getpid()), begun))
        pool.submit(os.getpid)  # forks all workers
        end = time.monotonic() + START_S
        if all(begun.acquire(timeout=max(0.0, end - time.monotonic())) for _ in range(workers)):
            return pool
        for process in set(multiprocessing.active_children()).difference(others):
            process.kill()
        pool.shutdown()
    raise MachineError("the processes that decode images did not start: start the run again, or give num_workers=0")


def _decode(*task: Any) -> dict[int, str]:
    return _shared.decode(*task)


def _memory(*shape: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Memory that this process shares with those that it forks. It takes no space in /dev/shm, which is small in containers."""
    size = math.prod(shape)
    return np.frombuffer(mmap.mmap(-1, max(1, size * np.dtype(dtype).itemsize)), dtype, size).reshape(shape)


def _worked(jobs: Iterable[_Job], decoder: Decoder, workers: int) -> Generator[_Job, None, None]:
    """Yields the finished jobs in their order. With workers, further jobs are decoded meanwhile; ``host`` is valid until the next job."""
    jobs = iter(jobs)
    if not workers:
        for job in jobs:
            shape = (len(job.samples), job.size, job.size, 3)
            job.host = np.empty(shape, np.uint8)  # NumPy requests huge pages: far fewer page faults
            shared = _Shared(job.source, decoder, job.host[None], np.zeros((1, 1), np.int64))
            job.bad = shared.decode(0, 0, job.samples, job.crops)
            yield job
        return
    if (first := next(jobs, None)) is None:
        return
    count = len(first.samples)  # no other job has more
    ahead = max(AHEAD, 2 * workers // max(1, count))
    slots = _memory(ahead + 1, count, first.size, first.size, 3, dtype=np.uint8)
    shared = _Shared(first.source, decoder, slots, _memory(ahead + 1, max(1, count), dtype=np.int64))
    chunk = max(1, min(CHUNK, -(-count // workers)))
    pool = _started(shared, workers)
    waiting, hung = deque[tuple[_Job, int, dict[int, Future[dict[int, str]]]]](), False
    try:
        for number, job in enumerate(itertools.chain([first], jobs)):
            slot, tasks = number % len(slots), {}
            for begin in range(0, len(job.samples), chunk):
                part, shared.at[slot, begin] = slice(begin, begin + chunk), begin
                tasks[begin] = pool.submit(_decode, slot, begin, job.samples[part], job.crops[part])
            waiting.append((job, slot, tasks))
            if len(waiting) > ahead:
                yield _finished(shared, *waiting.popleft())
        while waiting:
            yield _finished(shared, *waiting.popleft())
    except MachineError:
        hung = True
        raise
    except BrokenProcessPool:
        fix = "if memory was short, request more with --mem, or lower num_workers=; if it crashed, the rank's log says where"
        raise MachineError(f"a process that decodes images was killed: {fix}") from None
    finally:
        pool.shutdown(wait=not hung, cancel_futures=True)


def _finished(shared: _Shared, job: _Job, slot: int, tasks: dict[int, Future[dict[int, str]]]) -> _Job:
    """Waits for a job. Raises MachineError if a read hangs."""
    for begin, task in tasks.items():
        clock = watchdog.RunningClock()
        end = clock.now() + STALL_S
        while not wait([task], watchdog.POLL_S).done:
            if clock.now() > end:
                name = job.source.name(job.samples[shared.at[slot, begin]])
                place = f"{job.source.place!r}: a read near {name!r}"
                raise MachineError(f"{place} did not return for {STALL_S:g} s: check the file system")
        job.bad |= task.result()
    job.host = shared.slots[slot, : len(job.samples)]
    return job


class _Mover:
    """Copies a batch's tensors to the device: to a GPU through pinned memory, on its own stream, during computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, tensor: Tensor, used_again: bool = False) -> Tensor:
        """tensor: in memory that is not pinned. used_again: whether other content will be written into it."""
        if self._stream is None:
            return tensor.to(self._device, copy=used_again)
        with torch.cuda.stream(self._stream):
            moved = tensor.pin_memory().to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        moved.record_stream(current)
        return moved
