"""Classifiers of torchvision and timm by name, with weights that are already on this machine, and
what of them is trained.
"""

import os
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torchvision.models import WeightsEnum

from recipes.core import files
from recipes.core.config import declare
from recipes.core.errors import InputError, MachineError, one_line, require
from recipes.core.train import sharding
from recipes.core.train.optimisation import Layer, heads

TIMM = "timm/"


def classifier(
    arch: str, weights: str, classes: int, zero_init_residual: bool = False, new_head: bool = False
) -> nn.Module:
    """A classifier for ``classes`` classes. It returns only logits: auxiliary heads for training
    are removed.

    arch: a name of torchvision, or ``timm/NAME``. weights: "" for random weights, ``true`` for the
    newest, or a name such as IMAGENET1K_V2. zero_init_residual: initialise each residual block of a
    ResNet as the identity; for random weights only. new_head: replace the last layer if the weights
    are for another number of classes. Raises InputError if the name is unknown, or if the number of
    classes is another one. Raises MachineError if the weights are missing on this machine or
    damaged.
    """
    if arch.startswith(TIMM):
        return _of_timm(arch.removeprefix(TIMM), weights, classes)
    _check_arch(arch)
    if not weights:
        options = {}
        if arch in ("googlenet", "inception_v3"):  # transform_input: as for their weights
            options = {"aux_logits": False, "init_weights": True, "transform_input": True}
        if zero_init_residual and arch.startswith(("resnet", "resnext", "wide_resnet")):
            options["zero_init_residual"] = True
        return torchvision.models.get_model(arch, weights=None, num_classes=classes, **options)
    chosen = find_weights(arch, weights)
    before = len(chosen.meta["categories"])
    if before != classes and not new_head:
        problem = f"the weights are for {before} classes, the data has {classes}"
        raise InputError(f"pretrained={weights}: {problem}; leave pretrained= out")
    path = cached(chosen)
    fault = fault_of(path)
    if fault:
        raise MachineError(
            f"pretrained={weights}: {path} {fault}: on a machine with internet, "
            f"run python -m recipes.prepare weights arch={arch} weights={chosen.name} "
            "(it writes into $TORCH_HOME)"
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    # torchvision's own function would execute the code in the file, or unpack a zip archive.
    vars(chosen)["get_state_dict"] = lambda *args, **kwargs: state
    net = torchvision.models.get_model(arch, weights=chosen)
    del vars(chosen)["get_state_dict"]
    if arch == "inception_v3":  # torchvision keeps the auxiliary head if the weights have one
        net.aux_logits = False
        net.AuxLogits = None
    if before != classes:
        ((name, last),) = heads(net).items()
        net.set_submodule(name, _like(last, classes))
    return net


def _like(layer: Layer, classes: int) -> Layer:
    has_bias = layer.bias is not None
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, classes, has_bias)
    size: Any = layer.kernel_size
    return nn.Conv2d(layer.in_channels, classes, size, bias=has_bias)


def _of_timm(name: str, weights: str, classes: int) -> nn.Module:
    """A model of timm; its weights must be in the cache of the Hugging Face hub ($HF_HOME). Raises
    InputError, MachineError.
    """
    timm = require_timm(name)
    if weights not in ("", "true"):
        fix = "the name of a timm model also selects its weights: give pretrained=true"
        raise InputError(f"pretrained={weights}: {fix}")
    try:
        net: nn.Module = timm.create_model(name, pretrained=bool(weights), num_classes=classes)
    except Exception as error:  # of the hub, of safetensors, of the file system
        raise MachineError(
            f"pretrained=true: {one_line(error, 120)}: on a machine with internet, "
            f"run python -m recipes.prepare weights arch={TIMM}{name} (it writes into $HF_HOME)"
        ) from None
    return net


