"""Lines as terminal text: colours by what the terminal can, and only what changed.

Pure: text in, text out. The first frame is painted with it before Textual is there,
and later frames are sent as differences, so a slow SSH link carries few bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import lru_cache

from kvtop.draw.style import resolve
from kvtop.draw.text import char_width
from kvtop.draw.view import Line

_JOIN_GAP = 6
"""Unchanged cells between two changed ones that cost less to send than to jump over."""

RESET = "\x1b[0m"
"""Back to the terminal's own colours."""


class Colours(IntEnum):
    """What a terminal can show."""

    NONE = 0
    """No colours: only bold, underlined and reversed text."""
    BASIC = 16
    """The 16 basic colours."""
    FULL = 256
    """xterm's 256 colours."""


_NO_COLOUR_TERMS = ("vt100", "vt102", "vt220", "dumb", "unknown", "ansi-m")


def colours_of(environ: Mapping[str, str]) -> Colours:
    """What the environment says of the terminal, by NO_COLOR, COLORTERM and TERM.

    Args:
        environ: Environment variables. `NO_COLOR` counts when it is not empty
            (no-color.org).
    """
    term = environ.get("TERM", "").lower()
    if environ.get("NO_COLOR") or term in _NO_COLOUR_TERMS:
        return Colours.NONE
    if environ.get("COLORTERM") or "256" in term or "direct" in term or "kitty" in term:
        return Colours.FULL
    return Colours.BASIC


@lru_cache(maxsize=1024)
def _codes(style: str, colours: Colours) -> tuple[str, str, str]:
    """SGR parameters of a style: attributes, foreground, background; empty for the default."""
    spec = resolve(style)
    on = ((spec.bold, "1"), (spec.dim, "2"), (spec.underline, "4"), (spec.reverse, "7"))
    attributes = ";".join(code for wanted, code in on if wanted)
    fg = bg = ""
    if colours is Colours.FULL:
        fg = f"38;5;{spec.fg.index}" if spec.fg else ""
        bg = f"48;5;{spec.bg.index}" if spec.bg else ""
    elif colours is Colours.BASIC:
        fg = str(_basic(spec.fg.basic)) if spec.fg else ""
        bg = str(_basic(spec.bg.basic) + 10) if spec.bg else ""
    return attributes, fg, bg


def _basic(colour: int) -> int:
    return 30 + colour if colour < 8 else 82 + colour


@lru_cache(maxsize=8192)
def _change(old: str, new: str, colours: Colours) -> str:
    """The shortest escape sequence that leads from one style to another."""
    before, after = _codes(old, colours), _codes(new, colours)
    if before == after:
        return ""
    full = ";".join(part for part in ("0" if any(before) else "", *after) if part)
    if before[0] == after[0]:
        parts = []
        if before[1] != after[1]:
            parts.append(after[1] or "39")
        if before[2] != after[2]:
            parts.append(after[2] or "49")
        if len(";".join(parts)) < len(full):
            full = ";".join(parts)
    return f"\x1b[{full if full != '0' else ''}m"


def _runs(line: Line, style: str, colours: Colours) -> tuple[str, str]:
    """A line as text, starting in a style, and the style it ends in."""
    out: list[str] = []
    for text, wanted in line:
        out.append(_change(style, wanted, colours))
        out.append(text)
        style = wanted
    return "".join(out), style


def paint(lines: Sequence[Line], colours: Colours) -> str:
    """Lines as text with colours, one below the other, each ended in default colours."""
    out = []
    for line in lines:
        text, style = _runs(line, "", colours)
        out.append(text + _change(style, "", colours))
    return "\n".join(out)


def frame(lines: Sequence[Line], colours: Colours) -> str:
    """Lines as one whole screen, each put at the start of its row."""
    out = [RESET]
    style = ""
    for row, line in enumerate(lines, 1):
        text, style = _runs(line, style, colours)
        out.append(f"\x1b[{row};1H{text}")
    out.append(RESET)
    return "".join(out)


def _cells(line: Line) -> list[tuple[str, str]]:
    """One entry a cell; the second cell of a wide character is empty."""
    cells: list[tuple[str, str]] = []
    for text, style in line:
        if text.isascii():
            cells.extend((char, style) for char in text)
            continue
        for char in text:
            width = char_width(char)
            if width == 0:
                # A mark belongs to the letter before it; at the start of a line there is none.
                at = len(cells) - (2 if cells and cells[-1][0] == "" else 1)
                if at >= 0:
                    cells[at] = (cells[at][0] + char, cells[at][1])
            else:
                cells.append((char, style))
                if width == 2:
                    cells.append(("", style))
    return cells


def update(old: Sequence[Line], new: Sequence[Line], colours: Colours) -> str:
    """What turns one screen into another of the same size; empty when they are equal.

    Args:
        old: Lines on the terminal now.
        new: Lines wanted; as many, each of as many cells.
        colours: What the terminal can show.
    """
    out: list[str] = []
    style = ""
    for row, (before, after) in enumerate(zip(old, new, strict=True), 1):
        if before is after or before == after:
            continue
        for start, cells in _spans(_cells(before), _cells(after)):
            out.append(f"\x1b[{row};{start + 1}H")
            for char, wanted in cells:
                if wanted != style:
                    out.append(_change(style, wanted, colours))
                    style = wanted
                out.append(char)
    if not out:
        return ""
    return RESET + "".join(out) + RESET


def _spans(
    before: list[tuple[str, str]], after: list[tuple[str, str]]
) -> list[tuple[int, list[tuple[str, str]]]]:
    """Columns and cells to send: stretches that differ, near ones joined."""
    changed = [at for at, (old, new) in enumerate(zip(before, after, strict=False)) if old != new]
    changed.extend(range(len(before), len(after)))
    bounds: list[list[int]] = []
    for at in changed:
        if bounds and at - bounds[-1][1] <= _JOIN_GAP:
            bounds[-1][1] = at + 1
        else:
            bounds.append([at, at + 1])
    spans = []
    for start, end in bounds:
        # A wide character is sent whole, whichever of its cells changed.
        while start > 0 and after[start][0] == "":
            start -= 1  # noqa: PLW2901
        while end < len(after) and after[end][0] == "":
            end += 1  # noqa: PLW2901
        spans.append((start, after[start:end]))
    return spans
