"""The device of this rank and the process group of all ranks: NCCL on GPUs, gloo on CPUs, if nothing else is asked for."""

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
PULSE_S = 1.0  # between two words of a rank on how far it is
EARLIER_S, SHARE_EARLIER = 10.0, 0.75
# torch's timeouts count the time in which a job is suspended, so this one is too long to expire, and timeout_s is measured with
# `RunningClock`. A longer one overflows: torch passes milliseconds to poll(2) as an int.
TORCH_TIMEOUT = datetime.timedelta(days=7)
WAIT = datetime.timedelta(seconds=1.0)  # between two looks at the clock
TEARDOWN_S = 10.0  # a process group that has lost a rank may never come back from its own teardown
READERS_S = 5.0  # that rank 0 waits for the others to have read why none of them goes on


@dataclass(frozen=True)
class World:
    """This rank among all ranks. hosts: each rank's host name, by rank. store: what the ranks met through. pulse: this rank's."""

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
        """For collectives outside the step loop: ``timeout_s`` applies in this context (torch's own timeout never expires)."""
        _, _, phase = self.pulse.read()
        if phase in watchdog.NOT_WATCHED:
            self.pulse.beat(watchdog.MEETING)
        try:
            yield
        finally:
            if phase in watchdog.NOT_WATCHED:
                self.pulse.beat(phase)

    def read(self, names: list[str]) -> list[str]:
        """The texts that the store has by these names, once it has all of them. Raises DistStoreError after ``timeout_s``."""
        _await_keys(self.store, names, self.clock, self.timeout_s)
        return [text.decode() for text in self.store.multi_get(names)]

    def sum(self, values: Tensor) -> Tensor:
        """``values`` summed over all ranks, in place; every rank has to call it."""
        with self.meeting():
            torch.distributed.all_reduce(values)
        return values

    def broadcast_text(self, name: str, text: str = "") -> str:
        """Rank 0's ``text``, on every rank. ``name`` is used once in a run."""
        if self.rank == 0:
            self.store.set(f"text/{name}", text)
        [text] = self.read([f"text/{name}"])
        self.store.add(f"read/{name}", 1)
        return text

    def await_readers(self, name: str) -> None:
        """Until all ranks have what rank 0 has broadcast as ``name``, `READERS_S` at most: where it leaves then, the store goes with it."""
        end = time.monotonic() + READERS_S
        while self.rank == 0 and self.store.add(f"read/{name}", 0) < self.size and time.monotonic() < end:
            time.sleep(0.02)

    def together(self, name: str, work: Callable[[Callable[[object], None]], T]) -> T:
        """``work``'s result, when every rank has done its own; for what may take longer than a collective is waited for.

        work is called with a function to be told its progress, whatever changes. Raises MachineError, on all ranks, where it
        fails on one (there, what it raised) or no rank gets on for ``timeout_s``; the line names the host. ``name`` is used once in a run.
        """
        # The news are rank 0's, so that nobody else asks for all ranks' keys.
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
        """The store goes with rank 0, which therefore leaves last."""
        if self.rank == 0:
            time.sleep(5 * POLL_S)

    def _all_done(self, name: str) -> str:
        """Rank 0's: what becomes of all ranks' work: done, or failed and why. Passes on that they get on."""
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
        """Waits for rank 0's word on all ranks' work. Raises MachineError where it failed, or none comes."""
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
            elif self.clock.now() - since > self.timeout_s + 5:  # rank 0 notices first, and knows who it is
                raise MachineError(
                    f"{self.hosts[0]}: rank 0 got no further with {name} in {self.timeout_s:g} s (timeout_s)"
                )
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def telling_pulses(self) -> Iterator[None]:
        """Tells the other ranks now and again how far this one is, from a thread, while it is entered; for `behind`."""

        def tell() -> None:
            words = 0
            while not self.silent.is_set():
                _, step, phase = self.pulse.read()
                try:
                    self.store.set(f"pulse/{self.rank}", f"{words} {step} {phase}")
                except torch.distributed.DistError:
                    return  # rank 0 is gone, and the store with it
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
        """Of the other ranks one that says nothing any more, else the one that is furthest behind: its rank, host and place.

        None where no rank is. Takes up to some five seconds; for who has waited for the others in vain.
        """
        answers: list[list[list[int]]] = []

        def ask() -> None:
            names = [f"pulse/{rank}" for rank in range(self.size)]
            with contextlib.suppress(torch.distributed.DistError):
                for wait_s in (0.0, 2.5 * PULSE_S):
                    time.sleep(wait_s)
                    answers.append([[int(n) for n in text.decode().split()] for text in self.store.multi_get(names)])

        # The store goes with rank 0, and may not answer.
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
        """Rank 0's buffers of ``model`` on every rank, such as the averages of batch normalisation; every rank has to call it."""
        buffers = [b for b in model.buffers() if b.is_floating_point()]
        if self.size == 1 or not buffers:
            return
        flat = torch.cat([b.flatten() for b in buffers])
        with self.meeting():
            torch.distributed.broadcast(flat, 0)
        for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))

    def parallel(self, model: nn.Module, compile: bool = False) -> nn.Module:
        """``model``, its gradients averaged over the ranks during the backward pass; as it is where there is one rank."""
        if compile:
            model = cast(nn.Module, torch.compile(model))
        if self.size == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        with self.meeting():  # it compares the ranks' parameters
            parallel = DistributedDataParallel(
                model, device_ids=devices, gradient_as_bucket_view=True, process_group=_group_of_gradients()
            )
        # It begins with rank 0's buffers, where there are such: who waits for them is further than who has not come there.
        parallel.register_forward_pre_hook(
            lambda *inputs: self.pulse.beat(watchdog.MODEL) if parallel.training else None
        )
        return parallel


