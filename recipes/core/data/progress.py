"""Lines about long work, such as a download: how much of it is done, and how long the rest takes.
Standard library only.
"""

import time
from collections.abc import Callable
from datetime import timedelta

EVERY_S = 10.0


class Progress:
    """Says a line at most every 10 s. total: amount of work in ``unit``; 0 if unknown. say: gets
    the lines.
    """

    def __init__(self, name: str, total: int, unit: str, say: Callable[[str], None]) -> None:
        self._name = name
        self._total = total
        self._unit = unit
        self._say = say
        self._began = self._said = time.monotonic()

    def at(self, done: int) -> None:
        """Call it whenever more of the work is done."""
        now = time.monotonic()
        if now - self._said < EVERY_S:
            return
        self._said = now
        left_s = (now - self._began) * (self._total - done) / max(1, done)
        rest = f" of {self._total} {self._unit}, about {timedelta(seconds=round(left_s))} left"
        self._say(f"{self._name}: {done}{rest if self._total else f' {self._unit}'}")
