"""Keys of the recipe broken; the fault tests put it beside the real ones as
recipes/conf/broken.py.
"""

from dataclasses import dataclass

from recipes.core.config.declare import key
from recipes.core.config.run_keys import TrainKeys


@dataclass(frozen=True)
class Config(TrainKeys):
    dataset: str = key("fake", "fake: random numbers", values=("fake",))
    epochs: int = key(1000, "passes over the training set", low=0)
    global_batch_size: int = key(32, "samples of one optimiser step over all ranks", low=1)
    lr: float = key(0.01, "learning rate", low=0)
    log_every_steps: int = key(1, "steps between rows of metrics.jsonl", low=1)
    samples: int = key(320, "samples of the training set", low=1)
    width: int = key(
        16, "units of the hidden layer; a checkpoint has some 270 bytes of each", low=1
    )
    evaluate_s: float = key(
        0.0,
        "seconds that an evaluation takes at least, a hundredth before each of its answers",
        low=0,
    )
    workers: str = key(
        "",
        (
            "how a DataLoader starts its two workers: fork, spawn or forkserver; without: no "
            "DataLoader"
        ),
    )
    pace_s: float = key(0.01, "seconds that a step takes at least", low=0)
