"""The GPUs of a node: whether all that were granted are visible, and each computes correctly. Standard library only; torch runs
in a separate process (`gpucheck`)."""

import json
import socket
import sys
from collections.abc import Mapping
from typing import Any

from recipes.core.doctor import commands
from recipes.core.doctor.node import Facts, Finding, Surroundings
from recipes.core.place import gpus

CHECK_S = 60.0
FREE_SHARE = 0.9  # of a GPU's memory; with less, another process uses it


def examine(here: Surroundings) -> tuple[Facts, list[Finding]]:
    """Facts and findings on the GPUs that this process may use."""
    if here.on_cpu:
        return {}, []
    granted = gpus.granted_gpus(here.environ)
    out, why = commands.run([sys.executable, "-m", "recipes.core.doctor.gpucheck", "gpus"], CHECK_S)
    if why and granted:
        fix = f"run there: {sys.executable} -m recipes.core.doctor.gpucheck gpus"
        return {}, [Finding(f"its GPUs could not be tested ({why})", fix)]
    seen = [] if why else json.loads(out.splitlines()[-1])
    found = _missing(here, len(seen))
    for gpu in seen:
        found += _of_one(gpu)
    # Nodes may have different numbers of granted GPUs, and `_missing` compares each with its own.
    count = None if granted else len(seen)
    return {"count": count, "name": seen[0].get("name") if seen else None, "gpus": seen}, found


def _missing(here: Surroundings, seen: int) -> list[Finding]:
    """Whether torch sees fewer GPUs than it should."""
    if few := gpus.shortage(here.environ, seen):
        return [Finding(few, f"compare nvidia-smi -L there; {_leave_out()}")]
    if here.info.in_slurm and seen == 0:
        fix = "request GPUs (--gpus-per-node=…), or give device=cpu"
        return [Finding("Slurm granted 0 GPUs and torch sees 0", fix, leave_out=False)]
    return []


def _of_one(gpu: Mapping[str, Any]) -> list[Finding]:
    name = f"GPU {gpu['index']} ({gpu.get('uuid', 'of unknown UUID')})"
    fix = f"drain it: {_leave_out()}"
    if gpu.get("error"):
        return [Finding(f"{name} cannot be used: {gpu['error']}", fix)]
    found = []
    if not gpu["correct"]:
        found.append(Finding(f"{name} computes a matrix product wrongly", fix))
    if gpu["free"] < FREE_SHARE * gpu["total"]:
        what = f"{name} has {gpu['free'] / 2**30:.1f} of {gpu['total'] / 2**30:.1f} GiB free"
        found.append(Finding(what, "another process uses it, maybe of a job that died: nvidia-smi there", bad=False))
    return found


def _leave_out() -> str:
    return f"sbatch --exclude={socket.gethostname()} leaves out that node"
