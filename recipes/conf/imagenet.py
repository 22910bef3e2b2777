"""Keys and variants of the recipe imagenet."""

from dataclasses import dataclass
from enum import Enum

from recipes.core.config.declare import NAME, key
from recipes.core.config.run_keys import Dtype, TrainKeys
from recipes.core.errors import ConfigError

Optimizer = Enum("Optimizer", "sgd lars")
Schedule = Enum("Schedule", "cosine step")
Decoder = Enum("Decoder", "auto torchcodec torchvision opencv")


@dataclass(frozen=True)
class Config(TrainKeys):
    prepared = ("imagenet",)
    dataset: str = key(
        "imagenet",
        "imagenet: train/<wnid>/*.JPEG and val/… in data_dir, or a packed copy; "
        "fake: random images",
        values=("imagenet", "fake"),
    )
    stage_dir: str = key(
        "",
        "folder on the node's local disk, such as '$TMPDIR', to which each node first copies the "
        "packed data",
        path=True,
    )
    decoder: Decoder = key(
        Decoder.auto,
        "auto: torchcodec if it is installed, else torchvision (the pixels of either differ from "
        "Pillow's by at most 1); "
        "opencv: faster, but the pixels differ, since it resizes without antialiasing",
    )
    num_workers: int = key(
        -1,
        "processes per rank that decode images; -1: one fewer than the CPUs of a rank, at most 16; "
        "0: decode in the main process",
        low=-1,
        high=1024,
    )
    arch: str = key(
        "resnet50",
        "any classification model of torchvision",
        pattern=r"[a-z][a-z0-9_]{0,63}",
        form="the name of a model",
    )
    pretrained: str = key(
        "",
        "torchvision's weights to start from: true (the newest), or a name such as IMAGENET1K_V2; "
        "empty: random",
        pattern=NAME,
    )
    weights: str = key(
        "",
        "run directory or checkpoint to start from, in place of pretrained=; "
        "the last layer is replaced if the classes differ",
        path=True,
    )
    epochs: int = 90
    global_batch_size: int = 1024
    optimizer: Optimizer = key(
        Optimizer.sgd,
        "sgd, or lars for global batches of at least 8192 (with lr_batch_size=0 and lr= of about "
        "10)",
    )
    lr: float = key(0.1, "peak learning rate for a global batch of lr_batch_size")
    lr_batch_size: int = key(
        256,
        "reference batch size of lr=: lr is scaled in proportion to global_batch_size; "
        "0: not scaled",
        high=2**30,
    )
    warmup_epochs: float = key(5, "number of epochs in which the learning rate rises (warm-up)")
    schedule: Schedule = key(
        Schedule.cosine,
        "learning rate after the warm-up: cosine (falls to zero) or step (divided by 10 after each "
        "third of the epochs)",
    )
    momentum: float = key(0.9, "momentum", high=1)
    nesterov: bool = key(True, "Nesterov's momentum (sgd)")
    weight_decay: float = key(
        1e-4, "weight decay; norms and biases have none unless decay_norms=true"
    )
    decay_norms: bool = key(False, "apply weight decay to norms and biases too")
    zero_init_residual: bool = key(True, "start residual blocks as the identity (ResNets)")
    label_smoothing: float = key(0.1, "label smoothing", high=1)
    mixup: float = key(0.0, "alpha of mixup (blends pairs of images and labels); 0: off")
    ema: float = key(
        0.0,
        "decay of the averaged weights (EMA) per lr_batch_size samples (per step if "
        "lr_batch_size=0); evaluations use these weights; 0: no averaging",
        high=0.999999,
    )
    px: int = key(224, "side in pixels of the training images", low=32, high=1024)
    small_px: int = key(
        0,
        "side in pixels of the training images at the start; it grows to px; 0: always px",
        high=1024,
    )
    val_px: int = key(224, "side in pixels of the validation images", low=32, high=1024)
    val_resize: int = key(
        256,
        "shorter side in pixels of a validation image before the center crop of val_px",
        low=32,
        high=2048,
    )
    min_crop: float = key(
        0.08, "minimum fraction of the image area in a random crop", low=0.01, high=1
    )
    flip: bool = key(True, "mirror half of the training images")
    sync_bn: bool = key(False, "batch normalisation over all ranks (GPUs only)")
    dtype: Dtype = Dtype.auto
    val_batch_size: int = key(
        256, "validation images per batch and rank", low=1, high=65536, may_change=True
    )

    def __post_init__(self) -> None:
        if self.val_resize < self.val_px:
            raise ConfigError(
                f"val_resize={self.val_resize}: must be at least val_px={self.val_px}"
            )
        if self.weights and self.pretrained:
            raise ConfigError(
                f"weights={self.weights}: cannot be used with pretrained={self.pretrained}; "
                "leave one of them out"
            )
        if self.small_px and not 32 <= self.small_px <= self.px:
            raise ConfigError(f"small_px={self.small_px}: must be from 32 to px={self.px}, or 0")
        if self.stage_dir and self.dataset == "fake":
            raise ConfigError(f"stage_dir={self.stage_dir}: dataset=fake has no files to copy")


# classic: the recipe of torchvision's first weights. fast: few epochs; the images grow. large: for
# 32 GPUs and more, LARS with the rates of You et al., "Large Batch Training of Convolutional
# Networks" (2017). dev: a minute on CPUs, on random images. Not measured on the full ImageNet.
VARIANTS = {
    "classic": {
        "schedule": "step",
        "nesterov": False,
        "decay_norms": True,
        "label_smoothing": 0.0,
        "zero_init_residual": False,
        "warmup_epochs": 0,
        "global_batch_size": 256,
    },
    "fast": {
        "epochs": 16,
        "small_px": 128,
        "px": 192,
        "lr": 0.2,
        "warmup_epochs": 2,
        "ema": 0.999,
        "decoder": "opencv",
    },
    "large": {
        "global_batch_size": 8192,
        "optimizer": "lars",
        "lr": 10.0,
        "lr_batch_size": 0,
        "weight_decay": 5e-5,
    },
    "dev": {
        "dataset": "fake",
        "arch": "resnet18",
        "epochs": 1,
        "max_steps": 20,
        "global_batch_size": 32,
        "px": 64,
        "val_px": 64,
        "val_resize": 64,
        "warmup_epochs": 0,
        "log_every_steps": 5,
    },
}
