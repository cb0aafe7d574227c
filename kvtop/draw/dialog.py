"""What is drawn over the panels: help, sources, messages, questions, a line of input."""

from __future__ import annotations

from kvtop.draw.findings import finding_panel, findings_panel
from kvtop.draw.frame import box
from kvtop.draw.layout import Rect
from kvtop.draw.status import sources_panel
from kvtop.draw.text import block, cell_width, cut, fit, line_width, safe, wrap
from kvtop.draw.view import Dialog, Line, View
from kvtop.model.snapshot import Snapshot

_HINTS = {
    "help": "esc closes  up/down scroll",
    "sources": "esc closes  up/down scroll",
    "findings": "enter opens  up/down choose  esc closes",
    "finding": "esc closes  up/down scroll  its blocks are lit on the map",
    "message": "esc closes",
    "confirm": "y yes  n no",
    "danger": "y does it  n, enter and esc do not  up/down scroll",
    "input": "enter accepts  esc cancels",
}
_LIVE = ("sources", "findings", "finding")


def dialog_rect(dialog: Dialog, width: int, height: int) -> Rect:
    """Where a dialog stands: in the middle, as large as it needs, inside the screen.

    Args:
        dialog: What is shown.
        width: Columns of the screen, at least 1.
        height: Rows of the screen, at least 1.
    """
    if dialog.kind in _LIVE:
        wanted, rows = min(width, 120), height - 2
    else:
        widest = max((line_width(line) for line in dialog.lines), default=0)
        wanted = max(widest, cell_width(dialog.title) + 4, 34) + 4
        rows = len(dialog_lines(dialog, width)) + 3 + (1 if dialog.kind == "input" else 0)
    columns = max(min(wanted, width), 1)
    # Header and footer stay in sight where there is room for that.
    rows = max(min(rows, height - 2 if height > 6 else height), 1)
    return Rect((width - columns) // 2, (height - rows) // 2, columns, rows)


def dialog_lines(dialog: Dialog, width: int) -> tuple[Line, ...]:
    """The text of a dialog on a screen of so many columns.

    What is asked before something is changed is broken again where it is too wide: it has to
    be read in full before the answer.
    """
    if dialog.kind != "danger":
        return dialog.lines
    inner = max(width - 4, 1)
    lines: list[Line] = []
    for line in dialog.lines:
        if line_width(line) <= inner:
            lines.append(line)
        else:
            text = "".join(part for part, _ in line)
            lines += [((part, line[0][1]),) for part in wrap(text, inner)]
    return tuple(lines)


def dialog_page(dialog: Dialog, width: int, height: int) -> int:
    """Lines of a dialog that are on screen at once."""
    rect = dialog_rect(dialog, width, height)
    return max(rect.height - 3 - (1 if dialog.kind == "input" else 0), 1)


def dialog_panel(snap: Snapshot | None, view: View, width: int, height: int) -> list[Line]:
    """The open dialog with its border; `height` lines of `width` cells.

    Args:
        snap: Sources are drawn from it.
        view: Its `dialog` must not be None.
        width: Columns of the rectangle from `dialog_rect`.
        height: Rows of it.
    """
    dialog = view.dialog
    if dialog is None:
        return block((), width, height)
    inner, rows = max(width - 4, 0), max(height - 2, 0)
    hint: Line = ((_HINTS.get(dialog.kind, "esc closes"), "dim"),)
    page = max(rows - 1 - (1 if dialog.kind == "input" else 0), 0)
    if dialog.kind == "sources" and snap is not None:
        content = sources_panel(snap, view, inner, page)
    elif dialog.kind == "findings" and snap is not None:
        content = findings_panel(snap, view, inner, page)
    elif dialog.kind == "finding" and snap is not None:
        text = finding_lines(snap, view, inner)
        first = max(min(view.scroll.get("dialog", 0), len(text) - page), 0)
        content = block(text[first:], inner, page)
    elif dialog.kind in _LIVE:
        content = block([(("nothing was read yet", "dim"),)], inner, page)
    else:
        text = list(dialog_lines(dialog, width))
        first = max(min(view.scroll.get("dialog", 0), len(text) - page), 0)
        content = block(text[first : first + page], inner, page)
    tail: list[Line] = []
    if dialog.kind == "input" and rows > 1:
        tail.append(_typed(dialog.value, inner, view.ascii))
    if rows > 0:
        tail.append(hint)
    lines = [fit(((" ", ""), *fit(line, inner)), max(width - 2, 0)) for line in (*content, *tail)]
    return box(dialog.title, lines[:rows], width, height, ascii=view.ascii, focused=True)


def finding_lines(snap: Snapshot, view: View, width: int) -> list[Line]:
    """Everything that an open finding says, in lines of at most `width` cells."""
    dialog = view.dialog
    texts = ["".join(text for text, _ in line) for line in (dialog.lines if dialog else ())]
    return finding_panel(snap, view, texts, width)


def _typed(value: str, width: int, ascii: bool) -> Line:  # noqa: A002 - the name of the option
    """The end of the text typed so far, with a cursor behind it."""
    text = safe(value, ascii)
    while text and cell_width(text) > width - 3:
        text = text[1:]
    return fit((("> ", "key"), (cut(text, max(width - 3, 0)), "search"), (" ", "cursor")), width)
