"""What a rank prints during a run: lines, warnings, and the progress of rank 0."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from recipes.core.train.world import World


@dataclass
class Console:
    """terminal: where rank 0 shows its progress; None if its output is a file, or if the terminal
    was closed.
    """

    world: World
    terminal: TextIO | None

    def say(self, text: str) -> None:
        """Prints a line, on rank 0 only."""
        if self.world.rank == 0:
            self.progress("")
            print(text, flush=True)

    def warn(self, text: str) -> None:
        """Prints a warning from any rank, with its host name."""
        line = f"warning: rank {self.world.rank} on {self.world.host}: {text}"
        print(line, file=sys.stderr, flush=True)

    def progress(self, text: str | Callable[[int], str]) -> None:
        """Rewrites rank 0's progress line in place, on a terminal only. text: may be a function of
        the terminal's columns.
        """
        if self.terminal and self.world.rank == 0:
            try:
                columns = os.get_terminal_size(self.terminal.fileno()).columns or 80
                line = text(columns) if callable(text) else text[: columns - 1]
                self.terminal.write(f"\r\033[K{line}")
                self.terminal.flush()
            except OSError:  # the terminal is closed; the run continues
                self.terminal = None
