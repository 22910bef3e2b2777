"""Keys and variants of the recipe cifar."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from recipes.core.config.run_keys import Dtype, TrainKeys
from recipes.core.config.declare import key
from recipes.core.errors import ConfigError


class Arch(Enum):
    resnet18 = "resnet18"
    resnet9 = "resnet9"


@dataclass(frozen=True)
class Config(TrainKeys):
    prepared: ClassVar[tuple[str, ...]] = ("cifar10",)
    dataset: str = key("cifar10", "cifar10; fake: random images")
    arch: Arch = key(Arch.resnet18, "resnet18: shaped for 32 px; resnet9: a quarter of its work")
    epochs: int = key(30, "passes over the training set", low=0, high=1_000_000)
    global_batch_size: int = key(
        512, "samples of one optimiser step over all ranks; need not divide", low=1, high=2**30
    )
    lr: float = key(0.4, "peak learning rate, for a batch of lr_batch_size", low=0)
    lr_batch_size: int = key(
        512, "the global batch that lr is for; another one scales it in proportion; 0: lr as it is", low=0, high=2**30
    )
    warmup: float = key(
        0.2, "share of the steps in which the learning rate rises; then it falls to zero", low=0, high=1
    )
    momentum: float = key(0.9, "Nesterov momentum", low=0, high=1)
    weight_decay: float = key(5e-4, "weight decay of the weights; norms and biases have none", low=0)
    label_smoothing: float = key(0.1, "share of the target spread over all classes", low=0, high=1)
    ema: float = key(
        0.0, "decay of the averaged weights, a step of lr_batch_size, that are evaluated; 0: none", low=0, high=0.999999
    )
    crop: int = key(4, "training images are shifted by up to so many pixels, over a mirrored border", low=0, high=31)
    flip: bool = key(True, "half of the training images are mirrored")
    cutout: int = key(0, "side, in pixels, of a square that is covered in each training image; 0: none", low=0, high=32)
    small_px: int = key(32, "side of the images at first; it grows with the epochs to 32", low=8, high=32)
    tta: bool = key(True, "evaluate each image and its mirror image, and add the two")
    sync_bn: bool = key(False, "batch normalisation over all ranks (GPUs only)")
    dtype: Dtype = key(Dtype.auto, "arithmetic of the model; auto: bfloat16 on a GPU that has it; bfloat16; float32")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose_dataset("cifar10", "fake")
        if self.small_px % 4:
            raise ConfigError(f"small_px={self.small_px}: wants a multiple of 4")


# Each with what to expect of it: not measured on a GPU yet.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    # For the shortest time to 94 %: few epochs of a small network, the first of them of small images.
    "fast": {"arch": "resnet9", "epochs": 14, "cutout": 8, "label_smoothing": 0.2, "ema": 0.99, "small_px": 20},
    # For 95.5 % and more.
    "accurate": {"epochs": 100, "cutout": 12, "ema": 0.999},
}