def _group_of_gradients() -> torch.distributed.ProcessGroup | None:
    """A group that is not looked at in debug mode, since DDP crashes on one that is (torch 2.15, gloo: SIGSEGV); None: the usual one."""
    level = torch.distributed.get_debug_level()
    if level != torch.distributed.DebugLevel.DETAIL:
        return None
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.OFF)
    try:
        return cast(torch.distributed.ProcessGroup, torch.distributed.new_group(timeout=TORCH_TIMEOUT))
    finally:
        torch.distributed.set_debug_level(level)


def resolve_device(device: Device, info: RankInfo, environ: Mapping[str, str], seen: int) -> torch.device:
    """This rank's device. ``seen``: GPUs that torch sees.

    One rank a GPU: the local rank's, or the only one shown where the launcher shows each rank its own. Raises MachineError,
    naming host and counts, where GPUs are missing; inside a Slurm job ``auto`` never becomes the CPU.
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
    """torch's name of the backend. Raises NodeError where this rank's device, or this torch, has no such."""
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
    """All ranks, met and connected; torn down at the end, in bounded time also where a rank was lost.

    Raises MachineError when the ranks do not meet within ``timeout_s``, two ranks have the same GPU, there is no such backend, or
    not the same one on all.
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
            if backend == "mpi":  # it numbers the ranks itself
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
    """Calls ``give_up``, from a thread, where the block takes longer than ``timeout_s``."""
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
    """Ends this process as a MachineError would, while its main thread is blocked in C++."""
    try:
        print(f"{start.settings.recipe}: {line}", file=sys.stderr, flush=True)
        entry.note_refusal(start.settings, errors.EXIT_MACHINE, line)
        entry.remove_own_folder(start)
    finally:
        os._exit(errors.EXIT_MACHINE)


