"""Classifies images with a trained model, or answers prompts.

    # a run directory or a checkpoint; images, or folders of them
    python -m recipes.predict runs/finetune/1234 photo.jpg
    # one JSON object per line: file, class, probabilities
    python -m recipes.predict runs/finetune/1234 photos --json
    python -m recipes.predict runs/finetune/1234 photos --csv out.csv
    # a run of llm: the answer to a prompt, or to each dialogue (messages) of a JSONL file
    python -m recipes.predict runs/llm/1234 prompt="Who wrote Hamlet?" max_tokens=100
    python -m recipes.predict runs/llm/1234 prompts=questions.jsonl

In Python: recipes.load("RUN")("photo.jpg"). Exit status: 0 done; 2 if a run or an image cannot be
read.
"""

import argparse
import csv
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from recipes.core import files, trust
from recipes.core.config import parser as keys_parser
from recipes.core.config.declare import key
from recipes.core.data import classfolder, documents
from recipes.core.errors import EXIT_CONFIG, EXIT_DONE, InputError, printable, shown, status_of

BATCH = 32
SHOWN = 3  # classes in a line of text
DEVICES = (Path("/dev"), Path("/dev/fd"))  # such as /dev/stdout, which is written and not replaced


@dataclass(frozen=True)
class PromptKeys:
    prompt: str = key("", "a message to answer")
    prompts: str = key("", "JSONL file of dialogues to answer")
    max_tokens: int = key(512, "maximum length of an answer", low=1)
    allow_code: str = key("", "digest of the model's own Python files, if they may run")


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
    for path, values in answers(model, args.images, faults):
        ordered = sorted(zip(model.classes, values, strict=True), key=lambda pair: -pair[1])
        best = ordered[0][0]
        table.writerow([path, best, *(f"{value:.6f}" for value in values)])
        if args.json:
            rounded = {name: round(value, 6) for name, value in ordered}
            print(files.json_line({"file": path, "class": best, "probabilities": rounded}))
        elif not args.csv:
            first = [f"{shown(name)} {value:.3f}" for name, value in ordered[:SHOWN]]
            print(f"{shown(path, 4096)}  {'  '.join(first)}")
    file.detach()  # it flushes; the caller closes the file


def dialogues(path: str) -> Iterator[list[dict[str, str]]]:
    """The messages in each line of a JSONL file. Raises InputError."""
    fix = 'give {"messages": [{"role": "user", "content": "…"}]}'
    with documents.reading(Path(path), fix) as rows:
        for row in rows:
            messages = [
                {name: part[name] for name in ("role", "content")} for part in row["messages"]
            ]
            texts = [text for message in messages for text in message.values()]
            if not texts or not all(isinstance(text, str) for text in texts):
                raise ValueError("has no messages, or content that is not a string")
            if messages[-1]["role"] == "assistant":
                raise ValueError("ends with an answer: leave the assistant's last message out")
            if row.get("tools") or any(part.get("tool_calls") for part in row["messages"]):
                raise ValueError("has tools, which are not supported here")
            yield messages


def reply(run: str, keys: PromptKeys) -> int:
    """Prints the answer to a prompt, or the dialogues of a file with their answers, as JSON."""
    import torch

    from recipes.core.train import causal

    if keys.prompt and keys.prompts:
        raise InputError("prompt= and prompts=: give one of them")
    asked = [[{"role": "user", "content": keys.prompt}]]
    if keys.prompts:
        asked = list(dialogues(keys.prompts))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = causal.load(run, device, keys.allow_code)
    print(f"model: {model.path}", file=sys.stderr)
    for messages in asked:
        text = model.answer(messages, keys.max_tokens)
        answer = {"role": "assistant", "content": text}
        if keys.prompts:
            print(files.json_line({"messages": [*messages, answer]}), flush=True)
        else:
            print("\n".join(map(printable, text.split("\n"))))
    return EXIT_DONE


def main(argv: list[str]) -> int:
    if any(word.startswith(("prompt=", "prompts=")) for word in argv):
        run, *words = argv
        return reply(run, keys_parser.parse_keys(PromptKeys, words))
    parser = argparse.ArgumentParser("python -m recipes.predict", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", help="run directory or checkpoint")
    parser.add_argument("images", nargs="+", help="images, or folders of them")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--csv", metavar="FILE", help="write a CSV table of all probabilities")
    args = parser.parse_intermixed_args(argv)
    args.images = [path for word in args.images for path in images(word)]
    import torch

    from recipes.core.train import trained

    model = trained.load(args.run, "cuda" if torch.cuda.is_available() else "cpu")
    print(f"model: {model.path}", file=sys.stderr)
    faults: list[str] = []
    table = Path(args.csv or os.devnull).expanduser()
    if table.parent in DEVICES:
        with open(table, "wb") as opened:
            classify(model, args, faults, opened)
    else:
        # A rename replaces a link that another user has made in a shared folder.
        folder = trust.resolved(table.parent)
        with files.writing_to(table.parent, "--csv"):
            files.write_whole(folder / table.name, lambda file: classify(model, args, faults, file))
    for fault in faults:
        print(f"predict: {fault}", file=sys.stderr)
    return EXIT_CONFIG if faults else EXIT_DONE


if __name__ == "__main__":
    sys.exit(status_of("predict", main))
