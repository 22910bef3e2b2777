"""Keys of the recipe toy."""

from dataclasses import dataclass
from typing import ClassVar

from recipes.core.config.run_keys import TrainKeys
from recipes.core.config.declare import key
from recipes.core.errors import ConfigError


@dataclass(frozen=True)
class Config(TrainKeys):
    lr_depends_on_length: ClassVar[bool] = False

    dataset: str = key("fake", "fake: numbers that are made up, the same from the same seed")
    epochs: int = key(20, "passes over the training set", low=0, high=1_000_000)
    global_batch_size: int = key(
        128, "samples of one optimiser step over all ranks; need not divide", low=1, high=2**30
    )
    lr: float = key(0.05, "learning rate", low=0)
    samples: int = key(2048, "samples of the training set", low=1, high=2**24)
    save_every: int = key(5, "epochs between snapshots; the last step is always one", low=1, may_change=True)
    spawn: int = key(
        0, "so many processes on this machine from plain python, by torch.multiprocessing; 0: none", low=0, high=1024,
        may_change=True, of_launch=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose_dataset("fake")
        if self.accumulate > 1:
            raise ConfigError(f"accumulate={self.accumulate}: the loop of toy takes a batch whole; leave it out")
