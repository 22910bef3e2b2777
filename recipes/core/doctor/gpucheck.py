"""Prints versions, or tests of the GPUs that torch sees, as JSON: ``python -m
recipes.core.doctor.gpucheck versions|gpus``.
"""

import json
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from recipes.core.errors import one_line

SIDE = 1024  # of the matrices whose product is compared with the CPU's
TIMED_SIDE = 8192
TIMED = 20
TIMED_S = 0.2
COPIED = 256 << 20  # bytes


def versions() -> dict[str, Any]:
    """Versions of Python, torch, CUDA and NCCL."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
    }


def gpus() -> list[dict[str, Any]]:
    """For each GPU that torch sees, its ``index`` and what `examine` and `copies` find; or
    ``error``.
    """
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    found = [{"index": device.index, **_tried(examine, device)} for device in devices]
    sound = [device for device in devices if "error" not in found[device.index]]
    for device, other in zip(sound, sound[1:] + sound[:1], strict=True):
        if device != other:
            found[device.index] |= _tried(copies, device, other)
    return found


def _tried(test: Callable[..., dict[str, Any]], *devices: torch.device) -> dict[str, Any]:
    try:
        return test(*devices)
    except Exception as error:  # a broken GPU raises whatever its driver says
        return {"error": one_line(error, 200)}


def examine(device: torch.device) -> dict[str, Any]:
    """Of one GPU: uuid, name, free and total (bytes), whether a matrix product is correct, and
    tflops.

    The matrices hold small integers, so that the result is exact in any order of summation, and
    with TF32.
    """
    known = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, (SIDE, SIDE), generator=generator).float() for _ in range(2))
    is_correct = torch.equal((a.to(device) @ b.to(device)).cpu(), a @ b)
    return {
        "uuid": f"GPU-{known.uuid}",
        "name": known.name,
        "free": free,
        "total": total,
        "correct": is_correct,
        "tflops": round(product_speed(device), 1),
    }


def copies(device: torch.device, other: torch.device) -> dict[str, float]:
    """to_next: GB/s of copies from one GPU to the next one."""
    data, there = (torch.empty(COPIED, dtype=torch.uint8, device=one) for one in (device, other))
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        there.copy_(data)
        torch.cuda.synchronize(other)
        torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    return {"to_next": round(COPIED / min(taken) / 1e9, 1)}


def product_speed(device: torch.device) -> float:
    """TFLOP/s of products of random matrices in bfloat16, or in float16 on GPUs without bfloat16.
    Equal numbers would take less power.
    """
    with torch.cuda.device(device):
        dtype = (
            torch.bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float16
        )
    a = torch.randn(TIMED_SIDE, TIMED_SIDE, dtype=dtype, device=device)
    a @ a
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    taken = 0.0
    done = 0
    while done < TIMED and taken < TIMED_S:
        a @ a
        torch.cuda.synchronize(device)
        done = done + 1
        taken = time.perf_counter() - begin
    return 2 * TIMED_SIDE**3 * done / taken / 1e12


if __name__ == "__main__":
    print(json.dumps(versions() if sys.argv[1:] == ["versions"] else gpus()))
