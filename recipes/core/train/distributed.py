"""The device of this rank and the process group of all ranks. The default backend is NCCL on GPUs and gloo on CPUs."""

import contextlib
import datetime
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recipes.core import errors
from recipes.core.config.run_keys import Backend, Device
from recipes.core.errors import InputError, Kind, MachineError, NodeError, Stopped
from recipes.core.place import gpus
from recipes.core.place.ranks import RankInfo
from recipes.core.run import entry, watchdog
from recipes.core.run.entry import Start
from recipes.core.run.watchdog import Pulse, RunningClock

T = TypeVar("T")

POLL_S = 0.2
STOPPED = "stopped by "
PULSE_S = 1.0  # between two reports of a rank's progress
EARLIER_S, SHARE_EARLIER = 10.0, 0.75
# torch's timeouts also count the time in which a job is suspended. Therefore this one is too long to expire, and `RunningClock`
# measures timeout_s. A longer one overflows: torch passes milliseconds to poll(2) as an int.
TORCH_TIMEOUT = datetime.timedelta(days=7)
WAIT = datetime.timedelta(seconds=1.0)  # between two readings of the clock
TEARDOWN_S = 10.0  # the teardown of a process group that has lost a rank may never return
READERS_S = 5.0  # rank 0 waits this long until the other ranks have read why the run ends


