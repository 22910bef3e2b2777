"""How far a preparation of images is, and how that is shown. Standard library only."""

import sys
import time
from dataclasses import dataclass


@dataclass
class Progress:
    """Counts images: all, done in this call, kept from an earlier call, and skipped in both."""

    total: int
    done: int = 0
    kept: int = 0
    skipped: int = 0


class Meter:
    """Shows progress: one line that is rewritten on a terminal, otherwise a plain line every ten seconds."""

    def __init__(self, name: str):
        self._name = name
        self._terminal = sys.stderr.isatty()
        self._start = self._last = 0.0

    def show(self, state: Progress) -> None:
        now, total = time.monotonic(), state.total - state.kept
        if not self._start:
            self._start, self._last = now, 0.0 if self._terminal else now
        if now - self._last < (0.2 if self._terminal else 10.0):
            return
        self._last = now
        pace = "starting"
        if state.done and now > self._start:
            rate = state.done / (now - self._start)
            pace = f"{rate:.0f} images/s, {_duration((total - state.done) / rate)} left"
        kept = f", {state.kept} kept" if state.kept else ""
        line = f"{self._name}: {state.done} of {total} images, {pace}, {state.skipped} skipped{kept}"
        start, end = ("\r\033[K", "") if self._terminal else ("", "\n")
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
