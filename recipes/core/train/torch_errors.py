"""Errors of torch for which it has no class: their texts are searched here, and nowhere else."""

import re
import traceback

import torch
import torch.distributed
from torch.nn import functional

from recipes.core.errors import Kind, one_line

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
# the module in which an error is raised, at the end of its traceback
WORKER_MODULES = (["torch.utils.data.dataloader"], ["torch.utils.data._utils.signal_handling"])

OPEN_FILES = ("Too many open files", "received 0 items of ancdata")


class PeerTimeout(RuntimeError):
    """This rank timed out waiting for the other ranks (timeout_s)."""


def peer_kind(error: BaseException) -> Kind | None:
    """Whether this rank lost the connection to another rank or timed out waiting for it. None for
    its own error.
    """
    if isinstance(error, PeerTimeout):
        return Kind.timeout
    of_torch = isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    dist = torch.distributed
    if not (of_torch or isinstance(error, dist.DistNetworkError | dist.DistStoreError)):
        return None
    text = peer_text(error).lower()
    return Kind.timeout if "timed out" in text or "timeout" in text else Kind.peer_lost


def peer_text(error: BaseException) -> str:
    """The text of a peer error, without gloo's source path and advice."""
    if isinstance(error, PeerTimeout):
        return str(error)
    return re.sub(r"^\w+: \[\S+\] ", "", text_of(error)).partition(". This is typically")[0]


def text_of(error: BaseException) -> str:
    """The type and text of an error in one line. Of an NCCL error: the name of its code, and what
    NCCL says after "Last error:".
    """
    if isinstance(error, torch.distributed.DistBackendError):
        text = r"\b(nccl[A-Z]\w+):(?:.*Last error:)?\s*(.*)"
        match = re.search(text, str(error), re.DOTALL)
        if match:
            error = type(error)(f"{match[1]}: {match[2]}")
    return one_line(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python could not allocate memory. torch's CPU allocator raises a plain
    RuntimeError.
    """
    by_class = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return by_class or "can't allocate memory" in one_line(error)


def is_open_files(error: BaseException) -> bool:
    """Whether the limit on open files is reached: an OSError (errno 24), which a worker of a
    DataLoader passes on as text, or a RuntimeError of torch's shared memory.
    """
    is_full = any(sign in str(error) for sign in OPEN_FILES)
    return isinstance(error, OSError | RuntimeError) and is_full


def is_dead_worker(error: BaseException) -> bool:
    """Whether a worker process of a DataLoader has ended: torch raises a plain RuntimeError, in one
    of WORKER_MODULES.
    """
    frames = traceback.walk_tb(error.__traceback__)
    modules = [frame.f_globals.get("__name__") for frame, _ in frames]  # torch.fx sets none
    return isinstance(error, RuntimeError) and modules[-1:] in WORKER_MODULES


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
