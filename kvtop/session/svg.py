"""Plots as SVG text: pure, no script, no font or image from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from kvtop.session.text import html_text

WIDTH, HEIGHT = 720, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 8, 18, 28

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line, or one layer of a stack."""

    name: str
    """For the legend."""
    colour: str
    """CSS colour."""
    points: Points
    """Unix seconds and value; None leaves a gap."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One moment drawn as a vertical line."""

    time_s: float
    """When."""
    colour: str
    """CSS colour."""
    text: str
    """Shown when it is pointed at."""


def plot(
    title: str,
    curves: Sequence[Curve],
    span: tuple[float, float],
    *,
    stacked: bool = False,
    top: float | None = None,
    label: Callable[[float], str] = lambda value: f"{value:,.0f}",
    marks: Sequence[Mark] = (),
) -> str:
    """One plot.

    Args:
        title: Above it, and what a screen reader says.
        curves: What is drawn.
        span: First and last moment of the axis, Unix seconds.
        stacked: True: layers on each other from the first up; a moment is left out where
            one of them is not known.
        top: Upper end of the axis. None: the largest value.
        label: A value as text.
        marks: Moments to point out.
    """
    shown = _stack(curves) if stacked else [(c, [(t, 0.0, v) for t, v in c.points]) for c in curves]
    values = [high for _, points in shown for _, _, high in points if high is not None]
    peak = top if top is not None else max(values, default=0.0)
    peak = peak if peak > 0 else 1.0
    first, last = span
    length = max(last - first, 1e-9)
    inner_w, inner_h = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x(time_s: float) -> float:
        return _LEFT + inner_w * min(max((time_s - first) / length, 0.0), 1.0)

    def y(value: float) -> float:
        return _TOP + inner_h * (1 - min(max(value / peak, 0.0), 1.0))

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html_text(title)}">',
        f"<title>{html_text(title)}</title>",
    ]
    for share in (0.0, 0.5, 1.0):
        height = y(peak * share)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{height:.1f}" '
            f'y2="{height:.1f}"/><text class="tick" x="{_LEFT - 6}" y="{height + 4:.1f}" '
            f'text-anchor="end">{html_text(label(peak * share))}</text>'
        )
    for index, share in enumerate((0.0, 0.5, 1.0)):
        anchor = ("start", "middle", "end")[index]
        parts.append(
            f'<text class="tick" x="{_LEFT + inner_w * share:.1f}" y="{HEIGHT - 6}" '
            f'text-anchor="{anchor}">{_clock(first + length * share, length)}</text>'
        )
    for curve, points in shown:
        draw = _area if stacked else _line
        parts += draw(curve, points, x, y)
    for mark in marks:
        place = x(mark.time_s)
        parts.append(
            f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP - 6}" y2="{HEIGHT - _BOTTOM}" '
            f'stroke="{mark.colour}" stroke-dasharray="3 3"><title>{html_text(mark.text)}</title>'
            "</line>"
        )
    parts.append("</svg>")
    legend = "".join(
        f'<span class="key"><i style="background:{curve.colour}"></i>{html_text(curve.name)}</span>'
        for curve in curves
    )
    head = f"<figcaption>{html_text(title)} {legend}</figcaption>"
    return f"<figure>{head}{''.join(parts)}</figure>"


_Band = list[tuple[float, float, float | None]]


def _stack(curves: Sequence[Curve]) -> list[tuple[Curve, _Band]]:
    out: list[tuple[Curve, _Band]] = []
    base: list[float | None] = []
    for curve in curves:
        if not base:
            base = [0.0] * len(curve.points)
        band: _Band = []
        for index, (time_s, value) in enumerate(curve.points):
            low = base[index]
            high = None if low is None or value is None else low + value
            band.append((time_s, low or 0.0, high))
            base[index] = high
        out.append((curve, band))
    return out


def _runs(points: _Band) -> list[list[tuple[float, float, float]]]:
    runs: list[list[tuple[float, float, float]]] = [[]]
    for time_s, low, high in points:
        if high is None or not math.isfinite(high):
            if runs[-1]:
                runs.append([])
        else:
            runs[-1].append((time_s, low, high))
    return [run for run in runs if run]


def _line(
    curve: Curve, points: _Band, x: Callable[[float], float], y: Callable[[float], float]
) -> list[str]:
    out = []
    for run in _runs(points):
        path = " ".join(f"{x(time_s):.1f},{y(high):.1f}" for time_s, _, high in run)
        if len(run) == 1:
            time_s, _, high = run[0]
            out.append(
                f'<circle cx="{x(time_s):.1f}" cy="{y(high):.1f}" r="1.5" fill="{curve.colour}"/>'
            )
        else:
            out.append(
                f'<polyline points="{path}" fill="none" stroke="{curve.colour}" '
                'stroke-width="1.5"/>'
            )
    return out


def _area(
    curve: Curve, points: _Band, x: Callable[[float], float], y: Callable[[float], float]
) -> list[str]:
    out = []
    for run in _runs(points):
        upper = [f"{x(time_s):.1f},{y(high):.1f}" for time_s, _, high in run]
        lower = [f"{x(time_s):.1f},{y(low):.1f}" for time_s, low, _ in reversed(run)]
        out.append(f'<polygon points="{" ".join(upper + lower)}" fill="{curve.colour}"/>')
    return out


def _clock(time_s: float, length: float) -> str:
    try:
        moment = datetime.fromtimestamp(time_s, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return "-"
    return moment.strftime("%m-%d %H:%M" if length > 86_400 else "%H:%M:%S")
