"""The recipes that exist, and the keys, variants and data sets that recipes/conf/NAME.py declares
for each.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from recipes.core.config import declare
from recipes.core.config.run_keys import RecipeKeys, RunKeys
from recipes.core.errors import ConfigError, shown
from recipes.core.files import ROOT


def names() -> list[str]:
    """The names of all recipes: files recipes/NAME.py that have a file recipes/conf/NAME.py."""
    folder = ROOT / "recipes"
    files = [path for path in folder.glob("conf/*.py") if (folder / path.name).is_file()]
    return sorted(path.stem for path in files if path.stem != "__init__")


Differences = Mapping[str, Mapping[str, Any]]


def require(recipe: str, label: str) -> None:
    """Raises ConfigError unless the recipe exists. label: names it in the message."""
    if recipe not in names():
        raise ConfigError(
            f"{label}: {declare.choice(recipe, names())} (recipes with a file recipes/conf/NAME.py)"
        )


def load(recipe: str) -> tuple[type[RecipeKeys], Differences]:
    """The ``Config`` dataclass and the ``VARIANTS`` of recipes/conf/RECIPE.py.

    Raises ConfigError for an unknown recipe, and if a variant or a data set in the file sets an
    unknown key.
    """
    require(recipe, f"recipe={shown(recipe)}")
    module = importlib.import_module(f"recipes.conf.{recipe}")
    variants = getattr(module, "VARIANTS", {})
    known = declare.names_of(module.Config, RunKeys)
    for kind, differences in (("variant", variants), ("dataset", datasets(recipe))):
        for name, keys in differences.items():
            for key in keys:
                if key not in known:
                    fault = (
                        f"sets '{shown(key)}', which is neither a key of the recipe nor a run key"
                    )
                    raise ConfigError(
                        f"recipes/conf/{recipe}.py: {kind}={shown(name)}: {fault}"
                        f"{declare.nearest(key, known)}"
                    )
    return module.Config, variants


def datasets(recipe: str) -> Differences:
    """The keys that recipes/conf/RECIPE.py sets for each of its data sets that has any
    (``DATASETS``).
    """
    differences: Differences
    differences = getattr(importlib.import_module(f"recipes.conf.{recipe}"), "DATASETS", {})
    return differences
