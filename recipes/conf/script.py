"""Keys of script, which runs a program of your own. ``script=FILE -- ARGUMENT…`` sets them: see
`command_line.of_script`.
"""

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from recipes.core.config.declare import key
from recipes.core.config.run_keys import RecipeKeys
from recipes.core.errors import ConfigError, shown

MOST_BYTES = 100_000  # Linux allows 128 KiB for one argument
Through = Enum("Through", "rank torchrun accelerate node")
StopSignal = Enum("StopSignal", "auto USR2 USR1 TERM")


@dataclass(frozen=True)
class Config(RecipeKeys):
    hint = "; write the arguments of your program after --, as in script=FILE -- --their --args"

    # Not declared as a path: .venv/bin/python is a link that must not be resolved.
    program: str = key("", "your program: a .py file, or an executable; type it as script=FILE")
    args: str = key("", "arguments of the program, quoted as in a shell; type them after --")
    workdir: str = key(
        "",
        "working directory of the program; default: the folder in which you type the command",
        path=True,
    )
    through: Through = key(
        Through.rank,
        "what starts the program: rank: the job, once per GPU; torchrun or accelerate: "
        "one launcher per node, which "
        "starts a process per GPU; node: the job, once per node, with all GPUs of the node",
    )
    launcher_args: str = key(
        "", "further options of torchrun or of accelerate launch, quoted as in a shell"
    )
    nproc_per_node: int = key(
        0,
        "processes that through=torchrun or accelerate starts on each node; "
        "0: one per GPU, or ranks_per_node=",
        high=1024,
    )
    stop_signal: StopSignal = key(
        StopSignal.auto,
        "signal that asks the program to save; auto: the first of USR2, USR1, TERM that it catches",
    )
    saves: str = key(
        "",
        "folder in which the program saves; the job is not requeued again if a requeued program "
        "changes nothing there",
        path=True,
    )
    silent_s: float = key(
        0.0,
        "end the program if, for this number of seconds, no rank prints a line and no file in the "
        "run directory (or in saves=) is new or changed; 0: off",
    )
    restart_on_hang: bool = key(
        False, "requeue the job after a hang (silent_s=); with restarts=, the job is not requeued"
    )

    def __post_init__(self) -> None:
        for name, typed in (
            ("args", "type the arguments after --"),
            ("launcher_args", "close the quotes"),
        ):
            try:
                shlex.split(getattr(self, name))
            except ValueError as error:
                raise ConfigError(
                    f"{name}={shown(getattr(self, name))}: {error}; {typed}"
                ) from None
        if len(os.fsencode(self.args)) > MOST_BYTES:
            raise ConfigError(
                f"args=…: is longer than {MOST_BYTES} bytes, the limit of Linux: "
                "write the list into a file"
            )
        if self.restart_on_hang and not self.silent_s:
            raise ConfigError(
                "restart_on_hang=true: requires silent_s=, such as silent_s=1800: "
                "a time longer than any in which the program writes nothing"
            )
        if self.launcher_args and self.through not in (Through.torchrun, Through.accelerate):
            raise ConfigError(
                f"launcher_args={shown(self.launcher_args)}: requires through=torchrun or "
                "through=accelerate"
            )
        if _has_unsafe_rendezvous(shlex.split(self.launcher_args)):
            raise ConfigError(
                f"launcher_args={shown(self.launcher_args)}: leave out --standalone and "
                "--rdzv-backend: such a rendezvous can execute code of other users"
            )


def _has_unsafe_rendezvous(options: Sequence[str]) -> bool:
    """Whether options of torchrun or accelerate select a rendezvous that reads pickles from its
    port (torch 2.15, dynamic_rendezvous.py). Both accept the beginning of an option, and "_".
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--standalone", nargs="?", const="true")
    parser.add_argument("--rdzv-backend", nargs="?", default="static")
    seen, _ = parser.parse_known_args([option.replace("_", "-") for option in options])
    return bool(seen.standalone) or seen.rdzv_backend != "static"
