"""A chart as SVG, to lie within a page whose style sheet has the colours --c0 to --c5, --line and the text's."""

from __future__ import annotations

import html
import math

from embedserve.loadtest.results import Chart

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 260, 64, 14, 14, 40
COLORS, GRID_LINES, MARKED_POINTS = 6, 4, 40
NICE = (1, 2, 4, 5, 8, 10)  # times a power of ten: quarters of these are short numbers


def svg(chart: Chart) -> str:
    """The picture and a key to its lines; nothing if there are no points."""
    points = [point for line in chart.lines.values() for point in line]
    if not points:
        return ""
    place = _Axes(chart, points)
    lines = "".join(_line(line, i, place) for i, line in enumerate(chart.lines.values()))
    key = "".join(
        f'<span><i style="background:var(--c{i % COLORS})"></i>{html.escape(name)}</span>'
        for i, name in enumerate(chart.lines)
    )
    title = html.escape(f"{chart.title}, {chart.y}" if chart.y else chart.title)
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{place.drawn()}{lines}</svg>'
    return f'<figure class="card"><figcaption>{title}</figcaption>{picture}<div class="key">{key}</div></figure>'


class _Axes:
    """From values to places."""

    def __init__(self, chart: Chart, points: list[tuple[float, float]]) -> None:
        self._chart = chart
        self._low, self._high = min(x for x, _ in points), max(x for x, _ in points)
        self._top = _nice(max(y for _, y in points))

    def x(self, value: float) -> float:
        low, value, high = (
            (math.log10(v) for v in (self._low, value, self._high))
            if self._chart.log_x
            else (self._low, value, self._high)
        )
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / ((high - low) or 1)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / self._top

    def drawn(self) -> str:
        parts = []
        for i in range(GRID_LINES + 1):
            value = self._top * i / GRID_LINES
            at = self.y(value)
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="var(--line)"/>')
            parts.append(_text(LEFT - 8, at + 4, "end", f"{value:,.6g}"))
        ticks = self._chart.ticks or {self._low: f"{self._low:,.3g}", self._high: f"{self._high:,.3g}"}
        for value, name in ticks.items():
            anchor = "start" if value == self._low else "end" if value == self._high else "middle"
            parts.append(_text(self.x(value), HEIGHT - BOTTOM + 16, anchor, name))
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "middle", self._chart.x))
        return "".join(parts)


def _line(line: list[tuple[float, float]], number: int, place: _Axes) -> str:
    color = f"var(--c{number % COLORS})"
    places = [(f"{place.x(x):.1f}", f"{place.y(y):.1f}") for x, y in line]
    path = " ".join(f"{x},{y}" for x, y in places)
    marks = places if len(places) <= MARKED_POINTS else []
    return f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>' + "".join(
        f'<circle r="3" fill="{color}" cx="{x}" cy="{y}"/>' for x, y in marks
    )


def _text(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def _nice(value: float) -> float:
    """The least short number that is not below."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(n * unit for n in NICE if n * unit >= value * (1 - 1e-9))
