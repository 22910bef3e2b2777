"""Keys and variants of the recipe mnist."""

from dataclasses import dataclass
from enum import Enum

from recipes.core.config.declare import key
from recipes.core.config.run_keys import TrainKeys

Optimizer = Enum("Optimizer", "sgd adamw")
Schedule = Enum("Schedule", "cosine constant")


@dataclass(frozen=True)
class Config(TrainKeys):
    prepared = ("mnist",)
    dataset: str = key(
        "mnist",
        "mnist; digits: scikit-learn's 1,797 digits, no download; fake: random images",
        values=("mnist", "digits", "fake"),
    )
    epochs: int = 4
    global_batch_size: int = 256
    lr: float = 0.004
    optimizer: Optimizer = key(Optimizer.adamw, "adamw, or sgd with Nesterov momentum 0.9")
    weight_decay: float = key(0.05, "weight decay")
    schedule: Schedule = key(
        Schedule.cosine, "learning rate after the warm-up: cosine (falls to zero) or constant"
    )
    warmup: float = key(
        0.06, "fraction of the steps in which the learning rate rises (warm-up)", high=1
    )
    label_smoothing: float = key(0.1, "label smoothing", high=1)
    augment: bool = key(True, "shift each training image by up to one pixel")

    @property
    def lr_depends_on_length(self) -> bool:  # type: ignore[override]
        return self.schedule is Schedule.cosine or self.warmup > 0


# An epoch of 1,438 images has few steps, so the batches are smaller. 97.9 % in 4 epochs (5 seeds,
# 97.5 to 98.6 %).
DATASETS = {"digits": {"global_batch_size": 64, "lr": 0.003}}

# The comment of each variant is its test accuracy on MNIST after 4 epochs.
VARIANTS = {
    "sgd": {
        "optimizer": "sgd",
        "lr": 0.1,
        "weight_decay": 5e-4,
    },  # 99.41 % (6 seeds, 99.38 to 99.43 %)
}
