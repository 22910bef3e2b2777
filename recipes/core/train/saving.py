"""The checkpoints of one attempt: which one it resumes from, when the next one is due, and writing
them.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from recipes.core import files
from recipes.core.config.parser import Settings
from recipes.core.errors import InputError, MachineError
from recipes.core.run import attempt as attempts, directory, source, trackers, watchdog
from recipes.core.train import checkpoint, device, sharding
from recipes.core.train.console import Console
from recipes.core.train.world import World

ROWS_S = 0.05  # between two questions whether other ranks have written their rows of a checkpoint
ID_BYTES = 8  # of the random ID of a checkpoint


@dataclass
class Checkpoints:
    """The checkpoints of one attempt.

    shared_by: number of ranks that share a copy of the model. The ranks of the first copy have a
    ``saver``, which writes into ``target``. folder: where ``resume=`` looks. order: the values that
    determine the order of samples; each checkpoint keeps them.
    """

    settings: Settings
    world: World
    attempt: attempts.Attempt
    console: Console
    shared_by: int
    saver: checkpoint.Saver | None = None
    # set by take()
    state: checkpoint.State = None  # type: ignore[assignment]
    order: Mapping[str, Any] = field(default_factory=dict)
    # set by resume.load()
    resumed_from: Path | None = None
    resumed_from_step: int | None = None

    def __post_init__(self) -> None:
        self._saved_at = self.world.clock.now()
        run_dir = self.attempt.run_dir
        self.target = run_dir / "checkpoints"
        # folder that resume= uses; for an evaluation of a run, that of the run
        trained = self.settings.config.evaluate and run_dir.name == directory.EVALUATION
        self.folder = run_dir.parent / "checkpoints" if trained else self.target
        rank = self.world.rank
        if rank < self.shared_by:
            keys = self.settings.run
            self.saver = checkpoint.Saver(
                self.target,
                self.attempt.staging,
                self._saved,
                keys.keep_checkpoints,
                keys.keep_every_steps,
                number=rank,
                count=self.shared_by,
                wrote=lambda name: self.world.store.set(name, ""),
                await_rows=self._await_rows,
            )

    def take(self, state: checkpoint.State, order: Mapping[str, Any]) -> None:
        """Takes what each checkpoint contains: ``state``, and the values that determine the order
        of samples.
        """
        self.state = state
        self.order = order
        state.meta = {
            "recipe": self.settings.recipe,
            "config": plain(self.settings),
            "world_size": self.world.size,
            "torch": str(torch.__version__),
            "cpu_threads": torch.get_num_threads(),
            "device": device.device_name(self.world.device),
            "about": dict(state.about),
            # rank 0 saves and compares it
            "code": {} if self.world.rank else source.loaded(files.ROOT),
            "best": None,  # best evaluation so far: best_metric's value, and its step
            # the row of an epoch's last step if a stop has postponed its evaluation
            "unevaluated": None,
        }

    def is_due(self) -> bool:
        """Whether rank 0 requests a checkpoint by checkpoint_every_s=. It requests each one once;
        all ranks save it up to a step later.
        """
        now = self.world.clock.now()
        every_s = self.settings.run.checkpoint_every_s
        due = self.world.rank == 0 and 0 < every_s <= now - self._saved_at
        if due:
            self._saved_at = now
        return due

    def save(self, *, best: bool = False, wait: bool = False) -> None:
        """Starts to write a checkpoint of ``state``. The training continues meanwhile, unless
        ``wait``. Called by all ranks.

        best: point ``checkpoints/best`` to it. Raises MachineError on rank 0 if this checkpoint or
        the previous one cannot be written.
        """
        self._saved_at = self.world.clock.now()
        self.world.pulse.beat(watchdog.WAITING)
        gathered = self.world.gather(os.urandom(ID_BYTES) + checkpoint.rng_state(self.world.device))
        checkpoint_id = gathered[0][:ID_BYTES].hex()
        self.world.pulse.beat(watchdog.SAVING)
        sharding.reshard(self.state.model)
        if self.saver:
            rng = [part[ID_BYTES:] for part in gathered]
            content = checkpoint.content_of(self.state, self.order, rng)
            self.saver.save(content, best, checkpoint_id)
            if wait:
                self.saver.wait()
        if wait:
            self.world.pulse.beat(watchdog.WAITING)
            torch.distributed.barrier()

    def _saved(self, path: Path, step: int) -> None:
        attempts.write_status(self.attempt, "running", step)
        self.export()
        self.console.say(f"checkpoint {path}")

    def export(self) -> None:
        """tensorboard=true: adds the rows up to the newest checkpoint to TensorBoard's events. A
        failure is a warning.
        """
        if getattr(self.settings.config, "tensorboard", False):
            run_dir = self.attempt.run_dir
            try:
                with files.locked(run_dir / trackers.LOCK):
                    trackers.export(run_dir, "tensorboard", "")
            except (InputError, MachineError, OSError) as error:
                self.console.warn(f"tensorboard=true: {error}")

    def _await_rows(self, names: Sequence[str]) -> None:
        """Waits until the other ranks that share the model have written their rows, to files with
        these names. Called in the thread of rank 0's saver.
        """
        timeout_s = self.settings.run.timeout_s
        end = self.world.clock.now() + timeout_s
        for rank, name in enumerate(names, 1):
            while not self.world.store.check([name]):
                if self.world.clock.now() > end:
                    host = self.world.hosts[rank]
                    raise MachineError(
                        f"rank {rank} on {host} has not written its part of a checkpoint, {name}, "
                        f"within {timeout_s:g} s (timeout_s)"
                    )
                time.sleep(ROWS_S)


def plain(settings: Settings) -> dict[str, Any]:
    """The recipe's keys in the form that a checkpoint holds: texts, numbers and booleans."""
    return {field.name: settings.saved[field.name] for field in fields(settings.config)}
