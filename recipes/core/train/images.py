"""The image sets of a run, opened on all ranks: copied to the local disk, and listed."""

import os
from collections.abc import Callable
from pathlib import Path

from recipes.core.data import datasets, image_sets
from recipes.core.data.image_sets import Images
from recipes.core.data.packed import stage
from recipes.core.errors import InputError, Stopped
from recipes.core.train.run import Run
from recipes.core.slurm import environment

MOST_WORKERS = 16


def workers(run: Run, num_workers: int) -> int:
    """The number of processes that decode a rank's images. -1: one fewer than the CPUs of the rank,
    from 1 to `MOST_WORKERS`.
    """
    if num_workers >= 0:
        return num_workers
    allowed = len(os.sched_getaffinity(0))
    of_task = environment.cpus_per_task(os.environ)
    share = of_task or allowed // run.world.ranks.local_world_size
    return max(1, min(allowed, share, MOST_WORKERS + 1) - 1)


def open_sets(run: Run, dataset: str, data_dir: str, stage_dir: str) -> tuple[Images, Images]:
    """The training and the validation set. Called by all ranks: if one raises InputError or
    MachineError, all do.
    """
    if dataset == "fake":
        return image_sets.Fake(1_281_167), image_sets.Fake(2000)

    def opened(report: Callable[[object], None]) -> tuple[Path, Images, Images]:
        folder = datasets.find_imagenet(data_dir)
        place = os.path.expanduser(os.path.expandvars(stage_dir))
        if "$" in place:
            raise InputError(f"stage_dir={stage_dir}: a variable in it is not set: give a folder")

        def copied(done: int, total: int) -> None:
            if run.stop:
                raise Stopped(run.stop.reason)
            report(done)
            run.console.progress(f"copied to {place}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

        if place:
            folder = stage.to_local_disk(folder, Path(place), copied, run.warn)
        train, val = (image_sets.open_images(folder, split, report) for split in ("train", "val"))
        return folder, train, val

    if stage_dir:
        run.say(f"copying the packed data to stage_dir={stage_dir}, unless it is already there")
    folder, train, val = run.world.together("images", opened)
    counts = f"{len(train):,} training images and {len(val):,} validation images"
    run.say(f"{counts} in {len(train.classes)} classes: {train.kind}, {folder}")
    return train, val
