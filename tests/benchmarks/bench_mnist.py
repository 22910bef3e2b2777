"""MNIST's input path: against torchvision's dataset in a DataLoader, and as the share that it takes of a training step."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torchvision
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.transforms import ToTensor

from recipes import mnist, prepare
from recipes.conf.mnist import Config
from recipes.core.data import datasets, in_memory
from recipes.core.data.datasets import DataFileError
from recipes.core.data.in_memory import AugmentedImages, ImageSet
from recipes.core.data.sampling import GlobalBatches
from tests.benchmarks.measure import FULL, Figure, Size, interleaved, one_thread, samples_per_s

ROOT = Path(__file__).resolve().parents[2]
BATCH_SIZE = 128  # of the input alone; the step has the recipe's
Batch = tuple[Tensor, Tensor]  # images, labels


def figures(size: Size) -> list[Figure]:
    with mnist_folder(size.images) as (folder, source), one_thread():
        train_set, _ = in_memory.mnist(folder)
        return [input_alone(size, folder, train_set, source), input_and_step(size, train_set, source)]


def input_alone(size: Size, folder: str, train_set: ImageSet, source: str) -> Figure:
    """Whole epochs of batches, shuffled; ours are shifted and normalised as well, theirs are not."""
    epochs = itertools.count()
    shifted = AugmentedImages(train_set.images, mnist.REACH)
    peer_set = torchvision.datasets.MNIST(folder, transform=ToTensor())
    peer = DataLoader(peer_set, batch_size=BATCH_SIZE, shuffle=True, num_workers=0)

    def ours() -> float:
        return samples_per_s(lambda: recipe_batches(train_set, shifted, BATCH_SIZE, next(epochs)))

    values = interleaved(size.rounds, {"ours": ours, "theirs": lambda: samples_per_s(lambda: peer)})
    theirs_is = f"torchvision {torchvision.__version__}'s MNIST in a DataLoader, num_workers=0"
    return Figure(
        "mnist, input", "samples/s", "recipe, batch 128", theirs_is, ">= 12", values["ours"], values["theirs"], source
    )


def input_and_step(size: Size, train_set: ImageSet, source: str) -> Figure:
    """Steps of the recipe on the same batches, made as they are needed or all made before; a value is one step's.

    The two take turns step by step: by longer stretches, a shared machine's other load hides a difference of one per cent.
    What an epoch begins with, the shuffle and the shifts, is spread over its steps. Raises RuntimeError where the two did not
    come to the same losses, and so did not do the same work.
    """
    cfg = Config()
    per_epoch = -(-len(train_set) // cfg.global_batch_size)
    values: dict[str, list[float]] = {"ours": [], "theirs": []}
    shifted = {name: AugmentedImages(train_set.images, mnist.REACH) for name in values}
    for epoch in range(size.rounds + 1):
        batches = {name: recipe_batches(train_set, shifted[name], cfg.global_batch_size, epoch) for name in values}
        batches["theirs"] = iter(list(itertools.islice(batches["theirs"], size.steps + 1)))
        extra_s = dict.fromkeys(values, 0.0)
        start = time.perf_counter()
        next(batches["ours"])
        extra_s["ours"] = (time.perf_counter() - start) / per_epoch
        next(batches["theirs"])

        losses: dict[str, list[float]] = {name: [] for name in values}
        steps = {name: fresh_step(cfg, losses[name]) for name in values}
        for turn in range(size.steps):
            for name in list(values) if turn % 2 else reversed(values):
                start = time.perf_counter()
                samples = steps[name](next(batches[name]))
                seconds = time.perf_counter() - start + extra_s[name]
                if epoch:  # the first round fills caches and does not count
                    values[name].append(samples / seconds)
        if losses["ours"] != losses["theirs"]:
            raise RuntimeError(f"mnist, input and step: other losses, so other work: {losses}")
    return Figure(
        "mnist, input and step",
        "samples/s",
        f"recipe, batch {cfg.global_batch_size}",
        "step alone",
        ">= 0.95",
        values["ours"],
        values["theirs"],
        source,
    )


def fresh_step(cfg: Config, losses: list[float]) -> Callable[[Batch], int]:
    """An optimiser step of the recipe, from its first weights on: gives the batch's size, and adds its loss to ``losses``."""
    torch.manual_seed(cfg.seed)
    net = mnist.Net()
    optimizer = mnist.make_optimizer(cfg, net)

    def step(batch: Batch) -> int:
        images, labels = batch
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(images), labels, label_smoothing=cfg.label_smoothing)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return len(labels)

    return step


def recipe_batches(train_set: ImageSet, shifted: AugmentedImages, batch_size: int, epoch: int) -> Iterator[Batch]:
    """What a step of the recipe, on one rank, is given in ``epoch``."""
    seed = Config().seed
    for shard in GlobalBatches(len(train_set), batch_size, seed, rank=0, world_size=1).epoch(epoch):
        shifted.draw(seed, shard.epoch)
        yield mnist.normalise(shifted.take(shard.indices)), train_set.labels[shard.indices]


@contextlib.contextmanager
def mnist_folder(images: int) -> Iterator[tuple[str, str]]:
    """A temporary data_dir, and what is in it: MNIST where it is at hand and all is wanted, else as many random images."""
    source = os.environ.get("RECIPES_DATA") or str(ROOT.parent / "shared" / "data")
    with tempfile.TemporaryDirectory() as folder:
        if images == FULL.images and has_mnist(source):
            with contextlib.redirect_stdout(io.StringIO()):
                prepare.prepare_mnist(prepare.PrepareKeys(folder, source))
            yield folder, "MNIST"
        else:
            write_random(Path(folder, datasets.MNIST.folder), images)
            yield folder, f"{images:,} random images"


def has_mnist(data_dir: str) -> bool:
    try:
        return bool(datasets.find_mnist(data_dir))
    except DataFileError:
        return False


def write_random(folder: Path, images: int) -> None:
    """Files as MNIST's (idx.read_idx has the format), with random bytes for images and labels from 0 to 9."""
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(0)
    for file in datasets.MNIST.files:
        shape, values = ((images, 28, 28), 256) if "images" in file.name else ((images,), 10)
        content = torch.randint(values, shape, dtype=torch.uint8, generator=random)
        header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
        (folder / file.name).write_bytes(header + content.numpy().tobytes())