@dataclass(frozen=True)
class World:
    """This rank among all ranks.

    hosts: host name of each rank, by rank. store: the key-value store through which the ranks met. pulse: this rank's progress.
    """

    ranks: RankInfo
    device: torch.device
    backend: str
    hosts: tuple[str, ...]
    store: torch.distributed.Store
    timeout_s: float = 600.0
    pulse: Pulse = field(default_factory=Pulse, repr=False, compare=False)
    silent: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)  # ends `telling_pulses`

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.world_size

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    @property
    def clock(self) -> RunningClock:
        return self.pulse.clock

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Applies ``timeout_s`` to collectives outside the step loop. torch's own timeout never expires."""
        _, _, phase = self.pulse.read()
        if phase in watchdog.NOT_WATCHED:
            self.pulse.beat(watchdog.MEETING)
        try:
            yield
        finally:
            if phase in watchdog.NOT_WATCHED:
                self.pulse.beat(phase)

    def read(self, names: list[str]) -> list[str]:
        """Waits until the store has all of these names, and returns their texts. Raises DistStoreError after ``timeout_s``."""
        _await_keys(self.store, names, self.clock, self.timeout_s)
        return [text.decode() for text in self.store.multi_get(names)]

    def sum(self, values: Tensor) -> Tensor:
        """Sums ``values`` over all ranks, in place. A collective: every rank must call it."""
        with self.meeting():
            torch.distributed.all_reduce(values)
        return values

    def broadcast_text(self, name: str, text: str = "") -> str:
        """Returns rank 0's ``text`` on every rank. Every rank must call it. ``name`` must be unique in a run."""
        if self.rank == 0:
            self.store.set(f"text/{name}", text)
        [text] = self.read([f"text/{name}"])
        self.store.add(f"read/{name}", 1)
        return text

    def await_readers(self, name: str) -> None:
        """Rank 0 waits, at most `READERS_S`, until all ranks have read what it broadcast as ``name``.

        Required before rank 0 exits: the store ends with it. On the other ranks it returns at once.
        """
        end = time.monotonic() + READERS_S
        while self.rank == 0 and self.store.add(f"read/{name}", 0) < self.size and time.monotonic() < end:
            time.sleep(0.02)

    def together(self, name: str, work: Callable[[Callable[[object], None]], T]) -> T:
        """Calls ``work`` and returns its result when every rank has completed its own call. Every rank must call it.

        It is for work that may take longer than ``timeout_s``. ``work`` gets a function, which it calls with any value that changes as
        it progresses. If ``work`` fails on a rank, that rank raises the same type of error and the other ranks raise MachineError. If no
        rank makes progress for ``timeout_s``, all ranks raise MachineError. The line names the host. ``name`` must be unique in a run.
        """
        # Only rank 0 reads the keys of all ranks. It publishes the result under `news`.
        mine, news = f"{name}/{self.rank}", f"{name}/news"
        keys = [mine, news] if self.rank == 0 else [mine]

        def tell(progress: object) -> None:
            self.pulse.beat(watchdog.START)
            for key in keys:
                self.store.set(key, f"at {progress}")

        tell("its begin")
        try:
            result = work(tell)
        except Exception as error:
            known = isinstance(error, (InputError, MachineError))
            text = f"{self.host}: {error if known else errors.one_line(error)}"
            if isinstance(error, Stopped):
                text = f"{STOPPED}{error}"
            for key in keys:
                self.store.set(key, f"failed {text}")
            self._let_others_read()
            if known:
                raise type(error)(text) from None
            raise
        self.store.set(mine, "done")
        if self.rank == 0:
            self.store.set(news, self._all_done(name))
        self._await_news(name)
        self.pulse.beat(watchdog.UNWATCHED)
        return result

    def _let_others_read(self) -> None:
        """The store ends with rank 0. Therefore rank 0 waits a second, so that the other ranks can read it."""
        if self.rank == 0:
            time.sleep(5 * POLL_S)

    def _all_done(self, name: str) -> str:
        """For rank 0: waits for the work of all ranks and returns "done" or "failed REASON". Publishes their progress meanwhile."""
        names = [f"{name}/{rank}" for rank in range(self.size)]
        _await_keys(self.store, names, self.clock, self.timeout_s)
        seen, since, changes = [b""], self.clock.now(), 0
        while any(state != b"done" for state in seen):
            states = self.store.multi_get(names)
            if failed := [state.decode() for state in states if state.startswith(b"failed ")]:
                return failed[0]
            if states != seen:
                seen, since, changes = states, self.clock.now(), changes + 1
                self.store.set(f"{name}/news", f"waiting {changes}")
                self.pulse.beat(watchdog.START)
            elif self.clock.now() - since > self.timeout_s:
                rank = next(rank for rank, state in enumerate(states) if state != b"done")
                return f"failed {self.hosts[rank]}: rank {rank} got no further with {name} in {self.timeout_s:g} s (timeout_s)"
            time.sleep(POLL_S)
        return "done"

    def _await_news(self, name: str) -> None:
        """Waits until rank 0 reports that all ranks have done their work.

        Raises MachineError if the work failed or rank 0 makes no progress; raises Stopped if a rank was stopped.
        """
        news, seen, since = "", "", self.clock.now()
        while news != "done":
            [news] = self.read([f"{name}/news"])
            if news.startswith("failed "):
                self._let_others_read()
                text = news.removeprefix("failed ")
                raise Stopped(text.removeprefix(STOPPED)) if text.startswith(STOPPED) else MachineError(text)
            if news != seen:
                seen, since = news, self.clock.now()
                self.pulse.beat(watchdog.START)
            elif self.clock.now() - since > self.timeout_s + 5:  # rank 0 notices first, and knows which rank it is
                raise MachineError(
                    f"{self.hosts[0]}: rank 0 got no further with {name} in {self.timeout_s:g} s (timeout_s)"
                )
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def telling_pulses(self) -> Iterator[None]:
        """While entered, a thread reports this rank's progress to the store every `PULSE_S` seconds, for `behind`."""

        def tell() -> None:
            words = 0
            while not self.silent.is_set():
                _, step, phase = self.pulse.read()
                try:
                    self.store.set(f"pulse/{self.rank}", f"{words} {step} {phase}")
                except torch.distributed.DistError:
                    return  # rank 0 has ended, and the store with it
                words += 1
                self.silent.wait(PULSE_S)

        teller = threading.Thread(target=tell, name="pulse", daemon=True)
        if self.size > 1:
            teller.start()
        try:
            yield
        finally:
            self.silent.set()
            if teller.ident:
                teller.join(TEARDOWN_S)

    def behind(self) -> dict[str, Any] | None:
        """Another rank that no longer reports, otherwise the rank that is furthest behind: its rank, host and place.

        None if there is no such rank. It takes up to about five seconds. A rank calls it when it timed out waiting for the others.
        """
        answers: list[list[list[int]]] = []

        def ask() -> None:
            names = [f"pulse/{rank}" for rank in range(self.size)]
            with contextlib.suppress(torch.distributed.DistError):
                for wait_s in (0.0, 2.5 * PULSE_S):
                    time.sleep(wait_s)
                    answers.append([[int(n) for n in text.decode().split()] for text in self.store.multi_get(names)])

        # The store ends with rank 0, and then may not answer.
        asking = threading.Thread(target=ask, name="behind", daemon=True)
        asking.start()
        asking.join(4 * PULSE_S)
        if len(answers) < 2:
            return (
                {"rank": 0, "host": self.hosts[0], "at": "a step that it does not tell any more"} if self.rank else None
            )
        before, now = answers
        _, step, phase = self.pulse.read()
        silent = [rank for rank in range(self.size) if before[rank][0] == now[rank][0] and rank != self.rank]
        slow = [rank for rank in range(self.size) if tuple(now[rank][1:]) < (step, phase)]
        if not silent and not slow:
            return None
        rank = min(silent or slow, key=lambda rank: now[rank][1:])
        return {"rank": rank, "host": self.hosts[rank], "at": watchdog.place(*now[rank][1:])}

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copies rank 0's floating-point buffers of ``model``, such as the averages of batch normalisation, to every rank.

        A collective: every rank must call it.
        """
        buffers = [b for b in model.buffers() if b.is_floating_point()]
        if self.size == 1 or not buffers:
            return
        flat = torch.cat([b.flatten() for b in buffers])
        with self.meeting():
            torch.distributed.broadcast(flat, 0)
        for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))

    def parallel(self, model: nn.Module, compile: bool = False) -> nn.Module:
        """``model`` in DistributedDataParallel, which averages gradients over the ranks. With one rank, ``model`` is not wrapped.

        compile: compile ``model`` first. A collective: every rank must call it.
        """
        if compile:
            model = cast(nn.Module, torch.compile(model))
        if self.size == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        with self.meeting():  # its constructor compares the ranks' parameters
            parallel = DistributedDataParallel(
                model, device_ids=devices, gradient_as_bucket_view=True, process_group=_group_of_gradients()
            )
        # A forward pass begins with a broadcast of rank 0's buffers, if any. Ranks that wait for it count as ahead of ranks that have not
        # arrived.
        parallel.register_forward_pre_hook(
            lambda *inputs: self.pulse.beat(watchdog.MODEL) if parallel.training else None
        )
        return parallel


def _group_of_gradients() -> torch.distributed.ProcessGroup | None:
    """In debug mode (DETAIL), a group without debug checks, since DDP crashes on a checked group (torch 2.15, gloo: SIGSEGV).

    Otherwise None, which means the default group.
    """
    level = torch.distributed.get_debug_level()
    if level != torch.distributed.DebugLevel.DETAIL:
        return None
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.OFF)
    try:
        return cast(torch.distributed.ProcessGroup, torch.distributed.new_group(timeout=TORCH_TIMEOUT))
    finally:
        torch.distributed.set_debug_level(level)


def resolve_device(device: Device, info: RankInfo, environ: Mapping[str, str], seen: int) -> torch.device:
    """This rank's device. seen: number of GPUs that torch sees.

    There is one rank per GPU: the GPU with the local rank's number, or the only visible one if each rank sees only its own GPU.
    Raises MachineError, with host and counts, if GPUs are missing. Inside a Slurm job ``auto`` never selects the CPU.
    """
    if device is Device.cpu:
        return torch.device("cpu")
    host, on_node = socket.gethostname(), gpus.granted_gpus(environ)
    if few := gpus.shortage(environ, seen):
        raise MachineError(f"{host}: {few}: compare nvidia-smi -L there; sbatch --exclude={host} keeps off that node")
    if seen == 0:
        if info.in_slurm:
            named = gpus.named_gpus(environ)
            mend = f"{named[0]} names none: unset it" if named and on_node else "ask for GPUs (--gpus-per-node=…)"
            raise MachineError(f"{host}: Slurm granted {on_node} GPUs and torch sees 0: {mend}, or give device=cpu")
        if device is Device.cuda:
            raise MachineError(
                f"{host}: device=cuda and torch sees 0 GPUs: give device=cpu, or install a driver and a CUDA build of torch"
            )
        return torch.device("cpu")
    if info.local_world_size <= seen:
        return torch.device("cuda", info.local_rank)
    if seen == 1 and gpus.has_its_own(environ, info.local_world_size):
        return torch.device("cuda", 0)
    mend = "start fewer ranks there, ask for more GPUs, or give device=cpu"
    if seen == 1 and gpus.are_slices(environ):
        mend = "of several MIG slices a process has the first: give each rank its own (--gpus-per-task=1)"
    raise MachineError(f"{host}: {info.local_world_size} ranks and {seen} GPUs: there is one rank per GPU; {mend}")


def choose_backend(wanted: Backend, device: torch.device) -> str:
    """torch's name of the backend. Raises NodeError if this rank's device or this build of torch does not support it."""
    host = socket.gethostname()
    if wanted is Backend.auto:
        return "nccl" if device.type == "cuda" else "gloo"
    if wanted is Backend.nccl and device.type != "cuda":
        raise NodeError(
            f"{host}: backend=nccl: is for GPUs, and torch sees none: leave backend= out, or give backend=gloo"
        )
    if wanted is Backend.mpi and not torch.distributed.is_mpi_available():
        raise NodeError(
            f"{host}: backend=mpi: wants a torch that was built from source with MPI, and this one, as the usual wheels, was "
            "not: leave backend= out"
        )
    return wanted.name


@contextlib.contextmanager
def process_group(start: Start, device: torch.device) -> Iterator[World]:
    """The process group of all ranks. At exit it is destroyed within `TEARDOWN_S`, also if a rank was lost.

    Raises MachineError if the ranks do not meet within ``timeout_s``, if two ranks have the same GPU, or if the backend is not
    supported or not the same on all ranks.
    """
    info, run = start.ranks, start.settings.run
    clock, backend = start.pulse.clock, choose_backend(run.backend, device)
    if device.type == "cuda":
        _take_gpu(device)
    store = _meet(info, run.timeout_s, clock)
    hosts = _exchange_hosts(store, info, device, backend, run.timeout_s, clock)
    alone = f"{hosts[info.rank]}: rank {info.rank} cannot join the other {info.world_size - 1}"
    try:
        with _within(run.timeout_s, clock, lambda: _refuse(start, f"{alone} in {run.timeout_s:g} s (timeout_s)")):
            if backend == "mpi":  # MPI assigns the rank numbers itself
                torch.distributed.init_process_group("mpi")
            else:
                torch.distributed.init_process_group(
                    backend, store=torch.distributed.PrefixStore("group", store), rank=info.rank, world_size=info.world_size,
                    timeout=TORCH_TIMEOUT, device_id=device if backend == "nccl" else None,
                )  # fmt: skip
    except RuntimeError as error:
        raise MachineError(f"{alone} ({peer_words(error)})") from None
    try:
        _want_own_place(info)
        world = World(info, device, backend, hosts, store, run.timeout_s, start.pulse)
        with world.telling_pulses():
            yield world
    finally:
        leaving = threading.Thread(target=torch.distributed.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(TEARDOWN_S)


@contextlib.contextmanager
def _within(timeout_s: float, clock: RunningClock, give_up: Callable[[], object]) -> Iterator[None]:
    """Calls ``give_up``, from a thread, if the block takes longer than ``timeout_s``."""
    over = threading.Event()

    def watch() -> None:
        end = clock.now() + timeout_s
        while not over.wait(POLL_S):
            if clock.now() > end:
                give_up()
                return

    threading.Thread(target=watch, name="within", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _refuse(start: Start, line: str) -> NoReturn:
    """Ends this process as a MachineError would. Works while the main thread is blocked in C++."""
    try:
        print(f"{start.settings.recipe}: {line}", file=sys.stderr, flush=True)
        entry.note_refusal(start.settings, errors.EXIT_MACHINE, line)
        entry.remove_own_folder(start)
    finally:
        os._exit(errors.EXIT_MACHINE)


def _want_own_place(info: RankInfo) -> None:
    """Raises MachineError if the group gave this rank another number than its environment variables, as MPI can."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if (rank, world_size) != (info.rank, info.world_size):
        raise MachineError(
            f"{socket.gethostname()}: backend=mpi: is rank {rank} of {world_size} to MPI, and rank {info.rank} of {info.world_size} by its "
            "variables: start the ranks with mpirun, that of the MPI which torch was built with"
        )


