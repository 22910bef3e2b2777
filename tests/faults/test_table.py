"""Each fault of the table has a test, and each test names faults of the table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.faults.table import ROWS

FAULT = re.compile(r"pytest\.mark\.fault\(([\d, ]+)\)")


def test_each_fault_has_a_test_and_each_test_names_its_faults() -> None:
    named: set[int] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        text = path.read_text()
        named |= {int(row) for rows in FAULT.findall(text) for row in rows.split(",")}
        tests = []
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                tests.append(node)
        of_all = re.search(r"^pytestmark = [^=]*mark\.fault", text, re.MULTILINE)
        unnamed = []
        for test in tests:
            if not FAULT.search("".join(map(ast.unparse, test.decorator_list))):
                unnamed.append(test.name)
        assert of_all or path == Path(__file__) or not unnamed, f"{path.name}: {unnamed}"
    assert named == set(ROWS)
