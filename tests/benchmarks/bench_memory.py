"""That memory does not grow with the data set: what a packing run takes, and what an image more
costs a loader's process, at N and at 10 N images.

``python -m tests.benchmarks.bench_memory FOLDER "WHICH NAME" …`` measures loaders; WHICH: ours or
theirs.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import tempfile
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch

from recipes.core.data import decode, image_sets
from tests.benchmarks import bench_images, inputs
from tests.benchmarks.measure import Figure, Size, python

TIMES = 10
PX = 128  # of the crops
# A process's peak counts from the memory of the one that it was forked from: this one has next to
# none.
PEAK = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
    "stdout=subprocess.DEVNULL); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
)


def figures(size: Size) -> list[Figure]:
    few = size.small_files
    many = TIMES * size.small_files
    values: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in (few, many):
            files = Path(folder, f"files{count}")
            packed = Path(folder, f"packed{count}")
            inputs.small_jpegs(files, count)
            values[f"packing {count}"] = packing_mb(files, packed)
        loaders = [
            f"{kind}{count}"
            for kind in ("ours packed", "ours files", "theirs files")
            for count in (few, many)
        ]
        values.update(zip(loaders, loaders_mb(loaders, Path(folder)), strict=True))

    def added(which: str) -> list[float]:
        """Bytes an added image; what is measured as less than one counts as one."""
        return [
            max(1.0, (values[f"{which}{many}"] - values[f"{which}{few}"]) * 2**20 / (many - few))
        ]

    def loader(name: str, target: str, which: str) -> Figure:
        grown = (
            f"{values[f'{which}{few}']:.1f} MB grown at {few:,} images, "
            f"{values[f'{which}{many}']:.1f} MB at {many:,}"
        )
        about = f"{grown}; over an epoch, batch {bench_images.BATCH_SIZE}, {PX} px"
        return Figure(
            name,
            "bytes an added image",
            "ours",
            "ImageFolder",
            target,
            added(which),
            added("theirs files"),
            about,
        )

    peaks = [[values[f"packing {count}"]] for count in (many, few)]
    packing = "largest process of a packing run"
    return [
        Figure(
            "memory, packing",
            "MB",
            f"{packing}, {many:,} images",
            f"{few:,} images",
            "<= 1.1",
            *peaks,
        ),
        loader("memory, loader, packed jpeg", "<= 0.1", "ours packed"),
        loader("memory, loader, files", "<= 0.5", "ours files"),
    ]


def packing_mb(source: Path, target: Path) -> float:
    """The peak of the resident size of the largest process of a packing run."""
    keys = [f"source={source}", f"data_dir={target}", "size=32", "workers=1"]
    return (
        float(
            python(
                "-c", PEAK, sys.executable, "-m", "recipes.prepare", "imagenet", *keys
            ).splitlines()[-1]
        )
        / 1024
    )


def loaders_mb(wanted: list[str], folder: Path) -> list[float]:
    """By how much a process's private memory was larger during an epoch than before the data was
    opened, at most.

    wanted: ``WHICH NAME`` each, of a folder in ``folder``.
    """
    return json.loads(python("-m", __name__, folder, *wanted).splitlines()[-1])


def private_mb() -> float:
    """Resident memory of this process that is its own: files that are mapped are left out, which
    the kernel drops at will.
    """
    line = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert line
    return int(line[1]) / 1024


def grow(which: str, folder: Path, answers: SimpleQueue[float]) -> None:
    """An epoch in this process; see `loaders_mb`."""
    before = private_mb()
    if which == "ours":
        epochs = bench_images.OurEpochs(
            image_sets.open_images(folder, "train"), "opencv", workers=1, px=PX
        )
        batches = epochs.next(bench_images.crops)
    else:
        batches = iter(bench_images.peer_loader(folder, PX))
    answers.put(max(private_mb() for _ in batches) - before)


def measured_apart(folder: Path, wanted: list[str]) -> list[float]:
    """Memory of each loader in MB. Each runs in a separate process, a fork that has loaded all
    libraries and nothing else.
    """
    torch.set_num_threads(1)
    decode.make_decoder("opencv")
    context = multiprocessing.get_context("fork")
    grown = []
    for which, name in (words.split() for words in wanted):
        answers: SimpleQueue[float] = context.SimpleQueue()
        process = context.Process(target=grow, args=(which, folder / name, answers))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(1)  # it has said why
        grown.append(answers.get())
    return grown


if __name__ == "__main__":
    print(json.dumps(measured_apart(Path(sys.argv[1]), sys.argv[2:])))
