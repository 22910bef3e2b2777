"""Which GPUs this process may use, from its environment and the driver. Standard library only."""

import itertools
from pathlib import Path

from recipes.core.slurm import environment
from recipes.core.variables import Environ

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def shortage(environ: Environ, seen: int) -> str:
    """Why torch sees too few GPUs (``seen``), in one line without the host name; "" if it sees all
    that were granted or named.
    """
    source = "Slurm granted"
    expected = environment.gpus_on_node(environ)
    named = named_gpus(environ)
    if named:
        source = f"{named[0]} names"
        expected = named[1]
    return f"{source} {expected} GPUs and torch sees {seen}" if seen < expected else ""


def has_its_own(environ: Environ, ranks: int) -> bool:
    """Whether this rank, one of ``ranks`` on its node, sees only its own GPU (--gpus-per-task,
    --gpu-bind, or a variable).

    False if Slurm granted the node fewer GPUs than ranks.
    """
    named = named_gpus(environ)
    granted = environment.gpus_on_node(environ)
    listed = environ.get("CUDA_VISIBLE_DEVICES", "")
    # of several MIG slices, CUDA shows a process only the first
    if listed.startswith("MIG-") and "," in listed:
        return False
    return granted >= ranks or (granted == 0 and named is not None and named[1] == 1)


def visible_gpus(environ: Environ, root: Path = Path("/")) -> int:
    """Number of GPUs that a process here may use, without torch: from a variable, otherwise from
    NVIDIA's or AMD's driver.

    root: the folder that contains ``proc`` and ``sys``.
    """
    named = named_gpus(environ)
    if named:
        return named[1]
    nvidia = list(root.glob("proc/driver/nvidia/gpus/*"))
    nodes = root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")  # gpu_id 0 is a CPU
    return len(nvidia) or sum(node.read_text().strip() != "0" for node in nodes)


def named_gpus(environ: Environ) -> tuple[str, int] | None:
    """The variable (NVIDIA's or AMD's) that leaves a process the fewest GPUs, and their number;
    None if none is set.
    """
    counts = [(name, listed_gpus(environ[name])) for name in VISIBLE if name in environ]
    return min(counts, key=lambda count: count[1], default=None)


def listed_gpus(listed: str) -> int:
    """Number of GPUs that such a value makes visible: those before the first invalid one; at most
    one for MIG slices.
    """
    names = [name.strip() for name in listed.split(",")]
    known = list(itertools.takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), names))
    # CUDA shows a process only the first MIG slice.
    return min(len(known), 1) if known and known[0].startswith("MIG-") else len(known)
