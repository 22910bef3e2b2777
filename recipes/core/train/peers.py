"""Errors that another rank caused, by its end or its absence. torch has few classes for them, so their texts are searched."""

import re

import torch.distributed

from recipes.core import errors
from recipes.core.errors import Kind

SIGNS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "Application timeout", "Socket Timeout",
    "gloo/transport", "ncclRemoteError", "remote process exited",
)  # fmt: skip


class PeerTimeout(RuntimeError):
    """This rank timed out waiting for the other ranks (timeout_s)."""


def peer_kind(error: BaseException) -> Kind | None:
    """Whether this rank lost the connection to another rank or timed out waiting for it. None for its own error."""
    of_torch = isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    by_class = isinstance(error, torch.distributed.DistNetworkError | torch.distributed.DistStoreError | PeerTimeout)
    if not (of_torch or by_class):
        return None
    timed_out = any(sign in peer_words(error).lower() for sign in ("timed out", "timeout"))
    return Kind.timeout if timed_out or isinstance(error, PeerTimeout) else Kind.peer_lost


def peer_words(error: BaseException) -> str:
    """The text of a peer error, without gloo's source path and advice."""
    if isinstance(error, PeerTimeout):
        return str(error)
    return re.sub(r"^\w+: \[\S+\] ", "", errors.one_line(error)).partition(". This is typically")[0]
