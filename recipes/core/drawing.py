"""Plots with matplotlib, which is optional. If it is not installed, a line says so and nothing is drawn."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recipes.core.bandwidth import Figure, shown_size


def _figure(path: Path, say: Callable[[str], None], inches: tuple[float, float]) -> Any:
    """An empty matplotlib figure. If matplotlib is not installed, prints a line and returns None."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        say(f"{path.name} is not drawn: matplotlib is not installed; type: pip install matplotlib")
        return None
    return Canvas(figsize=inches, dpi=120, layout="constrained")


def bandwidths(figures: Sequence[Figure], path: Path, say: Callable[[str], None]) -> None:
    """Plots busbw over the size, with one line for each operation."""
    canvas = _figure(path, say, (9, 5.5))
    if canvas is None:
        return
    axes = canvas.subplots()
    for operation in dict.fromkeys(f.operation for f in figures):
        points = [(f.size, f.busbw) for f in figures if f.operation == operation and f.busbw]
        if points:  # with one rank most operations have no busbw
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=operation)
    axes.set(yscale="log", xlabel="bytes of the whole array", ylabel="busbw, GB/s", title=f"{figures[0].ranks} ranks")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, _: shown_size(int(size)))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    canvas.savefig(path)
    say(f"plot: {path}")


def matrix(rows: Sequence[Sequence[float]], names: Sequence[str], path: Path, say: Callable[[str], None]) -> None:
    """Plots GB/s between each pair of ``names`` as colours."""
    side = max(4.0, min(16.0, 0.5 * len(names) + 2))
    canvas = _figure(path, say, (side + 1.5, side))
    if canvas is None:
        return
    axes = canvas.subplots()
    drawn = axes.imshow(rows, cmap="viridis", vmin=0)
    few = len(names) <= 32
    ticks = range(len(names)) if few else range(0, len(names), -(-len(names) // 32))
    axes.set_xticks(list(ticks), [names[i] for i in ticks], rotation=90, fontsize="small")
    axes.set_yticks(list(ticks), [names[i] for i in ticks], fontsize="small")
    canvas.colorbar(drawn, label="GB/s each way")
    canvas.savefig(path)
    say(f"plot: {path}")
