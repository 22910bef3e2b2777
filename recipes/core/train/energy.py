"""Energy that a GPU has used, from NVML, a library of NVIDIA's driver."""

import ctypes
import functools
import math

import torch


def total_j(device: torch.device) -> float:
    """Joules since the driver was loaded; NaN if NVML does not know them: on a CPU, a slice of a GPU, or a GPU of another maker."""
    nvml = _nvml() if device.type == "cuda" else None
    if nvml is None:
        return math.nan
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    handle, found = ctypes.c_void_p(), ctypes.c_ulonglong()
    failed = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle))
    failed = failed or nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(found))
    return math.nan if failed else found.value / 1e3  # it counts millijoules


@functools.cache
def _nvml() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if nvml.nvmlInit_v2() else nvml
