"""Where the time of a training goes: the speed of a run, the parts of its steps, their arithmetic,
and what the ranks use.
"""

import contextlib
import ctypes
import functools
import itertools
import math
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from recipes.core.place import processes
from recipes.core.run import watchdog
from recipes.core.train.device import device_name
from recipes.core.train.world import World

PROGRESS_EVERY_S = 0.5
MEMORY_EVERY_S = 60.0  # between two measurements of memory, which are slow for large processes
PARTS = ("data_wait", "forward_backward", "optimizer")  # of a step; the rest is the loop's own work
ON_GPU = ("forward_backward", "optimizer")
# seconds per step, CPUs, joules of the GPU, bytes of memory, bytes of the GPU
OF_RANK = struct.Struct("dddQQ")
COUNTED = (F.linear, F.conv1d, F.conv2d, F.conv3d)  # by `Flops`
# TFLOP/s of matrix products in bfloat16 or float16 without sparsity, from the vendors' data sheets.
# The first that is in the GPU's name counts.
PEAKS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A100": 312.0,
    "A40": 150.0,
    "A30": 165.0,
    "A10": 125.0,
    "V100": 125.0,
    "T4": 65.0,
    "MI300X": 1307.0,
    "MI250X": 383.0,
}


class Meter:
    """Counts samples and seconds of training, without evaluation, saving and suspension. Also paces
    the progress line.

    On a GPU, which works while the host continues, CUDA events measure the parts of one step in
    each interval: see `sample`.
    """

    def __init__(self, running: watchdog.RunningClock, device: torch.device) -> None:
        self._now = running.now
        self._device = device
        self.samples = 0
        self.train_s = 0.0
        self.lap_samples = 0
        self._lap_steps = 0
        self._lap_start = self._at = self._progress_at = self._now()
        self._parts = defaultdict[str, float](float)  # seconds in this interval
        # seconds of this attempt that were not training, by the causes of run/ledger.py
        self.spent = defaultdict[str, float](float)
        # of the step that is measured
        self._events: list[tuple[str, torch.cuda.Event]] | None = None
        # since the last `of_ranks`
        self._busy_s = 0.0
        self._busy_steps = 0
        self._cpu = processes.cpu_time()
        self._joules = _energy_j(device)
        self._memory = 0
        self._memory_at = -math.inf

    def sample(self) -> None:
        """Measures the next step, which ends an interval, on the GPU. No effect on a CPU, where
        each step is measured.
        """
        self._events = [] if self._device.type == "cuda" else None

    def mark(self, part: str) -> None:
        """Counts the time since the last mark as time of ``part``."""
        now = self._now()
        if self._device.type != "cuda" or part not in ON_GPU:
            self._parts[part] += now - self._at
        self._at = now
        if self._events is not None and part in PARTS:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((part, event))

    @contextlib.contextmanager
    def spending(self, cause: str) -> Iterator[None]:
        """Counts the time in the block for a cause."""
        began = self._now()
        yield
        self.spent[cause] += self._now() - began

    def step_ends(self, samples: int) -> None:
        self.lap_samples += samples
        self._lap_steps += 1

    def lap(self, unhidden_s: float = 0.0) -> dict[str, float]:
        """Ends an interval of training. Returns its ``samples_per_second`` and the share of each of
        PARTS.

        Called before and after work that is not training. unhidden_s: seconds of each step in which
        this rank has only waited for the gradients of others; their share is ``communication``, a
        part of ``forward_backward``.
        """
        now = self._now()
        seconds = now - self._lap_start
        steps = self._lap_steps
        row = {"samples_per_second": 0.0}
        if steps and seconds > 0:
            parts = self._parts | self._on_gpu(steps)
            self.samples += self.lap_samples
            self.train_s += seconds
            busy = sum(parts[name] for name in ON_GPU)
            # the host may wait for data while a GPU still has work
            self.spent["data"] += max(0.0, min(parts["data_wait"], seconds - busy))
            row = {
                name: round(min(1.0, parts[name] / seconds), 3) for name in PARTS if name in parts
            }
            if "forward_backward" in row:
                # one step that was measured stands for all
                waited_s = min(unhidden_s * steps, parts["forward_backward"])
                self._busy_s += sum(parts[name] for name in PARTS) - waited_s
                self._busy_steps += steps
                share = min(row["forward_backward"], waited_s / seconds)
                row["communication"] = round(share, 3)
            row["samples_per_second"] = round(self.lap_samples / seconds, 1)
        self.lap_samples = 0
        self._lap_steps = 0
        self._lap_start = now
        self._at = now
        self._events = None
        self._parts.clear()
        return row

    def _on_gpu(self, steps: int) -> dict[str, float]:
        """Seconds of the GPU's parts in ``steps`` steps, from the one that was measured; {} if none
        was.
        """
        seconds = defaultdict[str, float](float)
        for (_, before), (part, event) in itertools.pairwise(self._events or []):
            if event.query():  # the host has waited for the step's loss
                seconds[part] += steps * before.elapsed_time(event) / 1e3
        return seconds

    def speed(self) -> float:
        """Samples per second of the interval so far; 0 at its start."""
        seconds = self._now() - self._lap_start
        return self.lap_samples / seconds if seconds > 0 else 0.0

    def progress_due(self) -> bool:
        due = self._now() - self._progress_at >= PROGRESS_EVERY_S
        if due:
            self._progress_at = self._now()
        return due

    def of_ranks(self, world: World) -> dict[str, Any]:
        """What the ranks have used since the last call: for a row of metrics. A collective.

        rank_step_s: seconds of each rank per step, without the wait for other ranks. memory_gb: of
        the node that uses most, with loader processes. cpus_used: CPUs kept busy per node.
        gpu_memory_gb: highest so far of any GPU. gpu_energy_kj: of all GPUs; left out if unknown.
        """
        cpu_s, now = processes.cpu_time()
        cpu_before_s, before = self._cpu
        cpus = max(0.0, cpu_s - cpu_before_s) / max(1e-9, now - before)
        gpu = self._device.type == "cuda"
        if now >= self._memory_at + MEMORY_EVERY_S:
            self._memory = processes.memory()
            self._memory_at = now
        peak = torch.cuda.max_memory_allocated(self._device) if gpu else 0
        joules = _energy_j(self._device)
        step_s = self._busy_s / max(1, self._busy_steps)
        used = OF_RANK.pack(step_s, cpus, joules - self._joules, self._memory, peak)
        self._busy_s = 0.0
        self._busy_steps = 0
        self._cpu = (cpu_s, now)
        self._joules = joules
        world.pulse.beat(watchdog.WAITING)
        ranks = map(OF_RANK.unpack, world.gather(used))
        steps_s, of_cpus, energies_j, memories, peaks = zip(*ranks, strict=True)
        memory = Counter[str]()
        for host, size in zip(world.hosts, memories, strict=True):
            memory[host] += size
        row: dict[str, Any] = {
            "rank_step_s": [float(f"{seconds:.4g}") for seconds in steps_s],
            "memory_gb": round(max(memory.values()) / 1e9, 3),
            "cpus_used": round(sum(of_cpus) / len(memory), 2),
        }
        if gpu:
            row["gpu_memory_gb"] = round(max(peaks) / 1e9, 3)
        spent_j = sum(energies_j)
        if math.isfinite(spent_j):
            row["gpu_energy_kj"] = round(spent_j / 1e3, 3)
        return row