def require_timm(name: str, offline: bool = True) -> Any:
    """The module timm. Raises InputError if it is not installed, or has no such model. offline:
    download nothing, as in a job.
    """
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported
    timm = require("timm", "timm", f"arch={TIMM}{name}: ")
    if not timm.is_model(name):
        nearest = declare.nearest(TIMM + name, [TIMM + known for known in timm.list_models()])
        raise InputError(f"arch={TIMM}{name}: timm has no such model{nearest}")
    return timm


def mean_and_std(arch: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the pixels (0 to 1; red, green, blue) that the weights of
    ``arch`` require.
    """
    if arch.startswith(TIMM):
        name = arch.removeprefix(TIMM)
        presets = require_timm(name).get_pretrained_cfg(name)
    else:
        presets = find_weights(arch, "DEFAULT").transforms()
    return tuple(presets.mean), tuple(presets.std)


def require_size(net: nn.Module, arch: str, px: int) -> None:
    """Raises InputError if the network, on the CPU, cannot take images of this size."""
    try:
        with torch.inference_mode():
            net.eval()(torch.zeros(1, 3, px, px))
    except Exception as error:
        why = f"does not accept images of this size ({one_line(error, 120)})"
        raise InputError(f"px={px}: arch={arch} {why}") from None
    net.train()


def train_only_head(net: nn.Module) -> None:
    """Freezes all weights but the head's, and the averages of batch normalisation."""
    net.requires_grad_(False)
    for layer in heads(net).values():
        layer.requires_grad_(True)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
            module.train = MethodType(_stays, module)  # type: ignore[method-assign]


def _stays(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def trained(net: nn.Module) -> str:
    """The number of parameters that are trained, as a phrase."""
    every, count = sharding.counts(net)
    return f"{count:,} of {every:,} parameters are trained ({count / every:.1%})"


def add_lora(net: nn.Module, rank: int) -> None:
    """Freezes all weights but the head's. Adds a trained product of two matrices of ``rank``
    columns to each other one (Hu et al., 2021).

    ``parametrize.remove_parametrizations`` would make it one matrix again. A filter of a
    convolution is a row of its matrix.
    """
    of_heads = heads(net)
    train_only_head(net)
    for name, module in list(net.named_modules()):
        if isinstance(module, Layer) and name not in of_heads:
            parametrize.register_parametrization(module, "weight", _LowRank(module.weight, rank))


class _LowRank(nn.Module):
    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows = len(weight)
        columns = weight[0].numel()
        self.down = nn.Parameter(torch.randn(rank, columns) / columns**0.5)
        self.up = nn.Parameter(torch.zeros(rows, rank))  # at first, the sum is the weight itself

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up @ self.down).view_as(weight)


def find_weights(arch: str, name: str) -> WeightsEnum:
    """The weights ``name`` of a model. Raises InputError, which lists the available names."""
    _check_arch(arch)
    weights = torchvision.models.get_model_weights(arch)
    if name == "true":
        name = "DEFAULT"
    if name not in weights.__members__:
        known = ", ".join(member.name for member in weights) or "(none exist)"
        raise InputError(f"arch={arch}: has no weights {name}: give one of {known}, or true")
    return weights[name]


def _check_arch(arch: str) -> None:
    known = torchvision.models.list_models(module=torchvision.models)
    if arch not in known:
        nearest = declare.nearest(arch, known)
        raise InputError(f"arch={arch}: torchvision has no such classifier{nearest}")


def fault_of(path: Path) -> str:
    """Why a file of weights is invalid; "" if it is valid. The end of its name is the start of its
    SHA-256. No code in it is executed.
    """
    if not path.is_file():
        return "does not exist"
    if not files.sha256(path).startswith(path.stem.rpartition("-")[2]):
        return "is damaged (its SHA-256 differs from the one in its name)"
    try:
        # torchvision itself would execute the pickled code
        torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        return f"is not a file of weights ({one_line(error, 80)})"
    return ""


def cached(weights: WeightsEnum) -> Path:
    """Path of the file of these weights in torch's cache on this machine."""
    return Path(torch.hub.get_dir(), "checkpoints", os.path.basename(weights.url))
