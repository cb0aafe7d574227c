"""Line charts by plotext 6: values over time, gaps where nothing was read.

plotext draws the lines only; axis labels are ours, so that a chart is exactly as wide
as it was asked to be and a number is never cut. It is imported at the first chart,
not before: it takes about 0.1 s, and the first frame does not need it.
"""

from __future__ import annotations

import ctypes
import math
import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from types import ModuleType

from kvtop.draw.numbers import Number, duration, short
from kvtop.draw.text import block, fit, pad, wrap
from kvtop.draw.view import Line, Run

_LABEL = 6
_MIN_WIDTH = _LABEL + 6
_MOST = 1e18
"""Beyond this nothing is drawn; no time and no count is that large."""
_SHORTEST_S = 0.001
"""A shorter span has no time axis."""
_FIRST_COLOUR = 16
"""Colours tell the series apart in plotext's output; the styles are put in afterwards."""
_ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")
# plotext keeps one figure for the whole process.
_FIGURE = threading.Lock()


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart."""

    name: str
    """For the legend."""
    letter: str
    """Drawn instead of dots on an ASCII screen."""
    style: str
    """Style name."""
    values: Sequence[Number]
    """One a time; None leaves a gap."""


@lru_cache(maxsize=1)
def _plotext() -> ModuleType | str:
    """plotext, or why it does not load here."""
    try:
        plotext = import_module("plotext")
    except (ImportError, OSError) as error:
        return f"no charts: plotext does not load here ({type(error).__name__})"
    # The size is ours to choose: the chart is a part of the screen.
    plotext.terminal.limit(False, False)
    return plotext


def _readable(values: Sequence[Number]) -> list[float | None]:
    """Values that can be drawn; NaN fails both comparisons, infinity one."""
    return [value if value is not None and 0 <= value < _MOST else None for value in values]


def chart(
    times: Sequence[float],
    curves: Sequence[Curve],
    width: int,
    height: int,
    *,
    ascii: bool = False,  # noqa: A002 - the name of the option
    upper: float | None = None,
) -> list[Line]:
    """A chart of exactly `height` lines of `width` cells, time from left to right.

    Args:
        times: Unix seconds, rising.
        curves: What is drawn, the last one on top.
        width: Cells.
        height: Lines; from 4 on the last one is the time axis.
        ascii: Letters instead of dots.
        upper: Top of the value axis. None: the largest value.

    Returns:
        The chart, or a line that says why there is none yet.
    """
    if width <= 0 or height <= 0:
        return block((), width, height)
    if len(times) > 1:
        times, curves = _steady(times, curves, width)
    shapes = tuple((c.name, c.letter, c.style, hash(tuple(c.values))) for c in curves)
    key = (width, height, ascii, upper, hash(tuple(times)), shapes)
    drawn = _DRAWN.get(key)
    if drawn is None:
        if len(_DRAWN) >= _MOST_DRAWN:
            _DRAWN.pop(next(iter(_DRAWN)))
        drawn = _DRAWN[key] = _chart(times, curves, width, height, ascii=ascii, upper=upper)
    return list(drawn)


_DRAWN: dict[tuple[object, ...], list[Line]] = {}
"""Charts drawn last, by everything that they depend on."""
_MOST_DRAWN = 8


def _steady(
    times: Sequence[float], curves: Sequence[Curve], width: int
) -> tuple[Sequence[float], list[Curve]]:
    """The points up to the last whole dot column.

    A dot column of a long chart is many seconds wide. Points of the one that is not yet
    over are left out until it is, so the chart is the same for all that time and need
    not be drawn again. Short charts are not touched.
    """
    span = times[-1] - times[0]
    if not 0 < span < _MOST:
        return times, list(curves)
    step = span / (2 * max(width, 1))
    if step <= 1.0:
        return times, list(curves)
    step = 2.0 ** math.floor(math.log2(step))
    first = bisect_left(times, math.ceil(times[0] / step) * step)
    last = bisect_right(times, math.floor(times[-1] / step) * step)
    if last - first < 2:
        return times, list(curves)
    return (
        times[first:last],
        [replace(curve, values=curve.values[first:last]) for curve in curves],
    )


def _chart(
    times: Sequence[float],
    curves: Sequence[Curve],
    width: int,
    height: int,
    *,
    ascii: bool,  # noqa: A002 - as above
    upper: float | None,
) -> list[Line]:
    lines_of = [_readable(curve.values) for curve in curves]
    seen = sum(any(value is not None for value in at) for at in zip(*lines_of, strict=False))
    # Also false where a time is NaN.
    if seen < 2 or not _SHORTEST_S <= times[-1] - times[0] < _MOST:
        return _note("collecting", width, height)
    if width < _MIN_WIDTH or height < 2:
        return _note("no room for a chart", width, height)
    plotext = _plotext()
    if isinstance(plotext, str):
        return _note(plotext, width, height)
    largest = max(value for line in lines_of for value in line if value is not None)
    top = max(upper or 1.0, largest, 1.0)
    axis = 1 if height >= 4 else 0
    rows = _canvas(plotext, times, curves, lines_of, width - _LABEL, height - axis, top, ascii)
    lines: list[Line] = []
    last = len(rows) - 1
    for at, row in enumerate(rows):
        label = ""
        if at == 0:
            label = _tick(top)
        elif at == last:
            label = "0"
        elif len(rows) >= 7 and at == len(rows) // 2:
            label = _tick(top * (last - at) / last)
        mark = "|" if ascii else "│"
        lines.append(fit(((pad(label, _LABEL - 1, right=True) + mark, "chart.axis"), *row), width))
    if axis:
        left = "-" + duration(times[-1] - times[0])
        room = width - _LABEL - len(left)
        right = pad("now", room, right=True) if room >= 4 else ""
        lines.append(fit(((" " * _LABEL + left + right, "chart.axis"),), width))
    return block(lines, width, height)


def _note(text: str, width: int, height: int) -> list[Line]:
    return block([((line, "dim"),) for line in wrap(text, width)], width, height)


def _tick(value: float) -> str:
    if value < 10 and value != round(value):
        return f"{value:.1f}"
    return short(value, _LABEL - 1)


def _canvas(
    plotext: ModuleType,
    times: Sequence[float],
    curves: Sequence[Curve],
    lines_of: Sequence[Sequence[float | None]],
    width: int,
    height: int,
    top: float,
    ascii: bool,  # noqa: A002 - as above
) -> list[list[Run]]:
    first, span = times[0], times[-1] - times[0]
    break_s = _longest_step(times)
    with _FIGURE:
        figure = plotext.figure
        figure.clear.all()
        figure.plot_size(width, height)
        figure.canvas("default")
        figure.axes(False)
        figure.ruler(0).frequency(0)
        figure.ruler(1).frequency(0)
        figure.ruler(0, 0).lim(0, span)
        figure.ruler(1, 0).lim(0, top)
        for at, curve in enumerate(curves):
            xs, ys, joined = _thinned(times, lines_of[at], 2 * width, break_s)
            if not xs:
                continue
            marker = plotext.marker(
                curve.letter if ascii else "braille", plotext.pixel(_FIRST_COLOUR + at)
            )
            signal = figure.signal([x - first for x in xs], ys, marker=marker)
            for point, join in enumerate(joined):
                signal.line(point, join)
            figure.draw(signal)
        text = figure.build().string()
        figure.clear.data()
        _give_memory_back()
    styles = {str(_FIRST_COLOUR + at): curve.style for at, curve in enumerate(curves)}
    rows = [_runs(row, styles) for row in text.split("\n")[:height]]
    return rows + [[] for _ in range(height - len(rows))]


@lru_cache(maxsize=1)
def _trim() -> Callable[[int], int]:
    """The C library's `malloc_trim`; where there is none, something that does nothing."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return lambda _pad: 0
    return trim


