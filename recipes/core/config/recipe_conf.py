"""The recipes that exist, and the keys, variants and data sets that recipes/conf/NAME.py declares for each."""

import importlib
from collections.abc import Mapping
from typing import Any, cast

from recipes.core.config import declare
from recipes.core.errors import ConfigError, shown
from recipes.core.files import ROOT


def names() -> list[str]:
    """The names of all recipes: files recipes/NAME.py that have a file recipes/conf/NAME.py."""
    twins = (p.stem for p in (ROOT / "recipes" / "conf").glob("*.py") if (ROOT / "recipes" / p.name).is_file())
    return sorted(name for name in twins if name != "__init__")


Differences = Mapping[str, Mapping[str, Any]]


def load(recipe: str) -> tuple[type, Differences]:
    """The ``Config`` dataclass and the ``VARIANTS`` of recipes/conf/RECIPE.py. Raises ConfigError for an unknown recipe."""
    if recipe not in (known := names()):
        raise ConfigError(f"recipe={shown(recipe)}: must be one of {', '.join(known)}{declare.nearest(recipe, known)}")
    module = importlib.import_module(f"recipes.conf.{recipe}")
    return module.Config, getattr(module, "VARIANTS", {})


def keys_of(recipe: str) -> set[str]:
    """The names of a recipe's own keys. Raises ConfigError for an unknown recipe."""
    return declare.names_of(load(recipe)[0])


def datasets(recipe: str) -> Differences:
    """The keys that recipes/conf/RECIPE.py sets for each of its data sets that has any (``DATASETS``)."""
    return cast(Differences, getattr(importlib.import_module(f"recipes.conf.{recipe}"), "DATASETS", {}))


def by_dataset(recipe: str, dataset: str) -> Mapping[str, Any]:
    """The keys that recipes/conf/RECIPE.py sets for one of its data sets."""
    return datasets(recipe).get(dataset, {})
