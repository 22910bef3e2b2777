"""A checked command line of ``key=value`` words: `Settings`. Never imports torch.

Precedence, from the lowest: the dataclass's default, the cluster's profile, the recipe's
differences for the dataset, the keys of the run that is resumed, ``variant=NAME``,
``config=FILE.yaml``, ``key=value``. A variant or a ``config=`` file that is given on a resume
counts as typed.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.core import trust
from recipes.core.config import declare, envfile, key_value, profiles, recipe_conf
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.key_value import Words
from recipes.core.config.recipe_conf import Differences
from recipes.core.config.run_keys import RESUME_WORDS, RecipeKeys, RunKeys
from recipes.core.errors import ConfigError, shown
from recipes.core.variables import Environ


@dataclass(frozen=True)
class Settings:
    """A command line, checked."""

    recipe: str
    job: JobKeys
    run: RunKeys
    config: Any  # the recipe's keys
    # run and recipe keys as given (in a ``config=`` file or as words), as text; paths are absolute
    typed: Words
    # the keys for ``config.yaml``: all of the recipe's, and the run keys that were given
    saved: dict[str, Any]
    of_job: tuple[str, ...] = ()  # names of the job keys that were given
    # the swept keys of each run; the other fields are those of the first run
    sweep: tuple[Words, ...] = ()
    # keys that come from the run that is resumed
    from_run: Words = dataclasses.field(default_factory=dict)
    resumes: Path | None = None  # the directory of that run

    def words_from_run(self) -> str:
        """The keys that come from the run and differ from the recipe's defaults, as words; "" for
        none.
        """
        of_dataset = recipe_conf.datasets(self.recipe).get(self.config.dataset, {})
        usual = {**vars(RunKeys()), **vars(declare.build(type(self.config), of_dataset))}
        now = {**vars(self.run), **vars(self.config)}
        return ", ".join(
            f"{name}={shown(text)}"
            for name, text in self.from_run.items()
            if now[name] != usual[name]
        )


Inherited = Callable[[RunKeys, str, type[RecipeKeys]], tuple[Path | None, Words]]


def settings(words: Words, recipe: str, environ: Environ, inherited: Inherited) -> Settings:
    """Checks ``words``, and finds the recipe, the variant and the profile.

    recipe: "" for words of launch.py, which have ``recipe=`` and job keys. environ: read for
    ``$RECIPES_CLUSTER``, ``$RECIPES_CONTAINER…`` and ``$RECIPES_DATA``. inherited: the directory
    and the keys of the run that is resumed, by the run keys, the recipe and its dataclass. Raises
    ConfigError for the first thing that is invalid, and MachineError if ``run_dir`` is a link of
    another user.
    """
    with_job_keys = not recipe
    recipe = recipe or words.get("recipe", "")
    if not recipe:
        recipes = ", ".join(recipe_conf.names())
        raise ConfigError(f"recipe= is missing: give one of {recipes}, or script=FILE")
    recipe_class, variants = recipe_conf.load(recipe)
    _check_names(words, recipe, recipe_class, with_job_keys)

    cluster = words.get("cluster") or environ.get("RECIPES_CLUSTER", "")
    defaults = _of_profile(cluster, recipe_class, environ)
    given = {**_of_variant(words.get("variant", ""), recipe, variants), **words}
    resumes, of_run = inherited(declare.build(RunKeys, {**defaults, **given}), recipe, recipe_class)
    from_run = {name: value for name, value in of_run.items() if name not in given}
    dataset = str(given.get("dataset", from_run.get("dataset", "")))
    of_dataset = recipe_conf.datasets(recipe).get(dataset, {})
    chosen = absolute({**defaults, **of_dataset, **from_run, **given}, recipe_class)

    job = declare.build(JobKeys, chosen) if with_job_keys else JobKeys()
    run = declare.build(RunKeys, chosen)
    # an invalid env file is refused before a job is submitted
    profiles.env_variables(run.network, cluster)
    config = declare.build(recipe_class, chosen)
    job_names = declare.names_of(JobKeys)
    return Settings(
        recipe=recipe,
        job=dataclasses.replace(job, recipe=recipe, cluster=cluster),
        run=run,
        config=config,
        typed={name: chosen[name] for name in words if name not in job_names},
        saved=saved_keys(run, config, {*given, *from_run}),
        of_job=tuple(name for name in words if name in job_names),
        from_run=from_run,
        resumes=resumes,
    )


def _of_profile(cluster: str, recipe_class: type, environ: Environ) -> dict[str, Any]:
    """The keys that the cluster's profile and the image set."""
    profile = profiles.cluster_profile(cluster)
    defaults = {name: value for name, value in profile.items() if name in profiles.DEFAULTS}
    defaults |= profiles.in_image(environ)
    has_data = "data_dir" in declare.names_of(recipe_class) and not environ.get("RECIPES_DATA")
    if has_data and "data_dir" in profile:
        defaults["data_dir"] = profile["data_dir"]
    return defaults