def _give_memory_back() -> None:
    """The kernel of plotext has just freed up to 16 MB of scratch, which malloc would keep."""
    _trim()(0)


def _longest_step(times: Sequence[float]) -> float:
    """Longest time between two points that are still joined; beyond it nobody was looking."""
    steps = sorted(after - before for before, after in pairwise(times))
    return max(3.0, 5 * steps[len(steps) // 2])


def _thinned(
    times: Sequence[float], values: Sequence[float | None], columns: int, break_s: float
) -> tuple[list[float], list[float], list[bool]]:
    """The points worth drawing: at most the lowest and highest of each dot column.

    Only points that were read are kept; none is computed. A point is joined to the
    one before it unless something between them could not be read.
    """
    first, last = times[0], times[-1]
    scale = columns / (last - first)
    points: list[tuple[float, float, bool]] = []
    low = high = (first, 0.0)
    column = -1
    joined = False

    def flush() -> None:
        if column < 0:
            return
        points.append((*min(low, high), joined))
        if low != high:
            points.append((*max(low, high), True))

    gap = True
    before = first
    for time_s, value in zip(times, values, strict=False):
        # A clock that was set back, or is no number, gives no place on the axis; plotext's
        # kernel does not survive points far outside of it.
        if value is None or not first <= time_s <= last:
            gap = True
            continue
        gap = gap or time_s - before > break_s
        before = time_s
        at = int((time_s - first) * scale)
        if at != column or gap:
            flush()
            column, joined = at, not gap
            low = high = (time_s, value)
        elif value < low[1]:
            low = (time_s, value)
        elif value > high[1]:
            high = (time_s, value)
        gap = False
    flush()
    return (
        [x for x, _, _ in points],
        [float(y) for _, y, _ in points],
        [join for _, _, join in points],
    )


def _runs(row: str, styles: dict[str, str]) -> list[Run]:
    """One line of plotext's output as runs."""
    runs: list[Run] = []
    style = ""
    at = 0
    for match in _ESCAPE.finditer(row):
        if match.start() > at:
            runs.append((row[at : match.start()], style))
        code = match.group(1)
        style = styles.get(code[5:], "") if code.startswith("38;5;") else ""
        at = match.end()
    if at < len(row):
        runs.append((row[at:], style))
    return runs
