"""Keys of the doctor."""

from dataclasses import dataclass
from typing import ClassVar

from recipes.core.config.declare import key
from recipes.core.config.run_keys import RecipeKeys


@dataclass(frozen=True)
class Config(RecipeKeys):
    starts_a_run: ClassVar[bool] = False  # it examines nodes
    seconds: float = key(120.0, "after which the whole examination is over, whatever hangs", low=20, high=3600)
    json: bool = key(False, "the verdict as JSON on stdout, in place of the table (also --json)")
    bandwidth: bool = key(True, "time an all_reduce and pairs of nodes, where the nodes reach each other")
    data_dir: str = key("", "the folder of the data, which each node is to see; default: $RECIPES_DATA", path=True)
