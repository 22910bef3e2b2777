"""What a job runs, resolved once: `begin` of its batch script makes a `Spec` of the arguments, and
the ranks and the end of the job read it from their environment.

So a site's profile, an env file or the run that is edited meanwhile does not change a job that has
begun, and no rank reads these files. The environment reaches every node without a shared folder.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.core.config import declare, recipe_conf
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.parser import Settings
from recipes.core.config.run_keys import RunKeys
from recipes.core.errors import ConfigError

VARIABLE = "RECIPES_SPEC"
MOST_BYTES = 100_000  # Linux allows 128 KiB in a variable


@dataclass(frozen=True)
class Spec:
    """A job's settings and what follows from them.

    settings: their `typed` keys have absolute paths. words: the arguments of its ranks. variables: those of the env files. step: options of srun for
    the container. inside: the command before a rank's arguments; () for the job's own Python.
    by_clock: whether the ranks stop by the clock, and not by the script's signal.
    """

    settings: Settings
    words: tuple[str, ...]
    variables: Mapping[str, str]
    step: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    by_clock: bool = False


def to_text(spec: Spec) -> str:
    """The value of `VARIABLE`. Raises ConfigError if it would be too long."""
    settings = spec.settings
    content = {
        **vars(spec),
        "settings": {
            "recipe": settings.recipe,
            "cluster": settings.job.cluster,
            "run": _plain(settings.run, settings.typed),
            "config": _plain(settings.config, settings.typed),
            "typed": settings.typed,
            "saved": settings.saved,
            "from_run": settings.from_run,
            "resumes": settings.resumes and str(settings.resumes.absolute()),
        },
    }
    text = json.dumps(content)
    if len(text) > MOST_BYTES:
        raise ConfigError(
            f"the arguments have {sum(map(len, spec.words))} characters, which is too long for a "
            "job: put them into a file, such as config=FILE.yaml"
        )
    return text


def _plain(keys: Any, typed: Mapping[str, str]) -> dict[str, Any]:
    """The values of ``keys``, with the paths of ``typed``, which are absolute."""
    return {name: typed.get(name, declare.plain(value)) for name, value in vars(keys).items()}


def of_job(environ: Mapping[str, str]) -> Spec | None:
    """The spec of this job; None outside a job whose script has called `begin`."""
    text = environ.get(VARIABLE)
    if not text:
        return None
    content = json.loads(text)
    saved = content.pop("settings")
    recipe_class, _ = recipe_conf.load(saved["recipe"])
    settings = Settings(
        recipe=saved["recipe"],
        job=JobKeys(recipe=saved["recipe"], cluster=saved["cluster"]),
        run=declare.build(RunKeys, saved["run"]),
        config=declare.build(recipe_class, saved["config"]),
        typed=saved["typed"],
        saved=saved["saved"],
        from_run=saved["from_run"],
        resumes=Path(saved["resumes"]) if saved["resumes"] else None,
    )
    words, step, inside = (tuple(content[name]) for name in ("words", "step", "inside"))
    return Spec(settings, words, content["variables"], step, inside, content["by_clock"])


def of_ranks(environ: Mapping[str, str], recipe: str, words: Sequence[str]) -> Spec | None:
    """The spec of this job if these ranks are started with its arguments; None if a step of the
    script has others.
    """
    spec = of_job(environ)
    is_same = spec and spec.settings.recipe == recipe and spec.words == tuple(words)
    return spec if is_same else None
