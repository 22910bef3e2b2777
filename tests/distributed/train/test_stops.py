"""A crash after the end."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests import helpers

# A library that crashes when the interpreter takes itself apart, and what is done before that.
CRASHES = """
import atexit, os
from recipes.core.run import entry
entry.begin("toy")
import sys
class Library:
    abort = staticmethod(os.abort)
    def __del__(self):
        self.abort()
library = Library()
atexit.register(print, "at exit")
entry.end(0)
"""


@pytest.mark.parametrize(("looked_into", "status"), [({}, 0), ({"LD_PRELOAD": ""}, -signal.SIGABRT)])
def test_a_crash_after_the_end_does_not_fail_the_run(looked_into: dict[str, str], status: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CRASHES, "device=cpu", "max_steps=1", f"run_dir={tmp_path}/run"]
    ended = helpers.run(command, environ=helpers.clean_environment(**looked_into)).expect(status)
    assert "at exit" in ended.lines
