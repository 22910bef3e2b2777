"""What the tests of other users share."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.core.launch import runs
from recipes.core.run.record import State

STRANGER = 65534


as_root = pytest.mark.usefixtures("needs_root")


def set_list(
    path: Path,
    owner: int,
    user: int,
    group: int,
    others: int,
    *,
    account: int = STRANGER,
    kind: str = "access",
) -> None:
    """Gives ``path`` an access control list: the permissions of its owner, of the user ``account``
    (which are also the most that it allows), of its group and of all others.
    """
    entries = [(1, owner, -1), (2, user, account), (4, group, -1), (16, user, -1), (32, others, -1)]
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    os.setxattr(path, f"system.posix_acl_{kind}", content)


FAILED = runs.Run("", "toy", "7", State.failed, 0, 0, None, {}, None, None, None, None, 1, "", "")


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
