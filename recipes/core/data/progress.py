"""Lines about long work, such as a download: how much of it is done, and how long the rest takes.
Standard library only.
"""

import time
from collections.abc import Callable
from datetime import timedelta

EVERY_S = 10.0


def progress(name: str, total: int, unit: str, say: Callable[[str], None]) -> Callable[[int], None]:
    """Returns a function to call with the amount of work that is done, whenever it is more. It says
    a line at most every 10 s.

    total: amount of work in ``unit``; 0 if unknown. say: gets the lines.
    """
    began = said = time.monotonic()

    def at(done: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said < EVERY_S:
            return
        said = now
        amount = f"{done} {unit}"
        if total:
            left_s = (now - began) * (total - done) / max(1, done)
            rest = timedelta(seconds=round(left_s))
            amount = f"{done} of {total} {unit}, about {rest} left"
        say(f"{name}: {amount}")

    return at
