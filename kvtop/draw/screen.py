"""The whole main screen as lines: the only place that knows which panel goes where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtop.draw import detail, gpu, kv, requests, stacks, status, trend
from kvtop.draw.dialog import dialog_panel, dialog_rect
from kvtop.draw.findings import diagnosis_line
from kvtop.draw.frame import box, compose, overlay
from kvtop.draw.layout import Rect, layout
from kvtop.draw.player import timeline_line
from kvtop.draw.text import block, fit
from kvtop.draw.view import Line, View
from kvtop.model.snapshot import Snapshot

Title = Callable[[Snapshot, View, int], str]
Panel = Callable[[Snapshot, View, int, int], list[Line]]


@dataclass(frozen=True, slots=True)
class _Part:
    """What fills the box of one panel."""

    title: Title
    """Text of the border, for a width in cells."""
    panel: Panel
    """Lines inside the border, for a width and a height in cells."""


_PARTS = {
    "gpu": _Part(gpu.title, gpu.gpu_panel),
    "kv": _Part(kv.title, kv.kv_panel),
    "requests": _Part(requests.title, requests.requests_panel),
    "detail": _Part(detail.title, detail.detail_panel),
    "stacks": _Part(stacks.title, stacks.stacks_panel),
    "trend": _Part(trend.title, trend.trend_panel),
    "nothing": _Part(lambda _snap, _view, _width: "No vLLM engine yet", status.nothing_found),
}


def screen(
    snap: Snapshot | None,
    view: View,
    width: int,
    height: int,
    keys: Sequence[tuple[str, str]] = (),
) -> list[Line]:
    """Everything on the screen: exactly `height` lines of exactly `width` cells.

    Args:
        snap: What is shown. None: nothing was read yet, and the screen says so.
        view: What the user chose.
        width: Columns of the terminal.
        height: Rows of the terminal.
        keys: Keys and their short names for the last line.
    """
    if width < 1 or height < 1:
        return [()] * max(height, 0)
    if snap is None:
        lines = _waiting(view, width, height)
    else:
        rects = layout(width, height, view, found=bool(snap.engines))
        lines = compose(
            [(rect, _piece(name, rect, snap, view, keys)) for name, rect in rects.items()],
            width,
            height,
        )
    if view.dialog is None:
        return lines
    rect = dialog_rect(view.dialog, width, height)
    return overlay(lines, rect, dialog_panel(snap, view, rect.width, rect.height), width)


def _piece(
    name: str, rect: Rect, snap: Snapshot, view: View, keys: Sequence[tuple[str, str]]
) -> list[Line]:
    if name == "header":
        return [fit(status.header(snap, view, rect.width), rect.width)]
    if name == "footer":
        return [fit(status.footer(snap, view, rect.width, keys), rect.width)]
    if name == "diagnosis":
        return [diagnosis_line(snap, view, rect.width)]
    if name == "timeline":
        line = timeline_line(view.player, rect.width, view.ascii) if view.player else ()
        return [fit(line, rect.width)]
    part = _PARTS[name]
    # Without colours a half block says nothing: the map falls back to letters.
    shown = replace(view, ascii=True) if view.mono and name == "kv" else view
    inner, rows = max(rect.width - 2, 0), max(rect.height - 2, 0)
    inside = block(part.panel(snap, shown, inner, rows), inner, rows) if inner and rows else []
    focused = view.focus == name or (view.focus == "requests" and name in ("detail", "nothing"))
    title = part.title(snap, view, max(rect.width - 6, 0))
    return box(title, inside, rect.width, rect.height, ascii=view.ascii, focused=focused)


def _waiting(view: View, width: int, height: int) -> list[Line]:
    dots = "..." if view.ascii else "…"
    lines: list[Line] = [(("kvtop", "header"),)]
    if height > 2:
        lines += [()] * (height // 2 - 1)
        lines.append((("  Reading GPUs and vLLM engines" + dots, "label"),))
    return block(lines, width, height)
