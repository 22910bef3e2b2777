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

from recipes.core.config import declare, key_value, recipe_conf
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.parser import Settings
from recipes.core.config.run_keys import RunKeys
from recipes.core.errors import ConfigError

VARIABLE = "RECIPES_SPEC"
MOST_BYTES = 130_000  # Linux allows 128 KiB in a variable


@dataclass(frozen=True)
class Spec:
    """A job's settings and what follows from them.

    words: the arguments of its ranks, which are the `typed` keys of the settings, with absolute
    paths. variables: those of the env files. step: options of srun for
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
    """The value of `VARIABLE`. Raises ConfigError if it would be too long.

    A typed key is in it once, in the words: the arguments of a program can be long.
    """
    settings = spec.settings
    typed = settings.typed.keys()

    def others(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: declare.plain(values[name]) for name in values.keys() - typed}

    content = {
        **vars(spec),
        "settings": {
            "recipe": settings.recipe,
            "cluster": settings.job.cluster,
            "run": others(vars(settings.run)),
            "config": others(vars(settings.config)),
            "saved": others(settings.saved),
            "typed_and_saved": sorted(typed & settings.saved.keys()),
            "from_run": settings.from_run,
            "resumes": settings.resumes and str(settings.resumes.absolute()),
        },
    }
    text = json.dumps(content, ensure_ascii=False)
    if len(text.encode("utf-8", "surrogateescape")) > MOST_BYTES:
        raise ConfigError(
            f"the arguments have {sum(map(len, spec.words))} characters, which is too long for a "
            "job: put them into a file"
        )
    return text


def of_job(environ: Mapping[str, str]) -> Spec | None:
    """The spec of this job; None outside a job whose script has called `begin`."""
    text = environ.get(VARIABLE)
    if not text:
        return None
    content = json.loads(text)
    words, step, inside = (tuple(content[name]) for name in ("words", "step", "inside"))
    settings = _settings(content["settings"], key_value.split(words))
    return Spec(settings, words, content["variables"], step, inside, content["by_clock"])


def _settings(content: Mapping[str, Any], typed: dict[str, str]) -> Settings:
    recipe_class, _ = recipe_conf.load(content["recipe"])
    run = declare.build(RunKeys, {**content["run"], **typed})
    config = declare.build(recipe_class, {**content["config"], **typed})
    values = {**vars(run), **vars(config)}
    typed_and_saved = {name: declare.plain(values[name]) for name in content["typed_and_saved"]}
    return Settings(
        recipe=content["recipe"],
        job=JobKeys(recipe=content["recipe"], cluster=content["cluster"]),
        run=run,
        config=config,
        typed=typed,
        saved={**content["saved"], **typed_and_saved},
        from_run=content["from_run"],
        resumes=Path(content["resumes"]) if content["resumes"] else None,
    )


def of_ranks(environ: Mapping[str, str], recipe: str, words: Sequence[str]) -> Spec | None:
    """The spec of this job if these ranks are started with its arguments; None if a step of the
    script has others.
    """
    spec = of_job(environ)
    is_same = spec and spec.settings.recipe == recipe and spec.words == tuple(words)
    return spec if is_same else None