def _want_own_place(info: RankInfo) -> None:
    """Raises MachineError where the group has numbered this rank otherwise than its variables, as MPI can."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if (rank, world_size) != (info.rank, info.world_size):
        raise MachineError(
            f"{socket.gethostname()}: backend=mpi: is rank {rank} of {world_size} to MPI, and rank {info.rank} of {info.world_size} by its "
            "variables: start the ranks with mpirun, that of the MPI which torch was built with"
        )


def _take_gpu(device: torch.device) -> None:
    """Makes ``device`` this process's. Raises MachineError where it is busy, in exclusive mode, or broken."""
    try:
        torch.cuda.set_device(device)
        torch.cuda.get_device_properties(device)
    except RuntimeError as error:
        host = socket.gethostname()
        raise MachineError(
            f"{host}: {device} cannot be used ({errors.one_line(error)}): look at nvidia-smi there; sbatch --exclude={host} keeps off that node"
        ) from None


def sooner(timeout_s: float) -> float:
    """Seconds of patience for who is to speak a little before the others' ``timeout_s`` ends the run."""
    return max(timeout_s - EARLIER_S, SHARE_EARLIER * timeout_s)


class PeerTimeout(RuntimeError):
    """This rank has waited for the other ranks for most of timeout_s."""


def peer_kind(error: BaseException) -> Kind | None:
    """Whether this rank lost the connection to another one, or timed out waiting for it; None for its own error.

    torch's errors differ in their words alone.
    """
    if not is_peer_error(error):
        return None
    timed_out = any(sign in peer_words(error).lower() for sign in ("timed out", "timeout"))
    return Kind.timeout if timed_out or isinstance(error, PeerTimeout) else Kind.peer_lost


def is_peer_error(error: BaseException) -> bool:
    """Whether ``error`` tells of another rank's end rather than of this rank's own fault."""
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
    """What a peer error says, without gloo's source path and advice."""
    if isinstance(error, PeerTimeout):
        return str(error)
    return re.sub(r"^\w+: \[\S+\] ", "", errors.one_line(error)).partition(". This is typically")[0]


def _await_keys(store: torch.distributed.Store, names: list[str], clock: RunningClock, timeout_s: float) -> None:
    """Waits until the store has these keys. Raises DistStoreError after ``timeout_s``, without the time of suspensions."""
    end = clock.now() + timeout_s
    while True:
        try:
            store.wait(names, WAIT)
            return
        except torch.distributed.DistStoreError:
            if clock.now() > end:
                raise


def _meet(info: RankInfo, timeout_s: float, clock: RunningClock) -> torch.distributed.Store:
    """The store that all ranks of this attempt share."""
    if info.world_size == 1:
        return torch.distributed.HashStore()
    # torchrun's agent already serves the store at that port, for every restart of its ranks.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = os.environ.pop("RECIPES_LISTEN_FD", None)
    where = f"{info.master_addr}:{info.master_port}"
    # A rank that does not reach rank 0 knows why. It reports that before rank 0 gives up and ends the others.
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
    # A job's name in it: another job's rank that has drawn the same port and node finds nothing here, and says so.
    job = (info.run_id or "").partition(".")[0]
    store = torch.distributed.PrefixStore(f"{job}-attempt-{info.restart_count}", store)
    store.set_timeout(TORCH_TIMEOUT)
    return store


def _odd_pair(found: list[list[str]], mine: int) -> str:
    """Why rank ``mine`` and another one cannot be in one group, by host, backend and GPU of each rank; "" where they can."""
    here, my_backend, my_gpu = found[mine]
    for rank, (host, backend, gpu) in enumerate(found):
        if gpu and rank != mine and (host, gpu) == (here, my_gpu):
            return f"{host}: ranks {rank} and {mine} have the same GPU {gpu}; there is one rank per GPU"
        if backend != my_backend:  # of machines that were started by hand one may have no GPU
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
    """Every rank's host name. Raises MachineError when two ranks hold one GPU or have not one backend, or a rank does not come."""
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
            time.sleep(5 * POLL_S)  # the store goes with it, and the others still look for the same
        raise MachineError(wrong)
    return tuple(host for host, *_ in found)
