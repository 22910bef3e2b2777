"""What a recipe's ``main`` gets: this rank's part of one attempt of a run."""

import threading
import time
from collections.abc import Mapping
from dataclasses import InitVar, asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
import yaml
from torch.nn.parallel import DistributedDataParallel

from recipes.core import files
from recipes.core.config.parser import Settings
from recipes.core.config.run_keys import RunKeys, TrainKeys
from recipes.core.data.sampling import Part, Source
from recipes.core.errors import RunError
from recipes.core.run import attempt as attempts, dryrun, signals, source
from recipes.core.train import agreement, checkpoint, console, metrics, resume, saving
from recipes.core.train.world import World

Results = Mapping[str, Any]  # what an evaluation, or a recipe's main, returns
STORE_EVERY_S = 1.0  # between two readings of the store by `Run.stop_is_near`


@dataclass
class Run:
    """What a recipe's main gets. stopping: why the ranks have agreed to stop, "" if they have not;
    only the step loop sets it.
    """

    settings: Settings
    world: World
    attempt: attempts.Attempt
    stop: signals.StopFlag
    terminal: InitVar[TextIO | None]
    rows: metrics.Rows | None = None  # on rank 0 only; set when the run starts
    was_done: bool = False
    dry_run: dryrun.Request | None = None  # set if `launch.py check` started this process
    activation_bytes: int | None = None  # of a step on a rank; a recipe may set it in a dry run
    is_running: bool = False
    stopping: str = ""
    # of the last evaluation; set by loop.steps
    results: Results = field(default_factory=dict)
    cut_short: bool = False  # whether stop_is_near() has returned True; each evaluation resets it
    complete: bool = False  # whether the loop over loop.steps has reached its end
    samples: int = 0  # trained in this attempt
    train_s: float = 0.0
    _store_asked_at: float = 0.0
    commit: str | None = None  # git commit of the code, on rank 0

    def __post_init__(self, terminal: TextIO | None) -> None:
        self.console = console.Console(self.world, terminal)
        self.opened_at = time.monotonic()
        self.failing = threading.Lock()  # held to record why this rank ends
        self.say = self.console.say
        self.warn = self.console.warn
        cfg = self.settings.config
        is_divided = isinstance(cfg, TrainKeys) and cfg.strategy == "fsdp"
        shared_by = (cfg.shard_size or self.ranks) if is_divided else 1
        self.checkpoints = saving.Checkpoints(
            self.settings, self.world, self.attempt, self.console, shared_by
        )

    @property
    def dir(self) -> Path:
        """The run directory."""
        return self.attempt.run_dir

    @property
    def keys(self) -> RunKeys:
        return self.settings.run

    @property
    def state(self) -> checkpoint.State:
        """None until `resume` has set it."""
        return self.checkpoints.state

    @property
    def step(self) -> int:
        """Completed optimiser steps."""
        return self.state.step if self.state else 0

    @property
    def ranks(self) -> int:
        """Number of ranks that see different samples. Under `launch.py check`, which runs as one
        process, the number of ranks of the job.
        """
        return self.dry_run.ranks if self.dry_run else self.world.data.size

    def close_rows(self) -> None:
        if self.rows:
            self.rows.close()

    def will_resume(self) -> bool:
        """Whether `resume` will load a checkpoint, which replaces all weights: those to start from
        are then not needed, and may no longer exist. Called by all ranks.
        """

        def is_chosen() -> bool:
            is_named = self.keys.resume not in ("auto", "never")
            return is_named or bool(checkpoint.candidates(self.checkpoints.folder))

        return self.world.from_rank_0("resumes", is_chosen)

    def resume(self, state: checkpoint.State, batches: Source[Part]) -> None:
        """Starts the run with ``state``, after loading the checkpoint that ``resume=`` selects, if
        there is one.

        From here on, each rank draws other random numbers from torch, for dropout; a checkpoint
        restores those of each rank. batches: a checkpoint keeps the values that determine their
        order. Called by all ranks. Raises InputError if the checkpoint is of another run or cannot
        be read. Then the status of the run directory does not change.
        """
        if self.is_running:
            raise RunError(
                "run.resume(): called twice: call it once, before the loop over loop.steps()"
            )
        if isinstance(state.model, DistributedDataParallel):
            raise RunError(
                "State(): give it the network itself, not the result of world.parallel()"
            )
        self.checkpoints.take(state, batches.order)
        seed = self.settings.config.seed * 1_000_003 + self.world.rank + 1
        torch.manual_seed(seed % 2**63)
        resume.compare_keys(self.world, self.settings, batches.order)
        began = time.monotonic()
        resume.load_chosen(self.checkpoints)
        self._start(time.monotonic() - began)

    def start(self) -> None:
        """Starts a run that saves and resumes nothing. Called by all ranks, not with `resume`."""
        resume.compare_keys(self.world, self.settings, {})
        self.end_dry_run()
        self._start()

    def end_dry_run(self) -> None:
        """If `launch.py check` started this process, writes what it found and raises DryRunEnd,
        which ends it.
        """
        if not self.dry_run:
            return
        evaluates = self.settings.config.evaluate
        facts: dict[str, Any] = {"resumed_from_step": self.checkpoints.resumed_from_step}
        if self.state:
            parameters = list(self.state.model.parameters())
            facts |= {"parameters": sum(p.numel() for p in parameters), "evaluates": evaluates}
        if self.state and not evaluates:
            size = checkpoint.size_in_training(self.state)
            gradients = checkpoint.size_of([p for p in parameters if p.requires_grad])
            facts |= {
                "samples": self.checkpoints.order.get("num_samples"),
                "checkpoint_bytes": size,
                "rank_bytes": (size + gradients) // self.checkpoints.shared_by,
                "activation_bytes": self.activation_bytes,
            }
        files.write_json(Path(self.dry_run.file), asdict(dryrun.Found(**facts)))
        raise dryrun.DryRunEnd

    def _start(self, load_s: float = 0.0) -> None:
        if self.world.rank == 0:
            self.commit = source.commit(files.ROOT)
            diff = source.difference(files.ROOT)
            path = self.checkpoints.resumed_from
            is_own = path is not None and path.parent == self.checkpoints.target
            attempts.begin(self.attempt, self.step, is_own, load_s=load_s)
            # From here on, this attempt owns the run; before, another one may write these files.
            trains = not self.settings.config.evaluate
            if path and is_own and trains and self.keys.resume != "auto":
                # the run may have been resumed from an earlier step
                checkpoint.point_back(path, self.state.meta["best"], self.attempt.staging)
            files.remove_temporary(self.checkpoints.target)
            if trains:
                text = yaml.safe_dump(self.settings.saved, sort_keys=False, allow_unicode=True)
                files.write_bytes(self.dir / "config.yaml", text.encode())
            (self.dir / source.DIFF).unlink(missing_ok=True)
            for folder in (self.dir, self.attempt.folder) if diff else ():
                files.write_bytes(folder / source.DIFF, diff)
            self.rows = metrics.Rows(self.dir / "metrics.jsonl")
            attempts.write_status(self.attempt, "running", self.step)
        self.is_running = True

    def stop_is_near(self, at_once: bool = False) -> bool:
        """Whether this rank or another rank was notified to stop. For a long loop between two
        steps, which can then end early.

        It may be called at any time, on any rank: it contains no collective. The answer can differ
        between ranks for about a second, since it reads the store at most once per `STORE_EVERY_S`,
        unless ``at_once``.
        """
        if self.stop:
            self.world.store.compare_set(agreement.STOP, "", self.stop.reason)
        elif not at_once and time.monotonic() - self._store_asked_at < STORE_EVERY_S:
            return False
        self._store_asked_at = time.monotonic()
        self.cut_short = self.world.store.check([agreement.STOP])
        return self.cut_short

    def agree_to_stop(self) -> str:
        """Why all ranks must stop now; "" if they continue. The same on all ranks. A collective:
        every rank must call it.
        """
        with self.world.meeting():
            _, reason, _, _ = agreement.Agreement(self.world, self.stop).read()
        return reason
