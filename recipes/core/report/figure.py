"""Line figures as inline SVG. The style sheet of the page sets their colours, so that they follow
light and dark.
"""

import html
import math
from collections.abc import Sequence

Point = tuple[float, float]
# Name, points with rising x, and classes of the style sheet. A y that is NaN is a gap in the line.
Series = tuple[str, Sequence[Point], str]
WIDTH = 420
HEIGHT = 250
# the plot in the figure
LEFT = 70
RIGHT = 406
TOP = 20
BOTTOM = 208
# of a figure, and of each series if there are many
MOST_POINTS = 2400
FEWEST_POINTS = 100
LEAST = 1e-300  # length of an axis; floating-point numbers cannot divide a shorter one
DOTS = 25  # a series of at most this number of points has a dot for each
LABEL_PX = 16  # between the labels of two marks


def figure(
    title: str,
    labels: tuple[str, str],
    series: Sequence[Series],
    steps: Sequence[float] = (),
    marks: Sequence[Point] = (),
    zero: bool = False,
) -> str:
    """A figure; "" without a finite value. steps: x that the axis includes. marks: x and number of
    vertical lines. zero: y includes 0.
    """
    finite = [(x, y) for _, points, _ in series for x, y in points if math.isfinite(y)]
    if not finite:
        return ""
    x_low, x_high = _range([*steps, *(x for x, _ in (*finite, *marks))])
    y_low, y_high = _range([y for _, y in finite] + [0.0] * zero)

    def across(x: float) -> float:
        return round(LEFT + (x - x_low) / (x_high - x_low) * (RIGHT - LEFT), 1)

    def down(y: float) -> float:
        return round(BOTTOM - (y - y_low) / (y_high - y_low) * (BOTTOM - TOP), 1)

    parts = [f'<path class="axis" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>']
    for y in _ticks(y_low, y_high):
        label = _label(LEFT - 6, down(y) + 4, f"{y:.6g}", "end")
        parts.append(f'<path class="grid" d="M{LEFT} {down(y)}H{RIGHT}"/>{label}')
    # steps and ranks are whole numbers, hours are not
    are_whole = all(x == round(x) for x, _ in finite)
    for x in _ticks(x_low, x_high, float(are_whole)):
        parts.append(
            f'<path class="axis" d="M{across(x)} {BOTTOM}v4"/>'
            + _label(across(x), BOTTOM + 17, f"{x:.6g}")
        )
    labelled = -math.inf
    for x, number in marks:
        parts.append(f'<path class="mark" d="M{across(x)} {TOP}V{BOTTOM}"/>')
        if across(x) >= labelled + LABEL_PX:
            labelled = across(x)
            parts.append(_label(labelled, TOP - 6, f"{number:g}"))
    for _, every, style in series:
        points = _thinned(every, max(FEWEST_POINTS, MOST_POINTS // len(series)))
        places = [f"{across(x)} {down(y)}" if math.isfinite(y) else "" for x, y in points]
        pairs = zip(["", *places], places, strict=False)
        lines = [f"L{end}" if begin else f"M{end}h0" for begin, end in pairs if end]
        dots = [f"M{place}h0" for place in places if place and len(points) <= DOTS]
        parts.append(f'<path class="line {style}" d="{" ".join(lines)}"/>')
        parts.append(f'<path class="dot {style}" d="{"".join(dots)}"/>')
    parts.append(_label((LEFT + RIGHT) / 2, HEIGHT - 6, labels[0]))
    parts.append(
        f'<g transform="translate(12 {(TOP + BOTTOM) / 2}) '
        f'rotate(-90)">{_label(0, 0, labels[1])}</g>'
    )
    last = "; ".join(
        f"{name}: {y:.5g} at {x:g}" for name, points, _ in series[:4] for x, y in points[-1:]
    )
    about = html.escape(f"{title}: {labels[1]} against {labels[0]}. Last values: {last}")
    gaps = sum(len(points) for _, points, _ in series) - len(finite)
    note = f'<p class="note">Values that are not finite: {gaps}</p>' if gaps else ""
    frame = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">'
    drawn = f"{frame}<title>{about}</title>{''.join(parts)}</svg>"
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{drawn}{note}</figure>"


def _label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" class="{anchor}">{html.escape(text)}</text>'


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis. They differ, even if the values do not."""
    low = min(values)
    high = max(values)
    if high - low > max(LEAST, 1e-9 * max(abs(low), abs(high))):
        return low, high
    pad = abs(low) * 0.1
    return (low - pad, high + pad) if pad else (0.0, 1.0)


def _ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """Two to six round values between the ends of an axis. Their distance is at least ``least``."""
    power = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = next(power * size for size in (1, 2, 5, 10) if (high - low) / (power * size) <= 5)
    step = max(least, step)
    first = math.ceil(low / step - 1e-6)
    last = math.floor(high / step + 1e-6)
    return [number * step for number in range(first, last + 1)]


def _thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most about ``most`` points: of each group of neighbours, the lowest and the highest, so
    that a peak remains.
    """
    size = max(1, math.ceil(2 * len(points) / most))
    kept = list[Point]()
    for start in range(0, len(points), size):
        group = points[start : start + size]
        finite = [point for point in group if math.isfinite(point[1])] or group[:1]
        by_height = sorted(finite, key=lambda point: point[1])
        kept += sorted({by_height[0], by_height[-1]})
    return kept