def _of_variant(variant: str, recipe: str, variants: Differences) -> Mapping[str, Any]:
    """The keys that a variant sets; {} for variant "". Raises ConfigError for an unknown one."""
    if not variant:
        return {}
    if variant in variants:
        return variants[variant]
    rule = f"recipe {recipe} has no variants; leave variant= out"
    if variants:
        rule = declare.choice(variant, variants)
    raise ConfigError(f"variant={shown(variant)}: {rule}")


def _check_names(
    words: Words, recipe: str, recipe_class: type[RecipeKeys], with_job_keys: bool
) -> None:
    """Raises ConfigError for a name that is no key here, and for keys that exclude each other."""
    job_names = declare.names_of(JobKeys)
    known = declare.names_of(RunKeys, recipe_class)
    if with_job_keys:
        known |= job_names
    for name, value in words.items():
        if name in job_names - known:
            raise ConfigError(_misplaced(name, value))
        if name not in known:
            hint = declare.nearest(name, known) or recipe_class.hint
            if with_job_keys and not hint:
                hint = "; an option of sbatch goes into extra=, such as extra='--mem=64G'"
            rule = f"recipe {recipe} has no key '{shown(name)}'{hint}"
            raise ConfigError(f"{shown(name)}={shown(value)}: {rule}")
    for name in ("gpus_per_node", "ranks_per_node"):
        if "gpus" in words and name in words:
            raise ConfigError(
                f"{name}={shown(words[name])}: cannot be used with gpus={shown(words['gpus'])}; "
                "give one of the two"
            )


def saved_keys(run: RunKeys, config: Any, given: set[str]) -> dict[str, Any]:
    """The keys for ``config.yaml``. given: the names of the keys that are given or inherited."""
    run_keys = given & declare.names_of(RunKeys) - declare.declared("not_inherited", RunKeys)
    chosen = dict(vars(config))
    chosen |= {name: value for name, value in vars(run).items() if name in run_keys}
    return {name: declare.plain(value) for name, value in chosen.items()}


def _misplaced(name: str, value: str) -> str:
    """Why a recipe refuses a job key, and what to give instead."""
    fields = {field.name: field for field in dataclasses.fields(JobKeys)}
    options = fields[name].metadata["instead"]
    label = f"{name}={shown(value)}"
    if not options:
        return f"{label}: is a key of launch.py: python launch.py {label} …"
    if options.startswith("--"):
        if " " not in options and "=" not in options:
            options += f"={shown(value)}"
        options = f"give sbatch or srun {options}"
    return f"{label}: is a job key, which only launch.py accepts; {options}, or use launch.py"


def parse_keys(cls: type, argv: Sequence[str]) -> Any:
    """An instance of one dataclass of keys from ``key=value`` words, for a command that is not a
    recipe. Raises ConfigError.
    """
    words = key_value.split(argv)
    known = declare.names_of(cls)
    for name, value in words.items():
        if name not in known:
            raise ConfigError(
                f"{shown(name)}={shown(value)}: the key {declare.choice(name, sorted(known))}"
            )
    return declare.build(cls, words)


def absolute(keys: Mapping[str, Any], recipe_class: type) -> dict[str, Any]:
    """``keys`` with every path made absolute, so that a job finds it from any folder. Raises
    ConfigError, and MachineError if ``run_dir`` is a link of another user.
    """
    paths = declare.declared("path", RunKeys, recipe_class)
    result = dict(keys)
    for name, value in keys.items():
        is_path = (
            name in paths
            or (name == "resume" and value not in RESUME_WORDS)
            or (name == "network" and envfile.is_path(value))
        )
        typed = os.path.expanduser(value) if is_path else ""
        # a variable is resolved on the node, and an unknown home or a line break is refused later
        if typed[:1] in ("", "$", "~") or declare.CONTROL.search(typed):
            continue
        # the current folder was removed: a relative path stays as typed
        with contextlib.suppress(FileNotFoundError):
            # Path.resolve() raises where links lead in a circle
            path = os.path.realpath(typed)
            if name == "run_dir":
                path = str(trust.resolved(Path(typed)))
            if declare.CONTROL.search(path):
                raise ConfigError(
                    f"{name}={shown(value)}: {shown(path)} has characters that cannot be printed; "
                    "rename it"
                )
            result[name] = path
    return result
