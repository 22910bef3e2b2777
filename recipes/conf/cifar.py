"""Keys and variants of the recipe cifar."""

from dataclasses import dataclass
from enum import Enum

from recipes.core.config.declare import key
from recipes.core.config.run_keys import Dtype, TrainKeys
from recipes.core.errors import ConfigError

MOST_DECAY = 0.1  # in one step

Arch = Enum("Arch", "resnet18 airbench94 airbench96")


@dataclass(frozen=True)
class Config(TrainKeys):
    prepared = ("cifar10",)
    dataset: str = key("cifar10", "cifar10; fake: random images", values=("cifar10", "fake"))
    arch: Arch = key(
        Arch.resnet18,
        "resnet18 (adapted to images of 32 px), airbench94 (a fifth of the compute of resnet18; "
        "set by variant=fast) or airbench96 (set by variant=accurate)",
    )
    epochs: int = 30
    global_batch_size: int = 512
    lr: float = key(
        0.4,
        "peak learning rate for a global batch of lr_batch_size; airbench94 and airbench96 use it "
        "for the filters only",
    )
    lr_batch_size: int = key(
        512,
        "reference batch size of lr=: lr is scaled in proportion to global_batch_size; "
        "0: not scaled",
        high=2**30,
    )
    warmup: float = key(
        0.2,
        "fraction of the steps in which the learning rate rises (warm-up); it then falls to zero",
        high=1,
    )
    momentum: float = key(
        0.9, "Nesterov momentum; with airbench94 and airbench96, only of the filters", high=1
    )
    weight_decay: float = key(
        5e-4,
        "weight decay; resnet18: norms and biases have none; airbench94, airbench96: only the "
        "head and the biases have it, multiplied by the batch size",
    )
    label_smoothing: float = key(0.1, "label smoothing", high=1)
    ema: float = key(
        0.0,
        "decay of the averaged weights (EMA) per lr_batch_size samples (per step if "
        "lr_batch_size=0); evaluations use these weights; 0: no averaging",
        high=0.999999,
    )
    crop: int = key(
        4,
        "maximum shift of training images in pixels; the border is filled with mirrored pixels",
        high=31,
    )
    flip: bool = key(
        True, "mirror half of the training images, and the other half in the next epoch"
    )
    cutout: int = key(
        0,
        "side in pixels of a square that is erased in each training image; 0: none",
        high=32,
    )
    tta: bool = key(
        True,
        "test-time augmentation: also evaluate the mirror image of each image, and add the outputs",
    )
    tta_shift: int = key(
        0,
        "with tta=true: also evaluate two shifted copies of each image, one up and left, "
        "the other down and right, "
        "by this number of pixels; each copy has half the weight of the image itself; 0: no copies",
        high=8,
    )
    sync_bn: bool = key(False, "batch normalisation over all ranks (GPUs only)")
    dtype: Dtype = Dtype.auto

    def __post_init__(self) -> None:
        if (
            self.arch is not Arch.resnet18
            and self.weight_decay * self.global_batch_size > MOST_DECAY
        ):
            fix = (
                f"is too large, since arch={self.arch.name} multiplies it by the batch size; "
                "give variant=fast, or weight_decay=2e-6"
            )
            raise ConfigError(f"weight_decay={self.weight_decay}: {fix}")


# fast: airbench94_muon (K. Jordan, 2024). accurate: the network of its airbench96, trained in the
# same way.
_AIRBENCH = {
    "global_batch_size": 2000,
    "lr": 0.24,
    "lr_batch_size": 0,
    "warmup": 0.0,
    "momentum": 0.6,
    "weight_decay": 2e-6,
    "label_smoothing": 0.2,
    "tta_shift": 1,
}
VARIANTS = {
    "fast": {"arch": "airbench94", "epochs": 8, "crop": 2, **_AIRBENCH},
    "accurate": {"arch": "airbench96", "epochs": 40, "crop": 4, "cutout": 12, **_AIRBENCH},
}
