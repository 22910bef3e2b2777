"""Bugs put into the product on purpose, one at a time: does `make test` notice each of them?

    python -m tests.mutations [only=WORD[,WORD]] [workers=2]

The data lies beside this file: about 160 bugs that lose work, give wrong results, hang, hide a
failure, or submit a wrong job.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One bug. old: occurs exactly once in ``file``. bug: what a user would see. tests: pytest's
    arguments, separated by spaces.

    The tests are a part of `make test` (`-m "not long"`), so `make test` kills each mutation that
    they kill.
    """

    file: str
    old: str
    new: str
    bug: str
    tests: str
