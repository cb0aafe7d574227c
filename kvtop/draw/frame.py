"""Boxes, and putting rectangles of lines together into whole lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtop.draw.layout import Rect
from kvtop.draw.text import cell_width, clip, cut, fit, safe
from kvtop.draw.view import Line, Run

_UNICODE = "╭╮╰╯─│"
_ASCII = "++++-|"


def box(
    title: str,
    inside: Sequence[Line],
    width: int,
    height: int,
    *,
    ascii: bool,  # noqa: A002 - the name of the option
    focused: bool,
) -> list[Line]:
    """A border with a title around lines; `height` lines of `width` cells.

    Args:
        title: Text in the upper border; may come from outside.
        inside: `height - 2` lines of `width - 2` cells; not looked at where there is no room.
        width: Columns, border included. Below 2 nothing but blanks is drawn.
        height: Rows, border included. One row shows the upper border only.
        ascii: Only ASCII characters.
        focused: The panel has the focus; its border is doubled where colour is missing.
    """
    if width < 2 or height < 1:
        return [fit((), width)] * max(height, 0)
    marks = tuple(_ASCII if ascii else _UNICODE)
    left_top, right_top, left_bottom, right_bottom, flat, upright = marks
    if focused:
        flat = "=" if ascii else "━"
    edge = "border.focus" if focused else "border"
    heading = "title.focus" if focused else "title"
    name = clip(safe(title, ascii), width - 6, ascii)
    label: list[Run] = [(f" {name} ", heading)] if name else []
    rest = width - 3 - sum(cell_width(text) for text, _ in label)
    top = fit(
        [(left_top + flat, edge), *label, (flat * max(rest, 0) + right_top, edge)],
        width,
    )
    if height == 1:
        return [top]
    side: Run = (upright, edge)
    lines = [top]
    lines.extend((side, *line, side) for line in (inside if width > 2 else [()] * (height - 2)))
    lines.append(((left_bottom + flat * (width - 2) + right_bottom, edge),))
    return lines


def compose(pieces: Iterable[tuple[Rect, Sequence[Line]]], width: int, height: int) -> list[Line]:
    """Whole lines of a screen from rectangles that do not overlap; gaps are blank."""
    rows: list[list[tuple[int, int, Line]]] = [[] for _ in range(height)]
    for rect, lines in pieces:
        for row, line in zip(range(rect.y, rect.y + rect.height), lines, strict=True):
            rows[row].append((rect.x, rect.width, line))
    out: list[Line] = []
    for row_pieces in rows:
        runs: list[Run] = []
        at = 0
        for x, cells, line in sorted(row_pieces, key=lambda piece: piece[0]):
            if x > at:
                runs.append((" " * (x - at), ""))
            runs.extend(line)
            at = x + cells
        out.append(fit(runs, width))
    return out


def section(line: Line, start: int, end: int) -> Line:
    """Cells `start` to `end` of a line; half a wide character becomes a blank."""
    runs: list[Run] = []
    at = 0
    for text, style in line:
        if at >= end:
            break
        cells = cell_width(text)
        first, last = max(start - at, 0), min(end - at, cells)
        at += cells
        if first >= last:
            continue
        head = cut(text, first)
        lost = first - cell_width(head)
        tail = text[len(head) + (1 if lost else 0) :]
        part = cut(tail, last - first - lost)
        filled = " " * lost + part
        runs.append((filled + " " * (last - first - cell_width(filled)), style))
    return fit(runs, max(end - start, 0))


def overlay(lines: Sequence[Line], rect: Rect, over: Sequence[Line], width: int) -> list[Line]:
    """Lines with a rectangle of other lines drawn over them."""
    out = list(lines)
    for row, line in zip(range(rect.y, rect.y + rect.height), over, strict=True):
        below = out[row]
        right = rect.x + rect.width
        out[row] = fit((*section(below, 0, rect.x), *line, *section(below, right, width)), width)
    return out
