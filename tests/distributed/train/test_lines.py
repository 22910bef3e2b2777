"""The lines of a run that people read."""

import pytest

from recipes.core.train import lines

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


@pytest.mark.parametrize("columns", [200, 80, 60, 30, 8, 1])
def test_a_bar_is_shorter_than_the_terminal(columns: int) -> None:
    now = {"step": 50, "total_steps": 200, "loss": 0.5, "samples_per_second": 100.0}
    line = lines.progress({**ROW, **now}, 4, 10, columns)
    assert len(line) < columns
    assert line.count("█") == {200: 6, 80: 2}.get(columns, 0)  # a quarter
    text = " 25%  epoch 2/4  step 50/200  loss 0.5000  100 samples/s  0:00:15 left"
    assert line.endswith(text if columns > 70 else text[: columns - 1])
