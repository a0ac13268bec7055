"""Small SVG charts for the report.

Text, lines and colours come from the page's style sheet, so light, dark and print work. A chart is
drawn for the width of a phone (400 units) and scales up from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 10, 10, 36
_MOST_POINTS = 700  # of one line; more cannot be told apart at this width


@dataclass(frozen=True)
class Line:
    """One curve. `style` is a CSS class of the page (`native`, `te`, `floor`, with `thin` or `wide`)."""

    xs: Sequence[float]
    ys: Sequence[float | None]
    style: str


@dataclass(frozen=True)
class Mark:
    """A straight line at one value, with its label at the end."""

    value: float
    label: str
    style: str
    vertical: bool = False


def line_chart(
    lines: Sequence[Line], x_label: str, y_label: str, *, log: bool = False, marks: Sequence[Mark] = ()
) -> str:
    """An SVG of curves over a common x axis; with `log`, values <= 0 lie at the foot of a log y axis."""
    xs = [x for line in lines for x in line.xs]
    ys = [y for line in lines for y in line.ys if y is not None and math.isfinite(y)]
    ys += [m.value for m in marks if not m.vertical]
    if not xs or not ys:
        return _empty("nothing to show")
    x_ticks = nice_ticks(min(xs), max(xs), 5)
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    if log:
        positive = [y for y in ys if y > 0]
        y_low, y_high = _decades(positive)
        y_ticks = _log_ticks(y_low, y_high)
    else:
        y_ticks = nice_ticks(min(ys), max(ys), 5)
        y_low, y_high = min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys))
        if y_low == y_high:
            y_low, y_high = y_low - 1, y_high + 1

    def to_x(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)

    def to_y(y: float) -> float:
        if log:
            share = math.log10(max(y, y_low) / y_low) / math.log10(y_high / y_low)
        else:
            share = (y - y_low) / (y_high - y_low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    body = _axes(x_ticks, y_ticks, to_x, to_y, x_label, y_label, log)
    for line in lines:
        for path in _paths(thin_out(list(line.xs), list(line.ys)), to_x, to_y):
            body.append(f'<path class="line {escape(line.style)}" d="{path}"/>')
    body += [_mark(mark, to_x, to_y) for mark in marks]
    return _svg(body)


def histogram(
    groups: Sequence[tuple[Sequence[float], str]], x_label: str, marks: Sequence[Mark] = (), bins: int = 36
) -> str:
    """An SVG of overlaid histograms; what lies beyond the 0.5th and 99.5th percentile of all is left out."""
    everything = sorted(v for values, _ in groups for v in values)
    if not everything:
        return _empty("no step times")
    low = everything[int(0.005 * (len(everything) - 1))]
    high = everything[math.ceil(0.995 * (len(everything) - 1))]
    if high <= low:
        low, high = low - 0.5, high + 0.5
    width = (high - low) / bins
    counts = []
    for values, _ in groups:
        count = [0] * bins
        for value in values:
            if low <= value <= high:
                count[min(int((value - low) / width), bins - 1)] += 1
        counts.append(count)
    top = max(max(count) for count in counts)
    y_ticks = nice_ticks(0, top, 4)
    y_high = max(y_ticks[-1], top)

    def to_x(x: float) -> float:
        return _LEFT + (x - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def to_y(y: float) -> float:
        return HEIGHT - _BOTTOM - y / y_high * (HEIGHT - _TOP - _BOTTOM)

    body = _axes(nice_ticks(low, high, 5), y_ticks, to_x, to_y, x_label, "steps", False)
    for count, (_, style) in zip(counts, groups, strict=True):
        points = [f"M{to_x(low):.1f} {to_y(0):.1f}"]
        for index, number in enumerate(count):
            points.append(f"L{to_x(low + index * width):.1f} {to_y(number):.1f}")
            points.append(f"L{to_x(low + (index + 1) * width):.1f} {to_y(number):.1f}")
        points.append(f"L{to_x(high):.1f} {to_y(0):.1f}Z")
        body.append(f'<path class="area {escape(style)}" d="{"".join(points)}"/>')
    body += [_mark(mark, to_x, to_y) for mark in marks if low <= mark.value <= high]
    return _svg(body)


def bars(
    labels: Sequence[str], groups: Sequence[tuple[Sequence[float | None], str]], x_label: str, y_label: str
) -> str:
    """An SVG of grouped bars from 0: at each label one bar of every group, none where its value is None."""
    everything = [v for values, _ in groups for v in values if v is not None]
    if not everything:
        return _empty("not measured")
    y_ticks = nice_ticks(0, max(everything), 4)
    y_high = max(y_ticks[-1], max(everything))
    slot = (WIDTH - _LEFT - _RIGHT) / len(labels)
    width = min(slot * 0.8 / len(groups), 40)

    def to_x(index: float) -> float:
        return _LEFT + (index + 0.5) * slot

    def to_y(y: float) -> float:
        return HEIGHT - _BOTTOM - y / y_high * (HEIGHT - _TOP - _BOTTOM)

    body = _axes([], y_ticks, to_x, to_y, x_label, y_label, False)
    for index, label in enumerate(labels):
        body.append(
            f'<text class="tick" x="{to_x(index):.1f}" y="{HEIGHT - _BOTTOM + 15}" '
            f'text-anchor="middle">{escape(label)}</text>'
        )
    for number, (values, style) in enumerate(groups):
        for index, value in enumerate(values):
            if value is not None:
                x = to_x(index) + (number - len(groups) / 2) * width
                body.append(
                    f'<rect class="area {escape(style)}" x="{x:.1f}" y="{to_y(value):.1f}" '
                    f'width="{width:.1f}" height="{to_y(0) - to_y(value):.1f}"/>'
                )
    return _svg(body)


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` + 1 round numbers within [low, high]."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(f * magnitude for f in (1, 2, 2.5, 5, 10) if f * magnitude >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)] or [low]


def tick_text(value: float) -> str:
    """`0.002`, `1500`, `12k`: short, and no exponent where a reader does not expect one."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.6g}" if abs(value) >= 1e-4 else f"{value:.0e}".replace("e-0", "e-")


