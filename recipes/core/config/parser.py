"""A command line of ``key=value`` words, checked: `Settings`. Never torch.

Precedence: the dataclass's default < the cluster's profile < the recipe's differences for the dataset < the keys of the run that is
resumed < ``variant=NAME`` < ``config=FILE.yaml`` < ``key=value``. OmegaConf converts the values, and ``__post_init__`` of each
dataclass checks them. A variant or a ``config=`` file that is given on a resume counts as typed.
"""

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

try:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
except ModuleNotFoundError as missing:
    fix = "activate your environment (. .venv/bin/activate), or type: make install"
    print(f"{sys.executable} has no module '{missing.name}': {fix}", file=sys.stderr)
    raise SystemExit(3) from None

from recipes.core.config import declare, envfile, profiles, recipe_conf, yaml_file
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.run_keys import RESUME_WORDS, RunKeys
from recipes.core.errors import ConfigError, shown


@dataclass(frozen=True)
class Settings:
    """A command line, checked.

    typed: run and recipe keys as given (in a ``config=`` file or as words), as text.
    saved: the keys for ``config.yaml``: all of the recipe's, and the run keys that were given.
    of_job: names of the job keys that were given. sweep: the swept keys of each run; the other fields are those of the first run.
    from_run: keys that were not given and come from the run that is resumed. resumes: the directory of that run.
    """

    recipe: str
    job: JobKeys
    run: RunKeys
    config: Any
    typed: dict[str, str]
    saved: dict[str, Any]
    of_job: tuple[str, ...] = ()
    sweep: tuple[dict[str, str], ...] = ()
    from_run: dict[str, str] = dataclasses.field(default_factory=dict)
    resumes: Path | None = None

    def words_from_run(self) -> str:
        """The keys that come from the run and differ from the recipe's defaults, as words; "" for none."""
        cls, _ = recipe_conf.load(self.recipe)
        usual = {f.name: f.default for c in (RunKeys, cls) for f in dataclasses.fields(c)}
        usual |= recipe_conf.by_dataset(self.recipe, str(getattr(self.config, "dataset", "")))
        values = {name: getattr(self.config, name, getattr(self.run, name, "")) for name in self.from_run}
        return ", ".join(
            f"{name}={shown(text)}"
            for name, text in self.from_run.items()
            if as_text(values[name]) != as_text(usual[name])
        )


@dataclass(frozen=True)
class CommandLine:
    """Words whose names are checked; their values are checked by `settings`.

    of_launch: whether job keys are allowed. recipe_class: the recipe's dataclass. given: the words and the variant's keys.
    defaults: keys of the site's profile and of the environment.
    """

    recipe: str
    of_launch: bool
    recipe_class: type
    words: Mapping[str, str]
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    cluster: str

    def run_keys(self) -> RunKeys:
        """The run keys without those of a run that is resumed. Raises ConfigError."""
        names = declare.names_of(RunKeys)
        return cast(RunKeys, build(RunKeys, {k: v for k, v in {**self.defaults, **self.given}.items() if k in names}))

    def settings(self, of_run: Mapping[str, str], resumes: Path | None) -> Settings:
        """The settings. of_run: the keys of the run in ``resumes``, which hold where nothing was given. Raises ConfigError."""
        from_run = {name: value for name, value in of_run.items() if name not in self.given}
        dataset = str(self.given.get("dataset", from_run.get("dataset", "")))
        of_dataset = recipe_conf.by_dataset(self.recipe, dataset)
        chosen = {**self.defaults, **of_dataset, **from_run, **self.given}
        job = JobKeys()
        if self.of_launch:
            job_names = declare.names_of(JobKeys)
            job = build(JobKeys, {k: v for k, v in chosen.items() if k in job_names})
        run = _build_resumed(RunKeys, chosen, from_run, resumes)
        try:
            profiles.env_variables(run.network, self.cluster)
        except envfile.EnvFileError as error:
            raise ConfigError(str(error)) from None
        config = _build_resumed(self.recipe_class, chosen, from_run, resumes)
        saved_run_keys = {*self.given, *from_run} & declare.names_of(RunKeys) - declare.declared(RunKeys, "of_launch")
        saved = {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(self.recipe_class)}
        saved |= {name: _plain(getattr(run, name)) for name in saved_run_keys}
        paths = {
            name: str(saved[name]) for name in saved.keys() & (declare.path_keys((self.recipe_class,)) | {"network"})
        }
        with contextlib.suppress(FileNotFoundError):  # the current folder was removed: a relative path stays as typed
            saved |= absolute(paths, (self.recipe_class,), Path())
        job_names = declare.names_of(JobKeys)
        return Settings(
            self.recipe,
            dataclasses.replace(job, recipe=self.recipe, cluster=self.cluster),
            run,
            config,
            {name: value for name, value in self.words.items() if name not in job_names},
            saved,
            tuple(name for name in self.words if name in job_names),
            from_run=from_run,
            resumes=resumes,
        )


