"""Keys and variants of the recipe imagenet."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from recipes.core.config.run_keys import Dtype, TrainKeys
from recipes.core.config.declare import NAME, NAME_FORM, key
from recipes.core.errors import ConfigError


class Optimizer(Enum):
    sgd = "sgd"
    lars = "lars"


class Schedule(Enum):
    cosine = "cosine"
    step = "step"


class Decoder(Enum):
    torchvision = "torchvision"
    opencv = "opencv"


@dataclass(frozen=True)
class Config(TrainKeys):
    prepared: ClassVar[tuple[str, ...]] = ("imagenet",)
    dataset: str = key(
        "imagenet", "imagenet: data_dir's train/<wnid>/*.JPEG and val/…, or a packed copy; fake: random images"
    )
    stage_dir: str = key(
        "", "a node's own disk ('$TMPDIR', say) to which a packed copy is brought first, once a node", path=True
    )
    decoder: Decoder = key(
        Decoder.torchvision,
        "torchvision: the pixels that PIL would give; opencv: faster, other pixels (not antialiased)",
    )
    num_workers: int = key(6, "threads of a rank that decode images; 0: none of their own", low=0, high=1024)
    arch: str = key(
        "resnet50", "any classifier of torchvision's", pattern=r"[a-z][a-z0-9_]{0,63}", form="a model's name"
    )
    pretrained: str = key(
        "", "begin with torchvision's weights: true, or their name, such as IMAGENET1K_V2", pattern=NAME, form=NAME_FORM
    )
    epochs: int = key(90, "passes over the training set", low=0, high=1_000_000)
    global_batch_size: int = key(
        1024, "samples of one optimiser step over all ranks; need not divide", low=1, high=2**30
    )
    optimizer: Optimizer = key(
        Optimizer.sgd, "sgd; lars: for batches of 8192 and more, with lr_batch_size=0 and a rate of its own, 10 or so"
    )
    lr: float = key(0.1, "peak learning rate, for a batch of lr_batch_size", low=0)
    lr_batch_size: int = key(
        256, "the global batch that lr is for; another one scales it in proportion; 0: lr as it is", low=0, high=2**30
    )
    warmup_epochs: float = key(5, "epochs in which the learning rate rises", low=0)
    schedule: Schedule = key(
        Schedule.cosine, "after the warm-up. cosine: to zero; step: a tenth at each third of the epochs"
    )
    momentum: float = key(0.9, "momentum", low=0, high=1)
    nesterov: bool = key(True, "Nesterov's momentum (sgd)")
    weight_decay: float = key(1e-4, "weight decay of the weights", low=0)
    decay_norms: bool = key(False, "norms and biases have the weight decay too")
    zero_init_residual: bool = key(True, "a residual block begins as the identity (ResNets)")
    label_smoothing: float = key(0.1, "share of the target spread over all classes", low=0, high=1)
    mixup: float = key(0.0, "alpha of mixup, which blends pairs of images and their labels; 0: none", low=0)
    ema: float = key(
        0.0, "decay of the averaged weights, a step of lr_batch_size, that are evaluated; 0: none", low=0, high=0.999999
    )
    px: int = key(224, "side of the training images", low=32, high=1024)
    small_px: int = key(
        0, "side of the training images at first, which grows with the epochs to px; 0: px", low=0, high=1024
    )
    val_px: int = key(224, "side of the images that are evaluated", low=32, high=1024)
    val_resize: int = key(256, "shorter side of an image before its middle, of val_px, is cut out", low=32, high=2048)
    min_crop: float = key(0.08, "least share of an image's area that a random crop has", low=0.01, high=1)
    flip: bool = key(True, "half of the training images are mirrored")
    sync_bn: bool = key(False, "batch normalisation over all ranks (GPUs only)")
    dtype: Dtype = key(Dtype.auto, "arithmetic of the model; auto: bfloat16 on a GPU that has it; bfloat16; float32")
    val_batch_size: int = key(256, "images that a rank evaluates at once", low=1, high=65536, may_change=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose_dataset("imagenet", "fake")
        if self.val_resize < self.val_px:
            raise ConfigError(f"val_resize={self.val_resize}: the least is val_px, {self.val_px}")
        if self.small_px and not 32 <= self.small_px <= self.px:
            raise ConfigError(f"small_px={self.small_px}: wants 32 to px, {self.px}; or 0 for px")
        if self.stage_dir and self.dataset == "fake":
            raise ConfigError(f"stage_dir={self.stage_dir}: there is nothing to bring there for dataset=fake")


# Each with what to expect of it.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    # The recipe that torchvision's first weights come from, 76.1 % there; here not measured.
    "classic": {
        "schedule": "step", "nesterov": False, "decay_norms": True, "label_smoothing": 0.0, "zero_init_residual": False,
        "warmup_epochs": 0, "global_batch_size": 256,
    },
    # Few epochs of small images that grow; not measured.
    "fast": {
        "epochs": 16, "small_px": 128, "px": 192, "lr": 0.2, "warmup_epochs": 2, "ema": 0.999, "decoder": "opencv",
    },
    # To see all of it run, in a minute on CPUs, on random images; there is nothing to be learnt from them.
    "dev": {
        "dataset": "fake", "arch": "resnet18", "epochs": 1, "max_steps": 20, "global_batch_size": 32, "px": 64, "val_px": 64,
        "val_resize": 64, "warmup_epochs": 0, "log_every_steps": 5,
    },
}  # fmt: skip
