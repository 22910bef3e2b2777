"""Keys of the doctor."""

from dataclasses import dataclass

from recipes.core.config.declare import key
from recipes.core.config.run_keys import RecipeKeys


@dataclass(frozen=True)
class Config(RecipeKeys):
    starts_a_run = False
    seconds: float = key(
        120.0, "time limit of the whole examination, in seconds", low=20, high=3600
    )
    bandwidth: bool = key(True, "measure the bandwidths between the nodes")
    data_dir: str = key(
        "",
        "folder of the data, which all nodes must be able to read; default: $RECIPES_DATA",
        path=True,
    )
