"""Where each panel stands: a pure function of the size and of what the user chose.

Panels that do not fit are left out, the least important first; the focused one is the
last to go, so Tab reaches every panel at every size. No two rectangles overlap and
each lies inside the screen, whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtop.draw.view import View

PANELS = ("gpu", "kv", "requests", "stacks", "trend")
"""Panels that can have the focus, in the order of Tab and from top to bottom."""

WIDE = 100
"""From this width on panels stand side by side."""

_MIN_FOR_DIAGNOSIS = 20
_MIN_FOR_TIMELINE = 5
_IMPORTANCE = ("requests", "kv", "gpu", "trend", "stacks")
_MIN_ROWS = {"gpu": 4, "kv": 7, "requests": 8, "stacks": 6, "trend": 7}
_WEIGHT = {"gpu": 1, "kv": 4, "requests": 4, "stacks": 2, "trend": 3}
_MIN_BAND = {"top": 8, "requests": 7, "bottom": 7}
_BAND_WEIGHT = {"top": 3, "requests": 4, "bottom": 2}
_BAND_IMPORTANCE = ("requests", "top", "bottom")
_BANDS = {"top": ("gpu", "kv"), "requests": ("requests",), "bottom": ("stacks", "trend")}


@dataclass(frozen=True, slots=True)
class Rect:
    """Cells of the screen; the origin is its upper left corner."""

    x: int
    """First column."""
    y: int
    """First row."""
    width: int
    """Columns, at least 1."""
    height: int
    """Rows, at least 1."""

    def holds(self, x: int, y: int) -> bool:
        """Whether a cell lies in it."""
        return self.x <= x < self.x + self.width and self.y <= y < self.y + self.height


def focusable(view: View) -> tuple[str, ...]:
    """The panels that Tab goes through."""
    return tuple(name for name in PANELS if name != "stacks" or view.stacks_on)


def layout(width: int, height: int, view: View, found: bool = True) -> dict[str, Rect]:
    """Rectangles of everything on the screen, borders included.

    The names are those of `PANELS`, and `header`, `footer`, `detail` (in the place of
    `requests` while a request is open), `nothing` (in the place of everything about
    engines while there is none), `diagnosis` (below the header of a replay, and live
    once something was judged) and `timeline` (above the footer of a replay).

    Args:
        width: Columns of the terminal.
        height: Rows of the terminal.
        view: Focus, zoom, an open request, hidden panels.
        found: False: no engine is known.
    """
    if width < 1 or height < 1:
        return {}
    rects = {"header": Rect(0, 0, width, 1)}
    bottom = height
    if height >= 3:
        bottom -= 1
        rects["footer"] = Rect(0, bottom, width, 1)
    top = 1
    judged = bool(view.findings) or view.player is not None
    if found and judged and height >= _MIN_FOR_DIAGNOSIS:
        rects["diagnosis"] = Rect(0, 1, width, 1)
        top = 2
    if view.player is not None and height >= _MIN_FOR_TIMELINE:
        bottom -= 1
        rects["timeline"] = Rect(0, bottom, width, 1)
    body = Rect(0, top, width, bottom - top)
    if body.height < 1:
        return rects
    focus = view.focus if view.focus in focusable(view) else "requests"
    if not found:
        rects.update(_nothing(body))
    elif view.zoom:
        rects[focus] = body
    elif width >= WIDE:
        rects.update(_wide(body, focus, view))
    else:
        rects.update(_narrow(body, focus, view))
    if view.detail is not None and "requests" in rects:
        rects["detail"] = rects.pop("requests")
    return rects


def _nothing(body: Rect) -> dict[str, Rect]:
    if body.height < 14:
        return {"nothing": body}
    gpu = 8 if body.height >= 24 else 5
    return {
        "gpu": Rect(0, body.y, body.width, gpu),
        "nothing": Rect(0, body.y + gpu, body.width, body.height - gpu),
    }


def _narrow(body: Rect, focus: str, view: View) -> dict[str, Rect]:
    shown = _that_fit(
        [focus, *(name for name in _IMPORTANCE if name != focus and name in focusable(view))],
        _MIN_ROWS,
        body.height,
    )
    names = [name for name in PANELS if name in shown]
    heights = _shares(names, _MIN_ROWS, _WEIGHT, body.height)
    rects: dict[str, Rect] = {}
    y = body.y
    for name, rows in zip(names, heights, strict=True):
        rects[name] = Rect(body.x, y, body.width, rows)
        y += rows
    return rects


def _wide(body: Rect, focus: str, view: View) -> dict[str, Rect]:
    first = next(band for band, names in _BANDS.items() if focus in names)
    order = [first, *(band for band in _BAND_IMPORTANCE if band != first)]
    shown = _that_fit(order, _MIN_BAND, body.height)
    bands = [band for band in _BANDS if band in shown]
    heights = _shares(bands, _MIN_BAND, _BAND_WEIGHT, body.height)
    rects: dict[str, Rect] = {}
    y = body.y
    for band, rows in zip(bands, heights, strict=True):
        names = [name for name in _BANDS[band] if name in focusable(view)]
        left = body.width
        if len(names) == 2:
            left = min(max(body.width * 2 // 5, 46), 70) if band == "top" else body.width // 2
        rects[names[0]] = Rect(body.x, y, left, rows)
        if len(names) == 2:
            rects[names[1]] = Rect(body.x + left, y, body.width - left, rows)
        y += rows
    return rects


def _that_fit(order: Sequence[str], least: dict[str, int], rows: int) -> set[str]:
    """The first one always, and of the others all that still fit, in this order."""
    shown = {order[0]}
    used = least[order[0]]
    for name in order[1:]:
        if used + least[name] <= rows:
            shown.add(name)
            used += least[name]
    return shown


def _shares(
    names: Sequence[str], least: dict[str, int], weight: dict[str, int], rows: int
) -> list[int]:
    """Rows of each: its least and its share of the rest; together exactly `rows`."""
    if len(names) == 1:
        return [rows]
    spare = rows - sum(least[name] for name in names)
    total = sum(weight[name] for name in names)
    out: list[int] = []
    given = 0
    passed = 0
    for name in names:
        passed += weight[name]
        share = spare * passed // total - given
        given += share
        out.append(least[name] + share)
    return out
