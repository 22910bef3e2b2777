"""Classifies images with a trained model.

    python -m recipes.predict runs/finetune/1234 photo.jpg              # a run directory or a checkpoint; images, or folders of them
    python -m recipes.predict runs/finetune/1234 photos --json          # one JSON object per line: file, class, probabilities
    python -m recipes.predict runs/finetune/1234 photos --csv out.csv

In Python: recipes.load("RUN")("photo.jpg"). Exit status: 0 done; 2 if a run or an image cannot be read.
"""

import contextlib
import csv
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.core import errors
from recipes.core.data import classfolder
from recipes.core.errors import ConfigError, InputError

BATCH = 32
SHOWN = 3  # classes in a line of text


def images(words: Sequence[str]) -> Iterator[Path]:
    """The images that are named, and those in the folders that are named, in the order of their names. Raises InputError."""
    for word in words:
        path, count = Path(word), 0
        if not path.is_dir():
            yield path
            continue
        for place, folders, files in os.walk(path):
            folders.sort()
            for name in sorted(files):
                if os.fsencode(name).lower().endswith(classfolder.ENDINGS):
                    count += 1
                    yield Path(place, name)
        if not count:
            raise InputError(f"{word!r}: has no images: give files, or a folder that has some")


def answers(model: Any, paths: Iterator[Path]) -> Iterator[tuple[Path, list[float]]]:
    """Each image with its probabilities, in the order of ``model.classes``. Raises InputError."""
    import torch

    batch: list[Path] = []
    for path in [*paths, None]:
        if path:
            batch.append(path)
        if batch and (len(batch) == BATCH or path is None):
            inputs = torch.stack([model.input(one) for one in batch])
            yield from zip(batch, model.probabilities(inputs).tolist(), strict=True)
            batch = []


def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        print((__doc__ or "").strip())
        return errors.EXIT_DONE if argv else errors.EXIT_CONFIG
    table = argv[argv.index("--csv") + 1] if "--csv" in argv[:-1] else ""
    run, *words = [word for word in argv if word not in ("--json", "--csv") and word != table]
    if not words:
        raise InputError(f"{run}: give the images, or a folder of them, after the run")
    import torch

    from recipes.core.train import trained

    model = trained.load(run, "cuda" if torch.cuda.is_available() else "cpu")
    with contextlib.ExitStack() as stack:
        writer = csv.writer(stack.enter_context(open(table, "w", newline=""))) if table else None
        if writer:
            writer.writerow(["file", "class", *model.classes])
        for path, found in answers(model, images(words)):
            ordered = sorted(zip(model.classes, found, strict=True), key=lambda one: -one[1])
            if writer:
                writer.writerow([path, ordered[0][0], *(f"{value:.6f}" for value in found)])
            elif "--json" in argv:
                rounded = {name: round(value, 6) for name, value in ordered}
                print(json.dumps({"file": str(path), "class": ordered[0][0], "probabilities": rounded}))
            else:
                best = "  ".join(f"{errors.shown(name)} {value:.3f}" for name, value in ordered[:SHOWN])
                print(f"{errors.shown(path, 4096)}  {best}")
    return errors.EXIT_DONE


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may close the pipe: predict | head
    try:
        sys.exit(main(sys.argv[1:]))
    except (ConfigError, InputError) as error:
        print(f"predict: {error}", file=sys.stderr)
        sys.exit(errors.EXIT_CONFIG)
