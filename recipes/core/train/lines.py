"""The lines of a run that people read: a row of the log, and the progress bar of a terminal."""

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

LONGEST_BAR = 24  # characters


def of_row(row: Mapping[str, Any], epochs: int, per_step: int) -> str:
    """The log line of a row of metrics.jsonl, at most 100 columns.

    per_step: samples of a step; with it, the line has the time left.
    """
    total = f"/{row['total_steps']}" if row["total_steps"] else ""
    return (
        f"{time.strftime('%H:%M:%S')}  epoch {row['epoch'] + 1}/{epochs}"
        f"  step {row['step']}{total}  loss {row['loss']:.4f}  lr {row['lr']:.2g}"
        f"  {_speed(row, per_step)}"
    )


def of_results(results: Mapping[str, Any]) -> str:
    """The numbers of an evaluation."""
    return "  ".join(
        f"{name} {value:.4f}" for name, value in results.items() if isinstance(value, float)
    )


def progress(row: Mapping[str, Any], epochs: int, per_step: int, columns: int) -> str:
    """A progress bar and text, shorter than a terminal of ``columns``; without the bar if it does
    not fit.

    row: the last row of metrics.jsonl, with the step, the epoch and the speed of now. per_step:
    samples of a step.
    """
    share = row["step"] / row["total_steps"]
    line = (
        f"{share:4.0%}  epoch {row['epoch'] + 1}/{epochs}"
        f"  step {row['step']}/{row['total_steps']}  loss {row['loss']:.4f}"
        f"  {_speed(row, per_step)}"
    )
    length = min(LONGEST_BAR, columns - len(line) - 3)
    if length < 5:
        return line[: max(0, columns - 1)]
    filled = round(share * length)
    return f"{'█' * filled}{'░' * (length - filled)} {line}"


def _speed(row: Mapping[str, Any], per_step: int) -> str:
    """The speed, and the time left if it is known."""
    speed = row["samples_per_second"]
    text = f"{speed:,.0f} samples/s"
    left = (row["total_steps"] - row["step"]) * per_step
    return f"{text}  {timedelta(seconds=round(left / speed))} left" if left and speed else text
