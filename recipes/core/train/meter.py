"""Samples and seconds of training: the speed of a run, and its progress line."""

from recipes.core.run.watchdog import RunningClock

PROGRESS_EVERY_S = 0.5


class Meter:
    """Counts samples and seconds of training, without evaluation, saving and suspension. Also paces the progress line.

    wait_begins, wait_ends: called around the wait for a batch.
    """

    def __init__(self, running: RunningClock) -> None:
        self._now = running.now
        self.samples, self.train_s = 0, 0.0
        self.lap_samples, self._lap_start = 0, self._now()
        self._progress_at = self._lap_start
        self._waited_s, self._wait_start = 0.0, self._lap_start

    def wait_begins(self) -> None:
        self._wait_start = self._now()

    def wait_ends(self) -> None:
        self._waited_s += self._now() - self._wait_start

    def lap(self) -> tuple[float, float]:
        """Ends an interval of training. Returns its samples per second, and the share of it in which a step waited for its batch.

        Called before and after work that is not training.
        """
        seconds = self._now() - self._lap_start
        speed, waited = (self.lap_samples / seconds, self._waited_s / seconds) if self.lap_samples else (0.0, 0.0)
        if self.lap_samples:
            self.samples, self.train_s = self.samples + self.lap_samples, self.train_s + seconds
        self.lap_samples, self._waited_s, self._lap_start = 0, 0.0, self._now()
        return speed, waited

    def speed(self) -> float:
        """Samples per second of the interval so far; 0 at its start."""
        seconds = self._now() - self._lap_start
        return self.lap_samples / seconds if seconds > 0 else 0.0

    def progress_due(self) -> bool:
        due = self._now() - self._progress_at >= PROGRESS_EVERY_S
        self._progress_at = self._now() if due else self._progress_at
        return due