def _energy_j(device: torch.device) -> float:
    """Joules since the driver was loaded; NaN if NVML does not know them: on a CPU, a slice of a
    GPU, or a GPU of another maker.
    """
    nvml = _nvml() if device.type == "cuda" else None
    if nvml is None:
        return math.nan
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    handle = ctypes.c_void_p()
    millijoules = ctypes.c_ulonglong()
    failed = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle))
    failed = failed or nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
    return math.nan if failed else millijoules.value / 1e3


@functools.cache
def _nvml() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if nvml.nvmlInit_v2() else nvml


class Flops(TorchFunctionMode):
    """While entered, counts the floating-point operations of convolutions and linear layers. The
    backward pass has as many as the forward pass for each weight that is trained, and as many again
    for each input that has a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        output = func(*args, **named)
        if func in COUNTED:
            inputs = args[0] if args else named["input"]
            weight = args[1] if len(args) > 1 else named["weight"]
            # Each output has one product and one sum per weight of its row, or of its output
            # channel.
            passes = 1 + weight.requires_grad + inputs.requires_grad
            self.count += 2 * passes * output.numel() * math.prod(weight.shape[1:])
        return output


def achieved(flops_per_s: float, device: torch.device) -> dict[str, float]:
    """``tflops`` of a rank; on a GPU whose peak is known, also ``mfu``, their share of its peak in
    bfloat16 or float16.
    """
    peak = next((value for known, value in PEAKS.items() if known in device_name(device)), 0.0)
    row = {"tflops": float(f"{flops_per_s / 1e12:.4g}")}
    if peak:
        row["mfu"] = round(flops_per_s / 1e12 / peak, 3)
    return row
