"""The GPUs of a node: as many as were granted, and each one computes what it should. Standard library only; torch is in a child."""

from collections.abc import Mapping
from pathlib import Path


import itertools


def shortage(environ: Mapping[str, str], seen: int) -> str:
    """Why the GPUs that torch sees are too few for what was granted, in a line without the host's name; "" where they are not.

    seen: how many torch sees. Nothing is wrong where none was granted or named, and none is seen.
    """
    named = named_gpus(environ)
    source, expected = (f"{named[0]} names", named[1]) if named else ("Slurm granted", granted_gpus(environ))
    return f"{source} {expected} GPUs and torch sees {seen}" if seen < expected else ""


def has_its_own(environ: Mapping[str, str], ranks: int) -> bool:
    """Whether this rank, one of ``ranks`` on its node, is shown a GPU of its own alone (--gpus-per-task, --gpu-bind, a wrapper's
    variable). Not where Slurm has granted the node fewer than ranks."""
    named, granted = named_gpus(environ), granted_gpus(environ)
    if are_slices(environ):
        return False
    return granted >= ranks or (granted == 0 and named is not None and named[1] == 1)


def are_slices(environ: Mapping[str, str]) -> bool:
    """Whether several MIG slices are named, of which CUDA shows a process the first alone."""
    listed = environ.get("CUDA_VISIBLE_DEVICES", "")
    return listed.startswith("MIG-") and "," in listed


def granted_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that Slurm has granted on this node; 0 where it says nothing."""
    granted = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(granted) if granted.isdecimal() else 0


VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """GPUs that a process here may use, found without torch: those that a variable names, else those of NVIDIA's or AMD's driver."""
    if (named := named_gpus(environ)) is not None:
        return named[1]
    nvidia = list(root.glob("proc/driver/nvidia/gpus/*"))
    nodes = root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")  # 0 is a CPU
    return len(nvidia) or sum(node.read_text().strip() != "0" for node in nodes)


def named_gpus(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The variable that shows a process the fewest GPUs, NVIDIA's or AMD's, and how many; None where none is set."""
    counts = [(name, listed_gpus(environ[name])) for name in VISIBLE if name in environ]
    return min(counts, key=lambda one: one[1], default=None)


def listed_gpus(listed: str) -> int:
    """GPUs that are shown for a value of such a variable: those before the first that is none; of MIG slices one."""
    names = [name.strip() for name in listed.split(",")]
    known = list(itertools.takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), names))
    return min(len(known), 1) if known and known[0].startswith("MIG-") else len(known)
