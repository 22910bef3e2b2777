"""All checks by name, and one of them in this process: ``python -m tests.gpu.table NAME FOLDER
cpu|cuda``.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.gpu import checks, several
from tests.gpu.place import Figures, NotPossible, Place

MEASURED = {check.__name__ for check in (*checks.ALONE, *several.CHECKS)}  # they measure a speed
OF_ONE: dict[str, Callable[[Place], Figures]] = {
    check.__name__: check for check in (*checks.TOGETHER, *checks.ALONE)
}
OF_SEVERAL: dict[str, Callable[[Place], Figures]] = {
    check.__name__: check for check in several.CHECKS
}


def machine(dry: bool) -> dict[str, Any]:
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": len(os.sched_getaffinity(0)),
    }
    if not dry:
        facts |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return facts


def main(name: str, folder: str, device: str) -> None:
    place = Place(
        torch.device(device, 0) if device == "cuda" else torch.device(device), Path(folder)
    )
    if not place.dry:
        torch.cuda.set_device(place.device)
    try:
        print(json.dumps({"result": "pass", "figures": {**OF_ONE, **OF_SEVERAL}[name](place)}))
    except NotPossible as why:
        print(json.dumps({"result": "not possible", "why": str(why)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # without the teardown of a process group
