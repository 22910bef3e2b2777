"""The settings of a launch, from its command line, the keys of the run that it resumes, and the
values of a sweep.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.core.config import declare, key_value, parser
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.parser import Settings
from recipes.core.errors import ConfigError, shown
from recipes.core.run import resumed

LAUNCHERS = ("accelerate", "deepspeed", "torchrun")  # commands that start the ranks of a program
SWEEP = "sweep."
SCRIPT = "script"
JSON = "--json"
# all runs request the same CPUs
ONE_FOR_ALL = {
    "run_dir",
    "config",
    "umask",
    "device",
    "cpu_threads",
    "num_workers",
}


def parse(
    argv: Sequence[str],
    *,
    recipe: str = "",
    environ: Mapping[str, str] = os.environ,
    to_start: bool = True,
) -> Settings:
    """Checks a command line of ``key=value`` words, or with ``script=FILE -- ARGUMENT…``, and
    returns its settings.

    recipe: "" for the words of launch.py, which contain ``recipe=`` and job keys. to_start: False
    if only the result of the run is to be read. If ``run_dir=`` or ``resume=`` names a run, keys
    that are not given come from it. Raises ConfigError for the first invalid word.
    """
    words = key_value.read(of_script(argv, recipe))
    swept = {name: words[name] for name in words if name.startswith(SWEEP)}
    if swept and not recipe:
        return _sweep(
            {name: value for name, value in words.items() if name not in swept}, swept, environ
        )
    return _one(words, recipe, environ, to_start)


def before_dashes(argv: Sequence[str]) -> list[str]:
    """The words before ``--``, which separates the arguments of a program of your own."""
    return list(argv[: argv.index("--")] if "--" in argv else argv)


def with_json(argv: Sequence[str], main: Callable[[list[str], dict[str, Any]], int]) -> int:
    """Calls ``main`` with ``argv`` and a dictionary for its results. Returns the exit status.

    With ``--json``, the results and ``exit_status`` are printed to stdout as one JSON object, and
    lines for people to stderr.
    """
    told: dict[str, Any] = {}
    own = before_dashes(argv)
    if JSON not in own:
        return main(list(argv), told)
    with contextlib.redirect_stdout(sys.stderr):
        status = main([*(word for word in own if word != JSON), *argv[len(own) :]], told)
    print(json.dumps({**told, "exit_status": status}, default=str), flush=True)
    return status


def of_script(argv: Sequence[str], recipe: str) -> list[str]:
    """``script=FILE key=value… -- ARGUMENT…`` as keys of the recipe script; words without
    ``script=`` are returned unchanged.

    recipe: "" for the words of launch.py. A relative path belongs to the working directory. Raises
    ConfigError.
    """
    own = before_dashes(argv)
    given = dict(word.partition("=")[::2] for word in own)
    is_script = SCRIPT in (recipe, given.get("recipe")) or (not recipe and SCRIPT in given)
    if len(own) < len(argv) and not (is_script and SCRIPT in given):
        raise ConfigError("--: is only for a program of your own: give script=FILE before it")
    if not is_script or "program" in given:
        return own
    if SCRIPT not in given:
        raise ConfigError("script= is missing: give script=FILE, a .py file or an executable")
    name = given.pop(SCRIPT)
    file = Path(name).expanduser()
    shown_file = f"script={shown(name)}"
    is_python = name.endswith(".py")
    if given.get("recipe", SCRIPT) != SCRIPT:
        raise ConfigError(
            f"{shown_file}: cannot be used with recipe={shown(given['recipe'])}; give one of the two"
        )
    if odd := next((word for word in own if "=" not in word or word.startswith("-")), ""):
        raise ConfigError(
            f"'{shown(odd)}' is not key=value; arguments of the program come after --: {shown_file} -- …"
        )
    if file.name in LAUNCHERS and given.get("through") != "node":
        fix = f"give your program as script=FILE, and through={'accelerate' if file.name == 'accelerate' else 'torchrun'}"
        raise ConfigError(f"{shown_file}: starts ranks itself: {fix}")
    if not file.is_file():
        raise ConfigError(
            f"{shown_file}: there is no such file; give the path of a .py file or of an executable"
        )
    if not os.access(file, os.R_OK if is_python else os.X_OK):
        fix = (
            "cannot be read; chmod u+r it"
            if is_python
            else "is not executable; chmod +x it, or give a .py file"
        )
        raise ConfigError(f"{shown_file}: {fix}")
    args = [f"args={shlex.join(argv[len(own) + 1 :])}"] if len(own) < len(argv) else []
    words = {"workdir": os.getcwd(), **given, **({} if recipe else {"recipe": SCRIPT})}
    return [
        *(f"{name}={value}" for name, value in words.items()),
        f"program={os.path.abspath(file)}",
        *args,
    ]


def _one(
    words: Mapping[str, str], recipe: str, environ: Mapping[str, str], to_start: bool = True
) -> Settings:
    settings = parser.settings(words, recipe, environ, resumed.run_to_resume)
    if to_start:
        resumed.check_same_experiment(settings)
    return settings


def _sweep(
    words: Mapping[str, str], swept: Mapping[str, str], environ: Mapping[str, str]
) -> Settings:
    """Checks every combination of the swept values. Returns the settings of the first, with all of
    them in ``sweep``.
    """
    values: dict[str, list[str]] = {}
    for word, given in swept.items():
        name = word.removeprefix(SWEEP)
        values[name] = [value.strip(" ") for value in given.split(",")]
        if name in words:
            raise ConfigError(
                f"{word}={shown(given)}: {name}={shown(words[name])} is given as well; give one of the two"
            )
        if name in declare.names_of(JobKeys) | ONE_FOR_ALL:
            fix = f"{name}= must be the same in all runs of a sweep; sweep another key"
            raise ConfigError(f"{word}={shown(given)}: {fix}")
        if "" in values[name] or len(set(values[name])) < len(values[name]):
            raise ConfigError(
                f"{word}={shown(given)}: must be different values separated by commas"
            )
    runs = tuple(
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    )
    each = []
    for run in runs:
        try:
            each.append(_one({**words, **run}, "", environ))
        except ConfigError as error:
            pairs = [f"{SWEEP}{name}={shown(value)}" for name, value in run.items()]
            raise ConfigError(f"{' '.join(pairs)}: {error}") from None
    if len(runs) == 1:  # submitit makes no array of it
        return each[0]
    common = {name: value for name, value in each[0].typed.items() if name not in values}
    return dataclasses.replace(each[0], typed=common, sweep=runs)
