"""What the mouse does; nothing needs it."""

from __future__ import annotations

from dataclasses import replace

from kvtop.draw.requests import column_at, row_at
from kvtop.draw.view import View
from kvtop.model.snapshot import Snapshot
from kvtop.ui.controller import open_request, press
from kvtop.ui.effects import Result
from kvtop.ui.moves import Here, move_panel, rects

_WHEEL_ROWS = 3


def click(view: View, at: tuple[int, int], snap: Snapshot | None, size: tuple[int, int]) -> Result:
    """A click focuses a panel; in the list of requests it selects, opens, or sorts.

    Args:
        view: What is on screen.
        at: Column and row of the click.
        snap: What is shown. None: nothing yet.
        size: Columns and rows of the terminal.
    """
    if view.dialog is not None:
        return view, None
    here = Here(snap, size)
    name, rect = next(((n, r) for n, r in rects(view, here).items() if r.holds(*at)), ("", None))
    if name == "diagnosis":
        return press(view, "w", snap, size)
    if rect is None or name in ("header", "footer", "nothing", "timeline"):
        return view, None
    focused = replace(view, focus="requests" if name == "detail" else name)
    if name != "requests" or snap is None:
        return focused, None
    x, y = at[0] - rect.x - 1, at[1] - rect.y - 1
    if y == 0:
        title = column_at(snap, view, rect.width - 2, x)
        if title is None:
            return focused, None
        reverse = not view.reverse if title == view.sort else view.reverse
        return replace(focused, sort=title, reverse=reverse), None
    request = row_at(snap, view, rect.height - 2, y)
    if request is None:
        return focused, None
    if view.cursor_id == request.id and view.focus == "requests":
        return open_request(focused, here)
    return replace(focused, cursor_id=request.id), None


def wheel(
    view: View, at: tuple[int, int], rows: int, snap: Snapshot | None, size: tuple[int, int]
) -> Result:
    """The wheel moves the panel under it, or the open dialog.

    Args:
        view: What is on screen.
        at: Column and row of the mouse.
        rows: 1 down, -1 up.
        snap: What is shown. None: nothing yet.
        size: Columns and rows of the terminal.
    """
    if view.dialog is not None:
        if view.dialog.kind not in ("confirm", "input"):
            for _ in range(_WHEEL_ROWS):
                view, _effect = press(view, "down" if rows > 0 else "up", snap, size)
        return view, None
    here = Here(snap, size)
    name = next((n for n, r in rects(view, here).items() if r.holds(*at)), "")
    return move_panel(view, here, name, (_WHEEL_ROWS * rows, 0)), None
