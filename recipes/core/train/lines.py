"""The lines of a run that people read: a row of the log, and the progress bar of a terminal."""

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

LONGEST_BAR = 24  # characters


def of_row(row: Mapping[str, Any], epochs: int, left_s: float | None) -> str:
    """The log line of a row of metrics.jsonl, at most 100 columns. left_s: of the training; None if
    unknown.
    """
    total = f"/{row['total_steps']}" if row["total_steps"] else ""
    parts = [
        time.strftime("%H:%M:%S"),
        f"epoch {row['epoch'] + 1}/{epochs}",
        f"step {row['step']}{total}",
        f"loss {row['loss']:.4f}",
        f"lr {row['lr']:.2g}",
        f"{row['samples_per_second']:,.0f} samples/s",
    ]
    if left_s:
        parts.append(f"{_time(left_s)} left")
    return "  ".join(parts)


def of_results(results: Mapping[str, Any]) -> str:
    """The numbers of an evaluation."""
    return "  ".join(
        f"{name} {value:.4f}" for name, value in results.items() if isinstance(value, float)
    )


def progress(
    epoch: int,
    epochs: int,
    step: int,
    total: int,
    loss: float | None,
    speed: float,
    per_step: int,
    columns: int,
) -> str:
    """A progress bar and text, shorter than a terminal of ``columns``; without the bar if it does
    not fit.

    loss: the last known one. speed: samples per second. per_step: samples of a step.
    """
    share = step / max(1, total)
    of_loss = f"  loss {loss:.4f}" if loss is not None else ""
    left = f"  {_time((total - step) * per_step / speed)} left" if speed else ""
    line = (
        f"{share:4.0%}  epoch {epoch + 1}/{epochs}  step {step}/{total}{of_loss}"
        f"  {speed:,.0f} samples/s{left}"
    )
    length = min(LONGEST_BAR, columns - len(line) - 3)
    if length < 5:
        return line[: max(0, columns - 1)]
    filled = round(share * length)
    return f"{'█' * filled}{'░' * (length - filled)} {line}"


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
