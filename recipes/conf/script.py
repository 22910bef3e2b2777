"""Keys of script, which runs a program of your own. ``script=FILE -- ARGUMENT…`` sets them: see `command_line.of_script`."""

import shlex
from dataclasses import dataclass
from typing import ClassVar

from recipes.core.config.declare import key
from recipes.core.config.run_keys import RecipeKeys
from recipes.core.errors import ConfigError, shown


@dataclass(frozen=True)
class Config(RecipeKeys):
    hint: ClassVar[str] = "; write the arguments of your program after --, as in script=FILE -- --their --args"

    # Not declared as a path: .venv/bin/python is a link that must not be resolved.
    program: str = key("", "your program: a .py file, or an executable; type it as script=FILE")
    args: str = key("", "arguments of the program, quoted as in a shell; type them after --")
    workdir: str = key(
        "", "working directory of the program; default: the folder in which you type the command", path=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            shlex.split(self.args)
        except ValueError as error:
            raise ConfigError(f"args={shown(self.args)}: {error}; type the arguments after --") from None