def _take_gpu(device: torch.device) -> None:
    """Selects ``device`` for this process. Raises MachineError if it is broken, or busy in exclusive mode."""
    try:
        torch.cuda.set_device(device)
        torch.cuda.get_device_properties(device)
    except RuntimeError as error:
        host = socket.gethostname()
        raise MachineError(
            f"{host}: {device} cannot be used ({errors.one_line(error)}): look at nvidia-smi there; sbatch --exclude={host} keeps off that node"
        ) from None


def sooner(timeout_s: float) -> float:
    """A shorter timeout, in seconds, for a rank that must report before the other ranks' ``timeout_s`` ends the run."""
    return max(timeout_s - EARLIER_S, SHARE_EARLIER * timeout_s)


class PeerTimeout(RuntimeError):
    """This rank timed out waiting for the other ranks (timeout_s)."""


def peer_kind(error: BaseException) -> Kind | None:
    """Whether this rank lost the connection to another rank or timed out waiting for it. None for its own error.

    torch's errors differ only in their text.
    """
    if not is_peer_error(error):
        return None
    timed_out = any(sign in peer_words(error).lower() for sign in ("timed out", "timeout"))
    return Kind.timeout if timed_out or isinstance(error, PeerTimeout) else Kind.peer_lost


def is_peer_error(error: BaseException) -> bool:
    """Whether another rank caused ``error``, by its end or its absence."""
    if isinstance(error, torch.distributed.DistNetworkError | torch.distributed.DistStoreError | PeerTimeout):
        return True
    signs = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Timed out waiting",
        "Application timeout",
        "Socket Timeout",
        "gloo/transport",
        "ncclRemoteError",
        "remote process exited",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def peer_words(error: BaseException) -> str:
    """The text of a peer error, without gloo's source path and advice."""
    if isinstance(error, PeerTimeout):
        return str(error)
    return re.sub(r"^\w+: \[\S+\] ", "", errors.one_line(error)).partition(". This is typically")[0]


