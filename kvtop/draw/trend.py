"""The trend panel: free, cached, used blocks over time."""

from __future__ import annotations

from kvtop.draw.chart import Curve, chart
from kvtop.draw.numbers import Number, duration, known, percent, short
from kvtop.draw.pick import engine_of
from kvtop.draw.style import state_style
from kvtop.draw.text import Field, block, clip, fields
from kvtop.draw.view import Line, Run, View
from kvtop.model.blocks import LETTERS, BlockState
from kvtop.model.history import engine_key
from kvtop.model.snapshot import Snapshot

_ALWAYS = (
    (BlockState.FREE, "free"),
    (BlockState.CACHED, "cached"),
    (BlockState.USED, "used"),
)
_WHEN_SEEN = (
    (BlockState.SHARED, "shared"),
    (BlockState.HELD, "held"),
    (BlockState.GHOST, "ghost"),
)


def title(snap: Snapshot, view: View, width: int) -> str:
    """`Trend blocks  last 5m00s`."""
    parts: list[Field] = [(0, (("Trend", ""),)), (1, (("blocks", ""),))]
    engine = engine_of(snap, view)
    if view.history is not None and engine is not None:
        times, _ = view.history.series(engine_key(engine), "used")
        if len(times) > 1:
            parts.append((2, ((f"last {duration(times[-1] - times[0])}", ""),)))
    return clip("".join(text for text, _ in fields(parts, width, " ")), width, view.ascii)


def trend_panel(snap: Snapshot, view: View, width: int, height: int) -> list[Line]:
    """A legend with the last values, and the chart."""
    engine = engine_of(snap, view)
    if engine is None:
        return block([(("no engine yet", "dim"),)], width, height)
    if view.history is None:
        return block([(("collecting", "dim"),)], width, height)
    key = engine_key(engine)
    times: list[float] = []
    curves: list[Curve] = []
    for state, name in (*_ALWAYS, *_WHEN_SEEN):
        times, values = view.history.series(key, name)
        seen = any(known(value) and value > 0 for value in values)
        if (state, name) in _ALWAYS or seen:
            # A dot is the letter of FREE and of nothing else; on a chart it is too faint.
            letter = "f" if state is BlockState.FREE else LETTERS[state]
            curves.append(Curve(name, letter, state_style(state), values))
    upper: float | None = None
    in_percent = not any(known(value) for curve in curves for value in curve.values)
    if in_percent:
        times, values = view.history.series(key, "kv_used_percent")
        curves = [Curve("used % (from /metrics)", "U", state_style(BlockState.USED), values)]
        upper = 100.0
    lines = [_legend(curves, width, in_percent)]
    if height > 1:
        lines += chart(times, curves, width, height - 1, ascii=view.ascii or view.mono, upper=upper)
    return block(lines, width, height)


def _legend(curves: list[Curve], width: int, in_percent: bool) -> Line:
    parts: list[Field] = []
    for at, curve in enumerate(curves):
        last: Number = curve.values[-1] if curve.values else None
        value = percent(last) if in_percent else short(last, 6)
        runs: tuple[Run, ...] = (
            (curve.letter, curve.style),
            (f" {curve.name} ", "label"),
            (value, "value"),
        )
        # Ghost and held blocks are rare and the reason to look: they stay longest.
        rare = curve.name in ("ghost", "held")
        parts.append((0 if rare else at + 1, runs))
    return fields(parts, width)
