"""torchvision's classifiers by name, with weights that are on this machine already."""

import contextlib
import difflib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.models import WeightsEnum

from recipes.core import errors
from recipes.core.errors import InputError, MachineError


def classifier(arch: str, weights: str, classes: int, zero_init_residual: bool = False) -> nn.Module:
    """A classifier of torchvision's for ``classes`` classes, which gives logits alone: heads for training only are left out.

    weights: "" for random ones; ``true`` for the newest; or their name, such as IMAGENET1K_V2. zero_init_residual: of random
    ResNets, whose blocks then begin as the identity. Raises InputError for a name that torchvision does not have, or weights of
    another number of classes; MachineError where the weights are not on this machine.
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
            f"weights={chosen.name} ($TORCH_HOME says where)"
        )
    with _in_place_of(chosen, torch.load(path, map_location="cpu", weights_only=True)):
        net = torchvision.models.get_model(arch, weights=chosen)
    if arch == "inception_v3":  # which keeps the head that its weights have
        net.aux_logits, net.AuxLogits = False, None
    return net


@contextlib.contextmanager
def _in_place_of(weights: WeightsEnum, state: Mapping[str, Any]) -> Iterator[None]:
    """Has torchvision take ``state`` for ``weights``: by itself it runs what a file's pickle says, and unpacks what ends as a zip."""
    vars(weights)["get_state_dict"] = lambda *args, **kwargs: state
    try:
        yield
    finally:
        del vars(weights)["get_state_dict"]


def want_sizes(arch: str, net: nn.Module, sides: Iterable[int]) -> None:
    """Raises InputError where a network, still on the CPU, does not take square images of one of these sides, in pixels."""
    training = net.training
    net.eval()
    for side in sorted(sides):
        try:
            with torch.inference_mode():
                net(torch.zeros(1, 3, side, side))
        except (AssertionError, RuntimeError, ValueError) as error:
            raise InputError(
                f"arch={arch}: takes no images of {side} px ({errors.one_line(error, 120)}): give px, small_px, val_px of its own"
            ) from None
    net.train(training)


def find_weights(arch: str, name: str) -> WeightsEnum:
    """The weights ``name`` of a model. Raises InputError, naming those there are."""
    _check_arch(arch)
    there = torchvision.models.get_model_weights(arch)
    if name in ("true", "DEFAULT"):
        return there.DEFAULT
    if name not in there.__members__:
        raise InputError(
            f"weights {name}: {arch} has {', '.join(found.name for found in there) or 'no weights'}; or give true"
        )
    return there[name]


def _check_arch(arch: str) -> None:
    known = torchvision.models.list_models(module=torchvision.models)
    if arch not in known:
        close = difflib.get_close_matches(arch, known, n=3, cutoff=0.5)
        near = f"; near it: {', '.join(close)}" if close else ""
        raise InputError(f"arch={arch}: torchvision has no such classifier{near}")


def fault_of(path: Path) -> str:
    """What is wrong with a file of weights, "" for nothing: it has the hash that its name ends in, and nothing in it is run."""
    if not path.is_file():
        return "is not there"
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    if not digest.startswith(path.stem.rpartition("-")[2]):
        return "is damaged (its SHA-256 is not the one in its name)"
    try:
        torch.load(path, map_location="cpu", weights_only=True)  # torchvision itself would run what is pickled in it
    except Exception as error:
        return f"is no file of weights ({errors.one_line(error, 80)})"
    return ""


def cached(weights: WeightsEnum) -> Path:
    """Where torch keeps the file of these weights on this machine."""
    return Path(torch.hub.get_dir(), "checkpoints", os.path.basename(weights.url))


def sync_batch_norm(net: nn.Module, on_gpus: bool) -> nn.Module:
    """``net`` with its batch normalisation measured over all ranks. Raises InputError on CPUs, for which torch has none."""
    if not on_gpus:
        raise InputError("sync_bn=true: torch has it for GPUs only; leave it out, or train on GPUs")
    return nn.SyncBatchNorm.convert_sync_batchnorm(net)