def command_line(words: Mapping[str, str], recipe: str, environ: Mapping[str, str]) -> CommandLine:
    """Checks the names of ``words``, and finds the recipe, the variant and the profile.

    recipe: "" for words of launch.py, which have ``recipe=`` and job keys. environ: read for ``$RECIPES_CLUSTER``,
    ``$RECIPES_CONTAINER…`` and ``$RECIPES_DATA``. Raises ConfigError for the first thing that is invalid.
    """
    of_launch = not recipe
    recipe = recipe or words.get("recipe", "")
    if not recipe:
        raise ConfigError(f"recipe= is missing: give recipe=NAME, one of {', '.join(recipe_conf.names())}")
    recipe_class, variants = recipe_conf.load(recipe)
    job_names, run_names, own_names = (declare.names_of(c) for c in (JobKeys, RunKeys, recipe_class))
    for name, value in words.items():
        if name in job_names and not of_launch:
            raise ConfigError(_misplaced(name, value))
        if name not in job_names | run_names | own_names:
            known = (run_names | own_names | job_names) if of_launch else (run_names | own_names)
            raise ConfigError(
                f"{shown(name)}={shown(value)}: recipe {recipe} has no key '{shown(name)}'{declare.nearest(name, known)}"
            )
    for name in ("gpus_per_node", "ranks_per_node"):
        if "gpus" in words and name in words:
            raise ConfigError(
                f"{name}={shown(words[name])}: gpus={shown(words['gpus'])} sets the number of ranks too; give one of the two"
            )
    variant = words.get("variant", "")
    if variant and variant not in variants:
        there = ", ".join(variants) or "none"
        raise ConfigError(
            f"variant={shown(variant)}: the variants of recipe {recipe} are {there}{declare.nearest(variant, variants)}"
        )
    cluster = words.get("cluster") or environ.get("RECIPES_CLUSTER", "")
    profile = profiles.cluster_profile(cluster) if cluster else {}
    defaults = {k: v for k, v in profile.items() if k in (job_names | run_names) - profiles.ASKS.keys()}
    defaults |= profiles.in_image(environ)
    if "data_dir" in own_names & profile.keys() and not environ.get("RECIPES_DATA"):
        defaults["data_dir"] = profile["data_dir"]
    given = {**(variants[variant] if variant else {}), **words}
    return CommandLine(recipe, of_launch, recipe_class, words, given, defaults, cluster)


def read_words(argv: Sequence[str]) -> dict[str, str]:
    """The words by their names, those of the ``config=`` file among them. Raises ConfigError for one that is not ``key=value``."""
    words = _split(argv)
    if "config" not in words:
        return words
    file = words.pop("config")
    from_file = read_yaml(Path(os.path.expanduser(file)), f"config={shown(file)}")
    if "config" in from_file:
        raise ConfigError(
            f"config={shown(from_file['config'])}: is in a config= file; a config= file cannot name another"
        )
    return {**from_file, **words}


def read_yaml(file: Path, given: str) -> dict[str, str]:
    """The keys of a ``config=`` file, or of a run's config.yaml, as words. given: names the file in a message. Raises ConfigError."""
    words = []
    for name, value in yaml_file.load(file, given).items():
        if isinstance(value, (dict, list)):
            raise ConfigError(
                f"{given}: '{shown(name)}' must be one plain value; write the keys side by side, not nested"
            )
        words.append(f"{name}={value}")
    return _split(words)


def parse_keys(cls: type, argv: Sequence[str]) -> Any:
    """An instance of one dataclass of keys from ``key=value`` words, for a command that is not a recipe. Raises ConfigError."""
    words, known = _split(argv), declare.names_of(cls)
    for name, value in words.items():
        if name not in known:
            raise ConfigError(
                f"{shown(name)}={shown(value)}: there is no key '{shown(name)}', only {', '.join(sorted(known))}"
                f"{declare.nearest(name, known)}"
            )
    return build(cls, words)


def absolute(typed: Mapping[str, str], classes: Sequence[type], base: Path) -> dict[str, str]:
    """``typed`` with every path made absolute against ``base``, so that a job finds it from any folder. Raises ConfigError."""
    paths = declare.path_keys(classes)

    def full(name: str, value: str) -> str:
        is_path = (
            name in paths
            or (name == "resume" and value not in RESUME_WORDS)
            or (name == "network" and ("/" in value or value.endswith(".env")))
        )
        if not is_path or not value or value[0] == "$":  # a variable is resolved on the node
            return value
        found = os.path.realpath(base / Path(value).expanduser())  # Path.resolve() raises where links lead in a circle
        if declare.CONTROL.search(found) or any("\ud800" <= c <= "\udfff" for c in found):
            raise ConfigError(
                f"{name}={shown(value)}: is {shown(found)}, which has a character that cannot be printed; rename the folder"
            )
        return found

    return {name: full(name, value) for name, value in typed.items()}


