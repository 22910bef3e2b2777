"""The run that a launch resumes: its directory and keys, and the check that new keys do not change
the experiment.
"""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.core.config import declare, envfile, key_value, recipe_conf
from recipes.core.config.parser import Settings
from recipes.core.config.run_keys import RESUME_WORDS, RecipeKeys, RunKeys, TrainKeys
from recipes.core.errors import ConfigError, MachineError, shown
from recipes.core.run import attempt, directory

LENGTH = ("epochs", "max_steps")  # the keys that set how long a run trains


def run_to_resume(
    run: RunKeys, recipe: str, recipe_class: type[RecipeKeys]
) -> tuple[Path | None, key_value.Words]:
    """The run directory whose keys a launch inherits, and these keys: ``run_dir=``, else the run
    that ``resume=`` names.

    Raises ConfigError if ``run_dir=`` or ``resume=`` names a run of another recipe.
    """
    named = [("run_dir", Path(run.run_dir).expanduser())] if run.run_dir else []
    if run.resume not in RESUME_WORDS:
        path = Path(run.resume).expanduser()
        # RUN up to RUN/checkpoints/NAME
        named += [("resume", folder) for folder in (path, path.parent, path.parent.parent)]
    for name, folder in named:
        # A config.yaml beside a checkpoint that was copied elsewhere may belong to another program.
        is_copy = name == "resume" and not os.path.isdir(folder / "checkpoints")
        if is_copy or not os.path.isfile(folder / "config.yaml"):
            continue
        other = attempt.facts(folder).get("recipe") or recipe
        if other != recipe and recipe_class.starts_a_run:
            raise ConfigError(
                f"{name}={shown(getattr(run, name))}: is a run of recipe {other}, not {recipe}: "
                f"give another {name}="
            )
        if issubclass(recipe_class, TrainKeys) and run.resume != "never":
            return folder, keys_of(folder, recipe, recipe_class)
        return None, {}
    return None, {}


def keys_of(run_dir: Path, recipe: str, recipe_class: type) -> key_value.Words:
    """The keys of a run that a resumed launch inherits, with their values as text. Raises
    ConfigError.
    """
    path = run_dir / "config.yaml"
    left_out = declare.declared("not_inherited", RunKeys, recipe_class)
    try:
        words = key_value.read_own(Path(os.path.realpath(run_dir)) / path.name, shown(path, 4096))
    except (OSError, MachineError):
        words = key_value.read_yaml(path, shown(path, 4096))
        left_out |= key_value.ONLY_IN_OWN_FILE
    known = declare.names_of(RunKeys, recipe_class)
    if "num_workers" not in known:
        words.pop("num_workers", None)  # earlier versions wrote it for recipes that do not read it
    unknown = min(words.keys() - known, default="")
    if unknown:
        raise ConfigError(
            f"{shown(path, 4096)}: has {shown(unknown)}=, which recipe {recipe} does not have: "
            "use the code that the run was trained with, or start another run"
        )
    # If the run's path is empty, the site's default applies.
    left_out |= {name for name in declare.declared("path", recipe_class) if not words.get(name)}
    if envfile.is_path(str(words.get("network"))):  # the file may belong to another user
        left_out.add("network")
    return {name: value for name, value in words.items() if name not in left_out}


def own_env_file(settings: Settings) -> str:
    """The ``network=`` of the resumed run that `keys_of` does not return, since it is a file; "" if
    there is none or a key replaces it.
    """
    if settings.run.network or not settings.resumes:
        return ""
    network = str(key_value.read_yaml(settings.resumes / "config.yaml", "").get("network", ""))
    return network if envfile.is_path(network) else ""


def check_same_experiment(settings: Settings) -> None:
    """Raises ConfigError if the keys would change the experiment of the run that is resumed."""
    now = settings.config
    resumes = settings.resumes
    recipe_class = type(now)
    if not resumes or now.evaluate or not any((resumes / "checkpoints").glob("step-*.pt")):
        return
    saved = keys_of(resumes, settings.recipe, recipe_class)
    saved = {**recipe_conf.datasets(settings.recipe).get(saved.get("dataset", ""), {}), **saved}
    then = declare.build(recipe_class, saved)
    changed = "; ".join(differences(vars(then), vars(now), declare.may_change(recipe_class)))
    if changed:
        raise ConfigError(
            f"run_dir={shown(resumes, 4096)}: its checkpoints were saved with other keys "
            f"({changed}): "
            "give the earlier values, or another run_dir"
        )
    status = directory.read_status(resumes)
    resume = settings.run.resume
    named = re.search(r"step-(\d+)\.pt$", resume)
    is_last = int(named[1]) == status.get("step") if named else Path(resume).name != "best"
    is_finished = status.get("state") == "done" and is_last  # from an earlier step, steps are left
    problem = change_of_length(then, now, is_finished)
    if problem and not settings.run.force:
        raise ConfigError(
            f"{problem}: leave the key out, or give force=true; run directory: {resumes}"
        )


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], may_change: set[str]
) -> list[str]:
    """One text for each key that differs and is not in ``may_change``, with its saved value and its
    value now.
    """
    changed = []
    for name in {**saved, **now}:
        before = declare.plain(saved.get(name))
        after = declare.plain(now.get(name))
        if name not in may_change and before != after:
            changed.append(f"{name}={before} becomes {after}")
    return changed


def change_of_length(then: Any, now: Any, finished: bool) -> str:
    """Why a change of ``epochs`` or ``max_steps`` requires force=true; "" if it does not.

    A finished run may be made longer. An unfinished run may be made longer if its learning rate
    does not depend on its length.
    """
    for name in LENGTH:
        before = getattr(then, name)
        after = getattr(now, name)
        if before == after:
            continue
        change = f"{name}={after}: the run has {name}={before}"
        least = math.inf if name == "max_steps" else 0  # max_steps=0 means no limit
        if (after or least) < (before or least):
            return f"{change}, and would become shorter"
        if not finished and now.lr_depends_on_length:
            return f"{change}, and the learning-rate schedule of its remaining steps would change"
    return ""
