"""Charts of the last 15 minutes as inline SVG: shapes alone, with all text beside them as HTML.

The shapes are stretched to the width there is, so text in them would be, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxferd.control.status_page.html import Html, html, join, tag

# One column of a chart is five seconds: 180 columns for 15 minutes.
COLUMN_S = 5
NUM_COLUMNS = 180
HEIGHT = 100.0

Values = Sequence[float | None]


class Series(NamedTuple):
    """One value for each column, the last for now; None: the daemon took no sample."""

    name: str
    color: int  # 0 to 7
    values: Values
    unit: str = ""  # shown after the name: its value now


def line_chart(
    title: str, series: Sequence[Series], sampled: Values, format_value: Callable[[float], str]
) -> Html:
    """Return a chart with one line for each series. `sampled`: None in a column without a sample."""
    top = _round_up(max((v for s in series for v in s.values if v is not None), default=0.0))
    shapes = "".join(_line(s, top) for s in series)
    return _figure(title, series, sampled, top, shapes, format_value)


def stacked_chart(
    title: str, series: Sequence[Series], sampled: Values, format_value: Callable[[float], str]
) -> Html:
    """Return a chart of bars, in which the series of one column stand on each other."""
    columns = list(zip(*(s.values for s in series), strict=True)) or [(None,)] * NUM_COLUMNS
    top = _round_up(max(sum(v or 0.0 for v in column) for column in columns))
    floors = [0.0] * NUM_COLUMNS
    shapes = []
    for one in series:
        path = []
        for index, value in enumerate(one.values):
            if not value or not top:
                continue
            height = value / top * HEIGHT
            floors[index] += height
            path.append(f"M{index} {HEIGHT - floors[index]:.1f}h1v{height:.1f}h-1z")
        shapes.append(f'<path class="fill s{one.color}" d="{"".join(path)}"/>' if path else "")
    return _figure(title, series, sampled, top, "".join(shapes), format_value)


def share_bar(parts: Sequence[tuple[str, int, float]]) -> Html:
    """Return one bar whose parts (name, color, value) have their shares of the whole."""
    parts = [part for part in parts if 0.0 < part[2] < math.inf]
    total = sum(value for _, _, value in parts) or 1.0
    left, shapes = 0.0, []
    for name, color, value in parts:
        width = value / total * 100
        shapes.append(
            f'<rect class="fill s{color}" x="{left:.2f}" y="0" width="{width:.2f}" height="10">'
            f"<title>{html(name)}</title></rect>"
        )
        left += width
    return Html(
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(shapes)}</svg>"
    )


def columns_of(
    values: Sequence[float | None], spans_s: Sequence[int | None], *, is_rate: bool = True
) -> list[float | None]:
    """Return one value for each of the chart's columns from one for each second, the last for now.

    With `is_rate`, sums per second; else the largest value. A sample after a gap is for all of `spans_s`.
    """
    # By numpy, in a tenth of the time: a page has fifteen of these.
    seconds = _by_column(values)
    is_sampled = ~np.isnan(seconds)
    if is_rate:
        spans = np.where(is_sampled, _by_column(spans_s), 0.0)
        found = np.nansum(seconds, axis=1) / np.maximum(np.nansum(spans, axis=1), 1.0)
    else:
        found = np.where(is_sampled, seconds, -np.inf).max(axis=1)
    known: list[bool] = np.any(is_sampled, axis=1).tolist()
    return [value if is_known else None for value, is_known in zip(found.tolist(), known, strict=True)]


def _by_column(values: Sequence[float | None]) -> npt.NDArray[np.float64]:
    """Return (NUM_COLUMNS, COLUMN_S) values, the last at the end; NaN for None and for what is missing."""
    found = np.full(NUM_COLUMNS * COLUMN_S, np.nan)
    last = np.array(values[-found.size :], np.float64)
    if last.size:
        found[-last.size :] = last
    return found.reshape(NUM_COLUMNS, COLUMN_S)


def _line(series: Series, top: float) -> str:
    path, is_drawing = [], False
    for index, value in enumerate(series.values):
        if value is None:
            is_drawing = False
            continue
        y = HEIGHT - (value / top * HEIGHT if top else 0.0)
        path.append(f"{'L' if is_drawing else 'M'}{index} {y:.1f}h1")
        is_drawing = True
    return f'<path class="line s{series.color}" d="{"".join(path)}"/>' if path else ""


def _figure(
    title: str,
    series: Sequence[Series],
    sampled: Values,
    top: float,
    shapes: str,
    format_value: Callable[[float], str],
) -> Html:
    legend = join(
        Html(f'<span class="key"><i class="s{s.color}"></i>{html(s.name)} {tag("b", s.unit)}</span>')
        for s in series
    )
    gaps = "".join(f'<rect class="gap" x="{x}" y="0" width="{n}" height="100"/>' for x, n in _gaps(sampled))
    key = Html('<span class="key"><i class="gap"></i>no samples</span>') if gaps else ""
    grid = '<path class="grid" d="M0 50h180M60 0v100M120 0v100"/>'
    label = (
        f"{title}, the last 15 minutes, at most {format_value(top)}" if top else f"{title}: nothing to show"
    )
    return Html(
        f'<figure><figcaption>{html(title)}<span class="keys">{legend}{key}</span></figcaption>'
        f'<div class="plot"><span class="top">{html(format_value(top)) if top else "0"}</span>'
        f'<svg viewBox="0 0 {NUM_COLUMNS} {HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html(label)}">{gaps}{grid}{shapes}</svg></div>'
        '<div class="axis"><span>-15 min</span><span>-10 min</span><span>-5 min</span><span>now</span></div>'
        "</figure>"
    )


def _gaps(sampled: Values) -> Iterator[tuple[int, int]]:
    """Yield start and width of the columns without a sample."""
    start = None
    for index in range(NUM_COLUMNS + 1):
        is_gap = index < NUM_COLUMNS and sampled[index] is None
        if is_gap and start is None:
            start = index
        elif not is_gap and start is not None:
            yield start, index - start
            start = None


def _round_up(value: float) -> float:
    """Return the next of 1, 1.5, 2, 3, 5, 7 times a power of ten; 0 for 0."""
    if not 0 < value < math.inf:
        return 0.0
    scale = 1.0
    while scale * 10 <= value:
        scale *= 10
    while scale > value:
        scale /= 10
    return next((step * scale for step in (1, 1.5, 2, 3, 5, 7) if step * scale >= value), 10 * scale)
