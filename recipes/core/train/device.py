"""The device of this rank, and the backend of its process group. The default is NCCL on GPUs and gloo on CPUs."""

import socket
from collections.abc import Mapping

import torch
import torch.distributed

from recipes.core import errors
from recipes.core.config.run_keys import Backend, Device
from recipes.core.errors import MachineError, NodeError
from recipes.core.place import gpus
from recipes.core.place.ranks import RankInfo


def resolve_device(device: Device, info: RankInfo, environ: Mapping[str, str], seen: int) -> torch.device:
    """This rank's device. seen: number of GPUs that torch sees.

    There is one rank per GPU: the GPU with the local rank's number, or the only visible one if each rank sees only its own GPU.
    Raises MachineError, with host and counts, if GPUs are missing. Inside a Slurm job ``auto`` never selects the CPU.
    """
    if device is Device.cpu:
        return torch.device("cpu")
    host, on_node = socket.gethostname(), gpus.granted_gpus(environ)
    if few := gpus.shortage(environ, seen):
        raise MachineError(f"{host}: {few}: compare nvidia-smi -L there; sbatch --exclude={host} excludes that node")
    if seen == 0:
        if info.in_slurm:
            named = gpus.named_gpus(environ)
            fix = f"{named[0]} names none: unset it" if named and on_node else "ask for GPUs (--gpus-per-node=…)"
            raise MachineError(f"{host}: Slurm granted {on_node} GPUs and torch sees 0: {fix}, or give device=cpu")
        if device is Device.cuda:
            raise MachineError(
                f"{host}: device=cuda and torch sees 0 GPUs: give device=cpu, or install a driver and a CUDA build of torch"
            )
        return torch.device("cpu")
    if info.local_world_size <= seen:
        return torch.device("cuda", info.local_rank)
    if seen == 1 and gpus.has_its_own(environ, info.local_world_size):
        return torch.device("cuda", 0)
    fix = "start fewer ranks there, ask for more GPUs, or give device=cpu"
    if seen == 1 and gpus.are_slices(environ):
        fix = "of several MIG slices a process has the first: give each rank its own (--gpus-per-task=1)"
    raise MachineError(f"{host}: {info.local_world_size} ranks and {seen} GPUs: there is one rank per GPU; {fix}")


def choose_backend(wanted: Backend, device: torch.device) -> str:
    """torch's name of the backend. Raises NodeError if this rank's device or this build of torch does not support it."""
    host = socket.gethostname()
    if wanted is Backend.auto:
        return "nccl" if device.type == "cuda" else "gloo"
    if wanted is Backend.nccl and device.type != "cuda":
        raise NodeError(
            f"{host}: backend=nccl: is for GPUs, and torch sees none: leave backend= out, or give backend=gloo"
        )
    if wanted is Backend.mpi and not torch.distributed.is_mpi_available():
        raise NodeError(
            f"{host}: backend=mpi: wants a torch that was built from source with MPI, and this one, as the usual wheels, was "
            "not: leave backend= out"
        )
    return wanted.name


def take_gpu(device: torch.device) -> None:
    """Selects ``device`` for this process. Raises MachineError if it is broken, or busy in exclusive mode."""
    try:
        torch.cuda.set_device(device)
        torch.cuda.get_device_properties(device)
    except RuntimeError as error:
        host = socket.gethostname()
        raise MachineError(
            f"{host}: {device} cannot be used ({errors.one_line(error)}): look at nvidia-smi there; sbatch --exclude={host} excludes that node"
        ) from None
