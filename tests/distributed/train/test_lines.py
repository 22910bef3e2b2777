"""The lines of a run that people read."""

import io
import os
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.core.train import lines
from recipes.core.train.console import Console

ROW = {
    "step": 120,
    "total_steps": 690,
    "epoch": 1,
    "loss": 12.34567,
    "lr": 0.000123,
    "samples_per_second": 123456.7,
}


def test_a_row_fits_100_columns_and_names_what_is_left() -> None:
    line = lines.of_row(ROW, 10, 806_883)
    facts = "loss 12.3457  lr 0.00012  123,457 samples/s"
    assert line[8:] == f"  epoch 2/10  step 120/690  {facts}  1:02:05 left"
    late = {**ROW, "step": 10**7, "total_steps": 2 * 10**7, "epoch": 9999}
    assert len(lines.of_row(late, 10_000, 12_346)) <= 120
    endless = lines.of_row({**ROW, "total_steps": 0}, 10, 0)
    assert endless.endswith(f"step 120  {facts}")
    slow = {**ROW, "samples_per_second": 0.0}  # less than 0.05
    assert lines.of_row(slow, 10, 1).endswith("  0 samples/s")


@pytest.mark.parametrize("columns", [200, 80, 60, 30, 8, 1])
def test_a_bar_is_shorter_than_the_terminal(columns: int) -> None:
    now = {"step": 50, "total_steps": 200, "loss": 0.5, "samples_per_second": 100.0}
    line = lines.progress({**ROW, **now}, 4, 10, columns)
    assert len(line) < columns
    assert line.count("█") == {200: 6, 80: 2}.get(columns, 0)  # a quarter
    text = " 25%  epoch 2/4  step 50/200  loss 0.5000  100 samples/s  0:00:15 left"
    assert line.endswith(text if columns > 70 else text[: columns - 1])


class Terminal(io.StringIO):
    def fileno(self) -> int:
        return 1


@pytest.mark.parametrize(("columns", "known"), [(10, 10), (0, 80)])  # 0: not known
def test_progress_is_rewritten_in_one_line_of_the_terminal(
    columns: int, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda of: os.terminal_size((columns, 24)))
    terminal = Terminal()
    world: Any = SimpleNamespace(rank=0)
    console = Console(world, terminal)
    console.progress("x" * 99)
    console.progress(str)
    world.rank = 1
    console.progress("of another rank")
    clear = "\r\033[K"
    assert terminal.getvalue() == f"{clear}{'x' * (known - 1)}{clear}{known}"
