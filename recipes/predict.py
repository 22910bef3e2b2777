"""Classifies images with a trained model.

    # a run directory or a checkpoint; images, or folders of them
    python -m recipes.predict runs/finetune/1234 photo.jpg
    # one JSON object per line: file, class, probabilities
    python -m recipes.predict runs/finetune/1234 photos --json
    python -m recipes.predict runs/finetune/1234 photos --csv out.csv

In Python: recipes.load("RUN")("photo.jpg"). Exit status: 0 done; 2 if a run or an image cannot be
read.
"""

import argparse
import csv
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from recipes.core import errors, files
from recipes.core.data import classfolder
from recipes.core.errors import InputError

BATCH = 32
SHOWN = 3  # classes in a line of text
DEVICES = (Path("/dev"), Path("/dev/fd"))  # such as /dev/stdout, which is written and not replaced


def images(word: str) -> list[Path]:
    """The image that is named, or those in the folder that is named, in the order of their names.
    Raises InputError.
    """
    if not Path(word).is_dir():
        return [Path(word)]
    others = list[bytes]()
    names = sorted(classfolder.images(os.fsencode(Path(word)), set(), others))
    classfolder.say_left_out(word, others, partial(print, file=sys.stderr))
    if names:
        return [Path(word, os.fsdecode(name)) for name in names]
    raise InputError(f"{word!r}: has no images: give files, or a folder that has some")


def answers(
    model: Any, paths: Sequence[Path], faults: list[str]
) -> Iterator[tuple[Path, list[float]]]:
    """Each image with its probabilities, in the order of ``model.classes``. faults: gets a line for
    an image that cannot be read.
    """
    import torch

    for begin in range(0, len(paths), BATCH):
        inputs = {}
        for path in paths[begin : begin + BATCH]:
            try:
                inputs[path] = model.input(path)
            except InputError as error:
                faults.append(str(error))
        if inputs:
            probabilities = model.probabilities(torch.stack([*inputs.values()]))
            yield from zip(inputs, probabilities.tolist(), strict=True)


def classify(model: Any, args: argparse.Namespace, faults: list[str], to: IO[bytes]) -> None:
    """Prints the classes of the images, and writes the table of all probabilities as CSV."""
    file = io.TextIOWrapper(to, "utf-8", "backslashreplace", newline="")
    table = csv.writer(file)
    table.writerow(["file", "class", *model.classes])
    paths = [path for word in args.images for path in images(word)]
    for path, values in answers(model, paths, faults):
        ordered = sorted(zip(model.classes, values, strict=True), key=lambda pair: -pair[1])
        best = ordered[0][0]
        table.writerow([path, best, *(f"{value:.6f}" for value in values)])
        if args.json:
            rounded = {name: round(value, 6) for name, value in ordered}
            print(json.dumps({"file": str(path), "class": best, "probabilities": rounded}))
        elif not args.csv:
            first = [f"{errors.shown(name)} {value:.3f}" for name, value in ordered[:SHOWN]]
            print(f"{errors.shown(path, 4096)}  {'  '.join(first)}")
    file.detach()  # it flushes; the caller closes the file


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m recipes.predict", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", help="run directory or checkpoint")
    parser.add_argument("images", nargs="+", help="images, or folders of them")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--csv", metavar="FILE", help="write a CSV table of all probabilities")
    args = parser.parse_intermixed_args(argv)
    import torch

    from recipes.core.train import trained

    model = trained.load(args.run, "cuda" if torch.cuda.is_available() else "cpu")
    print(f"model: {model.path}", file=sys.stderr)
    faults: list[str] = []
    table = Path(args.csv or os.devnull)
    if table.parent in DEVICES:
        with open(table, "wb") as opened:
            classify(model, args, faults, opened)
    else:
        # A rename replaces a link that another user has made in a shared folder.
        files.write_whole(table, lambda file: classify(model, args, faults, file))
    for fault in faults:
        print(f"predict: {fault}", file=sys.stderr)
    return errors.EXIT_CONFIG if faults else errors.EXIT_DONE


if __name__ == "__main__":
    sys.exit(errors.status_of("predict", main))
