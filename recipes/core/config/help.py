"""``--help``: the keys with their defaults and meanings, in lines of at most 100 columns."""

import dataclasses
import textwrap
from collections.abc import Mapping
from typing import Any

from recipes.core.config import declare, recipe_conf
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.run_keys import RunKeys

COLUMNS = 100
INDENT = 28  # where the meanings begin


def help_text(recipe: str = "", with_job_keys: bool = False) -> str:
    """The keys of one recipe, or of launch.py where ``recipe`` is empty. with_job_keys: the
    recipe's keys and launch.py's job keys.
    """
    lines: list[str] = []
    groups: list[tuple[str, type]] = [("run keys", RunKeys)]
    if with_job_keys or not recipe:
        name = recipe or "NAME"
        lines.append(f"python launch.py recipe={name} key=value …         submits a job")
        lines.append(
            f"python launch.py check recipe={name} key=value …   validates a job without submitting it"
        )
        lines.append(
            "python launch.py runs | logs RUN | cancel RUN | resume RUN   manages runs (docs/run-directory.md)"
        )
        lines.append("python launch.py new NAME from=RECIPE           copies a recipe")
        lines.append(
            "python launch.py script=FILE key=value … -- ARGUMENT …   runs a program of your own"
        )
        groups.insert(0, ("job keys", JobKeys))
    else:
        lines.append(f"python -m recipes.{recipe} key=value …")
    if recipe:
        config, variants = recipe_conf.load(recipe)
        groups.insert(0, (f"keys of recipe {recipe}", config))
        datasets = recipe_conf.datasets(recipe)
        lines += _differences("variant", variants) + _differences("dataset", datasets)
    else:
        lines.append(
            f"python launch.py recipe={name} --help              shows the keys of a recipe"
        )
        lines.append(f"recipes: {', '.join(recipe_conf.names())}")
    for heading, cls in groups:
        lines += ["", f"{heading}:"]
        for field in dataclasses.fields(cls):
            word = f"  {field.name}={typed(field.default)}"
            meaning = textwrap.wrap(field.metadata.get("help", ""), COLUMNS - INDENT)
            if len(word) >= INDENT:
                lines.append(word)
            else:
                meaning[0] = f"{word:<{INDENT}}{meaning[0]}"
            lines += [part if part.startswith("  ") else " " * INDENT + part for part in meaning]
    return "\n".join(lines)


def typed(value: object) -> str:
    """A default as one types it."""
    value = declare.plain(value)
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _differences(key: str, each: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each variant, or data set, with the keys that it sets."""
    lines = []
    for name, keys in each.items():
        text = " ".join(f"{k}={typed(v)}" for k, v in keys.items()) or "no other keys"
        lines += textwrap.wrap(f"{key}={name} sets {text}", COLUMNS, subsequent_indent="    ")
    return lines
