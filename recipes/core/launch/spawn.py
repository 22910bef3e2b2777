"""Ranks that a recipe starts itself, as ``launcher=local`` does: ``python -m recipes.toy spawn=2``."""

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from recipes.core import errors
from recipes.core.config import parser
from recipes.core.config.run_keys import RunKeys
from recipes.core.errors import MachineError
from recipes.core.files import ROOT
from recipes.core.launch import local
from recipes.core.place import network
from recipes.core.run import directory, entry
from recipes.core.run.entry import Start


def processes(start: Start) -> NoReturn:
    """Runs the recipe in ``spawn=`` processes on this machine and exits with the exit status of the run.

    If another launcher has already started this process as a rank of a job, one line is printed, and the exit status is 2.
    """
    settings, info = start.settings, start.ranks
    recipe, config = settings.recipe, settings.config
    if "RECIPES_BATCH" in os.environ or info.world_size > 1:
        if info.rank:
            time.sleep(1.5)  # rank 0 prints the line before the launcher ends all ranks
        else:
            line = f"a launcher has already started this process as rank 0 of {info.world_size}: omit spawn="
            print(f"{recipe}: spawn={config.spawn}: {line}, or start plain python", file=sys.stderr)
        sys.exit(errors.EXIT_CONFIG)
    run_dir = directory.choose(settings.run.run_dir, recipe, info.run_id, ROOT)
    words = parser.absolute(settings.typed, (RunKeys, type(config)), Path.cwd())
    words["spawn"] = "0"
    # Each rank sets these variables itself and logs them.
    set_here = start.from_files | (network.settings(start.interface, {}) if start.interface else {})
    environ = {name: value for name, value in os.environ.items() if set_here.get(name) != value}
    try:
        code = local.run_recipe(settings, words, local.Layout((config.spawn,)), run_dir, environ)
    except MachineError as error:
        print(f"{recipe}: {error}", file=sys.stderr)
        code = errors.EXIT_MACHINE
    entry.remove_own_folder(start)
    sys.exit(code)
