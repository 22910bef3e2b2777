"""The settings of a launch, from its command line, the keys of the run that it resumes, and the
values of a sweep.
"""

import contextlib
import dataclasses
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.core import files
from recipes.core.config import declare, key_value, parser
from recipes.core.config.job_keys import JobKeys
from recipes.core.config.key_value import Words
from recipes.core.config.parser import Settings
from recipes.core.errors import ConfigError, InputError, MachineError, shown
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
) -> Settings:
    """Checks a command line of ``key=value`` words, or with ``script=FILE -- ARGUMENT…``, and
    returns its settings.

    recipe: "" for the words of launch.py, which contain ``recipe=`` and job keys. If ``run_dir=``
    or ``resume=`` names a run, keys that are not given come from it. Raises ConfigError for the
    first invalid word.
    """
    words = key_value.read(of_script(argv, recipe))
    if not recipe and any(name.startswith(SWEEP) for name in words):
        return _sweep(words, environ)
    settings = parser.settings(words, recipe, environ, resumed.run_to_resume)
    resumed.check_same_experiment(settings)
    return settings


def before_dashes(argv: Sequence[str]) -> list[str]:
    """The words before ``--``, which separates the arguments of a program of your own."""
    return list(argv[: argv.index("--")] if "--" in argv else argv)


def with_json(argv: Sequence[str], main: Callable[[list[str], dict[str, Any]], int]) -> int:
    """Calls ``main`` with ``argv`` and a dictionary for its results. Returns the exit status.

    With ``--json``, the results and ``exit_status`` are printed to stdout as one JSON object, with
    ``error`` if ``main`` raises it, and lines for people to stderr.
    """
    results: dict[str, Any] = {}
    words = before_dashes(argv)
    if JSON not in words:
        return main(list(argv), results)
    rest = argv[len(words) :]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            status = main([*(word for word in words if word != JSON), *rest], results)
        results["exit_status"] = status
    except (ConfigError, InputError, MachineError) as error:
        results |= {"error": str(error), "exit_status": error.exit_status}
        raise
    finally:
        print(files.json_line(results), flush=True)
    return status


def of_script(argv: Sequence[str], recipe: str) -> list[str]:
    """``script=FILE key=value… -- ARGUMENT…`` as keys of the recipe script; words without
    ``script=`` are returned unchanged.

    recipe: "" for the words of launch.py. A relative path belongs to the working directory. Raises
    ConfigError.
    """
    options = before_dashes(argv)
    keys = dict(word.partition("=")[::2] for word in options)
    is_script = SCRIPT in (recipe, keys.get("recipe")) or (not recipe and SCRIPT in keys)
    has_arguments = len(options) < len(argv)
    if has_arguments and not (is_script and SCRIPT in keys):
        raise ConfigError("--: is only for a program of your own: give script=FILE before it")
    if not is_script or "program" in keys:
        return options
    if SCRIPT not in keys:
        raise ConfigError("script= is missing: give script=FILE, a .py file or an executable")

    name = keys.pop(SCRIPT)
    file = Path(name).expanduser()
    problem = _why_no_program(file, keys)
    if problem:
        raise ConfigError(f"script={shown(name)}: {problem}")
    for word in options:
        if "=" not in word or word.startswith("-"):
            raise ConfigError(
                f"'{shown(word)}' is not key=value; arguments of the program come after --: "
                f"script={shown(name)} -- …"
            )
    if not recipe:
        keys["recipe"] = SCRIPT
    words = {"workdir": os.getcwd(), **keys, "program": os.path.abspath(file)}
    script_words = key_value.words_of(words)
    if has_arguments:
        script_words.append(f"args={shlex.join(argv[len(options) + 1 :])}")
    return script_words


def _why_no_program(file: Path, keys: Words) -> str:
    """Why ``file`` cannot be the program of a job with these keys, and the fix; "" if it can."""
    if keys.get("recipe", SCRIPT) != SCRIPT:
        return f"cannot be used with recipe={shown(keys['recipe'])}; give one of the two"
    if file.name in LAUNCHERS and keys.get("through") != "node":
        through = "accelerate" if file.name == "accelerate" else "torchrun"
        return f"starts ranks itself: give your program as script=FILE, and through={through}"
    if not os.path.isfile(file):
        return "there is no such file; give the path of a .py file or of an executable"
    if file.suffix == ".py":
        return "" if os.access(file, os.R_OK) else "cannot be read; chmod u+r it"
    if os.access(file, os.X_OK):
        return ""
    return "is not executable; chmod +x it, or give a .py file"


def _sweep(words: Words, environ: Mapping[str, str]) -> Settings:
    """Checks every combination of the swept values. Returns the settings of the first, with all of
    them in ``sweep``.
    """
    swept = {name: words.pop(name) for name in list(words) if name.startswith(SWEEP)}
    values: dict[str, list[str]] = {}
    for word, text in swept.items():
        name = word.removeprefix(SWEEP)
        values[name] = [value.strip(" ") for value in text.split(",")]
        problem = ""
        if name in words:
            problem = f"{name}={shown(words[name])} is given as well; give one of the two"
        elif name in declare.names_of(JobKeys) | ONE_FOR_ALL:
            problem = f"{name}= must be the same in all runs of a sweep; sweep another key"
        elif "" in values[name] or len(set(values[name])) < len(values[name]):
            problem = "must be different values separated by commas"
        if problem:
            raise ConfigError(f"{word}={shown(text)}: {problem}")

    runs = tuple(
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    )
    each = []
    for run in runs:
        try:
            settings = parser.settings({**words, **run}, "", environ, resumed.run_to_resume)
            resumed.check_same_experiment(settings)
            each.append(settings)
        except ConfigError as error:
            pairs = [f"{SWEEP}{name}={shown(value)}" for name, value in run.items()]
            raise ConfigError(f"{' '.join(pairs)}: {error}") from None
    if len(runs) == 1:  # submitit makes no array of it
        return each[0]
    common = {name: value for name, value in each[0].typed.items() if name not in values}
    sweep = tuple({name: settings.typed[name] for name in values} for settings in each)
    return dataclasses.replace(each[0], typed=common, sweep=sweep)
