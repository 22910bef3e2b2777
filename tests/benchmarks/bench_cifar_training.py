"""CIFAR-10 trained on two CPU ranks: the recipe against the straightforward way, `plain_cifar`, on
the same files.

The time is that of the training, first step to last. It leaves out the recipe's evaluations after
each epoch, its checkpoint, and the peer's one evaluation. The line printed for each training also
has its whole wall time, with the start of the processes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from recipes.core.data import datasets
from recipes.core.errors import InputError
from tests.benchmarks import inputs
from tests.benchmarks.measure import FULL, TWO_RANKS, Figure, Size, python

LONG = "some 30 minutes on two cores"
# one view of a test image, as the peer
OURS = (
    "variant=fast",
    "epochs=2",
    "global_batch_size=100",
    "tta=false",
    "tta_shift=0",
)
PEER_EPOCHS = 8
SEEDS = 3
TRAIN_IMAGES = 2000
TEST_IMAGES = 1000


@dataclass(frozen=True)
class Trained:
    """wrong: percent of the test images. train_s: first step to last. wall_s: of the whole
    command.
    """

    wrong: float
    train_s: float
    wall_s: float


def figures(size: Size) -> list[Figure]:
    if size.images == FULL.images:
        return compare(TRAIN_IMAGES, TEST_IMAGES, SEEDS, PEER_EPOCHS, OURS, real=True)
    short = ("variant=fast", "epochs=1", "global_batch_size=20")
    return compare(20, 20, 1, 1, short, real=False)


def compare(
    train_images: int,
    test_images: int,
    seeds: int,
    peer_epochs: int,
    keys: tuple[str, ...],
    *,
    real: bool,
) -> list[Figure]:
    train_set, test_set, source = inputs.cifar10(train_images, test_images, real)
    if real and source == inputs.RANDOM:
        fix = (
            f"{datasets.prepare_command('cifar10', 'DIR')}, then RECIPES_DATA=DIR make bench "
            "ONLY=cifar_training"
        )
        raise InputError(f"accuracy requires the real CIFAR-10: {fix}")
    ours: list[Trained] = []
    theirs: list[Trained] = []
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "files")
        data_dir = Path(folder, "data")
        for part, images in (("train", train_set), ("test", test_set)):
            for number, (image, label) in enumerate(
                zip(images.images, images.labels.tolist(), strict=True)
            ):
                # PNG is without loss, so that both sides have the same pixels.
                inputs.write(
                    files / part / datasets.CIFAR10_CLASSES[label] / f"{number:04d}.png", image
                )
        python("-m", "recipes.prepare", "cifar10", f"data_dir={data_dir}", f"source={files}")
        for seed in range(seeds):
            theirs.append(train_plain(files, peer_epochs, seed, len(test_set)))
            ours.append(
                train_ours(
                    data_dir, Path(folder, f"run{seed}"), keys, seed, len(train_set), len(test_set)
                )
            )
    ours_is = f"recipe, {' '.join(keys)}"
    theirs_is = f"plain_cifar, ResNet-18, float32, {peer_epochs} epochs, batch 128"
    right = (
        f"right {statistics.fmean(100 - t.wrong for t in ours):.2f} % against "
        f"{statistics.fmean(100 - t.wrong for t in theirs):.2f} % in the mean"
    )
    note = (
        f"{train_images:,} training and {test_images:,} test images, {source}; two ranks, one "
        f"thread each; {right}"
    )

    def figure(name: str, unit: str, target: str, attribute: str) -> Figure:
        mine, peers = (
            [float(getattr(trained, attribute)) for trained in side] for side in (ours, theirs)
        )
        return Figure(
            f"cifar training, {name}",
            unit,
            ours_is,
            theirs_is,
            target,
            mine,
            peers,
            note,
            ratio_of="means",
        )

    return [
        figure("time", "s", "<= 0.33", "train_s"),
        figure("wrong test images", "%", "<= 1", "wrong"),
    ]


def train_plain(files: Path, epochs: int, seed: int, test_images: int) -> Trained:
    start = time.monotonic()
    out = python(
        *TWO_RANKS, "-m", "tests.benchmarks.plain_cifar", files, epochs, seed, OMP_NUM_THREADS="1"
    )
    wall_s = time.monotonic() - start
    told = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    return trained(
        "plain_cifar", seed, told["samples"], test_images, told["accuracy"], told["train_s"], wall_s
    )


def train_ours(
    data_dir: Path,
    run_dir: Path,
    keys: tuple[str, ...],
    seed: int,
    train_images: int,
    test_images: int,
) -> Trained:
    start = time.monotonic()
    place = (f"data_dir={data_dir}", f"run_dir={run_dir}")
    words = ("recipe=cifar", "launcher=local", "ranks_per_node=2", "device=cpu", *place)
    python("launch.py", *words, *keys, f"seed={seed}", OMP_NUM_THREADS="1")
    wall_s = time.monotonic() - start
    summary = json.loads((run_dir / "summary.json").read_text())
    train_s = summary["epochs"] * train_images / summary["samples_per_second"]
    return trained(
        "recipe", seed, summary["val_samples"], test_images, summary["val_top1"], train_s, wall_s
    )


def trained(
    who: str,
    seed: int,
    evaluated: int,
    test_images: int,
    accuracy: float,
    train_s: float,
    wall_s: float,
) -> Trained:
    """Prints the result of a training. Raises RuntimeError if it has not evaluated each test image
    once.
    """
    if evaluated != test_images:
        raise RuntimeError(f"cifar training: {evaluated} of {test_images} test images evaluated")
    print(
        (
            f"  seed {seed}, {who}: {accuracy:.2%} right, trained for {train_s:.0f} s, "
            f"{wall_s:.0f} s in all"
        ),
        flush=True,
    )
    return Trained(100 - 100 * accuracy, train_s, wall_s)
