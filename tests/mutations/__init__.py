"""Bugs put into the product on purpose, one at a time: does `make test` notice each of them?

    python -m tests.mutations [only=WORD[,WORD]] [workers=2] [out=FILE]

A mutation is a realistic bug as data: the file, the text to replace, its replacement, what goes wrong for a user, and the tests
that must notice it. The tests are a part of `make test` (`-m "not long"`), so a mutation that they kill is killed by
`make test`. The data lies beside this file, one file for each part of the product.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One bug. old: occurs exactly once in ``file``. bug: what a user would see. tests: pytest's arguments, separated by spaces.

    reason: why no test kills it, for a survivor that is accepted; it counts as survived all the same.
    """

    file: str
    old: str
    new: str
    bug: str
    tests: str
    reason: str = ""
