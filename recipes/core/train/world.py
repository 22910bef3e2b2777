"""This rank among all ranks: what they exchange through their store, and how each reports its
progress.
"""

import contextlib
import datetime
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recipes.core.config.run_keys import TrainKeys
from recipes.core.errors import InputError, MachineError, Stopped, one_line, shown
from recipes.core.place.keepalive import NodeLinks
from recipes.core.place.ranks import RankInfo
from recipes.core.run import watchdog
from recipes.core.run.watchdog import Pulse, RunningClock
from recipes.core.train import sharding

T = TypeVar("T")

POLL_S = 0.2
SEEN_S = 60.0  # maximum wait until another node sees a file that rank 0 has written or chosen
PULSE_S = 1.0  # between two reports of a rank's progress
BEHIND_S = 2.5 * PULSE_S  # between the two questions of `behind`
# torch's timeouts also count the time in which a job is suspended. Therefore this one is too long
# to expire, and `RunningClock` measures timeout_s. A longer one overflows: torch passes
# milliseconds to poll(2) as an int.
TORCH_TIMEOUT = datetime.timedelta(days=7)
# maximum wait for a thread that uses a store or a process group that has lost a rank
TEARDOWN_S = 10.0
LONGEST = 2000  # characters of a line that another rank has sent
MOST_SHAPES = 64  # beyond torch's own limit, 8, the model would run uncompiled
READERS_S = 5.0  # rank 0 waits this long until the other ranks have read why the run ends


class DataPlace(NamedTuple):
    """A rank's place among the ranks that see different samples."""

    rank: int
    size: int


