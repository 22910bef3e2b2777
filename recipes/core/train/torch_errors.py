"""Errors of torch for which it has no class: their texts are searched here, and nowhere else."""

import re
import traceback

import torch
import torch.distributed
from torch.nn import functional

from recipes.core import errors
from recipes.core.errors import Kind

SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout",
    "Socket Timeout",
    "gloo/transport",
    "ncclRemoteError",
    "ncclSystemError",
    "remote process exited",
    "communicator was aborted",
    "Watchdog caught",
)
WORKER_MODULES = ("torch.utils.data.dataloader", "torch.utils.data._utils.signal_handling")


class PeerTimeout(RuntimeError):
    """This rank timed out waiting for the other ranks (timeout_s)."""


def peer_kind(error: BaseException) -> Kind | None:
    """Whether this rank lost the connection to another rank or timed out waiting for it. None for
    its own error.
    """
    of_torch = isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    by_class = isinstance(
        error, torch.distributed.DistNetworkError | torch.distributed.DistStoreError | PeerTimeout
    )
    if not (of_torch or by_class):
        return None
    timed_out = any(sign in peer_text(error).lower() for sign in ("timed out", "timeout"))
    return Kind.timeout if timed_out or isinstance(error, PeerTimeout) else Kind.peer_lost


def peer_text(error: BaseException) -> str:
    """The text of a peer error, without gloo's source path and advice."""
    if isinstance(error, PeerTimeout):
        return str(error)
    return re.sub(r"^\w+: \[\S+\] ", "", text_of(error)).partition(". This is typically")[0]


def text_of(error: BaseException) -> str:
    """The type and text of an error in one line. Of an NCCL error: the name of its code, and what
    NCCL says after "Last error:".
    """
    is_nccl = isinstance(error, torch.distributed.DistBackendError)
    if is_nccl and (
        found := re.search(r"\b(nccl[A-Z]\w+):(?:.*Last error:)?\s*(.*)", str(error), re.DOTALL)
    ):
        return errors.one_line(type(error)(f"{found[1]}: {found[2]}"))
    return errors.one_line(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python could not allocate memory. torch's CPU allocator raises a plain
    RuntimeError.
    """
    return isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "can't allocate memory" in errors.one_line(error)


def is_dead_worker(error: BaseException) -> bool:
    """Whether a worker process of a DataLoader has ended: torch raises a plain RuntimeError, in one
    of WORKER_MODULES.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return (
        isinstance(error, RuntimeError)
        and bool(frames)
        and frames[-1].f_globals["__name__"] in WORKER_MODULES
    )


def is_lone_value(error: BaseException) -> bool:
    """Whether a normalisation got one value per channel in training: torch raises a plain
    ValueError, in one function.
    """
    check = getattr(functional, "_verify_batch_size", None)  # of torch 2.10 to 2.15
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, ValueError) and check is not None and codes[-1:] == [check.__code__]


def is_port_in_use(error: BaseException) -> bool:
    """Whether rank 0's TCPStore could not listen because another program has the port."""
    return "EADDRINUSE" in str(error)
