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
from recipes.core.errors import ConfigError, InputError, MachineError

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
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                if os.fsencode(name).lower().endswith(classfolder.ENDINGS) and not name.startswith("."):
                    count += 1
                    yield Path(place, name)
        if not count:
            raise InputError(f"{word!r}: has no images: give files, or a folder that has some")


def answers(model: Any, paths: Sequence[Path], faults: list[str]) -> Iterator[tuple[Path, list[float]]]:
    """Each image with its probabilities, in the order of ``model.classes``. faults: gets a line for an image that cannot be read."""
    import torch

    for begin in range(0, len(paths), BATCH):
        inputs = {}
        for path in paths[begin : begin + BATCH]:
            try:
                inputs[path] = model.input(path)
            except InputError as error:
                faults.append(str(error))
        if inputs:
            yield from zip(inputs, model.probabilities(torch.stack([*inputs.values()])).tolist(), strict=True)


def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        print((__doc__ or "").strip())
        return errors.EXIT_DONE if argv else errors.EXIT_CONFIG
    words = [word for word in argv if word != "--json"]
    table = ""
    if "--csv" in words:
        at = words.index("--csv")
        table = next(iter(words[at + 1 :]), "")
        del words[at : at + 2]
        if not table:
            raise InputError("--csv: give the file to write after it")
    if len(words) < 2:
        raise InputError("give a run, and then the images, or folders of them")
    run, *words = words
    import torch

    from recipes.core.train import trained

    model = trained.load(run, "cuda" if torch.cuda.is_available() else "cpu")
    print(f"model: {model.path}", file=sys.stderr)
    faults: list[str] = []
    with contextlib.ExitStack() as stack:
        names = {"newline": "", "encoding": "utf-8", "errors": "backslashreplace"}
        writer = csv.writer(stack.enter_context(open(table, "w", **names))) if table else None  # type: ignore[call-overload]
        if writer:
            writer.writerow(["file", "class", *model.classes])
        for path, found in answers(model, [*images(words)], faults):
            ordered = sorted(zip(model.classes, found, strict=True), key=lambda one: -one[1])
            if writer:
                writer.writerow([path, ordered[0][0], *(f"{value:.6f}" for value in found)])
            elif "--json" in argv:
                rounded = {name: round(value, 6) for name, value in ordered}
                print(json.dumps({"file": str(path), "class": ordered[0][0], "probabilities": rounded}))
            else:
                best = "  ".join(f"{errors.shown(name)} {value:.3f}" for name, value in ordered[:SHOWN])
                print(f"{errors.shown(path, 4096)}  {best}")
    for fault in faults:
        print(f"predict: {fault}", file=sys.stderr)
    return errors.EXIT_CONFIG if faults else errors.EXIT_DONE


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may close the pipe: predict | head
    try:
        sys.exit(main(sys.argv[1:]))
    except (ConfigError, InputError, MachineError, OSError) as error:
        print(f"predict: {error}", file=sys.stderr)
        sys.exit(errors.EXIT_MACHINE if isinstance(error, MachineError) else errors.EXIT_CONFIG)