def _await_keys(store: torch.distributed.Store, names: list[str], clock: RunningClock, timeout_s: float) -> None:
    """Waits until the store has these keys. Raises DistStoreError after ``timeout_s``; time in suspension does not count."""
    end = clock.now() + timeout_s
    while True:
        try:
            store.wait(names, WAIT)
            return
        except torch.distributed.DistStoreError:
            if clock.now() > end:
                raise


def _meet(info: RankInfo, timeout_s: float, clock: RunningClock) -> torch.distributed.Store:
    """Connects to the store that all ranks of this attempt share."""
    if info.world_size == 1:
        return torch.distributed.HashStore()
    # torchrun's agent already serves the store at that port, and keeps it for every restart of its ranks.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = os.environ.pop("RECIPES_LISTEN_FD", None)
    where = f"{info.master_addr}:{info.master_port}"
    # A rank that cannot reach rank 0 knows the reason. It reports the reason before rank 0 times out and ends the others.
    patience = datetime.timedelta(seconds=timeout_s if info.rank == 0 else sooner(timeout_s))
    stopped_s = clock.stopped_s
    try:
        store: torch.distributed.Store = torch.distributed.TCPStore(
            info.master_addr, info.master_port, info.world_size, is_master=info.rank == 0 and not served, timeout=patience,
            wait_for_workers=False, master_listen_fd=int(listener) if listener else None,
        )  # fmt: skip
    except (torch.distributed.DistError, RuntimeError) as error:
        clock.now()
        if info.rank and clock.stopped_s > stopped_s:  # the job was suspended meanwhile
            return _meet(info, timeout_s, clock)
        if "EADDRINUSE" in str(error):
            raise MachineError(
                f"{socket.gethostname()}: port {info.master_port} is in use; set MASTER_PORT to another for all ranks"
            ) from None
        why = str(error).strip().split("\n")[0]
        raise MachineError(
            f"{socket.gethostname()}: rank {info.rank} cannot reach rank 0 at {where} ({why}); is that its name and is it running?"
        ) from None
    # The prefix contains the job id. A rank of another job with the same port and node finds no keys here and reports that.
    job = (info.run_id or "").partition(".")[0]
    store = torch.distributed.PrefixStore(f"{job}-attempt-{info.restart_count}", store)
    store.set_timeout(TORCH_TIMEOUT)
    return store