@dataclass(frozen=True)
class World:
    """This rank among all ranks.

    hosts: host name of each rank, by rank. store: the key-value store through which the ranks met.
    pulse: this rank's progress. links: which nodes are lost.
    """

    ranks: RankInfo
    device: torch.device
    backend: str
    hosts: tuple[str, ...]
    store: dist.Store
    timeout_s: float = 600.0
    pulse: Pulse = field(default_factory=Pulse)
    links: NodeLinks = field(default_factory=NodeLinks)
    # ends `telling_pulses`
    silent: threading.Event = field(default_factory=threading.Event)

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.world_size

    @property
    def data(self) -> DataPlace:
        """This rank's place among the ranks that see different samples. These are all ranks, as
        each has a whole sample for its model.
        """
        return DataPlace(self.rank, self.size)

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    @property
    def clock(self) -> RunningClock:
        return self.pulse.clock

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Applies ``timeout_s`` to collectives outside the step loop. torch's own timeout never
        expires.
        """
        _, _, phase = self.pulse.read()
        if phase == watchdog.OUTSIDE:
            self.pulse.beat(watchdog.WAITING)
        try:
            yield
        finally:
            if phase == watchdog.OUTSIDE:
                self.pulse.beat(phase)

    def sum(self, values: Tensor) -> Tensor:
        """Sums ``values`` over all ranks, in place. A collective: every rank must call it."""
        with self.meeting():
            dist.all_reduce(values)
        return values

    def gather(self, content: bytes) -> list[bytes]:
        """The ``content`` of each rank, by rank, on every rank. A collective: every rank must call
        it.

        torch's own all_gather_object would execute code that another process in the place of a rank
        has sent.
        """
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)
        sizes = torch.zeros(self.size, 1, dtype=torch.int64, device=self.device)
        with self.meeting():
            dist.all_gather(list(sizes), sizes.new_tensor([len(mine)]))
            padded = nn.functional.pad(mine, (0, int(sizes.max()) - len(mine)))
            parts = padded.repeat(self.size, 1)
            dist.all_gather(list(parts), padded)
        rows = parts.cpu().numpy()
        return [row[:size].tobytes() for row, size in zip(rows, sizes.flatten(), strict=True)]

    def from_rank_0(self, name: str, work: Callable[[], T]) -> T:
        """Calls ``work`` on rank 0 and returns its result, a value that JSON can hold, on every
        rank. Every rank must call it.

        Another user may write to the store. So the result must not name a file or code: each rank
        knows these by its own keys. If ``work`` raises InputError or MachineError, every rank
        raises it. ``name`` must be unique in a run. Raises DistStoreError after ``timeout_s``.
        """
        if self.rank == 0:
            try:
                self.store.set(f"{name}/result", json.dumps(work()))
            except (InputError, MachineError) as error:
                raise self._error_of_all(name, error) from None
        end = self.clock.now() + self.timeout_s
        pause_s = 0.01
        # Not wait(), since torch logs a warning for each that times out.
        while not self.store.check([f"{name}/result"]):
            if self.store.check([f"{name}/error"]):
                raise self._error_of_all(name, MachineError())
            if self.clock.now() > end:
                late = f"timed out after {self.timeout_s:g} s waiting for {name} from rank 0"
                raise dist.DistStoreError(late)
            time.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)
        text = self.store.get(f"{name}/result").decode(errors="replace")
        try:
            return cast(T, json.loads(text))
        except (ValueError, RecursionError):
            fix = "another program uses rank 0's port: set another MASTER_PORT"
            raise MachineError(f"rank 0 sent {shown(text)}: {fix}") from None

    def await_seen(self, path: Path, problem: str) -> None:
        """Waits until this node sees the file that rank 0 has written: a network file system can
        show it, or its folder, later on some nodes.

        Raises MachineError with ``problem`` after `SEEN_S`, or half of ``timeout_s`` if that is
        less.
        """
        end = self.clock.now() + min(SEEN_S, self.timeout_s / 2)
        while not path.exists():
            if self.clock.now() > end:
                raise MachineError(problem)
            for folder in path.parents[:2]:
                with contextlib.suppress(OSError):
                    os.listdir(folder)  # makes NFS refresh its cache
            time.sleep(0.1)

    def together(self, name: str, work: Callable[[Callable[[object], None]], T]) -> T:
        """Calls ``work`` and returns its result when every rank has completed its own call. Every
        rank must call it.

        It is for work that may take longer than ``timeout_s``. ``work`` gets a function, which it
        calls with any value that changes as it progresses. If ``work`` raises InputError,
        MachineError or Stopped on a rank, all ranks raise it. If it raises another error, the other
        ranks raise MachineError. If no rank makes progress for ``timeout_s``, all ranks raise
        MachineError. The line names the host. ``name`` must be unique in a run.
        """
        seen: object = None

        def tell(progress: object) -> None:
            nonlocal seen
            self.pulse.beat(watchdog.START)
            if progress != seen:
                seen = progress
                self.store.add(f"{name}/progress", 1)

        self.pulse.beat(watchdog.START)
        try:
            result = work(tell)
        except Stopped as error:
            raise self._error_of_all(name, error) from None
        except (InputError, MachineError) as error:
            raise self._error_of_all(name, type(error)(f"{self.host}: {error}")) from None
        except Exception as error:
            self._error_of_all(name, MachineError(f"{self.host}: {one_line(error)}"))
            raise
        self.store.set(f"{name}/{self.rank}", "done")
        self.store.add(f"{name}/done", 1)
        self._await_all(name)
        self.pulse.beat(watchdog.OUTSIDE)
        return result

    def _error_of_all(self, name: str, error: Exception) -> Exception:
        """Makes all ranks raise ``error``, or the error that another rank has published before.
        Returns it.
        """
        kinds: dict[str, type[Exception]] = {"Stopped": Stopped, "InputError": InputError}
        names = [kind for kind in kinds if isinstance(error, kinds[kind])]
        mine = f"{names[0] if names else 'MachineError'} {error}"
        first = self.store.compare_set(f"{name}/error", "", mine).decode(errors="replace")
        # Rank 0 waits until the other ranks have read it, since the store ends with rank 0.
        read = self.store.add(f"{name}/read", 1)
        end = time.monotonic() + READERS_S
        while self.rank == 0 and read < self.size and time.monotonic() < end:
            time.sleep(0.02)
            read = self.store.add(f"{name}/read", 0)
        if first == mine:
            return error
        kind, _, text = first.partition(" ")
        return kinds.get(kind, MachineError)(shown(text, LONGEST))

    def _await_all(self, name: str) -> None:
        """Waits until all ranks have done their work. Raises the error of a rank, or MachineError
        if no rank makes progress.
        """
        counted = (0, 0)
        since = self.clock.now()
        while True:
            if self.store.check([f"{name}/error"]):
                raise self._error_of_all(name, MachineError())
            before = counted
            counted = (self.store.add(f"{name}/progress", 0), self.store.add(f"{name}/done", 0))
            if counted[1] == self.size:
                return
            if counted != before:
                since = self.clock.now()
                self.pulse.beat(watchdog.START)
            elif self.clock.now() - since > self.timeout_s:
                missing = [n for n in range(self.size) if not self.store.check([f"{name}/{n}"])]
                if missing:  # else the last one has just ended
                    late = f"rank {missing[0]} made no progress with {name}"
                    limit = f"in {self.timeout_s:g} s (timeout_s)"
                    error = MachineError(f"{self.hosts[missing[0]]}: {late} {limit}")
                    raise self._error_of_all(name, error)
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def telling_pulses(self) -> Iterator[None]:
        """While entered, a thread reports this rank's progress to the store every `PULSE_S`
        seconds, for `behind`.
        """

        def tell() -> None:
            # rank 0 has ended, and the store with it
            with contextlib.suppress(dist.DistError):
                for words in itertools.count():
                    _, step, phase = self.pulse.read()
                    self.store.set(f"pulse/{self.rank}", f"{words} {step} {phase}")
                    if self.silent.wait(PULSE_S):
                        return

        teller = threading.Thread(target=tell, name="pulse", daemon=True)
        teller.start()
        try:
            yield
        finally:
            self.silent.set()
            teller.join(TEARDOWN_S)

    def behind(self) -> dict[str, Any] | None:
        """Another rank that no longer reports, otherwise the rank that is furthest behind: its
        rank, host and place.

        None if there is no such rank. It takes `BEHIND_S`, at most `1.5 * PULSE_S` longer. A rank
        calls it when it has waited long for the others.
        """
        answers: list[list[list[int]]] = []

        def ask() -> None:
            names = [f"pulse/{rank}" for rank in range(self.size)]
            with contextlib.suppress(dist.DistError):
                for wait_s in (0.0, BEHIND_S):
                    time.sleep(wait_s)
                    pulses = self.store.multi_get(names)
                    answers.append([list(map(int, text.split())) for text in pulses])

        # The store ends with rank 0, and then may not answer.
        asking = threading.Thread(target=ask, name="behind", daemon=True)
        asking.start()
        asking.join(BEHIND_S + 1.5 * PULSE_S)
        if len(answers) < 2:
            unknown = {"rank": 0, "host": self.hosts[0], "at": "an unknown step"}
            return unknown if self.rank else None

        before, now = answers
        _, step, phase = self.pulse.read()
        others = [rank for rank in range(self.size) if rank != self.rank]
        silent = [rank for rank in others if before[rank][0] == now[rank][0]]
        late = silent or [rank for rank in others if now[rank][1:] < [step, phase]]
        if not late:
            return None
        rank = min(late, key=lambda rank: now[rank][1:])
        _, step, phase = now[rank]
        return {"rank": rank, "host": self.hosts[rank], "at": watchdog.place(step, phase)}

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copies rank 0's floating-point buffers, such as batch normalisation's averages, to every
        rank. A collective.
        """
        with self.meeting():
            for buffer in model.buffers():
                if self.size > 1 and buffer.is_floating_point():
                    dist.broadcast(buffer, 0)

    def parallel(
        self, model: nn.Module, cfg: TrainKeys | None = None, half: torch.dtype | None = None
    ) -> nn.Module:
        """``model`` in DistributedDataParallel, which averages gradients over the ranks; with
        strategy=fsdp, ``model`` itself, divided.

        With one rank, ``model`` is neither wrapped nor divided. compile=true compiles it first. The
        result is on this rank's device, with the values of rank 0: on the others, tensors may be on
        the meta device. half: as for `sharding.divide`. Call it before the optimiser is made. A
        collective: every rank must call it.
        """
        is_divided = cfg is not None and cfg.strategy == "fsdp" and self.size > 1
        if not is_divided:
            sharding.materialize(model, self.device)
            model.to(self.device)
        if cfg and cfg.compile:
            # One graph for each shape of images, not one for all: it is faster, and progressive
            # sizes have few shapes.
            torch._dynamo.config.recompile_limit = MOST_SHAPES
            if cfg.strategy == "fsdp":
                model.compile(dynamic=False)  # in place: fully_shard needs the model itself
            else:
                model = cast(nn.Module, torch.compile(model, dynamic=False))
        if self.size == 1:
            return model
        with self.meeting():  # DDP's constructor compares the ranks' parameters
            if cfg and is_divided:
                sharding.divide(model, self.device, self.size, cfg.shard_size, half)
            else:
                parallel = DistributedDataParallel(
                    model,
                    [self.device] if self.device.type == "cuda" else None,
                    gradient_as_bucket_view=True,
                    process_group=_group_of_gradients(),
                )
                # in each forward pass, as the constructor has done
                parallel.broadcast_buffers = _needs_buffers(model)
                model = parallel
        # A forward pass begins with a collective. Ranks that wait there count as ahead of ranks
        # that have not arrived.
        model.register_forward_pre_hook(
            lambda *inputs: self.pulse.beat(watchdog.FORWARD) if model.training else None
        )
        return model


def _needs_buffers(model: nn.Module) -> bool:
    """Whether a forward pass needs rank 0's buffers. Those of batch normalisation matter to an
    evaluation only: see `scores.evaluation`.
    """
    needed = set(model.buffers())
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            needed -= set(module.buffers())
    return bool(needed)


def _group_of_gradients() -> dist.ProcessGroup | None:
    """None, the default group. In debug mode (DETAIL), a group without checks: DDP crashes on one
    with checks (torch 2.15, gloo: SIGSEGV).
    """
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return None
    dist.set_debug_level(dist.DebugLevel.OFF)
    group = dist.new_group(timeout=TORCH_TIMEOUT)
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    return cast(dist.ProcessGroup, group)
