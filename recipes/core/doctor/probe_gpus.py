"""The GPUs of a node: whether all that were granted are visible, and each computes correctly. Standard library only; torch runs
in a separate process (`gpucheck`)."""

import json
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.core.doctor.node import Finding
from recipes.core.place import gpus
from recipes.core.place.ranks import RankInfo

RunCommand = Callable[[Sequence[str], float], tuple[str, str]]
SMI_S, CHECK_S = 20.0, 60.0
LONGEST = 4096  # characters of a line of nvidia-smi
FREE_SHARE = 0.9  # of a GPU's memory; with less, another process uses it
# A field that a GPU or driver does not support is [N/A].
SMI = ("nvidia-smi", "--query-gpu=uuid,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader,nounits")


def examine(
    environ: Mapping[str, str], info: RankInfo, on_cpu: bool, run: RunCommand, root: Path = Path("/")
) -> tuple[dict[str, Any], list[Finding]]:
    """Facts and findings on the GPUs that this process may use.

    on_cpu: no GPU is needed. run: runs a command for at most so many seconds; its stdout, and why it failed ("" if it did not).
    """
    facts: dict[str, Any] = {"granted": gpus.granted_gpus(environ)}
    if on_cpu:
        return facts, []
    smi, why = run(SMI, SMI_S)
    in_smi = parse_smi(smi)
    found: list[Finding] = []
    # Many images have no nvidia-smi, and others have it without a GPU.
    if why and (facts["granted"] or gpus.visible_gpus(environ, root)) and shutil.which("nvidia-smi"):
        found.append(Finding(f"nvidia-smi fails ({why})", "the driver is broken there: tell the site"))
    out, why = run([sys.executable, "-m", "recipes.core.doctor.gpucheck", "gpus"], CHECK_S)
    try:
        facts["gpus"] = seen = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        facts["gpus"] = seen = []
        if in_smi or facts["granted"]:
            fix = f"run there: {sys.executable} -m recipes.core.doctor.gpucheck gpus"
            return facts, [*found, Finding(f"its GPUs could not be tested ({why or 'no answer'})", fix)]
    found += _missing(environ, info, len(seen), len(in_smi))
    for gpu in seen:
        found += _of_one(gpu, in_smi.get(gpu.get("uuid", ""), ""))
    return facts, found


def _missing(environ: Mapping[str, str], info: RankInfo, seen: int, in_smi: int) -> list[Finding]:
    """Whether torch sees fewer GPUs than it should. seen: by torch; in_smi: by nvidia-smi."""
    if few := gpus.shortage(environ, seen):
        return [Finding(few, f"compare nvidia-smi -L there; {_leave_out()}")]
    if info.in_slurm and seen == 0:
        fix = "request GPUs (--gpus-per-node=…), or give device=cpu"
        return [Finding("Slurm granted 0 GPUs and torch sees 0", fix, leave_out=False)]
    if seen < in_smi and not info.in_slurm and gpus.named_gpus(environ) is None:
        fix = "torch without CUDA, or too new for the driver: python -m torch.utils.collect_env"
        return [Finding(f"nvidia-smi shows {in_smi} GPUs and torch sees {seen}", fix, bad=seen == 0)]
    return []


def _of_one(gpu: Mapping[str, Any], errors: str) -> list[Finding]:
    """errors: uncorrected memory errors by nvidia-smi."""
    name = f"GPU {gpu.get('index')} ({gpu.get('uuid', 'of unknown UUID')})"
    fix = f"drain it: {_leave_out()}"
    if gpu.get("error"):
        return [Finding(f"{name} cannot be used: {gpu['error']}", fix)]
    found = []
    if not gpu.get("correct"):
        found.append(Finding(f"{name} computes a matrix product wrongly", fix))
    if gpu.get("free", 0) < FREE_SHARE * gpu.get("total", 0):
        what = f"{name} has {gpu['free'] / 2**30:.1f} of {gpu['total'] / 2**30:.1f} GiB free"
        found.append(Finding(what, "another process uses it, maybe of a job that died: nvidia-smi there", bad=False))
    if errors.isdecimal() and int(errors):
        found.append(Finding(f"{name} has had {errors} uncorrected memory errors since the driver was loaded", fix))
    return found


def _leave_out() -> str:
    return f"sbatch --exclude={socket.gethostname()} leaves out that node"


def parse_smi(text: str) -> dict[str, str]:
    """The uncorrected memory errors in nvidia-smi's output, by UUID. Other lines are ignored."""
    rows = (line.strip().split(", ") for line in text.splitlines() if len(line) < LONGEST)
    return {row[0]: row[1] for row in rows if len(row) == 2 and row[0].startswith("GPU-")}
