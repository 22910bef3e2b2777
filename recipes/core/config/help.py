"""``--help``: the keys with their defaults and meanings, in lines of at most 100 columns."""

import dataclasses
import textwrap

from recipes.core.config import declare, recipe_conf
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.run_keys import RunKeys

COLUMNS = 100
INDENT = 28  # where the meanings begin
OF_LAUNCH = """\
python launch.py recipe={0} key=value …         submits a job
python launch.py check recipe={0} key=value …   validates a job without submitting it
python launch.py runs | logs RUN | cancel RUN | resume RUN   manages runs (docs/run-directory.md)
python launch.py new NAME from=RECIPE           copies a recipe
python launch.py script=FILE key=value … -- ARGUMENT …   runs a program of your own
"""


def help_text(recipe: str = "", with_job_keys: bool = False) -> str:
    """The keys of one recipe, or of launch.py if ``recipe`` is empty. with_job_keys: the
    recipe's keys and launch.py's job keys.
    """
    lines = [f"python -m recipes.{recipe} key=value …"]
    groups: list[tuple[str, type]] = [("run keys", RunKeys)]
    if with_job_keys or not recipe:
        lines = OF_LAUNCH.format(recipe or "NAME").splitlines()
        groups.insert(0, ("job keys", JobKeys))
    if recipe:
        config, variants = recipe_conf.load(recipe)
        groups.insert(0, (f"keys of recipe {recipe}", config))
        lines += _differences("variant", variants)
        lines += _differences("dataset", recipe_conf.datasets(recipe))
    else:
        lines.append("python launch.py recipe=NAME --help              shows the keys of a recipe")
        lines.append(f"recipes: {', '.join(recipe_conf.names())}")
    for heading, cls in groups:
        lines += keys_of(heading, cls)
    return "\n".join(lines)


def keys_of(heading: str, cls: type) -> list[str]:
    """An empty line, a heading, and the keys of a dataclass."""
    lines = ["", f"{heading}:"]
    for field in dataclasses.fields(cls):
        word = f"  {field.name}={typed(field.default)}"
        indent = " " * INDENT
        begin = f"{word:<{INDENT}}"
        if len(word) >= INDENT:
            lines.append(word)
            begin = indent
        meaning = begin + field.metadata.get("help", "")
        lines += textwrap.wrap(meaning, COLUMNS, subsequent_indent=indent)
    return lines


def typed(value: object) -> str:
    """A default as one types it."""
    text = "" if value is None else str(declare.plain(value))
    return text.lower() if isinstance(value, bool) else text


def _differences(key: str, each: recipe_conf.Differences) -> list[str]:
    """A line for each variant, or data set, with the keys that it sets."""
    lines = []
    for name, keys in each.items():
        text = " ".join(f"{k}={typed(v)}" for k, v in keys.items()) or "no other keys"
        lines += textwrap.wrap(f"{key}={name} sets {text}", COLUMNS, subsequent_indent="    ")
    return lines