def thin_out(xs: list[float], ys: list[float | None]) -> list[tuple[float, float | None]]:
    """The same curve in fewer points: of every bin its least and greatest value, so that no spike is lost."""
    points = list(zip(xs, ys, strict=True))
    if len(points) <= _MOST_POINTS:
        return points
    size = math.ceil(len(points) / (_MOST_POINTS // 2))
    kept: list[tuple[float, float | None]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        numbers = [p for p in part if p[1] is not None]
        if len(numbers) < len(part):
            kept.append(next(p for p in part if p[1] is None))
        if numbers:
            extremes = {min(numbers, key=lambda p: p[1] or 0.0), max(numbers, key=lambda p: p[1] or 0.0)}
            kept += sorted(extremes)  # by x
    return kept


def _decades(positive: list[float]) -> tuple[float, float]:
    if not positive:
        return 1e-6, 10.0
    low = 10.0 ** math.floor(math.log10(min(positive)))
    high = 10.0 ** math.ceil(math.log10(max(positive)) + 1e-9)
    return max(low, high * 1e-8), max(high, low * 10)


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = round(math.log10(low)), round(math.log10(high))
    return [10.0**e for e in range(first, last + 1, max(1, (last - first + 4) // 5))]


def _axes(
    x_ticks: list[float],
    y_ticks: list[float],
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
    x_label: str,
    y_label: str,
    log: bool,
) -> list[str]:
    body = []
    bottom = HEIGHT - _BOTTOM
    for tick in y_ticks:
        y = to_y(tick)
        text = f"{tick:g}" if log and tick >= 1e-4 else tick_text(tick)
        body.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(
            f'<text class="tick" x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
        )
    for tick in x_ticks:
        x = min(to_x(tick), WIDTH - _RIGHT - 8)
        body.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 15}" '
            f'text-anchor="middle">{escape(tick_text(tick))}</text>'
        )
    body.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    body.append(
        f'<text class="tick" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>'
    )
    height = (_TOP + bottom) / 2
    body.append(
        f'<text class="tick" x="12" y="{height}" text-anchor="middle" transform="rotate(-90 12 {height})">'
        f"{escape(y_label)}</text>"
    )
    return body


def _mark(mark: Mark, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> str:
    if mark.vertical:
        x = to_x(mark.value)
        ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"'
        return f'<line class="mark {escape(mark.style)}" {ends}/>'
    y = to_y(mark.value)
    label_y = y - 4 if y > _TOP + 14 else y + 13
    return (
        f'<line class="mark {escape(mark.style)}" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" '
        f'y2="{y:.1f}"/>'
        f'<text class="label {escape(mark.style)}" x="{WIDTH - _RIGHT - 2}" y="{label_y:.1f}" '
        'text-anchor="end">'
        f"{escape(mark.label)}</text>"
    )


def _paths(
    points: list[tuple[float, float | None]], to_x: Callable[[float], float], to_y: Callable[[float], float]
) -> list[str]:
    """One path per unbroken stretch; a lone point becomes a dot-long dash, so that it can be seen."""
    paths: list[list[str]] = [[]]
    for x, y in points:
        if y is None or not math.isfinite(y):
            paths.append([])
        else:
            paths[-1].append(f"{to_x(x):.1f} {to_y(y):.1f}")
    return ["M" + "L".join(p) + ("h1" if len(p) == 1 else "") for p in paths if p]


def _empty(text: str) -> str:
    return _svg(
        [f'<text class="tick" x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">{escape(text)}</text>']
    )


def _svg(body: list[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(body)}</svg>'
