"""Keys of the recipe finetune."""

from dataclasses import dataclass

from recipes.core.config.declare import NAME, key
from recipes.core.config.run_keys import Dtype, TrainKeys
from recipes.core.errors import ConfigError


@dataclass(frozen=True)
class Config(TrainKeys):
    dataset: str = key(
        "images",
        "images: class folders in data_dir, or in its train/ and val/, "
        "or the files that labels= lists; fake: random images",
        values=("images", "fake"),
    )
    labels: str = key(
        "",
        "CSV to use instead of class folders; columns: file (its path in data_dir), label, "
        "and optionally split (train or val)",
        path=True,
    )
    multi_label: bool = key(False, "an image may have several labels, separated by ; in the CSV")
    val_fraction: float = key(
        0.2,
        "fraction of each class to use for validation if the data has neither val/ nor a column "
        "named split",
        low=0.01,
        high=0.9,
    )
    num_workers: int = key(
        4, "processes per rank that read images; 0: the main process reads them", high=1024
    )
    arch: str = key(
        "resnet50",
        "any classification model of torchvision, or timm/NAME",
        pattern=r"(timm/)?[a-zA-Z][a-zA-Z0-9_.-]{0,127}",
        form="the name of a model, or timm/NAME",
    )
    pretrained: str = key(
        "true",
        "weights to start from: true (the model's default ones), a name such as IMAGENET1K_V2, "
        "or false (random)",
        pattern=NAME,
    )
    weights: str = key(
        "",
        "run directory or checkpoint to start from, in place of pretrained=; "
        "the last layer is replaced if the classes differ",
        path=True,
    )
    train: str = key(
        "all",
        "what to train; all: every weight; head: only the last layer; lora: the last layer, and "
        "a low-rank addition to the matrix of every other linear or convolution layer",
        values=("all", "head", "lora"),
    )
    lora_rank: int = key(8, "rank of the matrices of train=lora", low=1, high=1024)
    head_epochs: float = key(0.0, "epochs at the start in which only the last layer is trained")
    epochs: int = 10
    global_batch_size: int = 64
    lr: float = 3e-4
    layer_decay: float = key(
        0.75,
        "the learning rate of each block is this factor times that of the block after it, so the "
        "first block has the lowest rate; 1: all are equal",
        high=1,
    )
    warmup: float = key(
        0.1,
        "fraction of the steps in which the learning rate rises (warm-up); it then falls to zero",
        high=1,
    )
    weight_decay: float = key(
        0.05,
        "weight decay of weights; norms, biases, position embeddings and the additions of "
        "train=lora have none",
    )
    label_smoothing: float = key(0.1, "label smoothing; ignored with multi_label=true", high=1)
    class_weights: bool = key(
        False, "weight each class in inverse proportion to its number of training images"
    )
    px: int = key(224, "side in pixels of the images", low=32, high=1024)
    val_resize: int = key(
        256,
        "shorter side in pixels of a validation image before the center crop of px",
        low=32,
        high=2048,
    )
    min_crop: float = key(
        0.35, "minimum fraction of the image area in a random crop", low=0.01, high=1
    )
    augment: str = key(
        "RandAugment",
        "a transform of torchvision.transforms.v2, with its default arguments, or none",
        values=("none", "RandAugment", "TrivialAugmentWide", "AutoAugment", "AugMix"),
    )
    erasing: float = key(
        0.0, "probability that a random rectangle of a training image is erased", high=1
    )
    mixup: float = key(0.0, "alpha of mixup (blends pairs of images and labels); 0: off")
    cutmix: float = key(0.0, "alpha of CutMix (pastes a rectangle of another image); 0: off")
    ema: float = key(
        0.0,
        "decay of the averaged weights (EMA) per step; evaluations use them; 0: off",
        high=0.999999,
    )
    dtype: Dtype = Dtype.auto

    def __post_init__(self) -> None:
        if self.val_resize < self.px:
            raise ConfigError(f"val_resize={self.val_resize}: must be at least px={self.px}")
        if self.multi_label and not (self.labels and self.dataset == "images"):
            raise ConfigError("multi_label=true: requires labels=FILE.csv")
        if self.multi_label and not self.best_metric:
            object.__setattr__(self, "best_metric", "val_map")
        if self.mixup and self.cutmix:
            raise ConfigError(
                f"cutmix={self.cutmix}: cannot be used with mixup={self.mixup}; "
                "leave one of them out"
            )
        for name in ("mixup", "cutmix", "class_weights"):
            value = getattr(self, name)
            if self.multi_label and value:
                rule = "cannot be used with multi_label=true; leave one of them out"
                raise ConfigError(f"{name}={value}: {rule}")


# Random images, to try the recipe: there is nothing to learn.
DATASETS = {
    "fake": {
        "arch": "resnet18",
        "pretrained": "false",
        "px": 64,
        "val_resize": 72,
        "epochs": 2,
        "global_batch_size": 16,
    },
}