def build(cls: type, values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass ``cls``, its values converted and checked. Raises ConfigError."""
    merged = cast(DictConfig, OmegaConf.structured(cls))
    OmegaConf.set_readonly(merged, False)  # frozen dataclasses are read-only
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name, value in values.items():
        field = fields[name]
        if field.type is bool and str(value).isdecimal() and str(value) not in ("0", "1"):
            raise ConfigError(f"{name}={shown(value)}: {_expected(field)}")  # OmegaConf takes any number but 0 as true
        if field.type in (int, int | None) and re.search(r"[^\x00-\x7f]|_", str(value)):
            # Python takes digits of other scripts, and 1_0 as 10.
            raise ConfigError(f"{name}={shown(value)}: {_expected(field)}")
        if isinstance(value, str):
            value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # not an interpolation of OmegaConf
        try:
            OmegaConf.update(merged, name, None if value == "null" and field.default is None else value)
        except (OmegaConfBaseException, RecursionError):
            raise ConfigError(f"{name}={shown(values[name])}: {_expected(field)}") from None
    converted = {}
    for name, field in fields.items():
        try:
            converted[name] = merged[name]
        except OmegaConfBaseException:  # "???", which to OmegaConf is a missing value
            raise ConfigError(f"{name}={shown(values[name])}: {_expected(field)}") from None
    return cls(**converted)


def as_text(value: object) -> str:
    """A key's value as it is typed on the command line."""
    return value.name if isinstance(value, Enum) else str(value)


def _plain(value: object) -> Any:
    return value.name if isinstance(value, Enum) else value


def _split(argv: Sequence[str]) -> dict[str, str]:
    words: dict[str, str] = {}
    for word in argv:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"(sweep\.)?[A-Za-z_][A-Za-z0-9_]*", name):
            option = re.fullmatch(r"--?([A-Za-z_][A-Za-z0-9_-]*)(=.*)?", word, re.DOTALL)
            fix = (
                f"{option[1].replace('-', '_')}{shown(option[2] or '=VALUE')}"
                if option
                else "key=value, without blanks"
            )
            raise ConfigError(f"'{shown(word)}' is not key=value; write {fix}")
        if "\0" in value or len(value) > 4096:
            raise ConfigError(f"{name}={shown(value)}: must have at most 4096 characters, and no NUL character")
        if any("\ud800" <= c <= "\udfff" for c in value):
            encoding = sys.getfilesystemencoding()
            fix = "write it in UTF-8" if encoding == "utf-8" else f"set PYTHONUTF8=1: this Python reads {encoding}"
            raise ConfigError(f"{name}={shown(value)}: is not UTF-8; {fix}")
        words[name] = value
    return words


def _misplaced(name: str, value: str) -> str:
    """Why a job key is refused behind a recipe, and what to give instead."""
    field = next(f for f in dataclasses.fields(JobKeys) if f.name == name)
    options = field.metadata["sbatch"]
    given = f"{name}={shown(value)}"
    if name == "cluster":
        return f"{given}: a recipe reads its site's profile from the environment: export RECIPES_CLUSTER={shown(value)}"
    if not options:
        return f"{given}: is a key of launch.py: python launch.py {given} …"
    if options.startswith("--") and " " not in options:
        options += f"={shown(value)}"
    return f"{given}: is a job key, which a recipe cannot set; give sbatch or srun {options}, or use launch.py"


def _build_resumed(cls: type, chosen: Mapping[str, Any], from_run: Mapping[str, str], resumes: Path | None) -> Any:
    """`build` of the ``chosen`` keys that ``cls`` has. Its message names the run's file where a key from there is the cause."""
    values = {name: value for name, value in chosen.items() if name in declare.names_of(cls)}
    try:
        return build(cls, values)
    except ConfigError as error:
        if values.keys().isdisjoint(from_run):
            raise
        try:
            build(cls, {name: value for name, value in values.items() if name not in from_run})
        except ConfigError:  # what was typed is invalid already
            raise error from None
        raise ConfigError(f"{error} (from {resumes}/config.yaml)") from None


def _expected(field: "dataclasses.Field[Any]") -> str:
    kind = field.type if isinstance(field.type, type) else int
    if issubclass(kind, Enum):
        return f"must be one of {', '.join(kind.__members__)}"
    known = {bool: "must be true or false", int: "must be a whole number", float: "must be a number"}
    return known.get(kind, "must be a text")