def _odd_pair(found: list[list[str]], mine: int) -> str:
    """Why rank ``mine`` and another rank cannot be in one group; "" if they can. found: host, backend and GPU of each rank."""
    here, my_backend, my_gpu = found[mine]
    for rank, (host, backend, gpu) in enumerate(found):
        if gpu and rank != mine and (host, gpu) == (here, my_gpu):
            return f"{host}: ranks {rank} and {mine} have the same GPU {gpu}; there is one rank per GPU"
        if backend != my_backend:  # possible if ranks are started by hand and one machine has no GPU
            return f"{here}: rank {mine} is for {my_backend}, rank {rank} on {host} for {backend}: give the same device= and backend= on each"
    return ""


def _exchange_hosts(
    store: torch.distributed.Store,
    info: RankInfo,
    device: torch.device,
    backend: str,
    timeout_s: float,
    clock: RunningClock,
) -> tuple[str, ...]:
    """The host name of each rank.

    Raises MachineError if two ranks have the same GPU, if the backends differ, or if a rank does not arrive within ``timeout_s``.
    """
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"host/{info.rank}", f"{socket.gethostname()} {backend} {gpu}")
    names = [f"host/{rank}" for rank in range(info.world_size)]
    try:
        _await_keys(store, names, clock, timeout_s)
        found = [text.decode().split(" ") for text in store.multi_get(names)]
    except torch.distributed.DistError:
        missing = [rank for rank in range(info.world_size) if not store.check([f"host/{rank}"])]
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise MachineError(
            f"{socket.gethostname()}: rank {shown} of {info.world_size} did not come in time (timeout_s)"
        ) from None
    if wrong := _odd_pair(found, info.rank):
        if info.rank == 0:
            time.sleep(5 * POLL_S)  # the store ends with rank 0, and the others still need it for the same check
        raise MachineError(wrong)
    return tuple(host for host, *_ in found)
