"""What the log says about a running program: the signal that it gets, and what is wrong with its
set-up.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.core import files
from recipes.core.program import delivery, remarks
from recipes.core.program.delivery import Target
from recipes.core.program.remarks import LOOKS, Remarks
from recipes.core.run.attempt import CATCHES
from recipes.core.run.stop_note import StopNote
from tests import helpers

USR1, TERM = (Target(7, number, True) for number in (signal.SIGUSR1, signal.SIGTERM))
ON_STOP = "when the run is stopped, the program of each rank gets "
WARNING = (
    "warning: the program catches none of TERM, USR1, USR2: it ends {} with what it has saved by "
    "then"
)
New = Callable[..., Remarks]


@pytest.fixture
def new(tmp_path: Path) -> New:
    """The remarks of a new wrapper. before_s: in the stop note."""
    attempt = helpers.attempt(tmp_path)

    def new(
        before_s: float | None = None,
        prints: bool = True,
        in_slurm: bool = True,
        wanted: str = "",
        port: int = 0,
        own_ranks: int = 0,
    ) -> Remarks:
        watch = SimpleNamespace(note=StopNote(before_s=before_s))
        return Remarks(attempt, watch, prints, "a.py", in_slurm, wanted, port, own_ranks)

    return new


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """The lines since the last call."""
    return lambda: capsys.readouterr().out.splitlines()


Said = Callable[[], list[str]]


def test_a_line_is_printed_when_it_changes(new: New, said: Said, tmp_path: Path) -> None:
    remark = new(before_s=90.0)
    catches = tmp_path / "attempts/0000" / CATCHES
    for targets, expected in (
        (
            [USR1],
            [
                "at the time limit, the program of each rank gets SIGUSR1 (it catches it) 90 s "
                "before the end"
            ],
        ),
        ([USR1, USR1], []),
        (
            [USR1, TERM],
            [
                "at the time limit, the program of each rank gets SIGTERM or SIGUSR1 (it catches "
                "it) 90 s before the end"
            ],
        ),
        ([], []),
        ([TERM, USR1], []),
    ):
        assert remark(1, targets) == ""
        assert said() == expected
    assert files.read_json(catches) == {"signals": ["SIGTERM", "SIGUSR1"]}


def test_without_a_time_limit_the_program_is_asked_when_it_is_stopped(new: New, said: Said) -> None:
    new()(1, [TERM])
    assert said() == [f"{ON_STOP}SIGTERM (it catches it)"]
    without_watch = new()
    without_watch.watch = None
    without_watch(1, [TERM])
    assert said() == [f"{ON_STOP}SIGTERM (it catches it)"]


def test_workers_that_are_not_protected_are_said(new: New, said: Said) -> None:
    new()(1, [USR1, Target(8, signal.SIGUSR1, False)])
    assert said() == [
        f"{ON_STOP}SIGUSR1 (it catches it); workers are not protected from signals to all processes"
    ]


@pytest.mark.parametrize(
    ("in_slurm", "wanted", "line"),
    [
        (True, "", WARNING.format("at the time limit")),
        (False, "", WARNING.format("when the run is stopped")),
        (True, "USR2", WARNING.format("at the time limit").replace("TERM, USR1, USR2", "USR2")),
    ],
)
def test_a_program_that_catches_nothing_is_warned_about_once_after_half_a_minute(
    new: New, said: Said, tmp_path: Path, in_slurm: bool, wanted: str, line: str
) -> None:
    remark = new(in_slurm=in_slurm, wanted=wanted)
    catches = tmp_path / "attempts/0000" / CATCHES
    for _ in range(LOOKS - 1):
        remark(1, [])
    assert said() == []
    assert not catches.exists()
    for _ in range(2 * LOOKS):
        remark(1, [])
    assert said() == [line]
    assert files.read_json(catches) == {"signals": []}


def test_the_looks_without_a_handler_are_counted_in_succession(new: New, said: Said) -> None:
    remark = new()
    for targets in ([], [USR1], *([[]] * (LOOKS - 1)), [USR1]):
        remark(1, targets)
    assert said() == [f"{ON_STOP}SIGUSR1 (it catches it)"]
    for _ in range(LOOKS):
        remark(1, [])
    assert said() == [WARNING.format("at the time limit")]


def test_only_the_first_wrapper_prints_until_the_program_is_stopped(
    new: New, said: Said, tmp_path: Path
) -> None:
    remark = new(prints=False)
    for targets in ([USR1], *([[]] * LOOKS)):
        remark(1, targets)
    stopping = new()
    stopping.watch.note = StopNote(reason="SIGUSR2")
    stopping(1, [USR1])
    assert said() == []
    assert not (tmp_path / "attempts/0000" / CATCHES).exists()


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a connection, on which nobody listens."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        yield int(connection.getsockname()[1])


def test_ranks_that_form_no_group_are_warned_about_once(new: New, said: Said, port: int) -> None:
    remark = new(port=port)
    for _ in range(LOOKS - 1):
        remark(1, [USR1])
    assert said() == [f"{ON_STOP}SIGUSR1 (it catches it)"]
    for _ in range(LOOKS):
        remark(1, [USR1])
    assert said() == [remarks.no_group(port)]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_ranks_that_have_formed_a_group_are_not_warned_about(
    new: New, said: Said, family: int
) -> None:
    """Also if rank 0 has closed the port before the end."""
    with socket.create_server(("", 0), family=family) as server:
        remark = new(port=server.getsockname()[1])
        remark(1, [USR1])
    for _ in range(LOOKS):
        remark(1, [USR1])
    assert len(said()) == 1


def test_several_ranks_that_each_start_a_launcher_are_refused(new: New, tmp_path: Path) -> None:
    """Each of the two would start a rank on each GPU."""
    (tmp_path / "torchrun").write_text("import time\ntime.sleep(60)")
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "torchrun")], env=dict(os.environ)
    ) as launcher:
        try:
            root = os.getpid()
            helpers.wait_until(lambda: delivery.rank_launcher(root), 20, "the launcher")
            line = (
                "script=a.py: each of the 2 ranks of a node has started torchrun, "
                "which starts ranks itself: give through=torchrun"
            )
            assert new(own_ranks=2)(root, []).startswith(line)
            assert [new(own_ranks=ranks)(root, []) for ranks in (0, 1)] == ["", ""]
        finally:
            launcher.kill()
