"""Keys of the recipe toy."""

from dataclasses import dataclass

from recipes.core.config.declare import key
from recipes.core.config.run_keys import TrainKeys


@dataclass(frozen=True)
class Config(TrainKeys):
    lr_depends_on_length = False

    dataset: str = key("fake", "fake: random numbers, the same for the same seed", values=("fake",))
    epochs: int = 20
    global_batch_size: int = 128
    lr: float = 0.05
    samples: int = key(2048, "number of training samples", low=1, high=2**24)
    save_every: int = key(
        5, "epochs between checkpoints; the last step is always saved", low=1, may_change=True
    )
