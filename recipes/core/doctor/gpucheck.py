"""Prints versions, or tests of the GPUs that torch sees, as JSON: ``python -m recipes.core.doctor.gpucheck versions|gpus``."""

import json
import platform
import sys
import time
from typing import Any

import torch

SIDE = 1024  # of the matrices whose product is compared with the CPU's
TIMED_SIDE, TIMED, TIMED_S = 8192, 20, 0.2


def versions() -> dict[str, Any]:
    """Versions of Python, torch, CUDA and NCCL."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": nccl,
    }


def gpus() -> list[dict[str, Any]]:
    """For each GPU that torch sees: whether a matrix product is correct, its speed and its memory; or ``error``."""
    found = []
    for index in range(torch.cuda.device_count()):
        try:
            found.append({"index": index, **one(torch.device("cuda", index))})
        except Exception as error:  # a broken GPU raises whatever its driver says
            found.append({"index": index, "error": " ".join(str(error).split())[:200]})
    return found


def one(device: torch.device) -> dict[str, Any]:
    """Tests one GPU. The matrices hold small integers, so that the result is exact in any order of summation, and with TF32."""
    known = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, (SIDE, SIDE), generator=generator).float() for _ in range(2))
    is_correct = torch.equal((a.to(device) @ b.to(device)).cpu(), a @ b)
    return {
        "uuid": f"GPU-{known.uuid}", "name": known.name, "free": free, "total": total, "correct": is_correct,
        "tflops": round(speed(device), 1),
    }  # fmt: skip


def speed(device: torch.device) -> float:
    """TFLOP/s of products of random numbers in bfloat16, or in float16 on GPUs without bfloat16. Equal numbers would take less power."""
    with torch.cuda.device(device):
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    a = torch.randn(TIMED_SIDE, TIMED_SIDE, dtype=dtype, device=device)
    a @ a
    torch.cuda.synchronize(device)
    begin, taken, done = time.perf_counter(), 0.0, 0
    while done < TIMED and taken < TIMED_S:
        a @ a
        torch.cuda.synchronize(device)
        done, taken = done + 1, time.perf_counter() - begin
    return 2 * TIMED_SIDE**3 * done / taken / 1e12


if __name__ == "__main__":
    print(json.dumps(versions() if sys.argv[1:] == ["versions"] else gpus()))
