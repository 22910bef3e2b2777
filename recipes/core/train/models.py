"""torchvision's classifiers by name, with weights that are already on this machine."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.models import WeightsEnum

from recipes.core import errors, files
from recipes.core.config import declare
from recipes.core.errors import InputError, MachineError


def classifier(arch: str, weights: str, classes: int, zero_init_residual: bool = False) -> nn.Module:
    """A torchvision classifier for ``classes`` classes. It returns only logits: auxiliary heads for training are removed.

    weights: "" for random weights, ``true`` for the newest, or a name such as IMAGENET1K_V2. zero_init_residual: initialise each
    residual block of a ResNet as the identity; for random weights only. Raises InputError if torchvision does not have the name, or if
    the weights are for another number of classes. Raises MachineError if the weights are missing on this machine or damaged.
    """
    _check_arch(arch)
    if not weights:
        has_heads = arch in ("googlenet", "inception_v3")
        options: dict[str, Any] = {"aux_logits": False, "init_weights": True} if has_heads else {}
        if zero_init_residual and arch.startswith(("resnet", "resnext", "wide_resnet")):
            options["zero_init_residual"] = True
        return torchvision.models.get_model(arch, weights=None, num_classes=classes, **options)
    chosen = find_weights(arch, weights)
    there = len(chosen.meta["categories"])
    if there != classes:
        raise InputError(
            f"pretrained={weights}: the weights are for {there} classes, the data has {classes}; leave pretrained= out"
        )
    path = cached(chosen)
    if fault := fault_of(path):
        raise MachineError(
            f"pretrained={weights}: {path} {fault}: on a machine with internet, python -m recipes.prepare weights arch={arch} "
            f"weights={chosen.name} (it writes into $TORCH_HOME)"
        )
    with _in_place_of(chosen, torch.load(path, map_location="cpu", weights_only=True)):
        net = torchvision.models.get_model(arch, weights=chosen)
    if arch == "inception_v3":  # torchvision keeps the auxiliary head if the weights have one
        net.aux_logits, net.AuxLogits = False, None
    return net


@contextlib.contextmanager
def _in_place_of(weights: WeightsEnum, state: Mapping[str, Any]) -> Iterator[None]:
    """Makes torchvision use ``state`` for ``weights``. Otherwise it would execute the code in the file, or unpack a zip archive."""
    vars(weights)["get_state_dict"] = lambda *args, **kwargs: state
    try:
        yield
    finally:
        del vars(weights)["get_state_dict"]


def find_weights(arch: str, name: str) -> WeightsEnum:
    """The weights ``name`` of a model. Raises InputError, which lists the available names."""
    _check_arch(arch)
    there = torchvision.models.get_model_weights(arch)
    if name in ("true", "DEFAULT"):
        return there.DEFAULT
    if name not in there.__members__:
        raise InputError(
            f"weights={name}: must be one of {', '.join(found.name for found in there) or '(none exist)'}, or true"
        )
    return there[name]


def _check_arch(arch: str) -> None:
    known = torchvision.models.list_models(module=torchvision.models)
    if arch not in known:
        raise InputError(f"arch={arch}: torchvision has no such classifier{declare.nearest(arch, known)}")


def fault_of(path: Path) -> str:
    """Why a file of weights is invalid; "" if it is valid. The end of its name is the start of its SHA-256. No code in it is executed."""
    if not path.is_file():
        return "is not there"
    if not files.sha256(path).startswith(path.stem.rpartition("-")[2]):
        return "is damaged (its SHA-256 is not the one in its name)"
    try:
        torch.load(path, map_location="cpu", weights_only=True)  # torchvision itself would execute the pickled code
    except Exception as error:
        return f"is no file of weights ({errors.one_line(error, 80)})"
    return ""


def cached(weights: WeightsEnum) -> Path:
    """Path of the file of these weights in torch's cache on this machine."""
    return Path(torch.hub.get_dir(), "checkpoints", os.path.basename(weights.url))
