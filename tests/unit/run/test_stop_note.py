"""The stop note, through which the batch shell asks the wrappers of a program on all nodes to stop
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.core.run import stop_note
from recipes.core.run.stop_note import StopNote
from tests import helpers

NOTE = StopNote(
    before_s=120.0, reason="SIGUSR2", at=1700000000.5, ends=True, limit_at=1700000120.25
)


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    attempt = helpers.attempt(tmp_path)
    assert stop_note.read(attempt) == StopNote()  # there is none
    stop_note.write(attempt, NOTE)
    assert stop_note.read(attempt) == NOTE
    stop_note.write(attempt, StopNote(before_s=5.0))  # a shorter one
    assert stop_note.read(attempt) == StopNote(before_s=5.0)


def test_a_note_is_written_into_the_same_file(tmp_path: Path) -> None:
    """A network file system may hide a new file for a minute. The file is never cut, since a reader
    could find an empty one.
    """
    attempt = helpers.attempt(tmp_path)
    stop_note.write(attempt, StopNote(before_s=30.0))
    with open(stop_note.path(attempt)) as reader:
        stop_note.write(attempt, NOTE)
        assert '"SIGUSR2"' in reader.read()
    size = stop_note.path(attempt).stat().st_size
    stop_note.write(attempt, StopNote())
    assert stop_note.path(attempt).stat().st_size == size


@pytest.mark.parametrize("length", [0, 1, 30, -1])
def test_a_note_that_is_being_written_counts_as_empty(tmp_path: Path, length: int) -> None:
    attempt = helpers.attempt(tmp_path)
    stop_note.write(attempt, NOTE)
    whole = stop_note.path(attempt).read_text().rstrip()
    stop_note.path(attempt).write_text(whole[:length])
    assert stop_note.read(attempt) == StopNote()


@pytest.mark.parametrize("text", ["[]", '{"unknown": 1}', "7"])
def test_a_note_of_another_version_counts_as_empty(tmp_path: Path, text: str) -> None:
    attempt = helpers.attempt(tmp_path)
    stop_note.path(attempt).write_text(text)
    assert stop_note.read(attempt) == StopNote()


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """It is not the same as a run that may continue."""
    attempt = helpers.attempt(tmp_path)
    stop_note.path(attempt).mkdir()
    with pytest.raises(OSError, match="directory"):
        stop_note.read(attempt)
