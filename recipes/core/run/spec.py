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

from recipes.core.config import declare, key_value, parser, recipe_conf
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
    values = {**vars(settings.run), **vars(settings.config)}
    content = {
        **vars(spec),
        "settings": {
            "recipe": settings.recipe,
            "cluster": settings.job.cluster,
            "values": {
                name: declare.plain(values[name]) for name in values.keys() - settings.typed
            },
            "saved": [*settings.saved],
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
    values = {**content["values"], **typed}
    run = declare.build(RunKeys, values)
    config = declare.build(recipe_class, values)
    return Settings(
        recipe=content["recipe"],
        job=JobKeys(recipe=content["recipe"], cluster=content["cluster"]),
        run=run,
        config=config,
        typed=typed,
        saved=parser.saved_keys(run, config, {*content["saved"]}),
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
