"""The device of this rank, and the backend of its process group. The default is NCCL on GPUs and
gloo on CPUs.
"""

import socket
from collections.abc import Mapping

import torch
import torch.distributed

from recipes.core.config.run_keys import Backend, Device
from recipes.core.errors import MachineError, one_line
from recipes.core.place import gpus, ranks
from recipes.core.slurm import environment

MIG_NCCL = (2, 31)  # from this version on, ranks may use several MIG slices of one GPU


def resolve_device(
    device: Device, info: ranks.RankInfo, environ: Mapping[str, str], seen: int
) -> torch.device:
    """This rank's device. seen: number of GPUs that torch sees.

    There is one rank per GPU: the GPU with the local rank's number, or the only visible one if each
    rank sees only its own GPU. Raises MachineError, with host and counts, if GPUs are missing.
    Inside a Slurm job ``auto`` never selects the CPU.
    """
    if device is Device.cpu:
        return torch.device("cpu")
    host = socket.gethostname()
    on_node = environment.gpus_on_node(environ)
    few = gpus.shortage(environ, seen)
    if few:
        fix = f"check nvidia-smi -L there, or exclude the node: sbatch --exclude={host}"
        raise MachineError(f"{host}: {few}: {fix}")
    if seen == 0:
        if info.in_slurm:
            named = gpus.named_gpus(environ)
            fix = "ask for GPUs (--gpus-per-node=…)"
            if named and on_node:
                fix = f"{named[0]} names none: unset it"
            raise MachineError(
                f"{host}: Slurm granted {on_node} GPUs and torch sees 0: {fix}, or give device=cpu"
            )
        if device is Device.cuda:
            raise MachineError(
                f"{host}: device=cuda and torch sees 0 GPUs: "
                "give device=cpu, or install a driver and a CUDA build of torch"
            )
        return torch.device("cpu")
    if info.local_world_size <= seen:
        return torch.device("cuda", info.local_rank)
    if seen == 1 and gpus.has_its_own(environ, info.local_world_size):
        return torch.device("cuda", 0)
    fix = (
        "start fewer ranks there, ask for more GPUs (with MIG: one slice for each task), "
        "or give device=cpu"
    )
    if 1 < seen < info.local_world_size <= on_node:
        fix = (
            f"Slurm granted {on_node}, and --gpu-bind= or --gpus-per-task= "
            "shows each rank only some of them: leave that option out"
        )
    counts = f"{info.local_world_size} ranks and {seen} GPUs"
    raise MachineError(f"{host}: {counts}: there can be only one rank per GPU; {fix}")


def choose_backend(wanted: Backend, device: torch.device) -> str:
    """torch's name of the backend. Raises MachineError for nccl without a GPU."""
    if wanted is Backend.auto:
        return "nccl" if device.type == "cuda" else "gloo"
    if wanted is Backend.nccl and device.type != "cuda":
        problem = "backend=nccl requires GPUs, and torch sees none: omit backend="
        raise MachineError(f"{socket.gethostname()}: {problem}")
    return wanted.name


def check_mig(info: ranks.RankInfo, environ: Mapping[str, str], nccl: tuple[int, ...]) -> None:
    """Raises MachineError if several ranks of this node use MIG slices with an NCCL that refuses
    two slices of one GPU. nccl: its version.
    """
    if (
        info.local_world_size > 1
        and environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
        and nccl < MIG_NCCL
    ):
        version = ".".join(map(str, nccl))
        raise MachineError(
            f"{socket.gethostname()}: NCCL {version} does not support "
            f"{info.local_world_size} ranks on MIG slices: "
            "give backend=gloo, start one rank per node, or use NCCL 2.31 or later"
        )


def device_name(device: torch.device) -> str:
    """The name of a GPU, such as "NVIDIA H100 80GB HBM3", or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def take_gpu(device: torch.device) -> None:
    """Selects ``device`` for this process. Raises MachineError if it is broken, or busy in
    exclusive mode.
    """
    try:
        torch.cuda.set_device(device)
        torch.cuda.get_device_properties(device)
    except RuntimeError as error:
        host = socket.gethostname()
        raise MachineError(
            f"{host}: {device} cannot be used ({one_line(error)}): "
            f"check nvidia-smi there, or exclude the node: sbatch --exclude={host}"
        ) from None
