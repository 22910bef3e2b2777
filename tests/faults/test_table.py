"""Each fault of the table has a test, and each test names faults of the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import helpers
from tests.faults.table import ROWS

# Collects the folder as pytest does, and writes [file, test, rows] of each test.
COLLECT = """
import json, sys, pytest

class Collector:
    def pytest_collection_finish(self, session):
        found = []
        for item in session.items:
            rows = [row for mark in item.iter_markers("fault") for row in mark.args]
            found.append([item.path.name, item.name, rows])
        with open(sys.argv[1], "w") as file:
            json.dump(found, file)

sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", sys.argv[2]], plugins=[Collector()]))
"""


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, list[int]]]:
    path = tmp_path_factory.mktemp("collected") / "tests.json"
    ended = helpers.run([sys.executable, "-c", COLLECT, str(path), str(Path(__file__).parent)])
    assert ended.status == 0, ended.out
    return [tuple(found) for found in json.loads(path.read_text())]


@pytest.mark.long
def test_each_test_names_rows_of_the_table(collected: list[tuple[str, str, list[int]]]) -> None:
    own = Path(__file__).name
    shown = [found for found in collected if found[0] != own]
    assert shown
    assert [(file, name) for file, name, rows in shown if not rows or not set(rows) <= set(ROWS)] == []


@pytest.mark.long
def test_each_fault_has_a_test(collected: list[tuple[str, str, list[int]]]) -> None:
    found = {row for _, _, rows in collected for row in rows}
    assert {row: title for row, title in ROWS.items() if row not in found} == {}
