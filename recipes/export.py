"""Writes a trained model for other programs, or the metrics of runs for experiment trackers.

    python -m recipes.export runs/finetune/1234 onnx           # compares the outputs with the model
    python -m recipes.export runs/finetune/1234 safetensors    # the weights
    python -m recipes.export runs/llm/1234 hf                  # a folder for from_pretrained
    python -m recipes.export runs/cifar to=tensorboard         # or to=wandb, mlflow, trackio

To write a model, give a run directory or a checkpoint, the format, and optionally out=FILE
(default: model.onnx or model.safetensors in the run directory; of a checkpoint, in the working
directory). The file's metadata has the classes and the preprocessing. hf is for runs of llm: out=
is a new folder (default: hf in the run directory), and adapter=true writes the low-rank additions
alone, for PEFT. To export metrics, give run directories, or folders of them; a later call adds only
the new rows. Exit status: 0 done; 2 if the run cannot be read, a library is missing, or the outputs
differ; 3 if nothing can be written.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from recipes.core import files, trust
from recipes.core.config import parser
from recipes.core.config.declare import key
from recipes.core.errors import (
    EXIT_CONFIG,
    EXIT_DONE,
    InputError,
    printable,
    require,
    shown,
    status_of,
)
from recipes.core.run import table, trackers

FORMATS = ("onnx", "safetensors", "hf")
TOLERANCE = 1e-5  # of the outputs, relative to the largest


@dataclass(frozen=True)
class FileKeys:
    out: str = key("", "file, or new folder")


@dataclass(frozen=True)
class FolderKeys(FileKeys):
    adapter: bool = key(False, "write the low-rank additions alone")
    allow_code: str = key("", "digest of the model's own Python files, if they may run")


def main(argv: list[str]) -> int:
    is_help = {"-h", "--help"} & set(argv)
    if is_help or len(argv) < 2:
        print((__doc__ or "").strip())
        return EXIT_DONE if is_help else EXIT_CONFIG
    run, kind, *more = argv
    if kind not in FORMATS:
        if any(word.startswith("to=") for word in argv):
            return to_tracker(argv)
        raise InputError(f"{shown(kind)}: must be one of {', '.join(FORMATS)}")
    os.umask(0o077)
    if kind == "hf":
        return to_folder(run, parser.parse_keys(FolderKeys, more))
    keys = parser.parse_keys(FileKeys, more)
    from recipes.core.train import trained  # it imports torch

    is_run = Path(run).is_dir()
    place = Path(run) if is_run else Path(".")
    if not keys.out:
        # before it is read: its owner could exchange it meanwhile
        trust.own_folder(trust.resolved(place), "out", is_listed=is_run)
    model = trained.load(run)
    out = Path(keys.out).expanduser() if keys.out else place / f"model.{kind}"
    folder = trust.resolved(out.parent)
    content, difference = to_onnx(model) if kind == "onnx" else (to_safetensors(model), "")
    with files.writing_to(out.parent, "out"):
        files.write_bytes(folder / out.name, content)
    print(f"{out}: from {model.path}, {len(model.classes)} classes{difference}")
    return EXIT_DONE


def to_folder(run: str, keys: FolderKeys) -> int:
    """Writes a folder for transformers, or for PEFT. It gets its name when it is complete."""
    from recipes.core.train import causal, trained

    place = Path(run)
    if not place.is_dir():
        place = trained.checkpoint_of(place).absolute().parents[1]
    if not keys.out:
        # before it is read: its owner could exchange it meanwhile
        trust.own_folder(trust.resolved(place), "out")
    model = causal.load(run, allow_code=keys.allow_code)
    out = Path(keys.out).expanduser() if keys.out else place / "hf"
    if out.exists():
        raise InputError(f"out={str(out)!r}: exists: give another out=")
    parent = trust.resolved(out.parent)
    with files.writing_to(out.parent, "out"), tempfile.TemporaryDirectory(dir=parent) as part:
        folder = Path(part, out.name)
        trust.own_folder(folder, "out")
        try:
            causal.write(model, folder, keys.adapter)
        except require("safetensors", "llm").SafetensorError as error:  # such as a full disk
            raise OSError(str(error)) from None
        os.rename(folder, parent / out.name)
    print(f"{out}: from {model.path}")
    return EXIT_DONE


def to_tracker(argv: list[str]) -> int:
    """Adds the new rows of runs to the tracker of to=."""
    words = [word for word in argv if word.startswith(("to=", "project="))]
    keys = dict(word.split("=", 1) for word in words)
    to = keys["to"]
    if to not in trackers.TRACKERS:
        raise InputError(f"to={shown(to)}: must be one of {', '.join(trackers.TRACKERS)}")
    export = partial(trackers.export, to=to, project=keys.get("project", ""))
    for path in table.find([Path(word) for word in argv if word not in words]):
        with files.writing_to(path, "run_dir"):
            trust.own_folder(trust.resolved(path))
            with files.locked(path / trackers.LOCK):
                line = table.read_one(path, export)
        print(printable(line), flush=True)
    return EXIT_DONE


def to_onnx(model: Any) -> tuple[bytes, str]:
    """An ONNX file with an input (batch, 3, px, px) and logits as output, and a phrase on how far
    its outputs are from the model's.
    """
    onnx, runtime = (require(name, "export") for name in ("onnx", "onnxruntime"))
    require("onnxscript", "export")
    import torch
    from PIL import Image

    shape = model.input(Image.new("RGB", (64, 64))).shape
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model.model(x)
    program = torch.onnx.export(
        model.model,
        (x,),
        dynamo=True,
        input_names=["images"],
        output_names=["logits"],
        verbose=False,
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
    )
    proto = program.model_proto  # type: ignore[union-attr]
    onnx.helper.set_model_props(proto, _about(model))
    content: bytes = proto.SerializeToString()
    outputs = runtime.InferenceSession(content).run(None, {"images": x.numpy()})[0]
    difference = torch.from_numpy(outputs) - expected
    apart = float(difference.abs().max() / expected.abs().max())
    if not apart <= TOLERANCE:  # also NaN
        fault = f"the outputs differ from the model's by {apart:.1e} (relative)"
        raise InputError(f"onnx: nothing was written: {fault}")
    return content, f"; its outputs are within {apart:.1e} of the model's"


def to_safetensors(model: Any) -> bytes:
    weights = {name: value.contiguous() for name, value in model.model.state_dict().items()}
    return require("safetensors.torch", "export").save(weights, _about(model))


def _about(model: Any) -> dict[str, str]:
    """What another program needs: the names of the classes, and how an image becomes an input."""
    return {"classes": json.dumps(list(model.classes)), "transform": str(model.transform)}


if __name__ == "__main__":
    sys.exit(status_of("export", main))
