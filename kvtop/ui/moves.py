"""Moving through panels: cursor, pages, scrolling; pure, shared by keys and mouse."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtop.draw.detail import detail_lines
from kvtop.draw.layout import Rect, layout
from kvtop.draw.requests import cursor_index, first_row, visible_requests
from kvtop.draw.view import View
from kvtop.model.snapshot import Request, Snapshot

FAR = 1_000_000
"""More rows than anything has."""

STEPS: dict[str, tuple[int, int]] = {
    "up": (-1, 0),
    "down": (1, 0),
    "page_up": (0, -1),
    "page_down": (0, 1),
    "first": (-FAR, 0),
    "last": (FAR, 0),
}
"""Rows and pages of each moving action."""


@dataclass(frozen=True, slots=True)
class Here:
    """What an action can look at besides the view."""

    snap: Snapshot | None
    """What is shown. None: nothing yet."""
    size: tuple[int, int]
    """Columns and rows of the terminal."""


def at(view: View, panel: str, first: int) -> dict[str, int]:
    """Scroll offsets with one changed."""
    return {**view.scroll, panel: first}


def scrolled(view: View, panel: str, step: tuple[int, int], page: int, lines: int) -> View:
    """A panel moved by rows and pages, never past its end.

    Args:
        view: What is on screen.
        panel: Key in `View.scroll`.
        step: Rows and pages.
        page: Lines on screen at once.
        lines: Lines there are.
    """
    rows = step[0] + step[1] * max(page - 1, 1)
    last = max(lines - page, 0)
    first = min(max(view.scroll.get(panel, 0), 0), last) + rows
    return replace(view, scroll=at(view, panel, min(max(first, 0), last)))


def rects(view: View, here: Here) -> dict[str, Rect]:
    """Where everything stands now."""
    found = here.snap is None or bool(here.snap.engines)
    return layout(here.size[0], here.size[1], view, found)


def _inside(view: View, here: Here, panel: str) -> tuple[int, int]:
    """Columns and rows inside the border of a panel; 1 x 1 where it is not on screen."""
    rect = rects(view, here).get(panel)
    return (max(rect.width - 2, 1), max(rect.height - 2, 1)) if rect else (1, 1)


def move_panel(view: View, here: Here, panel: str, step: tuple[int, int]) -> View:
    """Move a panel, or the cursor if it is the list of requests."""
    if here.snap is None:
        return view
    if panel == "requests":
        return _cursor(view, here, step)
    width, rows = _inside(view, here, panel)
    if panel == "detail":
        return scrolled(view, panel, step, rows, len(detail_lines(here.snap, view, width)))
    if panel == "stacks":
        frames = sum(len(stacks.frames) for stacks in here.snap.stacks)
        return scrolled(view, panel, step, max(rows - 1, 1), frames)
    return view


def chosen(view: View, snap: Snapshot | None) -> Request | None:
    """The request under the cursor. None: there is none."""
    rows = visible_requests(snap, view) if snap is not None else []
    return rows[cursor_index(rows, view)] if rows else None


def _cursor(view: View, here: Here, step: tuple[int, int]) -> View:
    rows = visible_requests(here.snap, view) if here.snap is not None else []
    if not rows:
        return view
    _, height = _inside(view, here, "requests")
    row = cursor_index(rows, view) + step[0] + step[1] * max(height - 2, 1)
    return in_sight(replace(view, cursor_id=rows[min(max(row, 0), len(rows) - 1)].id), here)


def in_sight(view: View, here: Here) -> View:
    """The list of requests scrolled as little as shows the cursor."""
    if here.snap is None:
        return view
    first = first_row(here.snap, view, _inside(view, here, "requests")[1])
    if first == view.scroll.get("requests", 0):
        return view
    return replace(view, scroll=at(view, "requests", first))


def settle(view: View, before: Snapshot | None, here: Here) -> View:
    """The view on a new snapshot: a cursor whose request is gone stays on its row.

    Args:
        view: What is on screen.
        before: The snapshot shown until now.
        here: The new one.
    """
    if view.cursor_id is None or before is None or here.snap is None:
        return view
    rows = visible_requests(here.snap, view)
    if rows and all(row.id != view.cursor_id for row in rows):
        old = visible_requests(before, view)
        if any(row.id == view.cursor_id for row in old):
            place = min(cursor_index(old, view), len(rows) - 1)
            view = replace(view, cursor_id=rows[place].id)
    return in_sight(view, here)
