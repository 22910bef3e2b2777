"""What a wrapper reads from and writes to the run directory while its program runs.

A thread does this, since a file system that does not answer must not keep the wrapper from ending
the program. Standard library only.
"""

import contextlib
import socket
import threading

from recipes.core.errors import EXIT_REQUEUE, Kind, MachineError
from recipes.core.run import attempt as attempts
from recipes.core.run import in_use, positions, stop_note
from recipes.core.run.watchdog import RunningClock


class Watch:
    """The view of the run directory that the thread has: it is new every few seconds.

    note: the stop note of the attempt. fenced: why the program must end at once; "" if it may
    continue. hangs: whether it must end because it hangs. seen_at: when the run directory was last
    read, by ``clock``.
    """

    def __init__(self, attempt: attempts.Attempt, task: int) -> None:
        """task: number of this wrapper, from 0."""
        clock = RunningClock()
        clock.start()
        self.note = stop_note.StopNote()
        self.fenced = ""
        self.hangs = False
        self.clock = clock.now
        self.seen_at = clock.now()
        self._attempt = attempt
        self._task = task
        self._stop = ""
        self._stopped_at = 0.0
        self._is_recorded = False
        self._changed = threading.Event()
        threading.Thread(target=self._run, name="run directory", daemon=True).start()

    @property
    def is_stopping(self) -> bool:
        """Whether the program was asked to stop."""
        return bool(self._stop or self.note.reason)

    def tell_stop(self, reason: str, moment: float) -> None:
        """Lets the thread record that the program was asked to stop at ``moment`` (time.time())."""
        self._stopped_at = moment
        self._stop = reason
        self._changed.set()

    def record_stop(self) -> None:
        """Records a request to stop, if there was one: the run is stopped, unless a rank failed
        before. Raises OSError.
        """
        if not self._stop or self._is_recorded:
            return
        attempts.record(
            self._attempt,
            rank=self._task,
            host=socket.gethostname(),
            kind=Kind.stopped,
            error=self._stop,
            exit_status=EXIT_REQUEUE,
            moment=self._stopped_at,
            name="stop",
        )
        if self._task == 0:
            attempts.write_status(
                self._attempt, "preempted", 0, reason=self._stop, kind=Kind.stopped
            )
        self._is_recorded = True

    def _run(self) -> None:
        while not self.fenced:
            with contextlib.suppress(OSError):
                self._look()
                self.seen_at = self.clock()
            self._changed.wait(in_use.HEARTBEAT_S)
            self._changed.clear()

    def _look(self) -> None:
        self._attempt.folder.stat()  # raises OSError without a view of the run directory
        self.note = stop_note.read(self._attempt)
        try:
            attempts.check_owner(self._attempt)
            if (self._attempt.folder / "ended.json").exists():
                raise MachineError("the job script has ended this attempt")
            self.record_stop()
        except MachineError as error:
            self.fenced = str(error)
        report = positions.file_of(self._attempt)
        self.hangs = self.hangs or (report.exists() and report.stat().st_size > 0)
        if self._task == 0:
            attempts.heartbeat(self._attempt)
